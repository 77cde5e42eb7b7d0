"""A posterior at several temperatures and scales of its covariance at once, weighted by what they say of left-out data.

Of outputs with mean μ and variance v, candidate k says softmax(μ/T_k) under the variance c_k v/T_k² (probit), or
N(μ, (T_k σ)² + c_k v) of real numbers. T = 1, c = 0 is the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.cached import cached_property
from laplace.tuning.stacking import stacking_weights

TEMPERATURES = (0.7, 1.0, 1.4, 2.0, 3.0)
"""T that are tried."""

OF_NUMBERS = (0.8, 0.9, 1.0, 1.2, 1.5)
"""The same of real numbers, whose noise left-out residuals have measured already."""

SCALES = (0.0, 0.01, 0.1, 1.0)
"""c that are tried."""


@dataclass(frozen=True, eq=False)
class Stacked:
    """A mixture of predictions that differ in temperature and scale.

    Attributes:
        temperatures: T, `[S]`.
        scales: c, `[S]`.
        weights: `[S]`.
    """

    temperatures: Tensor
    scales: Tensor
    weights: Tensor

    @classmethod
    def equal(cls, like: Tensor, temperatures: tuple[float, ...] = TEMPERATURES) -> Stacked:
        """Every pair of a temperature and a scale, with equal weights."""
        pairs = like.new_tensor([(t, c) for t in temperatures for c in SCALES])
        return cls(pairs[:, 0], pairs[:, 1], like.new_full((len(pairs),), 1 / len(pairs)))

    @classmethod
    def of_classes(cls, mean: Tensor, variance: Tensor, labels: Tensor, counts: Tensor) -> Stacked:
        """Weights by left-out labels `[N]` that count `[N]` times, at moments `[N, K]` of their logits."""
        candidates = cls.equal(mean)
        densities = candidates.log_probabilities(mean, variance)[:, torch.arange(len(labels)), labels].T
        return cls(candidates.temperatures, candidates.scales, stacking_weights(densities, counts))

    @classmethod
    def of_numbers(cls, mean: Tensor, variance: Tensor, noise: Tensor, y: Tensor) -> Stacked:
        """Weights by left-out targets `[N, 1]`, at moments `[N, 1]` of their means and the noise σ².

        For every c the total variance is scaled first to the mean square of the left-out residuals: one scale of the
        covariance is then as wide as another on the mean, and none is right by its noise alone.
        """
        equal = cls.equal(mean, OF_NUMBERS)
        ratio = ((y - mean).square() / (noise + equal.scales.view(-1, 1, 1) * variance)).mean((1, 2))
        candidates = cls(
            equal.temperatures * ratio.sqrt(), equal.scales * equal.temperatures.square() * ratio, equal.weights
        )
        total = candidates.variances(variance, noise)
        densities = -0.5 * ((y - mean).square() / total + total.log() + math.log(2 * math.pi)).sum(2)
        return cls(candidates.temperatures, candidates.scales, stacking_weights(densities.T))

    def log_probabilities(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Of every candidate, `[S, B, K]`."""
        return self._logits(mean, variance).log_softmax(2)

    def probabilities(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Σ_k w_k p_k, `[B, K]`."""
        each = self._logits(mean, variance).softmax(2)
        return (self.weights @ each.flatten(1)).view(each.shape[1:])

    def _logits(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean / torch.addcmul(*self._widths, variance).sqrt()

    @cached_property
    def _widths(self) -> tuple[Tensor, Tensor]:
        """T² and π c/8, `[S, 1, 1]`: found once, as of few inputs every operation counts."""
        return self.temperatures.square().view(-1, 1, 1), math.pi / 8 * self.scales.view(-1, 1, 1)

    def variances(self, variance: Tensor, noise: Tensor) -> Tensor:
        """(T σ)² + c v of every candidate, `[S, B, 1]`."""
        return self.temperatures.square().view(-1, 1, 1) * noise + self.scales.view(-1, 1, 1) * variance
