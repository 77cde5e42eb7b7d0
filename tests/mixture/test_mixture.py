"""Mixtures: weights, predictions, moments, samples, evidence and state, against dense float64 oracles."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import DiagLaplace, Laplace, MixtureLaplace
from laplace.errors import InvalidArgument, InvalidData, InvalidType, NotFittedError, StateError
from laplace.parametric import ParametricLaplace
from laplace.structures import STRUCTURES, DiagCurvature
from laplace.weights import AllWeights
from tests import grid
from tests.reference import mixture as reference
from tests.reference.compare import assert_close

RULES: list[Any] = ["uniform", "evidence", [0.2, 0.5, 0.3]]


def networks() -> list[nn.Module]:
    """Three architectures for the same task, float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return [
            nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double(),
            nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).double(),
            nn.Sequential(nn.Linear(3, 3)).double(),
        ]


def batches(likelihood: str) -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y.double() if y.is_floating_point() else y) for x, y in grid.batches(likelihood)]


def data(likelihood: str = "classification") -> Tensor:
    return grid.data(likelihood, seed=9)[0].double()


def parts(likelihood: str = "classification") -> list[ParametricLaplace]:
    """Different networks, weights and structures."""
    first, second, third = networks()
    return [
        Laplace(first, likelihood, "all", "kron", prior_precision=0.7),
        Laplace(second, likelihood, "last_layer", "full"),
        Laplace(third, likelihood, "all", "diag", prior_precision=2.0),
    ]


def fitted(likelihood: str = "classification", weights: Any = "uniform") -> MixtureLaplace:
    mixture = MixtureLaplace(parts(likelihood), weights=weights)
    mixture.fit(batches(likelihood))
    return mixture


def pi(mixture: MixtureLaplace, rule: Any) -> list[float]:
    """The weights as the oracle has them."""
    if rule == "uniform":
        return [1 / 3] * 3
    if rule == "evidence":
        return reference.weights_by_evidence([la.log_marginal_likelihood().item() for la in mixture.components])
    return rule


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"link_approx": "bridge"}, {"link_approx": "mc"}, {"pred_type": "nn", "n_samples": 7}],
    ids=["probit", "bridge", "mc", "nn"],
)
def test_probabilities_are_equation_9(rule: Any, options: dict[str, Any]) -> None:
    mixture, x = fitted(weights=rule), data()
    generator = torch.Generator().manual_seed(4)
    expected = sum(
        w * la(x, generator=generator, **options) for w, la in zip(pi(mixture, rule), mixture.components, strict=True)
    )
    found = mixture(x, generator=torch.Generator().manual_seed(4), **options)
    assert_close(found, expected, "algebra")
    assert_close(found.sum(1), torch.ones(len(x)), "algebra")
    assert_close(mixture.weights, pi(mixture, rule), "algebra")


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_moments_of_a_regression(rule: Any) -> None:
    """The law of total variance, per input, joint, as variances, and with noise."""
    mixture, x = fitted("regression", rule), data("regression")
    mixture.sigma_noise = 0.6
    weights = torch.tensor(pi(mixture, rule), dtype=torch.float64)
    joint = [la(x, joint=True) for la in mixture.components]
    mean, covariance = reference.moments(
        weights, torch.stack([m for m, _ in joint]), torch.stack([c for _, c in joint])
    )
    found = mixture(x, joint=True)
    assert_close(found[0], mean, "algebra")
    assert_close(found[1], covariance, "algebra")
    blocks = torch.stack([covariance[3 * b : 3 * b + 3, 3 * b : 3 * b + 3] for b in range(len(x))])
    full, diagonal, noisy = mixture(x), mixture(x, diagonal_output=True), mixture(x, observation_noise=True)
    assert_close(full[0], mean.view(-1, 3), "algebra")
    assert_close(full[1], blocks, "algebra")
    assert_close(diagonal[1], blocks.diagonal(dim1=1, dim2=2), "algebra")
    assert_close(noisy[1], blocks + 0.36 * torch.eye(3, dtype=torch.float64), "algebra")


def test_one_component_and_equal_ones_are_the_component() -> None:
    x = data()
    la = parts()[0]
    la.fit(batches("classification"))
    assert torch.equal(MixtureLaplace([la])(x), la(x))
    mixture = MixtureLaplace([networks()[0] for _ in range(3)], "classification")
    mixture.fit(batches("classification"))
    assert_close(mixture(x), mixture.components[0](x), "algebra")
    assert_close(mixture.log_marginal_likelihood(), mixture.components[0].log_marginal_likelihood(), "algebra")


