"""Likelihoods whose predictions are E[y] and Var(y): moments and densities against quadrature, refusals."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace import Laplace
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidData
from laplace.likelihoods import Heteroscedastic, MeanLogVariance, Poisson
from laplace.likelihoods.base import MomentLikelihood
from laplace.likelihoods.heteroscedastic import NaturalPairs
from laplace.likelihoods.links import LINKS
from laplace.likelihoods.mean_log_variance import LogVariancePairs
from laplace.likelihoods.pairs import Pairs
from laplace.likelihoods.poisson import log_normal_moments
from laplace.likelihoods.targets import MomentTarget, TargetMoments
from laplace.metrics import gaussian_crps
from laplace.tuning.losses import find_score
from tests import grid
from tests.reference import likelihoods as reference
from tests.reference.compare import assert_close

ONE = torch.ones((), dtype=torch.float64)


def natural_moments(mean: Tensor, covariance: Tensor) -> TargetMoments:
    return NaturalPairs.of(mean, covariance).moments()


def log_variance_moments(mean: Tensor, covariance: Tensor) -> TargetMoments:
    return LogVariancePairs.of(mean, covariance).moments()


MOMENTS = {
    "poisson": log_normal_moments,
    "heteroscedastic": natural_moments,
    "mean_log_variance": log_variance_moments,
}
LIKELIHOODS: list[MomentLikelihood] = [Poisson(), Heteroscedastic(), MeanLogVariance()]
NOISY: list[MomentLikelihood] = LIKELIHOODS[1:]
PAIRS: dict[str, type[Pairs]] = {"heteroscedastic": NaturalPairs, "mean_log_variance": LogVariancePairs}


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


@pytest.mark.parametrize("variance", [1e-6, 0.1, 2.0, 50.0])
def test_density_of_counts(variance: float) -> None:
    """The mixture over a log-normal rate, which the moments name again; of counts far from the mean too."""
    mean = torch.linspace(-2, 3, 6, dtype=torch.float64).unsqueeze(1)
    spread = torch.full_like(mean, variance)
    known = log_normal_moments(mean, spread)
    for count in (0.0, 1.0, 7.0, 120.0):
        y = torch.full_like(mean, count)
        actual = Poisson().predictive_nll(known.mean, known.variance, y, ONE)
        tolerance = "backend" if variance > 1e-3 else "float32"
        assert_close(actual, -reference.count_density(mean, spread, y)[:, 0], tolerance, label=str(count))


def test_density_of_counts_with_a_known_rate() -> None:
    f, y = torch.randn(6, 2, dtype=torch.float64), torch.poisson(torch.full((6, 2), 3.0, dtype=torch.float64))
    expected = reference.nll(f, y, "poisson")
    assert_close(Poisson().predictive_nll(f.exp(), None, y, ONE), expected, "algebra")
    assert_close(Poisson().predictive_nll(f.exp(), f.exp(), y, ONE), expected, "float32")
    rates = f.exp().requires_grad_()
    variances = (f.exp() + 0.4).requires_grad_()
    torch.autograd.gradcheck(lambda m, v: Poisson().predictive_nll(m, v, y, ONE), (rates, variances))


@pytest.mark.parametrize("likelihood", NOISY, ids=lambda likelihood: likelihood.name)
def test_density_of_a_noise_of_its_own(likelihood: MomentLikelihood) -> None:
    mean, variance, y = torch.randn(4, 2), torch.rand(4, 2) + 0.1, torch.randn(4, 2)
    expected = -Normal(mean, variance.sqrt()).log_prob(y).sum(1)
    assert_close(likelihood.predictive_nll(mean, variance, y, ONE), expected, "float32")
    with pytest.raises(InvalidData, match="without a variance"):
        likelihood.predictive_nll(mean, None, y, ONE)


@pytest.mark.parametrize("likelihood", NOISY, ids=lambda likelihood: likelihood.name)
@pytest.mark.parametrize("spread", [1e-4, 0.3, 1.0])
def test_density_of_a_noise_of_its_own_under_gaussian_outputs(spread: float, likelihood: MomentLikelihood) -> None:
    """The score that tuning minimises is exact, where the variance of y may say little."""
    mean, covariance = latents(spread)
    y = 3 * torch.randn(5, 2, dtype=torch.float64)
    summary = likelihood.target.summary(likelihood, mean, covariance, "probit", for_scores=True)
    actual = find_score("nll", likelihood)(likelihood, summary, y, ONE)
    pairs = [[c, c + 2] for c in range(2)]  # of a target's two outputs
    truth = [
        [
            reference.narrow_density(m[i], v[i][:, i], t, 100_001, likelihood.name)
            for i, t in zip(pairs, row, strict=True)
        ]
        for m, v, row in zip(mean, covariance, y, strict=True)
    ]
    assert_close(actual, -torch.tensor(truth, dtype=torch.float64).sum(1), "backend")
    candidates = tuple(part.expand(3, *part.shape) for part in summary)
    assert_close(find_score("nll", likelihood)(likelihood, candidates, y, ONE), actual.expand(3, 5), "algebra")


@pytest.mark.parametrize("eta", [3.0, 100.0, 3000.0])
@pytest.mark.parametrize(("s", "variance"), [(-2.0, 0.3), (1.0, 4.0)])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
@pytest.mark.turns
def test_density_where_the_first_parameter_is_almost_known(
    eta: float, s: float, variance: float, correlation: float
) -> None:
    """Then y decides s, to a small part of its standard deviation; also where it is far from what was expected."""
    likelihood = Heteroscedastic()
    mean = torch.tensor([eta, s], dtype=torch.float64)
    shared = correlation * (1e-10 * variance) ** 0.5
    covariance = torch.tensor([[1e-10, shared], [shared, variance]], dtype=torch.float64)
    precision = torch.nn.functional.softplus(mean[1])
    for offset in (0.0, 2.5, -8.0):
        y = eta / precision + offset / precision.sqrt()
        actual = find_score("nll", likelihood)(
            likelihood, (mean.unsqueeze(0), covariance.unsqueeze(0)), y.reshape(1, 1), ONE
        )
        assert_close(actual[0], -reference.narrow_density(mean, covariance, y), "backend", label=str(offset))


@pytest.mark.parametrize("y", [7717.0, 771.7, 50.0, -7717.0])
def test_density_where_the_second_parameter_is_hardly_known(y: float) -> None:
    """The precisions that y is likely at lie between the nodes of any grid over those that are possible."""
    likelihood, sign = Heteroscedastic(), 1.0 if y > 0 else -1.0
    mean = torch.tensor([1.97 * sign, 26.9], dtype=torch.float64)
    covariance = torch.tensor([[2.66e-5, 0.0626 * sign], [0.0626 * sign, 580.0]], dtype=torch.float64)
    target = torch.tensor([[y]], dtype=torch.float64)
    actual = find_score("nll", likelihood)(likelihood, (mean.unsqueeze(0), covariance.unsqueeze(0)), target, ONE)
    assert_close(actual[0], -reference.narrow_density(mean, covariance, target[0, 0]), "backend")


@pytest.mark.parametrize("likelihood", NOISY, ids=lambda likelihood: likelihood.name)
def test_density_of_a_noise_of_its_own_is_differentiable(likelihood: MomentLikelihood) -> None:
    mean, covariance = latents(c=2)
    y, root = torch.randn(5, 1, dtype=torch.float64), torch.linalg.cholesky(covariance)

    def nll(mean: Tensor, root: Tensor) -> Tensor:
        return find_score("nll", likelihood)(likelihood, (mean, root @ root.mT), y, ONE)

    torch.autograd.gradcheck(nll, (mean.requires_grad_(), root.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_summaries_of_samples_for_scores_have_their_covariances(dtype: torch.dtype) -> None:
    """Of η with s, and between targets, against the covariance of every row by itself; so have densities."""
    likelihood, (mean, covariance) = Heteroscedastic(), latents(0.4)
    samples = MultivariateNormal(mean, covariance).sample((30,)).to(dtype)
    summary = likelihood.target.summary_of_samples(likelihood, samples, for_scores=True)
    expected = reference.sampled_moments(samples)
    tolerance = "algebra" if dtype == torch.float64 else "float32"
    for part, truth in zip(summary, expected, strict=True):
        assert part.dtype == dtype
        assert_close(part.double(), truth, tolerance)
    y = torch.randn(5, 2, dtype=torch.float64)
    actual = find_score("nll", likelihood)(likelihood, summary, y.to(dtype), ONE)
    density = reference.noisy_density(*expected, y.to(dtype).double())
    assert_close(actual.double(), -density.sum(1), "backend" if dtype == torch.float64 else "float32")


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_density_where_moments_have_no_float(likelihood: MomentLikelihood, dtype: torch.dtype) -> None:
    """Under weak priors a variance of y overflows, while its density is an ordinary number."""
    mean = torch.tensor([[0.5, -0.5]], dtype=dtype)
    y = torch.full((1, 2 if likelihood.name == "poisson" else 1), 3.0, dtype=dtype)
    variance = torch.full_like(mean, 2000.0).requires_grad_()
    with pytest.warns(ApproximationWarning) if likelihood.name == "poisson" else nullcontext():
        predicted = likelihood.target.summary(likelihood, mean, variance, "probit")
    assert bool(predicted[1].isfinite().all())
    summary = likelihood.target.summary(likelihood, mean, torch.diag_embed(variance), "probit", for_scores=True)
    actual = find_score("nll", likelihood)(likelihood, summary, y, ONE)
    f = (mean[0].double() + 2000**0.5 * torch.linspace(-11, 11, 400_001, dtype=torch.float64).unsqueeze(1)).T
    weights = torch.softmax(-0.5 * torch.linspace(-11, 11, 400_001, dtype=torch.float64).square(), 0)
    if likelihood.name == "poisson":
        logs = likelihood.conditional(f.T).base_dist.log_prob(y.double())
        expected = -(logs + weights.log().unsqueeze(1)).logsumexp(0).sum()
    elif likelihood.name == "mean_log_variance":  # y is N(m, exp(l) + r) given l
        logs = Normal(0.5, (f[1].exp() + 2000).sqrt()).log_prob(torch.tensor(3.0, dtype=torch.float64))
        expected = -(logs + weights.log()).logsumexp(0)
    else:  # y is N(a/λ, (1 + r/λ)/λ) given s
        precision = f[1].exp().log1p().where(f[1] < 30, f[1])
        known = precision > 1e-140
        scale = ((1 + 2000 / precision[known]) / precision[known]).sqrt()
        logs = Normal(0.5 / precision[known], scale).log_prob(torch.tensor(3.0, dtype=torch.float64))
        expected = -(logs + weights[known].log()).logsumexp(0)
    assert_close(actual[0], expected, "float32")
    (slope,) = torch.autograd.grad(actual.sum(), variance)
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize(
    ("mean", "variance"), [(0.3, 0.0), (-2.0, 12.0), (-40.0, 60.0), (-500.0, 250.0), (-900.0, 800.0)]
)
def test_moments_of_counts_of_any_rate(mean: float, variance: float) -> None:
    """By quadrature of logarithms: a rate whose square has no float has a variance that has one."""
    z = torch.linspace(-70, 70, 200_001, dtype=torch.float64)
    f, log_weights = mean + variance**0.5 * z, torch.log_softmax(-0.5 * z.square(), 0)
    first, second = (log_weights + f).logsumexp(0), (log_weights + 2 * f).logsumexp(0)
    known = log_normal_moments(*torch.tensor([[[mean]], [[variance]]], dtype=torch.float64))
    assert_close(known.mean[0, 0], first.exp(), "algebra")
    assert_close(known.epistemic[0, 0], second.exp() - (2 * first).exp(), "algebra")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rates_that_no_float_holds_are_shown_by_their_middle(dtype: torch.dtype) -> None:
    """Rows beside them keep their moments to the bit; all have gradients; what has no middle is bounded."""
    mean = torch.tensor([[0.5, -0.5], [0.5, 2.0], [-400.0, 900.0]], dtype=dtype, requires_grad=True)
    variance = torch.tensor([[0.0, 0.2], [0.1, 2000.0], [0.3, 1.0]], dtype=dtype, requires_grad=True)
    likelihood = Poisson()
    with pytest.warns(ApproximationWarning, match="of 2 of 3 data are beyond the range"):
        shown = likelihood.target.summary(likelihood, mean, variance, "probit")
    alone = likelihood.target.summary(likelihood, mean[:1], variance[:1], "probit")
    assert all(map(torch.equal, (part[:1] for part in shown), alone))
    assert_close(shown[0][1, 1].double(), torch.tensor(2.0).double().exp(), "float32")
    ends = (2.0 + 2000**0.5 * torch.tensor([-1.0, 1.0]).double()).exp()
    known = (0.5 * (ends[1] - ends[0])).square() + torch.tensor(2.0).double().exp()
    bound = torch.tensor(torch.finfo(dtype).max / 16).double()  # half the upper end, as far as its square is held
    assert_close(shown[1][1, 1].double(), torch.minimum(known, bound), "float32_solve")
    slopes = torch.autograd.grad(sum(part.log1p().sum() for part in shown), (mean, variance))
    assert all(bool(part.isfinite().all()) for part in (*shown, *slopes))


def test_known_rates_that_no_float_holds_have_gradients() -> None:
    """Also where a log rate has no variance at all, beside one that has."""
    mean = torch.tensor([[709.0, 900.0]], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor([[0.0, 0.1]], dtype=torch.float64, requires_grad=True)
    with pytest.warns(ApproximationWarning, match="of 1 of 1 data are beyond the range"):
        known = log_normal_moments(mean, variance)
    slopes = torch.autograd.grad((known.mean + known.epistemic).sum(), (mean, variance))
    assert all(bool(part.isfinite().all()) for part in (known.mean, known.epistemic, *slopes))


def test_counts_of_any_rate() -> None:
    """Samples are no negative numbers; probabilities those of SciPy, and of a Gaussian where counts are many."""
    for rate, y in [(3e4, 29_500.0), (3e4, 20_001.0), (2e5, 2e5), (1e4, 3e4), (1e-3, 2e4), (2e4, 0.0)]:
        counts = Poisson().conditional(torch.tensor([[rate]]).double().log())
        expected = stats.poisson.logpmf(y, rate)
        assert_close(counts.log_prob(torch.tensor([[y]]).double()), torch.tensor([expected]).double(), "backend")
    f = torch.tensor([[11.0, 36.0, 60.0, 88.0, 1000.0, -1000.0]])
    for dtype in (torch.float32, torch.float64):
        counts = Poisson().conditional(f.to(dtype))
        y = counts.sample((50,))
        assert bool(((y >= 0) & y.isfinite()).all() and counts.log_prob(y).isfinite().all())
    many = Poisson().conditional(torch.tensor([[40.0]]).double())
    y = torch.tensor([[40.0]]).double().exp().round()
    assert_close(many.log_prob(y)[0], -0.5 * (math.log(2 * math.pi) + torch.tensor(40.0).double()), "backend")


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


def test_a_row_of_unknown_rate_leaves_the_others(device: torch.device) -> None:
    """One row far from the data: the batch has its answers, one warning says how many are of another kind."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 20, device=device).unsqueeze(1)
    y = torch.poisson(x.exp())
    la = Laplace(torch.nn.Linear(1, 1).to(device), "poisson", "all", "full")
    la.fit([(x, y)])
    far = torch.tensor([[0.5], [200.0], [-0.2], [1e4]], device=device)
    known = la(far[[0, 2]])
    with pytest.warns(ApproximationWarning, match="of 2 of 4 data") as said:
        shown = la(far)
    assert len(said) == 1
    for part, alone in zip(shown, known, strict=True):
        assert bool(part.isfinite().all())
        assert_close(part[[0, 2]], alone, "float32")
    prediction = la.predict(far)
    for noise in (True, False):
        lower, upper = prediction.interval(0.9, observation_noise=noise)
        assert bool((lower >= 0).all() and (upper >= lower).all() and upper.isfinite().all())
    with pytest.warns(ApproximationWarning):
        assert bool(prediction.entropy.isfinite().all())
    assert bool(prediction.decomposition.total.isfinite().all())
    with pytest.warns(ApproximationWarning):
        comparison = la.compare([(far, torch.ones(4, 1, device=device))])
    assert "nan" not in str(comparison)


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
        found = PAIRS[name].of(mean.unsqueeze(0), covariance.unsqueeze(0)).below(target)
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
    pairs = PAIRS[likelihood.name].of(mean[1:], covariance[1:]).flat
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


