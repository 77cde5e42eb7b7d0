"""Counts: y ~ Poisson(exp(f))."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor, distributions

from laplace.core.checks import require
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import poisson
from laplace.errors import InvalidData
from laplace.likelihoods.base import Likelihood, MomentLikelihood, OutputHessian
from laplace.likelihoods.checks import check_outputs, check_values
from laplace.likelihoods.targets import MomentTarget, Score, Summary, TargetMoments, mean_of, stretched, variance_of

_SMALLEST_VARIANCE = 1e-10
"""Variance of a log rate below which it counts as known: the density of y moves by less than this."""

if TYPE_CHECKING:
    from laplace.predictive.prediction import Prediction


def log_normal_moments(mean: Tensor, covariance: Tensor) -> TargetMoments:
    """Moments of a count with log rate f ~ N(μ, v), in closed form, float64.

    E[y] = E[Var(y | f)] = m = exp(μ + v/2),    Var(E[y | f]) = m² (exp(v) − 1).
    """
    variance = covariance if covariance.ndim == mean.ndim else covariance.diagonal(dim1=1, dim2=2)
    variance = widened(variance).clamp(min=0)
    rate = (widened(mean) + 0.5 * variance).exp()
    return TargetMoments(rate, rate, variance.expm1() * rate.square())


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
        return lower.exp(), upper.exp()


@dataclass(frozen=True)
class Poisson(MomentLikelihood):
    """p(y | f) = Π_c Poisson(y_c; exp(f_c)), for counts y: the outputs are logarithms of rates.

    `la(x)` is (E[y], Var(y)), `[B, C]` each: m = exp(μ + v/2) under f ~ N(μ, v), and m + m² (exp(v) − 1).
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
        return distributions.Independent(distributions.Poisson(f.exp(), validate_args=False), 1)

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
