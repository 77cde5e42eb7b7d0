"""`la.compare`: every number of the table against plain loops, over likelihoods and posteriors."""

from __future__ import annotations

import copy
import html
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Comparison, FunctionalLaplace, Laplace, MixtureLaplace, VaLLA, comparison
from laplace.comparison import N_RESAMPLES, Row, resampled
from laplace.core.random_numbers import drawn_seed
from laplace.errors import (
    DataWarning,
    InvalidArgument,
    InvalidCall,
    InvalidData,
    InvalidType,
    LaplaceError,
    ModelChangedError,
    NotFittedError,
    UnsupportedError,
)
from laplace.metrics import compare_probabilities
from tests import grid
from tests import problems as catalogue
from tests.conformance.cases import Case, truth
from tests.conformance.test_positions import net
from tests.likelihoods.test_targets import Counts
from tests.reference import comparison as reference
from tests.reference import likelihoods, predictive
from tests.reference.compare import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning"),
]

CLASS_ROWS = ["nll", "brier", "accuracy", "ece", "ece_floor", "aurc", "coverage_at_risk"]
REAL_ROWS = ["nll", "crps", "rmse", "coverage_50", "coverage_90"]

Scores = dict[str, list[float]]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check(
    found: Comparison, network: Scores, posterior: Scores, datum: Sequence[int] | None = None, kind: str = "algebra"
) -> None:
    """Every row of a comparison, given the scores of every datum: values, differences and standard errors."""
    datum = list(range(len(network["nll"]))) if datum is None else list(datum)
    means = [name for name in network if name not in ("confidence", "right", "square")]
    statistics = reference.statistics(network), reference.statistics(posterior)
    assert set(found.rows) - {"ece_floor"} == {*means, *statistics[0]}
    assert (found.n_data, found.n_labels) == (len(set(datum)), len(datum))
    for name in means:
        difference, error = reference.mean_difference(network[name], posterior[name], datum)
        values = [sum(side[name]) / len(datum) for side in (network, posterior)]
        assert_close(_numbers(found.rows[name]), [*values, difference, error], kind, label=name)
    every = range(len(datum))
    for name, of in statistics[0].items():
        values = [of(every), statistics[1][name](every)]
        row = found.rows[name]
        assert_close([row.network, row.posterior, row.difference], [*values, values[1] - values[0]], kind, label=name)


def _numbers(row: Row) -> list[float]:
    return [row.network, row.posterior, row.difference, row.standard_error]


def truths(case: Case, la: Any) -> tuple[Tensor, Tensor]:
    """f `[B, C]` and its covariances `[B, C, C]`, dense."""
    covariance = torch.linalg.inv(la.evidence().precision.to_dense())
    return truth(case.problem.name).f, predictive.functional_variance(case.jacobian, covariance)


# Likelihoods and structures, against the dense truth.

CELLS = [("full", "all"), ("kron", "last_layer"), ("diag", "random")]


@pytest.mark.parametrize(("structure", "weights"), CELLS)
@pytest.mark.parametrize("name", ["mlp_classification", "mlp_soft_labels", "dict_input"])
def test_classification(name: str, structure: str, weights: str) -> None:
    case = Case(catalogue.get(name), structure, weights)
    la = case.fit(prior_precision=3.0)
    f, covariance = truths(case, la)
    found = la.compare(case.problem.batches(2))
    y = case.problem.y
    check(found, reference.class_scores(f.softmax(1), y), reference.class_scores(predictive.probit(f, covariance), y))
    assert list(found.rows) == CLASS_ROWS and found.names == ("network", "posterior")


@pytest.mark.parametrize("link", ["bridge", "delta", "probit_centred"])
def test_links(link: str) -> None:
    case = Case(catalogue.get("mlp_classification"), "kron", "all")
    la = case.fit(prior_precision=40.0)
    probs = la(case.problem.x, link_approx=link)
    found = la.compare(case.problem.batches(3), link_approx=link)
    network = reference.class_scores(truth(case.problem.name).f.softmax(1), case.problem.y)
    check(found, network, reference.class_scores(probs, case.problem.y))


@pytest.mark.parametrize(("structure", "weights"), CELLS)
@pytest.mark.parametrize("name", [problem.name for problem in catalogue.problems("bernoulli")])
def test_labels_that_are_independent(name: str, structure: str, weights: str) -> None:
    case = Case(catalogue.get(name), structure, weights)
    la = case.fit()
    f, covariance = truths(case, la)
    y = case.problem.y.view_as(f)
    network = reference.binary_scores(f.sigmoid(), y)
    found = la.compare(case.problem.batches(2))
    check(found, network, reference.binary_scores(predictive.bernoulli_probit(f, covariance), y))


