"""Counts: y ~ Poisson(exp(f))."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, distributions

from laplace.core.checks import is_true, numbers_are_known, require
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import poisson
from laplace.errors import ApproximationWarning, InvalidData, warn
from laplace.likelihoods.base import Likelihood, MomentLikelihood, OutputHessian
from laplace.likelihoods.checks import check_outputs, check_values
from laplace.likelihoods.targets import MomentTarget, Score, Summary, TargetMoments, mean_of, stretched, variance_of

_WIDE = 40.0
"""Variance of a log rate above which exp(v) − 1 is exp(v) to the last digit of float64."""

_MANY = 1e4
"""Counts from which logarithms of their probabilities are a series."""

_NEAR = 1e-3
"""Relative distance of a count from its rate within which their deviance is a series."""

_SMALLEST_VARIANCE = 1e-10
"""Variance of a log rate below which it counts as known: the density of y moves by less than this."""

if TYPE_CHECKING:
    from laplace.predictive.prediction import Prediction


def log_normal_moments(mean: Tensor, covariance: Tensor) -> TargetMoments:
    """Moments of a count with log rate f ~ N(μ, v), in closed form, float64.

    E[y] = E[Var(y | f)] = m = exp(μ + v/2),    Var(E[y | f]) = m² (exp(v) − 1).

    Where the dtype of the outputs does not hold both, as of log rates that are hardly known, they are in their place
    the median exp(μ) of the rate, and the square of half its central 68 %, (exp(μ) sinh √v)², as far as it holds these.

    Warns:
        ApproximationWarning: There are such rows, as many as it says.
    """
    variance = covariance if covariance.ndim == mean.ndim else covariance.diagonal(dim1=1, dim2=2)
    f, variance = widened(mean), widened(variance).clamp(min=0)
    known = _moments(f, variance)
    unheld = ~known.variance.to(mean.dtype).isfinite()
    if numbers_are_known() and not is_true(unheld.any()):
        return known
    rows = unheld.any(-1)
    if is_true(rows.any()):
        warn(
            f"E[y] and Var(y) of {int(rows.sum())} of {len(rows)} data are beyond the range of {mean.dtype}, since "
            "their log rates are hardly known, or large: they are the median of the rate and the square of half its "
            "central 68 % there. NLL and intervals are those of y. Raise prior_precision, or look at these inputs.",
            ApproximationWarning,
        )
    held = _moments(f.where(~unheld, 0.0), variance.where(~unheld, 0.0))  # whose gradients are numbers
    largest, tiny = 0.5 * math.sqrt(torch.finfo(mean.dtype).max), torch.finfo(variance.dtype).tiny
    deviation = variance.where(unheld, 1.0).clamp(min=tiny).sqrt()  # of a rate that is known, without a gradient
    middle, upper, lower = (_bounded_exp(f + step, largest) for step in (0.0, deviation, -deviation))
    return TargetMoments(
        torch.where(unheld, middle, held.mean),
        torch.where(unheld, middle, held.aleatoric),
        torch.where(unheld, (0.5 * (upper - lower)).square(), held.epistemic),
    )


def _moments(f: Tensor, variance: Tensor) -> TargetMoments:
    rate, wide = (f + 0.5 * variance).exp(), variance > _WIDE
    square = rate.square().where(~wide, 0.0)  # which may vanish where its product does not
    epistemic = variance.where(~wide, 0.0).expm1() * square
    return TargetMoments(rate, rate, torch.where(wide, (2 * (f + variance)).where(wide, 0.0).exp(), epistemic))


def _bounded_exp(f: Tensor, largest: float) -> Tensor:
    return f.clamp(max=math.log(largest)).exp()


class CountTarget(MomentTarget):
    """Counts that are independent given their log rates.

    The negative log likelihood reads the latents: where log rates are hardly known no float holds the variance of y,
    while its density is an ordinary number. A summary of latents has covariances, one of y variances.
    """

    @property
    def scores(self) -> Mapping[str, Score]:
        return {"nll": self.nll}

    def nll(self, likelihood: Likelihood, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        """−Σ_c log ∫ Poisson(y_c; exp(f)) p(f) df of Gaussian latents; of moments of y that of `predictive_nll`."""
        if not isinstance(summary, tuple) or summary[1].ndim == summary[0].ndim:
            return likelihood.predictive_nll(mean_of(summary), variance_of(summary), y, sigma)
        mean, covariance = summary
        variance = widened(covariance.diagonal(dim1=-2, dim2=-1)).clamp(min=_SMALLEST_VARIANCE)
        return -_log_mixture(widened(mean), variance, widened(y)).sum(-1).to(mean)

    def _summary_without_link(self, mean: Tensor, covariance: Tensor, *, for_scores: bool) -> tuple[Tensor, Tensor]:
        """E[y] and Var(y); for scores the latents with diagonal covariances."""
        if not for_scores:
            return super()._summary_without_link(mean, covariance, for_scores=False)
        whole = covariance.ndim > mean.ndim
        return mean, (covariance if whole else torch.diag_embed(covariance)).to(mean.dtype)

    def interval(self, rows: Prediction, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Interval of y, by samples; of the rate exp(f) without noise, which carries quantiles of f over."""
        if observation_noise or rows.sampled:
            return super().interval(rows, level, observation_noise=observation_noise)
        lower, upper = rows.gaussian_interval([component.latent_variance for component in rows.components], level)
        largest = torch.finfo(lower.dtype).max / 2
        return _bounded_exp(lower, largest), _bounded_exp(upper, largest)