def test_default_is_the_last_layer_with_kronecker_factors_and_probit() -> None:
    mixture, x = MixtureLaplace(networks(), "classification", prior_precision=0.5), data()
    mixture.fit(batches("classification"))
    assert [type(la).__name__ for la in mixture.components] == ["KronLLLaplace"] * 3
    assert_close(mixture(x), sum(la(x, link_approx="probit") for la in mixture.components) / 3, "algebra")
    assert mixture.prior_precision.item() == 0.5


@pytest.mark.parametrize("structure", sorted(STRUCTURES))
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_every_structure(weights: str, structure: str) -> None:
    options = {"structure_kwargs": {"rank": 4}} if structure == "lowrank" else {}
    mixture = MixtureLaplace(networks()[:2], "classification", weights, structure, weights="evidence", **options)
    mixture.fit(batches("classification"))
    mixture.optimize_prior_precision(n_steps=2)
    assert_close(mixture(data()).sum(1), torch.ones(grid.N_DATA), "algebra")
    assert mixture.log_marginal_likelihood().isfinite()


# Evidence.


def test_parts_are_given_by_their_classes() -> None:
    mixture = MixtureLaplace(networks(), "classification", AllWeights, DiagCurvature)
    assert all(type(la) is DiagLaplace for la in mixture.components)


def test_evidence_is_the_mean_over_models() -> None:
    mixture = fitted()
    values = [la.log_marginal_likelihood().item() for la in mixture.components]
    assert_close(mixture.log_marginal_likelihood(), reference.log_evidence(values), "algebra")


def test_evidence_is_stable_where_evidences_underflow() -> None:
    """Evidences of e⁻⁵⁰⁰⁰ and less: ratios in log space."""
    many = [(x.repeat(400, 1), y.repeat(400)) for x, y in batches("classification")]
    mixture = MixtureLaplace(parts(), weights="evidence")
    mixture.fit(many)
    values = [la.log_marginal_likelihood().item() for la in mixture.components]
    assert max(values) < -3000
    assert math.exp(max(values)) == 0
    assert_close(mixture.weights, reference.weights_by_evidence(values), "algebra")
    assert_close(mixture.log_marginal_likelihood(), reference.log_evidence(values), "algebra")


def test_evidence_at_other_hyperparameters_is_assigned_and_differentiable() -> None:
    mixture = fitted("regression")
    prior = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p, s: mixture.log_marginal_likelihood(p, s), (prior, sigma))
    assert_close(mixture.prior_precision, [1.5], "float32_solve")
    assert not mixture.prior_precision.requires_grad
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: mixture.log_marginal_likelihood(temperature=t), (temperature,))
    assert not mixture.temperature.requires_grad
    with pytest.raises(InvalidArgument, match="prior_precision must be positive"):
        mixture.log_marginal_likelihood(torch.tensor(-1.0))
    assert mixture.prior_precision.item() > 0


def test_evidences_of_different_data_are_not_compared() -> None:
    mixture = fitted(weights="evidence")
    mixture.components[0].fit(batches("classification")[:1])
    for ask in (lambda: mixture.weights, mixture.log_marginal_likelihood, lambda: mixture(data())):
        with pytest.raises(InvalidArgument, match="same data"):
            ask()
    mixture.weights = "uniform"
    assert mixture(data()).isfinite().all()


# Samples.


def test_functional_samples_have_the_moments_of_the_mixture() -> None:
    mixture, x = fitted("regression", [0.7, 0.1, 0.2]), data("regression")[:2]
    n = 20_000
    samples = mixture.functional_samples(
        x, n_samples=n, generator=torch.Generator().manual_seed(0), joint=True
    ).flatten(1)
    mean, covariance = mixture(x, joint=True)
    assert samples.shape == (n, 6)
    assert_close(samples.mean(0), mean, "mc", standard_error=samples.std(0) / n**0.5)
    products = torch.einsum("si,sj->sij", samples - mean, samples - mean)
    assert_close(products.mean(0), covariance, "mc", standard_error=products.std(0) / n**0.5)


def test_predictive_samples_average_to_the_mc_prediction() -> None:
    mixture, x, n = fitted(weights=[0.7, 0.1, 0.2]), data()[:3], 20_000
    samples = mixture.predictive_samples(x, n_samples=n, generator=torch.Generator().manual_seed(0))
    expected = mixture(x, link_approx="mc", n_samples=200_000, generator=torch.Generator().manual_seed(1))
    assert_close(samples.mean(0), expected, "mc", standard_error=1.1 * samples.std(0) / n**0.5)