@pytest.mark.parametrize(("structure", "weights"), CELLS)
def test_regression(structure: str, weights: str) -> None:
    case = Case(catalogue.get("mlp_regression"), structure, weights)
    la = case.fit(sigma_noise=0.7)
    f, covariance = truths(case, la)
    noise = torch.full_like(f, 0.49)
    variance = covariance.diagonal(dim1=1, dim2=2) + noise
    y = case.problem.y
    found = la.compare(case.problem.batches(2))
    check(found, reference.gaussian_scores(f, noise, y), reference.gaussian_scores(f, variance, y), kind="float32")
    assert list(found.rows) == REAL_ROWS
    assert found.rows["rmse"].difference == 0 and found.rows["rmse"].standard_error == 0


def test_every_output_has_its_noise() -> None:
    case = Case(catalogue.get("mlp_regression"), "full", "all")
    f = truth(case.problem.name).f
    sigma = torch.linspace(0.5, 1.5, f.shape[1], dtype=torch.float64)
    la = case.fit(sigma_noise=sigma)
    f, covariance = truths(case, la)
    noise = sigma.square().expand_as(f)
    variance, y = covariance.diagonal(dim1=1, dim2=2) + noise, case.problem.y
    found = la.compare(case.problem.batches())
    check(found, reference.gaussian_scores(f, noise, y), reference.gaussian_scores(f, variance, y), kind="float32")


@pytest.mark.filterwarnings("ignore:these are the data by which")
def test_a_calibrated_posterior_and_the_network_have_their_own_noise() -> None:
    case = Case(catalogue.get("mlp_regression"), "full", "all")
    la = case.fit(sigma_noise=0.7)
    generator = seeded()
    x = torch.randn(60, *case.problem.x.shape[1:], dtype=torch.float64, generator=generator)
    spread = la.predict(x).latent_variance
    y = la.predict(x).latent_mean + (spread + 1e-4).sqrt() * torch.randn(
        spread.shape, dtype=torch.float64, generator=generator
    )
    calibration = la.calibrate([(x, y)])
    assert bool(calibration.sigma_noise < 0.5 * calibration.network_noise)
    prediction, noise = la.predict(x), calibration.network_noise.square().expand_as(y)
    own = reference.gaussian_scores(prediction.latent_mean, noise, y)
    check(la.compare([(x, y)]), own, reference.gaussian_scores(prediction.mean, prediction.variance, y), kind="float32")


def test_a_noise_that_the_network_predicts() -> None:
    case = Case(catalogue.problems("heteroscedastic")[0], "full", "all")
    la = case.fit(prior_precision=30.0)
    f, covariance = truths(case, la)
    y, half = case.problem.y, f.shape[1] // 2
    precision = nn.functional.softplus(f[:, half:])
    network = reference.gaussian_scores(f[:, :half] / precision, 1 / precision, y)
    mean, variance = la(case.problem.x)
    posterior = reference.gaussian_scores(mean, variance, y)
    posterior["nll"] = (-likelihoods.noisy_density(f, covariance, y)).sum(1).tolist()
    check(la.compare(case.problem.batches(2)), network, posterior, kind="float32")


def test_counts() -> None:
    case = Case(catalogue.problems("poisson")[0], "full", "all")
    la = case.fit(prior_precision=5.0)
    f, covariance = truths(case, la)
    variance, y = covariance.diagonal(dim1=1, dim2=2), case.problem.y.double()
    network = {
        "nll": (-torch.distributions.Poisson(f.exp()).log_prob(y)).sum(1).tolist(),
        "square": (y - f.exp()).square().mean(1).tolist(),
    }
    posterior = {
        "nll": (-likelihoods.count_density(f, variance, y)).sum(1).tolist(),
        "square": (y - (f + variance / 2).exp()).square().mean(1).tolist(),
    }
    check(la.compare(case.problem.batches(2)), network, posterior, kind="float32")


def test_preferences() -> None:
    la = Laplace(grid.network("reward_modeling").double(), "reward_modeling", "all", "full")
    x, y = grid.data("reward_modeling")
    la.fit([(x.double(), y)])
    probs = la(x.double(), fitting=True)
    network = reference.class_scores(la.model(x.double()).detach().softmax(1), y)
    check(la.compare([(x.double(), y)]), network, reference.class_scores(probs, y))