@dataclass(frozen=True)
class Poisson(MomentLikelihood):
    """p(y | f) = Π_c Poisson(y_c; exp(f_c)), for counts y: the outputs are logarithms of rates.

    `la(x)` is (E[y], Var(y)), `[B, C]` each: m = exp(μ + v/2) under f ~ N(μ, v), and m + m² (exp(v) − 1), see
    `log_normal_moments`.
    """

    name = "poisson"
    target = CountTarget(log_normal_moments, "count", variances_only=True)
    independent_outputs = True
    some_outputs = True

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Counts of the shape of f, `[B, C]`, in its dtype.

        Raises:
            InvalidData: Another shape, negative or fractional values, NaN or infinite ones.
        """
        check_outputs(f)
        y = check_values(f, y)
        right = (y >= 0) & (y == y.round())
        require(
            right,
            lambda: InvalidData(
                f"Targets hold {y[~right][0].item():.6g}; likelihood='poisson' accepts counts 0, 1, 2, …: use "
                "'regression' for real numbers, and for rates the counts with the logarithm of the exposure added to f."
            ),
        )
        return y

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ_bc exp(f) − y f + log y!, `[1]`."""
        return (f.exp() - y * f + torch.lgamma(y + 1)).sum().reshape(1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """exp(f) − y, `[B, C]`."""
        return f.exp() - y

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """diag(exp(f))."""
        return OutputHessian(f.exp())

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: Generator | None = None
    ) -> Tensor:
        """exp(f) − ŷ with ŷ ~ Poisson(exp(f)), `[S, B, C]`."""
        return f.exp() - poisson(f.detach().exp().expand(n_samples, *f.shape), generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        """The rate exp(f)."""
        return f.exp()

    def conditional(self, f: Tensor) -> distributions.Distribution:
        """C independent Poisson distributions."""
        return distributions.Independent(_Counts(_bounded_exp(f, torch.finfo(f.dtype).max / 2)), 1)

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        """−Σ_c log ∫ Poisson(y_c; exp(f)) N(f; μ, v) df, `[B]`, with the μ and v of these moments of y_c.

        Of Gaussian latents it is exact but for the quadrature, whose error is below 1e-8; without a variance the rate
        is known.
        """
        mean, y = widened(prediction), widened(y)
        mean = mean.clamp(min=torch.finfo(mean.dtype).tiny)
        known = y * mean.log() - mean - torch.lgamma(y + 1)
        if variance is None:
            return -known.sum(-1).to(prediction)
        spread = ((widened(variance) - mean) / mean.square()).log1p().clamp(min=_SMALLEST_VARIANCE)
        return -_log_mixture(mean.log() - 0.5 * spread, spread, y).sum(-1).to(prediction)


class _Counts(distributions.Poisson):
    """Counts of any rate: their numbers, and logarithms of their probabilities, are right where rates are large."""

    def __init__(self, rate: Tensor) -> None:
        super().__init__(rate, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> _Counts:
        return _Counts(self.rate.expand(batch_shape))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        with torch.no_grad():
            return poisson(self.rate.expand(self._extended_shape(sample_shape)))

    def log_prob(self, value: Tensor) -> Tensor:
        """Of counts in the thousands in float64, by deviance and Stirling's series: its terms cancel.

        (Loader, 2000, "Fast and accurate computation of binomial probabilities".)
        """
        known = super().log_prob(value)
        y, rate = torch.broadcast_tensors(widened(value), widened(self.rate))
        many = y > _MANY
        if not is_true(many.any()):
            return known
        y, rate = y.where(many, 1.0), rate.where(many, 1.0)
        gap = (y - rate) / rate
        near = rate * gap.square() * (0.5 - gap * (1 / 6 - gap / 12))
        deviance = torch.where(gap.abs() < _NEAR, near, y * (y / rate).log() - (y - rate))
        return torch.where(many, -deviance - 0.5 * (y.log() + math.log(2 * math.pi)) - 1 / (12 * y), known.to(y)).to(
            known
        )


def _log_mixture(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """Log ∫ Poisson(y; exp(f)) N(f; μ, v) df by the trapezoidal rule, element-wise.

    The logarithm of the integrand is concave, with a curvature of 1/v + exp(f): its width is w = (1/v + exp(f̂))^(−½) at
    the mode f̂, and up to √v below it.
    """
    with torch.no_grad():
        mode = _mode(mean, variance, y)
        f, log_steps = stretched(mode, (1 / variance + mode.exp()).rsqrt(), variance.sqrt())
    log_normal = -0.5 * ((f - mean).square() / variance + (2 * math.pi * variance).log())
    return (y * f - f.exp() - torch.lgamma(y + 1) + log_normal + log_steps).logsumexp(0)


def _mode(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """The f with y − exp(f) = (f − μ) / v, by Newton's method for exp(l) + l = z with l = f + log v.

    From above, where every step stays, eight of them reach the last digits.
    """
    z = variance.log() + variance * y + mean
    shifted = torch.where(z > 1, z.clamp(min=1).log(), z)
    for _ in range(8):
        shifted = shifted - (shifted.exp() + shifted - z) / (shifted.exp() + 1)
    return shifted - variance.log()
