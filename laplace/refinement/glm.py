"""The generalised linear model p(D | f_lin(x, θ)) p(θ) as a convex function of θ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.likelihoods.base import Likelihood
from laplace.refinement.linear import LinearData
from laplace.refinement.smoothing import NOWHERE, Smoothing


@dataclass(frozen=True, eq=False)
class LinearModel:
    """−log p(D | f_lin) − log p(θ) up to constants, f_lin = f(x, θ*) + J (θ − θ*), as a function of θ − θ*, `[P]`.

    With a covariance of the outputs the loss is its expectation under N(f_lin, V): the part of the evidence lower
    bound that depends on the mean.

    Attributes:
        data: The data.
        likelihood: p(y | f).
        scale: 1/(σ²T), 0-dim or `[C]`.
        prior_precision: δ, `[P]`, float64.
        offset: θ* − μ₀, `[P]`, float64.
        smoothing: Points of the expectation.
        roots: A root of V for every batch, or None.
    """

    data: LinearData
    likelihood: Likelihood
    scale: Tensor
    prior_precision: Tensor
    offset: Tensor
    smoothing: Smoothing = NOWHERE
    roots: Sequence[Tensor] | None = None

    def _each(self, at: Tensor) -> list[tuple[Tensor, Tensor | None, Tensor]]:
        """Outputs of the linearised network, root and targets of every batch."""
        roots = [None] * len(self.data.batches) if self.roots is None else self.roots
        pushed = self.data.push(at)
        return [(b.f + s, root, b.y) for b, s, root in zip(self.data.batches, pushed, roots, strict=True)]

    def loss_terms(self, at: Tensor) -> Tensor:
        """Summed (expected) unit negative log likelihood, `[1]` or `[C]`."""
        parts = [self.smoothing.loss_terms(self.likelihood, *one) for one in self._each(at)]
        return torch.stack(parts).sum(0)

    def value(self, at: Tensor) -> float:
        """The function."""
        theta = self.offset + at
        return float((self.scale * self.loss_terms(at)).sum() + 0.5 * (self.prior_precision * theta) @ theta)

    def gradient(self, at: Tensor) -> Tensor:
        """Its gradient, `[P]`."""
        residuals = [self.scale * self.smoothing.gradient(self.likelihood, *one) for one in self._each(at)]
        return self.data.pull(residuals) + self.prior_precision * (self.offset + at)

    def hessian_at(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        """Products of its Hessian with vectors."""
        inner = [self.smoothing.hessian(self.likelihood, *one) for one in self._each(at)]

        def product(vector: Tensor) -> Tensor:
            curved = self.data.curvature_product(inner, self.scale, vector)
            return curved + self.prior_precision * vector

        return product
