"""Likelihoods whose predictions are E[y] and Var(y): moments and densities against quadrature, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import Laplace
from laplace.errors import InvalidArgument, InvalidData
from laplace.likelihoods import Heteroscedastic, MeanLogVariance, Poisson
from laplace.likelihoods.base import MomentLikelihood
from laplace.likelihoods.heteroscedastic import NaturalPairs
from laplace.likelihoods.links import LINKS
from laplace.likelihoods.mean_log_variance import LogVariancePairs
from laplace.likelihoods.pairs import GaussianPairs
from laplace.likelihoods.poisson import log_normal_moments
from laplace.likelihoods.targets import MomentTarget, TargetMoments
from tests import grid
from tests.reference import likelihoods as reference
from tests.reference.compare import assert_close


def natural_moments(mean: Tensor, covariance: Tensor) -> TargetMoments:
    return NaturalPairs.from_outputs(mean, covariance).moments()


def log_variance_moments(mean: Tensor, covariance: Tensor) -> TargetMoments:
    return LogVariancePairs.from_outputs(mean, covariance).moments()


MOMENTS = {
    "poisson": log_normal_moments,
    "heteroscedastic": natural_moments,
    "mean_log_variance": log_variance_moments,
}
LIKELIHOODS: list[MomentLikelihood] = [Poisson(), Heteroscedastic(), MeanLogVariance()]
NOISY: list[MomentLikelihood] = LIKELIHOODS[1:]
PAIRS: dict[str, type[GaussianPairs]] = {"heteroscedastic": NaturalPairs, "mean_log_variance": LogVariancePairs}


def latents(spread: float = 0.3, c: int = 4) -> tuple[Tensor, Tensor]:
    """Gaussians of five rows, whose outputs are correlated."""
    factor = torch.randn(5, c, c + 1, dtype=torch.float64)
    return torch.randn(5, c, dtype=torch.float64), spread * factor @ factor.mT / c


def check(actual: TargetMoments, mean: Tensor, covariance: Tensor, name: str) -> None:
    expected = reference.moments(mean, covariance, name)
    for label, part, truth in zip(
        ("mean", "aleatoric", "epistemic"), (actual.mean, actual.aleatoric, actual.epistemic), expected, strict=True
    ):
        assert_close(part, truth, "backend", label=label)


@pytest.mark.parametrize("name", list(MOMENTS))
@pytest.mark.parametrize("spread", [1e-6, 0.3, 1.0])
def test_moments(name: str, spread: float) -> None:
    mean, covariance = latents(spread)
    check(MOMENTS[name](mean, covariance), mean, covariance, name)
    variances = covariance.diagonal(dim1=1, dim2=2)
    check(MOMENTS[name](mean, variances), mean, torch.diag_embed(variances), name)


@pytest.mark.parametrize("name", list(MOMENTS))
def test_moments_of_known_outputs(name: str) -> None:
    """Without a variance of f they are those of p(y | f)."""
    mean, covariance = latents()
    known = MOMENTS[name](mean, 0 * covariance)
    likelihood = next(one for one in LIKELIHOODS if one.name == name)
    assert_close(known.mean, likelihood.inverse_link(mean), "algebra")
    assert_close(known.aleatoric, likelihood.conditional(mean).variance, "algebra")
    assert_close(known.epistemic, torch.zeros_like(known.mean), "algebra")


def test_a_wide_precision() -> None:
    """The tail of 1/λ² that a standard deviation of 3 of s reaches, by samples of closed forms: λ ≈ exp(s) there."""
    mean = torch.tensor([[0.0, -30.0]], dtype=torch.float64)
    known = natural_moments(mean, torch.tensor([[0.0, 9.0]], dtype=torch.float64))
    assert_close(known.aleatoric, torch.tensor([[30 + 4.5]], dtype=torch.float64).exp(), "backend")
    first = natural_moments(mean, torch.tensor([[2.0, 9.0]], dtype=torch.float64))
    assert_close(first.epistemic, 2 * torch.tensor([[60 + 18.0]], dtype=torch.float64).exp(), "backend")


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
def test_predictions_do_not_depend_on_the_link_and_are_differentiable(likelihood: MomentLikelihood) -> None:
    mean, covariance = latents(c=2)
    expected = MOMENTS[likelihood.name](mean, covariance).mean
    for link in LINKS:
        assert torch.equal(likelihood.predict(mean, covariance, link), expected)
    assert likelihood.links == ()

    def summary(mean: Tensor, root: Tensor) -> Any:
        return likelihood.target.summary(likelihood, mean, root @ root.mT, "probit")

    root = torch.linalg.cholesky(covariance)
    torch.autograd.gradcheck(summary, (mean.requires_grad_(), root.requires_grad_()))


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
def test_moments_of_a_prediction_are_found_once(likelihood: MomentLikelihood, monkeypatch: pytest.MonkeyPatch) -> None:
    la: Any = grid.make("all", "diag", likelihood.name, prior_precision=50.0)
    x, y = grid.data(likelihood.name)
    la.fit([(x, y)])
    given, times = la.likelihood_object.target, list[int]()
    assert isinstance(given, MomentTarget)

    def moments(mean: Tensor, covariance: Tensor) -> TargetMoments:
        times.append(len(mean))
        return given.moments(mean, covariance)

    expected = la(x)
    monkeypatch.setattr(type(la.likelihood_object), "target", replace(given, moments=moments))
    assert all(map(torch.equal, la(x), expected))
    assert times == [len(x)]


HARD = [(0.3, 0.2), (2.0, 9.0), (2.0, 100.0), (1e-6, 400.0), (50.0, 2000.0)]
"""Variances of the two outputs, under which the noise is better and worse known, until next to nothing is."""


@pytest.mark.parametrize("name", list(PAIRS))
@pytest.mark.parametrize(("first", "second"), HARD)
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_distribution_function(name: str, first: float, second: float, correlation: float) -> None:
    """What coverage is counted by, against SciPy's adaptive quadrature: of steps within 1 %, the share of a node."""
    shared = correlation * (first * second) ** 0.5
    mean = torch.tensor([0.5, -0.5], dtype=torch.float64)
    covariance = torch.tensor([[first, shared], [shared, second]], dtype=torch.float64)
    for y in (-3.0, 0.1, 0.6, 40.0):
        target = torch.tensor([[y]], dtype=torch.float64)
        found = PAIRS[name].from_outputs(mean.unsqueeze(0), covariance.unsqueeze(0)).below(target)
        assert abs(float(found) - reference.distribution(mean, covariance, y, name)) < (1e-7 if second < 1 else 0.01)