@pytest.mark.parametrize("name", ["crps", "entropy"])
def test_scores_of_a_noise_of_its_own(name: str) -> None:
    """Of Gaussians with the moments of y, whichever of the two summaries is known."""
    likelihood = Heteroscedastic()
    mean, covariance = latents()
    y, score = torch.randn(5, 2, dtype=torch.float64), find_score(name, likelihood)
    values = [
        score(likelihood, likelihood.target.summary(likelihood, mean, covariance, "probit", for_scores=latent), y, ONE)
        for latent in (False, True)
    ]
    assert_close(values[0], values[1], "algebra")
    m, aleatoric, epistemic = reference.moments(mean, covariance, "heteroscedastic")
    normal = Normal(m, (aleatoric + epistemic).sqrt())
    if name == "entropy":
        assert_close(values[0], normal.entropy().sum(1), "backend")
    else:
        expected = gaussian_crps(m, normal.variance, y)
        assert_close(values[0].mean(), expected, "backend")
    with pytest.raises(InvalidData, match="without a variance"):
        score(likelihood, m, y, ONE)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
def test_conditionals_and_their_samples(likelihood: MomentLikelihood) -> None:
    f, _ = latents()
    width = f.shape[1] if likelihood.name == "poisson" else f.shape[1] // 2
    conditional = likelihood.conditional(f.expand(3, *f.shape))
    y = conditional.sample()
    assert y.shape == (3, 5, width)
    assert_close(conditional.log_prob(y), -reference.nll(f.expand(3, *f.shape), y, likelihood.name), "algebra")


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
def test_summaries_of_samples_agree_with_those_of_their_gaussian(likelihood: MomentLikelihood) -> None:
    mean, covariance = latents(0.05)
    n = 100_000
    samples = MultivariateNormal(mean, covariance).sample((n,))
    drawn = likelihood.target.summary_of_samples(likelihood, samples)
    known = likelihood.target.summary(likelihood, mean, covariance, "probit")
    means = likelihood.conditional(samples[:5000]).mean
    assert_close(drawn[0], known[0], "mc", standard_error=means.std(0) / n**0.5)
    terms = likelihood.conditional(samples[:5000]).variance + (means - means.mean(0)).square()
    assert_close(drawn[1], known[1], "mc", standard_error=terms.std(0) / n**0.5)


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


def test_counts_may_be_integers() -> None:
    y = Poisson().check_targets(torch.zeros(2, 2), torch.tensor([[1, 2], [0, 5]]))
    assert y.dtype == torch.float32


@pytest.mark.parametrize("likelihood", ["poisson", "heteroscedastic", "mean_log_variance"])
def test_a_noise_is_refused(likelihood: str) -> None:
    with pytest.raises(InvalidArgument, match="no observation noise"):
        Laplace(grid.network(likelihood), likelihood, "all", "diag", sigma_noise=0.5)
    la = grid.fitted("all", "diag", likelihood)
    with pytest.raises(InvalidArgument, match="no noise"):
        la(grid.data(likelihood)[0], observation_noise=True)