def test_samples_of_weights_come_from_the_chosen_component() -> None:
    mixture = fitted(weights=[0.5, 0.0, 0.5])
    chosen, samples = mixture.sample(4000, torch.Generator().manual_seed(0))
    again = mixture.sample(4000, torch.Generator().manual_seed(0))
    assert torch.equal(chosen, again[0])
    assert all(torch.equal(a, b) for a, b in zip(samples, again[1], strict=True))
    counts = torch.bincount(chosen, minlength=3)
    assert counts.tolist() == [len(part) for part in samples]
    assert counts[1] == 0
    assert_close(counts[0] / 4000, 0.5, "mc", standard_error=0.5 / 4000**0.5)
    for la, part in zip(mixture.components, samples, strict=True):
        assert part.shape[1] == la.n_params
        if len(part):
            assert_close(part.mean(0), la.mean, "mc", standard_error=(la.posterior_variance / len(part)).sqrt())


def test_global_random_state_is_used_without_a_generator_and_left_with_one() -> None:
    mixture, x = fitted(), data()
    before = torch.get_rng_state()
    mixture.functional_samples(x, generator=torch.Generator().manual_seed(0))
    mixture.fit(batches("classification"))
    assert torch.equal(torch.get_rng_state(), before)


# State, manners, errors.


def saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_state_goes_through_a_file(rule: Any) -> None:
    mixture, x = fitted(weights=rule), data()
    other = MixtureLaplace(parts())
    other.load_state_dict(saved(mixture.state_dict()))
    assert torch.equal(other(x), mixture(x))
    assert torch.equal(other.weights, mixture.weights)
    assert torch.equal(copy.deepcopy(mixture)(x), mixture(x))


def test_a_refused_state_changes_nothing() -> None:
    mixture = fitted()
    good = mixture.state_dict()
    before, x = mixture(data()), data()
    bad = good | {"components": [good["components"][0], good["components"][1], good["components"][1]]}
    for state in (bad, good | {"version": 0}, good | {"components": good["components"][:2]}, {"version": 1}, 3,
                  good | {"weights": [2.0, 1.0, 0.0]}, good | {"weights": None}, good | {"components": 3}):  # fmt: skip
        fresh = fitted()
        fresh.components[0].prior_precision = 9.0
        former = fresh(x)
        with pytest.raises(StateError):
            fresh.load_state_dict(state)
        assert torch.equal(fresh(x), former)
    assert torch.equal(mixture(x), before)


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
def test_a_failed_fit_keeps_every_former_posterior() -> None:
    mixture, x = fitted(), data()
    before = mixture(x)
    reads = 0

    class Broken:
        """Good for the first component alone."""

        def __iter__(self):
            nonlocal reads
            reads += 1
            yield batches("classification")[0]
            if reads > 1:
                yield torch.full((2, 3), torch.nan, dtype=torch.float64), torch.tensor([0, 1])

    with pytest.raises(InvalidData):
        mixture.fit(Broken())
    assert reads == 2
    assert torch.equal(mixture(x), before)
    mixture.fit(batches("classification"), override=False)
    assert [la.n_data for la in mixture.components] == [2 * grid.N_DATA] * 3


def test_models_are_lent() -> None:
    models = networks()
    before = [copy.deepcopy(model.state_dict()) for model in models]
    mixture = MixtureLaplace(models, "classification")
    mixture.fit(batches("classification"))
    mixture(data())
    mixture.sample(3)
    for model, state in zip(models, before, strict=True):
        assert model.training
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


def test_it_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    mixture = MixtureLaplace(parts(), weights=[0.2, 0.5, 0.3])
    assert "not fitted" in repr(mixture)
    assert not mixture.is_fitted
    mixture.fit(batches("classification"), progress_bar=True)
    assert "components" in capsys.readouterr().err
    assert mixture.is_fitted
    for word in ("3 components", "[0.2, 0.5, 0.3]", "(0): KronLaplace", "(1): FullLLLaplace", "(2): DiagLaplace"):
        assert word in repr(mixture)


