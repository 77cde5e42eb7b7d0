"""Regression with a noise that depends on the input: y ~ N(η₁ / λ(s), 1 / λ(s)), in natural parameters.

(Immer, Palumbo, Marx and Vogt, 2023, "Effective Bayesian heteroscedastic regression with deep neural networks".) The
natural parameters of a Gaussian are η₁ = m/σ² and η₂ = −1/(2σ²) < 0. The network returns η₁ and an s that is free, with
η₂ = −½ softplus(s): the precision of y is λ(s) = softplus(s). It grows linearly, not exponentially, so that a Gaussian
over s gives no log-normal precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, distributions
from torch.nn.functional import softplus

from laplace.core import scores
from laplace.core.random_numbers import standard_normal
from laplace.errors import InvalidData
from laplace.likelihoods.base import OutputHessian
from laplace.likelihoods.checks import check_outputs, check_values
from laplace.likelihoods.moment_target import MomentLikelihood, MomentTarget, TargetMoments
from laplace.likelihoods.outputs import Density
from laplace.likelihoods.points import Points
from laplace.likelihoods.target import Score, Summary, mean_of, variance_of


def natural_moments(mean: Tensor, covariance: Tensor) -> TargetMoments:
    """Moments of y under Gaussian (η₁, s), float64, by quadrature over s, given which η₁ is Gaussian.

    With η₁ | s ~ N(a(s), r):  E[y] = E[a/λ],  E[Var(y | f)] = E[1/λ],  Var(E[y | f]) = E[(a/λ − E[y])² + r/λ²].

    Args:
        mean: `[B, 2C]`.
        covariance: `[B, 2C, 2C]` or variances `[B, 2C]`.
    """
    first, s = mean.double().chunk(2, 1)
    variances = covariance if covariance.ndim == mean.ndim else covariance.diagonal(dim1=1, dim2=2)
    first_variance, variance = variances.double().clamp(min=0).chunk(2, 1)
    c = first.shape[1]
    shared = torch.zeros_like(first)
    if covariance.ndim > mean.ndim:
        shared = covariance[:, :c, c:].diagonal(dim1=1, dim2=2).double()
    slope = torch.where(variance > 0, shared / variance.where(variance > 0, 1.0), 0.0)
    rest = (first_variance - slope * shared).clamp(min=0)
    # 1/λ² grows like exp(−2s) as s falls, so that its mean lies 2 standard deviations per unit of s further down.
    points = Points.of_gaussian(s, variance, further_below=2 * variance.sqrt())
    conditional = points.map(lambda value: (first + slope * (value - s)) / softplus(value))
    expected = conditional.mean()
    return TargetMoments(
        expected,
        points.mean(lambda value: 1 / softplus(value)),
        conditional.mean(lambda value: (value - expected).square())
        + rest * points.mean(lambda value: softplus(value).pow(-2)),
    )


class NoisyRealTarget(MomentTarget):
    """Real numbers, each with a noise of its own; scores are those of the Gaussian with their moments."""

    @property
    def scores(self) -> Mapping[str, Score]:
        return {"crps": self.crps, "entropy": self.predictive_entropy}

    def crps(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        """Continuous ranked probability scores, summed over outputs."""
        return scores.gaussian_crps(mean_of(summary), _variance(summary), y)

    def predictive_entropy(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        """Differential entropy."""
        return scores.gaussian_entropy(_variance(summary))


@dataclass(frozen=True)
class Heteroscedastic(MomentLikelihood):
    """p(y | f) = Π_c N(y_c; η_c / λ_c, 1 / λ_c) with outputs f = [η | s], `[B, 2C]`, and λ = softplus(s).

    −log p(y | f) = Σ_c ½ λ_c (y_c − η_c/λ_c)² − ½ log λ_c + ½ log 2π. The curvature is the Fisher information with
    respect to f, which does not depend on y. `la(x)` is (E[y], Var(y)), `[B, C]` each, with the noise.
    """

    name = "heteroscedastic"
    target = NoisyRealTarget(natural_moments, "real")

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Finite targets `[B, C]` of outputs `[B, 2C]`, in their dtype.

        Raises:
            InvalidData: An odd number of outputs, targets of another shape, NaN or infinite values.
        """
        check_outputs(f)
        if f.shape[1] % 2:
            raise InvalidData(
                f"Outputs have shape {list(f.shape)}; likelihood='heteroscedastic' accepts [B, 2C], natural parameters "
                "[eta | s] of C targets: give the last layer an even number of outputs."
            )
        return check_values(f[:, ::2], y)

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ_b −log p(y_b | f_b), `[1]`."""
        mean, precision, _ = _parameters(f)
        terms = 0.5 * (precision * (y - mean).square() - precision.log() + math.log(2 * math.pi))
        return terms.sum().reshape(1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """[m − y | ½ σ(s) (y² − m² − 1/λ)] with m = η/λ and λ' = σ(s), `[B, 2C]`."""
        mean, precision, slope = _parameters(f)
        return torch.cat([mean - y, 0.5 * slope * ((y - mean) * (y + mean) - 1 / precision)], 1)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """The Fisher information, of every pair (η, s) [[1, −σ m], [−σ m, σ² (m² + 1/(2λ))]] / λ."""
        mean, precision, slope = _parameters(f)
        diag = torch.cat([1 / precision, slope.square() * (mean.square() + 0.5 / precision) / precision], 1)
        mixed = torch.diag_embed(-slope * mean / precision)
        zeros = torch.zeros_like(mixed)
        off = torch.cat([torch.cat([zeros, mixed], 2), torch.cat([mixed, zeros], 2)], 1)
        return OutputHessian(diag, dense=torch.diag_embed(diag) + off)

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """Gradients at ŷ = m + ε/√λ with ε ~ N(0, 1), `[S, B, 2C]`."""
        mean, precision, slope = _parameters(f)
        noise = standard_normal((n_samples, *mean.shape), mean, generator)
        step = noise * precision.rsqrt()
        second = 0.5 * slope * (2 * mean * step + (noise.square() - 1) / precision)
        return torch.cat([-step, second], 2)

    def inverse_link(self, f: Tensor) -> Tensor:
        """E[y | f] = η / λ, `[..., C]` of outputs `[..., 2C]`."""
        return _parameters(f)[0]

    def conditional(self, f: Tensor) -> distributions.Distribution:
        """C independent Gaussians."""
        mean, precision, _ = _parameters(f)
        return distributions.Independent(distributions.Normal(mean, precision.rsqrt()), 1)

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        """−Σ_c log N(y_c; prediction_c, variance_c), `[B]`: of the Gaussian with the moments of y.

        Raises:
            InvalidData: No variance, without which the density is not known.
        """
        if variance is None:
            raise InvalidData("a mean was given without a variance, of which likelihood='heteroscedastic' needs both.")
        return scores.gaussian_nll(prediction, variance, y)


def _parameters(f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """M = η/λ, λ = softplus(s) and dλ/ds = σ(s), `[..., C]` each, of outputs `[..., 2C]`."""
    first, s = f.chunk(2, -1)
    precision = softplus(s)
    return first / precision, precision, torch.sigmoid(s)


def _variance(summary: Summary) -> Tensor:
    variance = variance_of(summary)
    if variance is None:
        raise InvalidData("a mean was given without a variance, of which likelihood='heteroscedastic' needs both.")
    return variance
