"""A precision that is known by a root of its inverse: of posteriors that were computed elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.structures.root_precision import RootPrecision


@dataclass(frozen=True)
class GivenPrecision(RootPrecision):
    """A precision that is known by a root of its covariance, with the graph that leads to it.

    Attributes:
        root: L with L Lᵀ = P⁻¹, `[P, P]`, or standard deviations `[P]`.
    """

    root: Tensor

    @property
    def _is_diagonal(self) -> bool:
        return self.root.ndim == 1

    def logdet(self) -> Tensor:
        root = widened(self.root)
        return -2 * (root.log().sum() if self._is_diagonal else torch.linalg.slogdet(root).logabsdet)

    def logdet_ratio(self) -> Tensor:
        """Of the prior nothing is known here: as if it were N(0, I)."""
        return self.logdet()

    def quad(self, vectors: Tensor) -> Tensor:
        return self._whitened(vectors).square().sum(-1)

    def _whitened(self, vectors: Tensor) -> Tensor:
        """L⁻¹ v of vectors `[..., P]`."""
        if self._is_diagonal:
            return vectors / self.root
        rows = vectors.reshape(-1, vectors.shape[-1])
        return torch.linalg.solve(widened(self.root), widened(rows).T).T.to(vectors).view_as(vectors)

    def to_dense(self) -> Tensor:
        if self._is_diagonal:
            return torch.diag(self.root.square().reciprocal())
        inverse = torch.linalg.inv(widened(self.root))
        return (inverse.T @ inverse).to(self.root)

    @property
    def public(self) -> Tensor:
        return self.root.square().reciprocal() if self._is_diagonal else self.to_dense()

    @property
    def scale(self) -> Tensor:
        return self.root