# Other posteriors.


def double(likelihood: str = "classification") -> tuple[nn.Module, Tensor, Tensor]:
    x, y = grid.data(likelihood)
    return grid.network(likelihood).double().eval(), x.double(), y.double() if y.is_floating_point() else y


@pytest.mark.parametrize("make", [
    lambda model: FunctionalLaplace(model, "classification", n_subset=8),
    lambda model: VaLLA(model, "classification", num_inducing=4, inducing_locations="random"),
    lambda model: Laplace(model, "classification", "all", "lowrank"),
    lambda model: Laplace(model, "classification", "all", "matrix_free"),
    lambda model: Laplace(model, "classification", "last_layer", "ekfac"),
])  # fmt: skip
def test_other_posteriors(make: Callable[[nn.Module], Any]) -> None:
    model, x, y = double()
    la = make(model)
    la.fit([(x, y)])
    network = reference.class_scores(model(x).detach().softmax(1), y)
    check(la.compare([(x[:5], y[:5]), (x[5:], y[5:])]), network, reference.class_scores(la(x).detach(), y))


def held_out(likelihood: str) -> tuple[Tensor, Tensor]:
    """Data that were not fitted."""
    x, y = grid.data(likelihood, seed=11)
    return x.double(), y.double() if y.is_floating_point() else y


def mixture(likelihood: str, weights: list[float]) -> tuple[MixtureLaplace, Tensor, Tensor]:
    _, x, y = double(likelihood)
    models = []
    for scale in (1.0, 1.5, -0.5):
        model = grid.network(likelihood).double().eval()
        with torch.no_grad():
            model[3].weight.mul_(scale)
        models.append(model)
    la = MixtureLaplace(models, likelihood, "last_layer", "full", weights=weights)
    la.fit([(x, y)])
    return la, x, y


def test_a_mixture_of_classifiers_is_compared_with_the_ensemble() -> None:
    la, x, y = mixture("classification", [0.5, 0.2, 0.3])
    found = la.compare([(x[:5], y[:5]), (x[5:], y[5:])])
    check(found, ensemble(la, x, y), reference.class_scores(la(x), y))
    assert found.names == ("ensemble", "posterior") and "ensemble" in repr(found).splitlines()[0]


def test_a_mixture_of_regressions_is_compared_by_its_moments() -> None:
    la, x, y = mixture("regression", [0.5, 0.2, 0.3])
    for one, sigma in zip(la.components, (0.5, 1.0, 2.0), strict=True):
        one.sigma_noise = sigma
    f = torch.stack([one.model(x).detach() for one in la.components])
    noise = sum(w * s**2 for w, s in zip(la.weights, (0.5, 1.0, 2.0), strict=True))
    mean = torch.einsum("k,kbc->bc", la.weights, f)
    spread = torch.einsum("k,kbc->bc", la.weights, (f - mean).square())
    network = reference.gaussian_scores(mean, spread + noise, y)
    moments = la(x, diagonal_output=True)
    posterior = reference.gaussian_scores(moments[0], moments[1] + noise, y)
    check(la.compare([(x, y)]), network, posterior, kind="float32")


def test_a_refined_posterior_is_compared_with_the_network_itself() -> None:
    model, x, y = double()
    la = Laplace(model, "classification", "all", "full")
    la.fit([(x, y)])
    la.refine([(x, y)])
    network = reference.class_scores(model(x).detach().softmax(1), y)
    check(la.compare([(x, y)]), network, reference.class_scores(la(x), y))


def test_a_tempered_posterior_near_the_network_makes_no_difference() -> None:
    model, x, y = double()
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    la.temperature = 1e-9
    la.prior_precision = 1e9
    found = la.compare([(x, y)])
    assert abs(found.rows["nll"].difference) < 1e-6
    assert found.verdict == "no difference: the NLL is the same on 12 data"


@pytest.mark.filterwarnings("ignore:these are the data by which")
@pytest.mark.filterwarnings("ignore::laplace.errors.CalibrationWarning")  # of 12 data
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_a_calibrated_posterior_is_compared_as_it_predicts(likelihood: str) -> None:
    model, x, y = double(likelihood)
    la = Laplace(model, likelihood, "all", "kron")
    la.fit([(x, y)])
    x, y = held_out(likelihood)
    calibration = la.calibrate([(x, y)])
    found = la.compare([(x[:5], y[:5]), (x[5:], y[5:])]).rows["nll"]
    assert_close(found.posterior, calibration.posterior_nll, "algebra")
    if likelihood == "classification":  # whose network has no noise of its own
        assert_close(found.network, calibration.network_nll, "algebra")
        assert calibration.is_network or found.difference != 0


