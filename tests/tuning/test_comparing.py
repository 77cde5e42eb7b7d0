"""`la.compare`: every number of the table against plain loops, over likelihoods and posteriors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from laplace import Comparison, FunctionalLaplace, Laplace, MixtureLaplace, VaLLA
from laplace.comparison import ComparisonRow
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


def _numbers(row: ComparisonRow) -> list[float]:
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


# Bad input.


def fitted() -> tuple[Any, Tensor, Tensor]:
    model, x, y = double()
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    return la, x, y


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
    pairs = la.likelihood_object.target.pairs.from_outputs(latent.mean, latent.covariance)
    below = pairs.below(y.repeat(2, 1)[:40].double())
    assert found.rows["coverage_90"].posterior == float(((below - 0.5).abs() <= 0.45).double().mean())


def test_data_that_chose_the_calibration_are_known_again() -> None:
    x, y = (torch.cat(parts) for parts in zip(*(grid.data(seed=seed) for seed in range(4)), strict=True))
    la = grid.fitted("all", "full")
    la.calibrate([(x[:36], y[:36])])
    la.compare([(x[36:], y[36:])])
    with pytest.warns(DataWarning, match="by which la.calibrate chose"):
        la.compare([(x[:36], y[:36])])
