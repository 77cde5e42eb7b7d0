"""A posterior precision by a root of its covariance, whoever computed that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.gram import row_gram
from laplace.core.precision_policy import widened
from laplace.jacobian.jacobian import Jacobian
from laplace.structures.precision import Form, Precision


@dataclass(frozen=True, eq=False)
class FixedRootPrecision(Precision):
    """A precision that is known by a root of its covariance, with the graph that leads to it."""

    root: Tensor  # L with L Lᵀ = P⁻¹, `[P, P]`, or standard deviations `[P]`

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> FixedRootPrecision:
        """The same elsewhere."""
        return FixedRootPrecision(self.root.to(device=device, dtype=dtype))

    @property
    def _is_diagonal(self) -> bool:
        return self.root.ndim == 1

    def logdet(self) -> Tensor:
        root = widened(self.root)
        return -2 * (root.log().sum() if self._is_diagonal else torch.linalg.slogdet(root).logabsdet)

    def logdet_ratio(self) -> Tensor:
        """The ratio for a prior N(0, I), since nothing is known of it here."""
        return self.logdet()

    def quad(self, vectors: Tensor) -> Tensor:
        return self._whitened(vectors).square().sum(-1)

    def _whitened(self, vectors: Tensor) -> Tensor:
        """L⁻¹ v of vectors `[..., P]`."""
        if self._is_diagonal:
            return vectors / self.root
        rows = vectors.reshape(-1, vectors.shape[-1])
        return torch.linalg.solve(widened(self.root), widened(rows).T).T.to(vectors).view_as(vectors)

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        if self._is_diagonal:
            return vectors * self.root if exponent == -0.5 else vectors * self.root ** (-2 * exponent)
        if exponent == 1:
            rows = self._whitened(vectors).reshape(-1, vectors.shape[-1])
            return torch.linalg.solve(widened(self.root).T, widened(rows).T).T.to(vectors).view_as(vectors)
        return (vectors if exponent == -0.5 else vectors @ self.root) @ self.root.T

    @property
    def public(self) -> Tensor:
        return self.root.square().reciprocal() if self._is_diagonal else self.to_dense()

    @property
    def scale(self) -> Tensor:
        return self.root

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        if form == "joint":
            return self._gram(self._times_root(jacobian.dense()).flatten(0, 1), jacobian)
        rows = (self._times_root(piece) for piece in jacobian.pieces())
        return torch.cat([r.square().sum(2) if form == "diagonal" else self._gram(r, jacobian) for r in rows])

    def _gram(self, rows: Tensor, jacobian: Jacobian) -> Tensor:
        return row_gram(rows, dtype=jacobian.summed_in(rows.dtype))

    def _times_root(self, piece: Tensor) -> Tensor:
        """J L of a piece `[b, C, P]`, as one flat product: its rounding is that of joint covariances, graph or not."""
        if self._is_diagonal:
            return piece * self.root
        return (piece.flatten(0, 1) @ self.root).view(piece.shape)

    def diagonal_of_inverse(self) -> Tensor:
        return self.root.square() if self._is_diagonal else self.root.square().sum(1)

    @property
    def covariance(self) -> Tensor:
        return torch.diag(self.root.square()) if self._is_diagonal else self.root @ self.root.T
