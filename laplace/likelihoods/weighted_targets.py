"""Targets with the number of times that each of them counts: Π_b p(y_b | f_b)^{w_b}."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.checks import for_each
from laplace.likelihoods.output_hessian import OutputHessian


@dataclass(frozen=True, eq=False)
class Observed:
    """Checked targets of B rows under a likelihood; whole weights are those of rows that are repeated.

    Attributes:
        likelihood: p(y | f), which may weigh targets itself.
        y: Checked targets.
        data_weights: How often every row counts besides, `[B]`; None for once.
    """

    likelihood: Likelihood
    y: Tensor
    data_weights: Tensor | None = None

    @property
    def weights(self) -> Tensor | None:
        """Number of times that every row counts, `[B]`, float64; None if all that count do so once."""
        own = self.likelihood.weights(self.y)
        if self.data_weights is None:
            return None if own is None else widened(own)
        return widened(self.data_weights) if own is None else widened(own) * self.data_weights

    def at(self, rows: Tensor | None) -> Observed:
        """The targets of some rows, indices `[n]`; None for all."""
        if rows is None:
            return self
        own = self.data_weights
        return replace(self, y=self.y[rows], data_weights=None if own is None else own[rows])

    def loss_terms(self, f: Tensor) -> Tensor:
        """Σ_b w_b ℓ_b of outputs `[B, C]`, as `Likelihood.loss_terms`, `[1]` or `[C]`."""
        if self.data_weights is None:
            return self.likelihood.loss_terms(f, self.y)
        each = for_each(lambda f, y: self.likelihood.loss_terms(f.unsqueeze(0), y.unsqueeze(0)), f, self.y)
        return self.data_weights.to(each) @ each

    def count(self, f: Tensor) -> int | Tensor:
        """Σ_b w_b of the rows that are not ignored; 0-dim where a device knows it."""
        if self.data_weights is None:
            return self.likelihood.count(f, self.y)
        ignored = self.likelihood.ignore_index
        weights = widened(self.data_weights) if (both := self.weights) is None else both
        if ignored is None or self.y.ndim > 1 or self.y.is_floating_point():
            return weights.sum()
        return torch.where(self.y == ignored, 0.0, weights).sum()

    def hessian(self, f: Tensor) -> OutputHessian:
        """w_b Λ_b."""
        return self.likelihood.hessian(f, self.y).scaled(self.data_weights)

    def gradients(self, f: Tensor) -> Tensor:
        """Rows √w_b g_b, `[B, C]`, g_b the gradient of a target that counts once, with Σ w g gᵀ: of repeated data.

        The gradient of the weighted loss is w_b g_b, whose outer product would weigh a target by the square.
        """
        gradients, own = self.likelihood.gradient(f, self.y), self.likelihood.weights(self.y)
        if own is not None:
            root = own.to(f).sqrt()
            gradients = gradients * torch.where(root > 0, 1 / root, 0.0).unsqueeze(1)
        return self._rooted(gradients)

    def sample_gradients(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """√w_b times gradients at targets drawn from p(y | f), `[S, B, C]`; the weight is that of what was observed."""
        return self._rooted(self.likelihood.sample_gradients(f, self.y, n_samples, generator))

    def _rooted(self, rows: Tensor) -> Tensor:
        """Rows `[..., B, C]` times √w of the data."""
        return rows if self.data_weights is None else self.data_weights.to(rows).sqrt().unsqueeze(1) * rows