@pytest.mark.filterwarnings("ignore:these are the data by which")
@pytest.mark.filterwarnings("ignore::laplace.errors.CalibrationWarning")
def test_a_calibrated_mixture_keeps_its_weights() -> None:
    la, x, y = mixture("classification", [0.5, 0.2, 0.3])
    la.weights = "evidence"
    x, y = held_out("classification")
    la.calibrate([(x, y)])
    check(la.compare([(x, y)]), ensemble(la, x, y), reference.class_scores(la(x), y))


def ensemble(la: MixtureLaplace, x: Tensor, y: Tensor) -> Scores:
    """Scores of the ensemble of classifiers."""
    probs = torch.stack([one.model(x).detach().softmax(1) for one in la.components])
    return reference.class_scores(torch.einsum("k,kbc->bc", la.weights, probs), y)


@pytest.mark.parametrize("likelihood", ["classification", "regression", "poisson", "heteroscedastic", "bernoulli"])
def test_sampled_weights_are_the_same_for_all_batches(likelihood: str) -> None:
    model, x, y = double(likelihood)
    la = Laplace(model, likelihood, "all", "kron", prior_precision=10.0)
    la.fit([(x, y)])
    options = {"pred_type": "nn", "n_samples": 20}
    whole = la.compare([(x, y)], generator=seeded(3), **options)
    parts = la.compare([(x[i : i + 5], y[i : i + 5]) for i in (0, 5, 10)], generator=seeded(3), **options)
    assert_same(whole, parts)
    other = la.compare([(x, y)], generator=seeded(4), **options)
    assert other.rows["nll"].network == whole.rows["nll"].network
    assert other.rows["nll"].posterior != whole.rows["nll"].posterior


def test_a_method_of_ones_own_predicts() -> None:
    class Halved(type(Laplace(nn.Linear(1, 1), "classification", "all", "kron"))):
        def __call__(self, x: Any, **options: Any) -> Any:
            return 0.5 * super().__call__(x, **options) + 0.5 / 3

    model, x, y = double()
    la = Halved(model, "classification")
    la.fit([(x, y)])
    network = reference.class_scores(model(x).detach().softmax(1), y)
    check(la.compare([(x, y)]), network, reference.class_scores(la(x), y))


# Outputs with positions.


