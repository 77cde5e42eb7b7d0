"""The generalised linear model p(D | f_lin(x, θ)) p(θ) as a convex function of θ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.refinement.smoothing import NOWHERE, Smoothing


class Outputs(Protocol):
    """A batch."""

    @property
    def f(self) -> Tensor:
        """Outputs of the linear model where its parameters are zero, `[B, C]`, float64."""
        ...

    @property
    def y(self) -> Tensor:
        """Checked targets."""
        ...


class Data(Protocol):
    """Data as a linear model sees them, f + J v of parameters v `[n]`: for the linearised network, v = θ − θ*."""

    @property
    def batches(self) -> Sequence[Outputs]:
        """All of them."""
        ...

    @property
    def n_data(self) -> float:
        """Number of data, without ignored ones."""
        ...

    def push(self, vector: Tensor) -> list[Tensor]:
        """J v of every batch, `[B, C]` each."""
        ...

    def pull(self, cotangents: Sequence[Tensor]) -> Tensor:
        """Σ Jᵀ u over batches, `[n]`."""
        ...

    def curvature_product(self, inner: Sequence[OutputHessian], scale: Tensor, vector: Tensor) -> Tensor:
        """Σ Jᵀ (scale · Λ) J v, `[n]`, with an output Hessian per batch."""
        ...


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

    data: Data
    likelihood: Likelihood
    scale: Tensor
    prior_precision: Tensor
    offset: Tensor
    smoothing: Smoothing = NOWHERE
    roots: Sequence[Tensor] | None = None

    @classmethod
    def standard(cls, data: Data, likelihood: Likelihood, scale: Tensor, n: int) -> LinearModel:
        """A model with n parameters and a standard normal prior."""
        zero = torch.zeros(n, dtype=data.batches[0].f.dtype, device=data.batches[0].f.device)
        return cls(data, likelihood, scale, torch.ones_like(zero), zero)

    @property
    def n_outputs(self) -> int:
        """C."""
        return self.data.batches[0].f.shape[1]

    def _each(self, at: Tensor) -> list[tuple[Tensor, Tensor | None, Tensor]]:
        """Outputs of the linearised network, root and targets of every batch."""
        roots = [None] * len(self.data.batches) if self.roots is None else self.roots
        pushed = self.data.push(at)
        return [(b.f + s, root, b.y) for b, s, root in zip(self.data.batches, pushed, roots, strict=True)]

    def loss_terms(self, at: Tensor) -> Tensor:
        """Summed (expected) unit negative log likelihood, `[1]` or `[C]`."""
        return self.smoothing.mean(self.losses(at))

    def losses(self, at: Tensor) -> Tensor:
        """The same at every point of the expectation, `[S, 1]` or `[S, C]`."""
        return torch.stack([self.smoothing.losses(self.likelihood, *one) for one in self._each(at)]).sum(0)

    def value(self, at: Tensor) -> float:
        """The function."""
        theta = self.offset + at
        return float((self.scale * self.loss_terms(at)).sum() + 0.5 * (self.prior_precision * theta) @ theta)

    def gradient(self, at: Tensor) -> Tensor:
        """Its gradient, `[P]`."""
        residuals = [self.scale * self.smoothing.gradient(self.likelihood, *one) for one in self._each(at)]
        return self.data.pull(residuals) + self.prior_precision * (self.offset + at)

    def hessians(self, at: Tensor) -> list[OutputHessian]:
        """(Expected) output Hessians of every batch."""
        return [self.smoothing.hessian(self.likelihood, *one) for one in self._each(at)]

    def hessian_at(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        """Products of its Hessian with vectors."""
        inner = self.hessians(at)

        def product(vector: Tensor) -> Tensor:
            curved = self.data.curvature_product(inner, self.scale, vector)
            return curved + self.prior_precision * vector

        return product