def test_shared_hyperparameters() -> None:
    mixture = fitted("regression")
    with pytest.raises(InvalidArgument, match="no common prior_precision"):
        _ = mixture.prior_precision
    mixture.prior_precision, mixture.temperature, mixture.sigma_noise = 3.0, 0.5, 0.2
    for la in mixture.components:
        assert (la.prior_precision.item(), la.temperature.item()) == (3.0, 0.5)
        assert_close(la.sigma_noise, 0.2, "algebra")
    assert (mixture.prior_precision.item(), mixture.temperature.item()) == (3.0, 0.5)
    with pytest.raises(InvalidArgument, match="length 38"):  # the first component's, too long for the next
        mixture.prior_precision = torch.ones(mixture.components[0].n_params or 0)
    assert mixture.prior_precision.item() == 3.0


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ([[]], {}, InvalidArgument, "empty"),
        ([networks()], {}, InvalidArgument, "likelihood="),
        ([networks()[0], "classification"], {}, InvalidType, "sequence"),
        ([[3], "classification"], {}, InvalidType, "int"),
        ([parts()], {"prior_precision": 2.0}, InvalidArgument, "prior_precision"),
        ([[parts()[0]] * 2], {}, InvalidArgument, "more than once"),
        ([[parts()[0], parts("regression")[1]]], {}, InvalidArgument, "likelihoods"),
        ([parts(), "regression"], {}, InvalidArgument, "regression"),
        ([parts()], {"weights": "best"}, InvalidArgument, "uniform"),
        ([parts()], {"weights": [0.5, 0.5]}, InvalidArgument, "shape"),
        ([parts()], {"weights": [0.5, 0.6, -0.1]}, InvalidArgument, "negative"),
        ([parts()], {"weights": [1.0, 1.0, 1.0]}, InvalidArgument, "sum to 1"),
        ([parts()], {"weights": 3}, InvalidArgument, "shape"),
        ([parts()], {"weights": ["a", "b", "c"]}, InvalidType, "numbers"),
    ],
)
def test_refusals(arguments: list[Any], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MixtureLaplace(*arguments, **options)


def test_refusals_of_a_mixture() -> None:
    mixture = MixtureLaplace(parts())
    for ask in (lambda: mixture(data()), mixture.state_dict, mixture.log_marginal_likelihood, mixture.sample):
        with pytest.raises(NotFittedError):
            ask()
    with pytest.raises(InvalidArgument, match="read once"):
        mixture.fit(iter(batches("classification")))
    mixture.fit(batches("classification"))
    with pytest.raises(InvalidArgument, match="n_samples"):
        mixture.sample(0)


def test_gaussian_processes_are_components_like_any_other() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 2), torch.randint(0, 3, (8,))
    parts = [
        Laplace(nn.Linear(2, 3), "classification", "all", "gp", n_subset=6),
        Laplace(nn.Linear(2, 3), "classification", "all", "full"),
    ]
    mixture = MixtureLaplace(parts)
    mixture.fit([(x, y)])
    expected = 0.5 * (parts[0](x) + parts[1](x))
    assert_close(mixture(x), expected, "float32")
    assert mixture.predictive_samples(x, n_samples=4).shape == (4, 8, 3)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_pixels_are_mixed_along_their_channels(likelihood: str) -> None:
    """As many channels as columns: a wrong dimension would not fail by itself."""
    torch.manual_seed(0)
    networks = [nn.Conv2d(2, 3, 1).double() for _ in range(2)]
    x, classes = torch.randn(4, 2, 3, 3, dtype=torch.float64), likelihood == "classification"
    y = torch.randint(0, 3, (4, 3, 3)) if classes else torch.randn(4, 3, 3, 3, dtype=torch.float64)
    mixture = MixtureLaplace(networks, likelihood, "all", "full", channel_dim=1)
    mixture.fit([(x, y)])
    rows = [la.predict(x).rows for la in mixture.components]
    if classes:
        expected = (rows[0].mean + rows[1].mean) / 2
        assert_close(mixture(x).movedim(1, -1).flatten(0, 2), expected, "algebra")
    else:
        mean, covariance = mixture(x)
        expected = (rows[0].latent_mean + rows[1].latent_mean) / 2
        apart = (rows[0].latent_mean - rows[1].latent_mean) / 2
        within = (rows[0].latent.shown + rows[1].latent.shown) / 2
        assert_close(mean.movedim(1, -1).flatten(0, 2), expected, "algebra")
        assert_close(covariance.flatten(0, 2), within + apart[:, :, None] * apart[:, None, :], "algebra")
    latents, samples = (
        draw(x, n_samples=5, generator=torch.Generator().manual_seed(0))
        for draw in (mixture.functional_samples, mixture.predictive_samples)
    )
    assert_close(samples, latents.softmax(2) if classes else latents, "algebra")


def test_layouts_that_differ_are_refused() -> None:
    parts = [Laplace(nn.Conv2d(2, 3, 1), "classification", "all", "diag", channel_dim=dim) for dim in (1, -1)]
    with pytest.raises(InvalidArgument, match=r"channel_dim=\[1, -1\]"):
        MixtureLaplace(parts)


def test_other_numbers_of_outputs_are_refused() -> None:
    """Where they are first known: at the fit, or before, of components that were fitted apart from each other."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 2), torch.randint(0, 3, (8,))
    parts = [Laplace(nn.Linear(2, n_outputs), "classification", "all", "full") for n_outputs in (3, 4)]
    mixture = MixtureLaplace(parts)
    with pytest.raises(InvalidArgument, match=r"\[3, 4\] outputs"):
        mixture.fit([(x, y)])
    assert not any(la.is_fitted for la in parts)
    for la in parts:
        la.fit([(x, y)])
    with pytest.raises(InvalidArgument, match=r"\[3, 4\] outputs"):
        MixtureLaplace(parts)
