"""Regression by networks of a mean and a logarithm of a variance, as `torch.nn.GaussianNLLLoss` trains them.

y ~ N(m, exp(l)) with outputs f = [m | l] (Nix and Weigend, 1994, "Estimating the mean and variance of the target
probability distribution").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, distributions

from laplace.core.random_numbers import standard_normal
from laplace.likelihoods.base import OutputHessian
from laplace.likelihoods.pairs import GaussianPairs, NoisyRealTarget, PairLikelihood
from laplace.likelihoods.targets import TargetMoments


@dataclass(frozen=True, eq=False)
class LogVariancePairs(GaussianPairs):
    """Pairs (m, l): y given both is N(m, exp(l))."""

    def standardised(self, s: Tensor) -> tuple[Tensor, Tensor]:
        deviation = self._total(s).sqrt()
        return 1 / deviation, self.first_given(s) / deviation

    def log_given(self, y: Tensor, s: Tensor) -> Tensor:
        total = self._total(s)
        return -0.5 * ((y - self.first_given(s)).square() / total + (2 * math.pi * total).log())

    def log_square(self, s: Tensor) -> Tensor:
        rest = (self.rest + self.first_given(s).square()).clamp(min=torch.finfo(s.dtype).tiny)
        return torch.logaddexp(s, rest.log())

    def noise(self, s: Tensor) -> Tensor:
        return s.exp()

    def moments(self) -> TargetMoments:
        """E[y] = E[m],  E[Var(y | f)] = exp(E[l] + Var(l)/2),  Var(E[y | f]) = Var(m)."""
        epistemic = self.rest + self.slope.square() * self.variance
        return TargetMoments(self.first, (self.s + 0.5 * self.variance).exp(), epistemic)

    def steepness(self, y: Tensor, s: Tensor) -> Tensor:
        total = self._total(s)
        share, squares = s.exp() / total, (y - self.first_given(s)).square() / total
        return self.slope.square() / total + 0.5 * share.square() * squares.clamp(min=1)

    def narrow_places(self, y: Tensor) -> Tensor:
        """Where y is the mean of its density given l, and where its distance from E[m] is a standard deviation."""
        deviation = self.variance.sqrt().clamp(min=torch.finfo(self.s.dtype).tiny)
        slope = self.slope * deviation
        exact = (y - self.first) / slope.where(slope != 0, torch.inf)
        typical = ((y - self.first).square().clamp(min=torch.finfo(y.dtype).tiny).log() - self.s) / deviation
        return torch.stack([exact, typical]).clamp(-40, 40)

    def _total(self, s: Tensor) -> Tensor:
        """exp(l) + r, positive."""
        return (s.exp() + self.rest).clamp(min=torch.finfo(s.dtype).tiny)


@dataclass(frozen=True)
class MeanLogVariance(PairLikelihood):
    """p(y | f) = Π_c N(y_c; m_c, exp(l_c)) with outputs f = [m | l], `[B, 2C]`.

    −log p(y | f) = Σ_c ½ exp(−l_c) (y_c − m_c)² + ½ l_c + ½ log 2π. The curvature is the Fisher information with
    respect to f, diag(exp(−l), ½), which does not depend on y. `la(x)` is (E[y], Var(y)), `[B, C]` each, with noise.

    The loss is convex in m and in l, but not in both. `la.refine` goes down by steps of the Fisher information, each
    shortened until the loss falls: it ends in a mode, to which every step comes nearer by a factor (where the loss is
    convex, by twice the digits).
    """

    name = "mean_log_variance"
    target = NoisyRealTarget(LogVariancePairs.shown, "real", pairs=LogVariancePairs)

    outputs = "[mean | log variance]"

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ_b −log p(y_b | f_b), `[1]`."""
        mean, log_variance = f.chunk(2, -1)
        terms = (-log_variance).exp() * (y - mean).square() + log_variance + math.log(2 * math.pi)
        return 0.5 * terms.sum().reshape(1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """[(m − y) exp(−l) | ½ (1 − (y − m)² exp(−l))], `[B, 2C]`."""
        mean, log_variance = f.chunk(2, -1)
        precision, residual = (-log_variance).exp(), mean - y
        return torch.cat([residual * precision, 0.5 * (1 - residual.square() * precision)], 1)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """The Fisher information, diag(exp(−l), ½)."""
        _, log_variance = f.chunk(2, -1)
        return OutputHessian(torch.cat([(-log_variance).exp(), torch.full_like(log_variance, 0.5)], 1))

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: Generator | None = None
    ) -> Tensor:
        """Gradients at ŷ = m + exp(l/2) ε with ε ~ N(0, 1), `[S, B, 2C]`."""
        _, log_variance = f.chunk(2, -1)
        noise = standard_normal((n_samples, *log_variance.shape), log_variance, generator)
        return torch.cat([-noise * (-0.5 * log_variance).exp(), 0.5 * (1 - noise.square())], 2)

    def inverse_link(self, f: Tensor) -> Tensor:
        """E[y | f] = m, `[..., C]` of outputs `[..., 2C]`."""
        return f.chunk(2, -1)[0]

    def conditional(self, f: Tensor) -> distributions.Distribution:
        """C independent Gaussians."""
        mean, log_variance = f.chunk(2, -1)
        limit = 0.75 * math.log(torch.finfo(f.dtype).max)  # beyond it no sample of y may be NaN
        deviation = (0.5 * log_variance.clamp(-limit, limit)).exp()
        return distributions.Independent(distributions.Normal(mean, deviation, validate_args=False), 1)