@pytest.mark.parametrize("likelihood", NOISY, ids=lambda likelihood: likelihood.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("variance", [100.0, 400.0, 5000.0])
def test_where_moments_say_nothing_median_and_spread_are_shown(
    likelihood: MomentLikelihood, dtype: torch.dtype, variance: float
) -> None:
    """Rows beside them keep their moments to the bit; aleatoric and epistemic parts add up."""
    mean = torch.tensor([[0.5, -0.5], [0.5, -0.5]], dtype=dtype)
    covariance = torch.diag_embed(torch.tensor([[0.1, 0.2], [0.1, variance]], dtype=dtype))
    middle, spread = likelihood.target.summary(likelihood, mean, covariance, "probit")
    known = MOMENTS[likelihood.name](mean, covariance)
    assert torch.equal(middle[0], known.mean.to(dtype)[0]) and torch.equal(spread[0], known.variance.to(dtype)[0])
    assert bool(middle.isfinite().all() and spread.isfinite().all() and (spread > 0).all())
    pairs = PAIRS[likelihood.name].from_outputs(mean[1:], covariance[1:]).flat
    levels = tuple(float(level) for level in torch.special.ndtr(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)))
    low, median, high = pairs.quantiles(levels, torch.finfo(dtype).max ** 0.49)
    assert_close(middle[1], median, "float32")
    assert_close(spread[1], (0.5 * (high - low)).square(), "float32_solve")
    for level, quantile in zip(levels, (low, median, high), strict=True):
        below = reference.distribution(mean[1].double(), covariance[1].double(), float(quantile), likelihood.name)
        assert abs(below - level) < 0.02


@pytest.mark.parametrize("likelihood", NOISY, ids=lambda likelihood: likelihood.name)
def test_median_and_spread_are_differentiable(likelihood: MomentLikelihood) -> None:
    mean = torch.tensor([[0.5, -0.5]], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor([[0.5, 60.0]], dtype=torch.float64, requires_grad=True)

    def summary(mean: Tensor, variance: Tensor) -> Any:
        return likelihood.target.summary(likelihood, mean, variance.diag_embed(), "probit")

    torch.autograd.gradcheck(summary, (mean, variance), rtol=1e-2, atol=1e-3)


def test_moments_within_a_few_deviations_are_shown() -> None:
    """Whatever their size is: a small precision that is known gives a large variance."""
    mean, variance = torch.tensor([[1.0, -30.0]], dtype=torch.float64), torch.tensor([[0.1, 1.0]], dtype=torch.float64)
    shown = Heteroscedastic().target.summary(Heteroscedastic(), mean, variance, "probit")
    assert_close(shown[1], natural_moments(mean, variance).variance, "exact")


@pytest.mark.parametrize(
    ("likelihood", "f", "y", "message"),
    [
        (Poisson(), torch.zeros(2, 1), torch.tensor([[1.0], [-3.0]]), "Targets hold -3"),
        (Poisson(), torch.zeros(2, 1), torch.tensor([[1.0], [0.25]]), "Targets hold 0.25"),
        (Poisson(), torch.zeros(2, 1), torch.tensor([1.0, 2.0]), r"unsqueeze\(-1\)"),
        (Poisson(), torch.zeros(2, 1), torch.tensor([[1.0], [float("inf")]]), "NaN or infinite"),
        (Heteroscedastic(), torch.zeros(2, 3), torch.zeros(2, 1), r"\[B, 2C\]"),
        (MeanLogVariance(), torch.zeros(2, 3), torch.zeros(2, 1), r"mean \| log variance"),
        (Heteroscedastic(), torch.zeros(2, 4), torch.zeros(2, 4), "must be equal"),
        (Heteroscedastic(), torch.zeros(2, 4), torch.full((2, 2), float("nan")), "NaN"),
    ],
)
def test_bad_data_is_refused(likelihood: MomentLikelihood, f: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        likelihood.check_targets(f, y)


@pytest.mark.parametrize("likelihood", ["poisson", "heteroscedastic", "mean_log_variance"])
def test_a_noise_is_refused(likelihood: str) -> None:
    with pytest.raises(InvalidArgument, match="no observation noise"):
        Laplace(grid.network(likelihood), likelihood, "all", "diag", sigma_noise=0.5)
    la = grid.fitted("all", "diag", likelihood)
    with pytest.raises(InvalidArgument, match="no noise"):
        la(grid.data(likelihood)[0], observation_noise=True)
