"""Precisions whose inverse is known by a dense root."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laplace.core.gram import row_gram
from laplace.jacobian.jacobian import Jacobian
from laplace.structures.precision import Precision


class RootPrecision(Precision):
    """A precision with P⁻¹ = L Lᵀ for L = `scale`, `[P, P]`, or standard deviations `[P]`."""

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        return torch.cat([row_gram(rows, dtype=jacobian.summed_in(rows.dtype)) for rows in self.coloured(jacobian)])

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        return torch.cat([self._times_root(piece).square().sum(2) for piece in jacobian.pieces()])

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        rows = self._times_root(jacobian.dense()).flatten(0, 1)
        return row_gram(rows, dtype=jacobian.summed_in(rows.dtype))

    def coloured(self, jacobian: Jacobian) -> Iterator[Tensor]:
        """J L of a few data at a time, `[b, C, P]`."""
        return map(self._times_root, jacobian.pieces())

    def _times_root(self, piece: Tensor) -> Tensor:
        """J L of a piece `[b, C, P]`, as one flat product: its rounding is that of joint covariances, graph or not."""
        if self.scale.ndim == 1:
            return piece * self.scale
        return (piece.flatten(0, 1) @ self.scale).view(piece.shape)

    def sample(self, noise: Tensor) -> Tensor:
        return noise * self.scale if self.scale.ndim == 1 else noise @ self.scale.T

    def diagonal_of_inverse(self) -> Tensor:
        return self.scale.square() if self.scale.ndim == 1 else self.scale.square().sum(1)

    @property
    def covariance(self) -> Tensor:
        return torch.diag(self.scale.square()) if self.scale.ndim == 1 else self.scale @ self.scale.T
