"""Variances of a head's outputs: of P⁻¹ no more than the blocks of single outputs is needed, φᵀ (P⁻¹)_cc φ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.jacobian.blocks import CHUNK_BYTES

_COLUMNS = 32
"""Columns of every output's triangle that are multiplied at once, with the rows below the first of them."""


@dataclass(frozen=True)
class HeadRoots:
    """Lower triangular roots of the blocks (P⁻¹)_cc = L_c L_cᵀ, for sums of squares |L_cᵀ φ|².

    Attributes:
        columns: Of all outputs some columns side by side, without the rows that are zero, `[D − s, w·C]`; the last ones
            are the fewest.
        n_outputs: C.
    """

    columns: tuple[Tensor, ...]
    n_outputs: int

    @classmethod
    def of(cls, root: Tensor, order: Tensor, dtype: torch.dtype) -> HeadRoots:
        """The roots of a head's blocks, differentiable in the root of P⁻¹.

        Args:
            root: L with L Lᵀ = P⁻¹, `[P, P]`, float64.
            order: Place of every (output, feature), `[C, D]`.
            dtype: Of products with the roots.
        """
        # By an orthogonal factorisation of the rows, which unlike a Cholesky one of their Gram always exists.
        mode = "reduced" if root.requires_grad and torch.is_grad_enabled() else "r"
        lower = torch.stack([torch.linalg.qr(root[entries].T, mode)[1].T for entries in order]).to(dtype)
        starts = range(0, order.shape[1], _COLUMNS)
        columns = (lower[:, start:, start : start + _COLUMNS].permute(1, 2, 0).flatten(1) for start in starts)
        return cls(tuple(part.contiguous() for part in columns), len(order))

    def variances(self, features: Tensor) -> Tensor:
        """φᵀ (P⁻¹)_cc φ of features `[B, D]`, `[B, C]`."""
        features = features.to(self.columns[0])
        step = max(1, CHUNK_BYTES // (8 * self.n_outputs * features.shape[1]))
        return torch.cat([self._of_some(rows) for rows in features.split(step)])

    def _of_some(self, features: Tensor) -> Tensor:
        first, *others = self.columns
        squares = (features @ first).square()
        for columns in others:
            products = features[:, features.shape[1] - len(columns) :] @ columns
            squares[:, : columns.shape[1]].addcmul_(products, products)
        return squares.unflatten(1, (-1, self.n_outputs)).sum(1)