@pytest.mark.parametrize("name", ["tokens", "pixels_3x3"])
def test_labels_of_a_datum_are_not_independent(name: str) -> None:
    case = net(name)
    la = case.make("all", "full")
    y, counted = case.rows, case.rows != -100
    datum = torch.arange(len(case.y)).repeat_interleave(len(y) // len(case.y))[counted].tolist()
    probs = la(case.x).movedim(case.channel_dim, -1).reshape(len(y), -1)
    f = case.model(case.x).detach().movedim(case.channel_dim, -1).reshape(len(y), -1)
    network, posterior = (reference.class_scores(p[counted], y[counted]) for p in (f.softmax(1), probs))
    batches = [(case.x[i : i + 1], case.y[i : i + 1]) for i in range(len(case.y))]
    for loader in ([(case.x, case.y)], batches):
        check(la.compare(loader), network, posterior, datum)
    assert "labels" in repr(la.compare(batches))


@pytest.mark.parametrize("name", ["tokens_regression", "pixels_regression"])
def test_numbers_of_a_datum_are_not_independent(name: str) -> None:
    case = net(name)
    la = case.make("all", "full")
    moments = (la(case.x, diagonal_output=True), (case.model(case.x).detach(), torch.zeros(())))
    y = case.y.movedim(case.channel_dim, -1).flatten(0, -2)
    sides = []
    for mean, variance in reversed(moments):
        rows = [part.expand_as(mean).movedim(case.channel_dim, -1).flatten(0, -2) for part in (mean, variance + 1.0)]
        sides.append(reference.gaussian_scores(*rows, y))
    datum = torch.arange(len(case.y)).repeat_interleave(len(y) // len(case.y)).tolist()
    check(la.compare([(case.x, case.y)]), sides[0], sides[1], datum, kind="float32")


# Standard errors of what is no mean.


@pytest.mark.parametrize("per_datum", [1, 3])
def test_errors_of_rankings_are_spreads_over_resampled_data(per_datum: int) -> None:
    probs, y = _calibrated(60)
    datum = [i // per_datum for i in range(60)]
    shape = (60 // per_datum, per_datum) if per_datum > 1 else (60,)
    other = (0.5 * probs.log()).softmax(1)
    found = compare_probabilities(probs.view(*shape, 3), other.view(*shape, 3), y.view(shape), generator=seeded(5))
    network, posterior = reference.class_scores(probs, y), reference.class_scores(other, y)
    check(found, network, posterior, datum)
    source = seeded(drawn_seed(seeded(5)))
    drawn_seed(source)  # of the floors
    counts = torch.cat(list(resampled(torch.tensor(datum), source)))
    assert len(counts) == N_RESAMPLES and bool((counts.sum(1) == 60).all())
    first, second = reference.statistics(network), reference.statistics(posterior)
    for name in first:
        samples = [[i for i, n in enumerate(row) for _ in range(int(n))] for row in counts.tolist()]
        spread = torch.tensor([second[name](rows) - first[name](rows) for rows in samples], dtype=torch.float64).std()
        assert_close(found.rows[name].standard_error, spread, "algebra", label=name)


def _calibrated(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities of three classes, and labels drawn from them."""
    probs = torch.randn(n, 3, generator=seeded(seed), dtype=torch.float64).mul(2).softmax(1)
    return probs, torch.multinomial(probs, 1, generator=seeded(seed + 1)).squeeze(1)


@pytest.mark.nightly
def test_standard_errors_are_those_of_new_data() -> None:
    """Over 200 sets of data: the spread of a difference, and its mean standard error; both known to 5 to 10 %."""
    found = []
    for seed in range(200):
        probs, y = _calibrated(150, seed)
        found.append(compare_probabilities(probs, (0.3 * probs.log()).softmax(1), y).rows)
    for name in ("nll", "brier", "ece", "aurc"):
        spread = torch.tensor([rows[name].difference for rows in found]).std()
        error = torch.tensor([rows[name].standard_error for rows in found]).mean()
        assert 0.7 < float(error / spread) < 1.4, name


# Invariance.


def assert_same(first: Comparison, second: Comparison, *, errors: bool = True) -> None:
    assert list(first.rows) == list(second.rows) and first.n_data == second.n_data
    for name, row in first.rows.items():
        count = 4 if errors or name not in ("ece", "aurc", "coverage_at_risk", "rmse") else 3
        assert_close(_numbers(row)[:count], _numbers(second.rows[name])[:count], "algebra", label=name)


@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
@pytest.mark.parametrize("size", [1, 5, 12])
def test_batches_and_their_order_do_not_matter(likelihood: str, size: int) -> None:
    model, x, y = double(likelihood)
    la = Laplace(model, likelihood, "all", "kron")
    la.fit([(x, y)])
    whole = la.compare([(x, y)])
    assert_same(whole, la.compare([(x[i : i + size], y[i : i + size]) for i in range(0, 12, size)]))
    order = torch.randperm(12)
    assert_same(whole, la.compare([(x[order], y[order])]), errors=False)


def test_ignored_data_do_not_count() -> None:
    model, x, y = double()
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    marked = torch.cat([y, torch.full((3,), -100)])
    more = torch.cat([x, torch.full((3, 3), 7.0, dtype=torch.float64)])
    assert la.compare([(more, marked)]).rows == la.compare([(x, y)]).rows


def test_nothing_is_changed_and_equal_seeds_give_equal_bits() -> None:
    model, x, y = double()
    model.train()
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    before, state, predicted = copy.deepcopy(model.state_dict()), torch.get_rng_state(), la(x)
    for options in ({}, {"link_approx": "mc"}, {"pred_type": "nn"}):
        first, second = (la.compare(iter([(x[:7], y[:7]), (x[7:], y[7:])]), **options) for _ in range(2))
        assert first == second and repr(first) == repr(second)
        generators = seeded(1), seeded(1)
        first, second = (la.compare([(x, y)], generator=generator, **options) for generator in generators)
        assert first == second and torch.equal(*(generator.get_state() for generator in generators))
    assert model.training and all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(la(x), predicted)


def test_a_graph_through_hyperparameters_is_not_needed() -> None:
    model, x, y = double()
    la = Laplace(model, "classification", "all", "kron", enable_backprop=True)
    la.fit([(x, y)])
    plain = la.compare([(x, y)])
    la.prior_precision = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    x.requires_grad_()
    assert la.compare([(x, y)]).rows == plain.rows


# Probabilities of anything.


def test_probabilities_alone_have_the_same_table() -> None:
    model, x, y = double()
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    expected = la.compare([(x, y)])
    found = compare_probabilities(model(x).softmax(1), la(x), y, names=("temperature scaling", "Laplace"))
    assert_same(expected, found)
    assert found.names == ("temperature scaling", "Laplace")
    assert repr(found).splitlines()[0].split() == ["temperature", "scaling", "Laplace", "difference"]


def test_ignored_labels_and_probabilities_of_zero() -> None:
    probs, y = _calibrated(20)
    marked = y.clone()
    marked[::4] = -100
    kept = marked != -100
    first, second = (
        compare_probabilities(probs, probs, marked),
        compare_probabilities(probs[kept], probs[kept], y[kept]),
    )
    assert_same(first, second)
    certain = torch.nn.functional.one_hot((y + 1) % 3, 3).float()
    assert math.isfinite(compare_probabilities(probs, certain, y).rows["nll"].posterior)


def test_probabilities_that_cannot_be_compared() -> None:
    probs, y = _calibrated(6)
    with pytest.raises(InvalidData, match=r"\[6, 3\] and \[6, 4\]"):
        compare_probabilities(probs, torch.full((6, 4), 0.25), y)
    with pytest.raises(InvalidData, match="not logits"):
        compare_probabilities(probs, probs.log(), y)
    with pytest.raises(InvalidData, match="no label is left"):
        compare_probabilities(probs, probs, torch.full((6,), -100))
    with pytest.raises(InvalidArgument, match="names='ab'"):
        compare_probabilities(probs, probs, y, names="ab")  # pyright: ignore
    with pytest.raises(InvalidType, match="generator"):
        compare_probabilities(probs, probs, y, generator=3)  # pyright: ignore


# The table.


def table(difference: float, error: float, n_data: int = 300) -> Comparison:
    return Comparison({"nll": Row(0.5, 0.5 + difference, difference, error)}, n_data, n_data)


@pytest.mark.parametrize(
    ("comparison", "verdict"),
    [
        (table(0.1234, 0.0123), "use the network: its NLL is lower by 0.123 ± 0.012 on 300 data"),
        (table(-0.1234, 0.0123), "use the posterior: its NLL is lower by 0.123 ± 0.012 on 300 data"),
        (
            table(-0.01, 0.02, 12),
            "no difference beyond two standard errors: the NLL of the posterior is lower by 0.010 ± 0.020 on 12 data",
        ),
        (
            table(-0.1234, 0.0123, 19),
            "too few data for a verdict: the NLL of the posterior is lower by 0.123 ± 0.012 on 19 data",
        ),
        (table(1e-7, 1e-9), "no difference: the NLL is the same on 300 data"),
        (table(0.1, 0.0), "use the network: its NLL is lower by 0.1 ± 0 on 300 data"),
        (table(0.1, math.nan, 1), "no verdict: a difference on one datum has no standard error"),
        (table(math.inf, math.nan), "no verdict: the NLL is 0.5000 and inf on 300 data"),
    ],
)
def test_verdicts(comparison: Comparison, verdict: str) -> None:
    assert comparison.verdict == verdict
    assert repr(comparison).endswith(f"\n{verdict[0].upper()}{verdict[1:]}.")


def test_a_table_is_text_html_and_data() -> None:
    row = Row(0.1221, 0.1943, 0.0722, 0.0106)
    rows = OrderedDict(nll=row, ece_floor=Row(0.01, 0.02, 0.01, math.nan), aurc=Row(0.0, 12345.0, 5e-5, 0.0))
    comparison = Comparison(rows, 20, 5120, ("a <b>", "posterior"))
    assert repr(comparison).splitlines() == [
        "                  a <b>  posterior  difference",
        "NLL              0.1221     0.1943  +0.0722 ± 0.0106",
        "ECE noise floor  0.0100     0.0200",
        "AURC             0.0000   1.23e+04  +5e-05 ± 0.0000",
        "Differences ± one paired standard error, on 20 data with 5,120 labels.",
        "Use a <b>: its NLL is lower by 0.072 ± 0.011 on 20 data.",
    ]
    shown = comparison._repr_html_()
    assert "<b>" not in shown and "a &lt;b&gt;" in shown
    assert shown.count("<tr>") == 4 and "0.0722 ± 0.0106" in html.unescape(shown)
    assert shown.count("padding:") == 4 * 4  # or cells run together where a page has no style of its own
    assert repr(pickle.loads(pickle.dumps(comparison))) == repr(comparison)
    with pytest.raises(AttributeError):
        comparison.n_data = 3  # pyright: ignore


# Bad input.


def fitted() -> tuple[Any, Tensor, Tensor]:
    model, x, y = double()
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    return la, x, y


def test_one_class_and_one_datum() -> None:
    la, x, y = fitted()
    one = la.compare([(x, torch.zeros_like(y))])
    assert math.isfinite(one.rows["aurc"].posterior)
    single = la.compare([(x[:1], y[:1])])
    assert all(math.isnan(row.standard_error) for row in single.rows.values())
    assert single.verdict == "no verdict: a difference on one datum has no standard error"


def test_before_a_fit_and_after_a_change() -> None:
    model, x, y = double()
    la = Laplace(model, "classification", "all", "kron")
    with pytest.raises(NotFittedError):
        la.compare([(x, y)])
    with pytest.raises(NotFittedError):
        MixtureLaplace([model, grid.network().double()], "classification").compare([(x, y)])
    la.fit([(x, y)])
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(ModelChangedError):
        la.compare([(x, y)])


@pytest.mark.parametrize(
    ("loader", "error", "match"),
    [
        (lambda x, y: [], InvalidData, "gave no data"),
        (lambda x, y: [(x, torch.full_like(y, -100))], InvalidData, "gave no data"),
        (lambda x, y: [(x, y), (x, y + 5)], InvalidData, "validation batch 1: .*out of range"),
        (lambda x, y: [(x, y[:3])], InvalidData, "batch 0"),
        (lambda x, y: [(x * math.nan, y)], InvalidData, "NaN"),
        (lambda x, y: [(x, y.double())], InvalidData, "batch 0"),
        (lambda x, y: [x], InvalidData, "batch 0"),
        (lambda x, y: x, InvalidType, "loader is of type Tensor"),
        (lambda x, y: 3, InvalidType, "loader is of type int"),
        (lambda x, y: (x, y), LaplaceError, "batch 0"),
    ],
)
def test_data_that_cannot_be_compared(loader: Callable[..., Any], error: type[Exception], match: str) -> None:
    la, x, y = fitted()
    expected = la(x)
    with pytest.raises(error, match=match):
        la.compare(loader(x, y))
    assert torch.equal(la(x), expected)


def test_data_of_the_fit_are_told_of() -> None:
    la, x, y = fitted()
    with pytest.warns(DataWarning, match="are training data"):
        la.compare([(x, y)])


def test_options_that_are_not_accepted() -> None:
    la, x, y = fitted()
    with pytest.raises(InvalidArgument, match="pred_type='ml'"):
        la.compare([(x, y)], pred_type="ml")
    with pytest.raises(InvalidArgument, match="link_approx"):
        la.compare([(x, y)], link_approx="logit")
    with pytest.raises(InvalidArgument, match="n_samples"):
        la.compare([(x, y)], n_samples=0)
    with pytest.raises(InvalidType, match="generator"):
        la.compare([(x, y)], generator=0)
    with pytest.raises(InvalidCall, match="progress_bar"):
        la.compare([(x, y)], progressbar=True)
    with pytest.raises(InvalidArgument, match="'gp'"):
        gp = FunctionalLaplace(double()[0], "classification", n_subset=8)
        gp.fit([(x, y)])
        gp.compare([(x, y)], pred_type="nn")


def test_targets_of_which_nothing_is_said_are_refused_by_name() -> None:
    model, x, _ = double("poisson")
    la = Laplace(model, Counts(), "all", "kron")
    y = torch.ones(12, 3, dtype=torch.float64)
    la.fit([(x, y)])
    with pytest.raises(UnsupportedError, match=r"'counts' does not say .* define predictive_nll"):
        la.compare([(x, y)], link_approx="mc")


class Scored(Counts):
    """A user's likelihood whose mean says the density."""

    name = "scored"

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        return (prediction - y * prediction.log() + torch.lgamma(y + 1)).sum(1)


def test_a_likelihood_of_ones_own_has_the_likelihood_alone() -> None:
    model, x, _ = double("poisson")
    la = Laplace(model, Scored(), "all", "kron")
    y = torch.ones(12, 3, dtype=torch.float64)
    la.fit([(x, y)])
    found = la.compare([(x, y)], link_approx="mc", generator=seeded())
    rates = model(x).detach().exp()
    assert list(found.rows) == ["nll"]
    assert_close(found.rows["nll"].network, (-torch.distributions.Poisson(rates).log_prob(y)).sum(1).mean(), "algebra")


def test_many_rows_of_few_data_are_resampled_by_datum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of every datum serve all samples: standard errors are those of rows, to the width of a group."""
    draws, n, size = torch.Generator().manual_seed(0), 40, 500
    y = torch.randint(3, (n, size), generator=draws)
    logits = torch.randn(n, size, 3, generator=draws) + 2 * torch.nn.functional.one_hot(y, 3) * torch.rand(n, 1, 1)
    probs = logits.double().softmax(2), (0.5 * logits).double().softmax(2)
    by_rows = compare_probabilities(*probs, y)
    monkeypatch.setattr(comparison, "_AT_ONCE", n)
    by_data = compare_probabilities(*probs, y)
    for name, row in by_rows.rows.items():
        assert (row.network, row.posterior) == (by_data.rows[name].network, by_data.rows[name].posterior)
        if name != "ece_floor":
            assert abs(by_data.rows[name].standard_error - row.standard_error) <= 0.05 * row.standard_error + 2e-4


@pytest.mark.parametrize("likelihood", ["heteroscedastic", "mean_log_variance"])
def test_intervals_of_a_noise_that_is_hardly_known_count_as_they_are(likelihood: str) -> None:
    """No row is NaN, none is infinite, and coverage is that of quantiles of y."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=draws)
    y = torch.randn(30, 3, generator=draws)
    la: Any = Laplace(grid.network(likelihood), cast("Any", likelihood), "all", "full", prior_precision=1e-3)
    la.fit([(x, y)])
    strange = 30 * torch.randn(40, 3, generator=draws)
    mean, variance = la(strange)
    assert bool(mean.isfinite().all() and variance.isfinite().all() and (variance > 0).all())
    found = la.compare([(strange, y.repeat(2, 1)[:40])])
    assert all(math.isfinite(value) for row in found.rows.values() for value in (row.network, row.posterior))
    latent = la.predict(strange).latent
    below = la.likelihood_object.target.pairs.of(latent.mean, latent.covariance).below(y.repeat(2, 1)[:40].double())
    assert found.rows["coverage_90"].posterior == float(((below - 0.5).abs() <= 0.45).double().mean())


def test_what_is_no_number_is_in_no_verdict() -> None:
    """Predictions of a user's own that are NaN are neither hits nor misses, and nobody wins."""

    class Gaps(type(grid.fitted("all", "full", "regression"))):
        def __call__(self, x: Any, *arguments: Any, **options: Any) -> Any:
            mean, variance = super().__call__(x, *arguments, **options)
            return mean.index_fill(0, torch.tensor([1]), math.nan), variance

    x, y = grid.data("regression")
    la = Gaps(grid.network("regression"), "regression")
    la.fit([(x, y)])
    found = la.compare([(grid.data("regression", seed=9)[0], y)])
    assert found.verdict.startswith("no verdict: 1 of 12")
    assert all(math.isnan(row.posterior) for row in found.rows.values())
    assert all(math.isfinite(row.network) for row in found.rows.values())


@pytest.mark.parametrize("call", ["compare", "calibrate", "report"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_worse_than_chance_is_said(call: str, likelihood: str) -> None:
    """Labels in another order, and targets in other units."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=draws)
    model = nn.Linear(3, 3)
    model.load_state_dict({"weight": 5 * torch.eye(3), "bias": torch.zeros(3)})
    y = x.argmax(1) if likelihood == "classification" else 5 * x + 0.1 * torch.randn(100, 3, generator=draws)
    la: Any = Laplace(model, cast("Any", likelihood), "all", "full", **({} if y.ndim == 1 else {"sigma_noise": 0.1}))
    la.fit([(x[:50], y[:50])])
    asked = partial(laplace.report, la) if call == "report" else getattr(la, call)
    asked([(x[50:], y[50:])])
    if call == "calibrate":
        la.calibration.undo()
    with pytest.warns(DataWarning, match="same class order, same preprocessing"):
        asked([(x[50:], 2 - y[50:] if y.ndim == 1 else 1000 * y[50:])])


def test_data_that_chose_the_calibration_are_known_again() -> None:
    x, y = (torch.cat(parts) for parts in zip(*(grid.data(seed=seed) for seed in range(4)), strict=True))
    la = grid.fitted("all", "full")
    la.calibrate([(x[:36], y[:36])])
    la.compare([(x[36:], y[36:])])
    with pytest.warns(DataWarning, match="by which la.calibrate chose"):
        la.compare([(x[:36], y[:36])])
