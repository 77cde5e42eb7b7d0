"""Regression with a noise that depends on the input: y ~ N(η / λ(s), 1 / λ(s)), in natural parameters.

(Immer, Palumbo, Marx and Vogt, 2023, "Effective Bayesian heteroscedastic regression with deep neural networks".) The
natural parameters of a Gaussian are η₁ = m/σ² and η₂ = −1/(2σ²) < 0. The network returns η₁ and an s that is free, with
η₂ = −½ softplus(s): the precision of y is λ(s) = softplus(s). It grows linearly, not exponentially, so that a Gaussian
over s gives no log-normal precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, distributions
from torch.nn.functional import softplus

from laplace.core.random_numbers import standard_normal
from laplace.likelihoods.base import OutputHessian
from laplace.likelihoods.pairs import GaussianPairs, NoisyRealTarget, PairLikelihood, exact_places
from laplace.likelihoods.targets import Points, TargetMoments

_EXPONENTIAL = -40.0
"""Below it softplus(s) is exp(s) to the last digit of float64."""


@dataclass(frozen=True, eq=False)
class NaturalPairs(GaussianPairs):
    """Pairs (η, s): y given both is N(η / λ(s), 1 / λ(s))."""

    def standardised(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Of the mean a/λ and the variance (λ + r)/λ², which has no float where λ is tiny: λ² is taken out of it."""
        precision = softplus(s)
        deviation = self._total(precision).sqrt()
        return precision / deviation, self.first_given(s) / deviation

    def log_given(self, y: Tensor, s: Tensor) -> Tensor:
        precision = softplus(s)
        total = self._total(precision)
        squares = (y * precision - self.first_given(s)).square() / total
        return _log_softplus(s) - 0.5 * (squares + (2 * math.pi * total).log())

    def log_square(self, s: Tensor) -> Tensor:
        precision = softplus(s)
        return (self._total(precision) + self.first_given(s).square()).log() - 2 * _log_softplus(s)

    def noise(self, s: Tensor) -> Tensor:
        return 1 / softplus(s)

    def moments(self) -> TargetMoments:
        """By quadrature over s, given which η is Gaussian.

        With η | s ~ N(a(s), r):  E[y] = E[a/λ],  E[Var(y | f)] = E[1/λ],  Var(E[y | f]) = E[(a/λ − E[y])² + r/λ²].
        Variances that no float holds, of precisions that are hardly known, are infinite.
        """
        # For functions that grow like exp(−2s), whose mean lies 2 standard deviations per unit of s further down.
        points = Points.of_gaussian(self.s, self.variance, further_below=2 * self.variance.sqrt())
        conditional = points.map(lambda s: self.first_given(s) / softplus(s))
        expected = conditional.mean()
        epistemic = conditional.mean(lambda value: (value - expected).square())
        epistemic = epistemic + self.rest * points.mean(lambda s: softplus(s).pow(-2))
        aleatoric = points.mean(lambda s: 1 / softplus(s))
        return TargetMoments(expected, *(part.nan_to_num(math.inf, math.inf) for part in (aleatoric, epistemic)))

    def steepness(self, y: Tensor, s: Tensor) -> Tensor:
        return (y * torch.sigmoid(s) - self.slope).square() / self._total(softplus(s))

    def narrow_places(self, y: Tensor) -> Tensor:
        """Where y is the mean of its density given s, λ(s) y = a(s): λ is convex and a linear, they meet twice at most.

        Places that are no such are returned, too.
        """
        deviation = self.variance.sqrt()

        def above(z: Tensor) -> Tensor:
            s = self.s + z * deviation
            return softplus(s) * y > self.first_given(s)

        return exact_places(above, self.s)

    def _total(self, precision: Tensor) -> Tensor:
        """λ + r, positive."""
        return (precision + self.rest).clamp(min=torch.finfo(precision.dtype).tiny)


@dataclass(frozen=True)
class Heteroscedastic(PairLikelihood):
    """p(y | f) = Π_c N(y_c; η_c / λ_c, 1 / λ_c) with outputs f = [η | s], `[B, 2C]`, and λ = softplus(s).

    −log p(y | f) = Σ_c ½ λ_c (y_c − η_c/λ_c)² − ½ log λ_c + ½ log 2π. The curvature is the Fisher information with
    respect to f, which does not depend on y. `la(x)` is (E[y], Var(y)), `[B, C]` each, with the noise.
    """

    name = "heteroscedastic"
    target = NoisyRealTarget(NaturalPairs.shown, "real", pairs=NaturalPairs)

    outputs = "natural parameters [eta | s]"

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
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: Generator | None = None
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
        first, s = f.chunk(2, -1)
        # A precision below this has means and deviations that no float holds: no sample of y may be NaN.
        precision = softplus(s).clamp(min=torch.finfo(f.dtype).tiny ** 0.75)
        normal = distributions.Normal(first / precision, precision.rsqrt(), validate_args=False)
        return distributions.Independent(normal, 1)


def _parameters(f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """M = η/λ, λ = softplus(s) and dλ/ds = σ(s), `[..., C]` each, of outputs `[..., 2C]`."""
    first, s = f.chunk(2, -1)
    precision = softplus(s)
    return first / precision, precision, torch.sigmoid(s)


def _log_softplus(s: Tensor) -> Tensor:
    """Log softplus(s), which is s where the exponential is all there is of it."""
    return torch.where(s < _EXPONENTIAL, s, softplus(s.clamp(min=_EXPONENTIAL)).log())
