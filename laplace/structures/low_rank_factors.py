"""Dominant eigenvectors of Kronecker factors known by their products alone (Halko et al., 2011, algorithms 4.1, 5.3).

A factor A is multiplied with random vectors in a first reading of the data, Y = AΩ, and with an orthonormal basis Q of
Y's range in a second one. Within the range of Q everything is then known: QᵀAQ, of width w instead of n.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.inference import kept_for_later
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import InvalidData
from laplace.structures import algebra


class Draws:
    """A probe of standard normal vectors, or of the identity where those would be no fewer.

    Args:
        width: Vectors per side, w.
        seed: Of all draws; that of a side does not depend on which other sides there are.
        device: Where they are wanted, batch after batch; numbers do not depend on it.
    """

    def __init__(self, width: int, seed: int, device: torch.device) -> None:
        self.width = width
        self.seed = seed
        self.device = device
        self.drawn: dict[str, Tensor] = {}

    def __call__(self, key: str, groups: int, n: int) -> Tensor:
        if key not in self.drawn:
            self.drawn[key] = self._drawn(key, groups, n).to(self.device, wide_dtype(self.device))
        return self.drawn[key]

    def _drawn(self, key: str, groups: int, n: int) -> Tensor:
        if self.width >= n:
            return torch.eye(n, dtype=wide_dtype()).expand(groups, -1, -1)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {key}".encode()))
        return torch.randn(groups, n, self.width, dtype=wide_dtype(), generator=generator)


@dataclass(frozen=True, eq=False)
class Ranges:
    """A probe of orthonormal bases of the ranges of former products.

    Attributes:
        bases: Q by key, `[G, n, w]`.
    """

    bases: dict[str, Tensor]

    @classmethod
    def of(cls, products: dict[str, Tensor]) -> Ranges:
        """The ranges of Y by key, `[G, n, w]` or `[E, G, n, w]`, of which the sum over E counts."""
        with kept_for_later():
            return cls({key: _orthonormal(value) for key, value in products.items()})

    def __call__(self, key: str, groups: int, n: int) -> Tensor:
        if key not in self.bases or self.bases[key].shape[:2] != (groups, n):
            raise InvalidData("the layers see other inputs than in the first reading; give the same data every time.")
        return self.bases[key]


def _orthonormal(products: Tensor) -> Tensor:
    """Q `[G, n, w]` in the dtype of the products; the identity where they span everything."""
    total = widened(products.sum(0) if products.ndim == 4 else products)
    groups, n, width = total.shape
    if width >= n:
        return torch.eye(n, dtype=products.dtype, device=products.device).expand(groups, -1, -1)
    return torch.linalg.qr(total)[0].to(products.dtype)


@dataclass(frozen=True, eq=False)
class Side:
    """One side of Kronecker factors as U M_e Uᵀ, positive semi-definite, of low rank.

    Attributes:
        basis: U, orthonormal columns `[G, n, r]`: eigenvectors of the sum of the terms.
        cores: M_e, `[E, G, r, r]`; E is 1 for an input side, which all terms share.
    """

    basis: Tensor
    cores: Tensor

    @property
    def values(self) -> Tensor:
        """Uᵀ A_e U of single eigenvectors, `[E, G, r]`, float64, without rounding below zero."""
        return widened(self.cores).diagonal(dim1=-2, dim2=-1).clamp(min=0)

    @classmethod
    def of(cls, basis: Tensor, products: Tensor, rank: int) -> Side:
        """The dominant part within a range (Rayleigh and Ritz).

        Args:
            basis: Q, `[G, n, w]`.
            products: A_e Q, `[E, G, n, w]`, or A Q, `[G, n, w]`.
            rank: Eigenvectors kept of every group.
        """
        products = products if products.ndim == 4 else products.unsqueeze(0)
        return cls._truncated(basis, widened(basis).mT @ widened(products), rank)

    def added(self, other: Side) -> Side:
        """The dominant part of the sum of two sides, of as many vectors as the wider one has."""
        rank = max(self.basis.shape[-1], other.basis.shape[-1])
        stacked, triangular = torch.linalg.qr(widened(torch.cat([self.basis, other.basis], -1)))
        mine, yours = triangular.split([self.basis.shape[-1], other.basis.shape[-1]], -1)
        cores = mine @ widened(self.cores) @ mine.mT + yours @ widened(other.cores) @ yours.mT
        return self._truncated(stacked.to(self.basis), cores, rank)

    @classmethod
    def _truncated(cls, basis: Tensor, cores: Tensor, rank: int) -> Side:
        """The eigenvectors of Σ_e M_e with the largest eigenvalues; `cores` in float64."""
        cores = 0.5 * (cores + cores.mT)
        vectors = algebra.eigh(_without_ties(cores.sum(0), basis.dtype))[1].flip(-1)[..., :rank]  # the largest first
        return cls(basis @ vectors.to(basis), (vectors.mT @ cores @ vectors).to(basis))


def _without_ties(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices `[G, w, w]`, exact multiples of the identity where they are such but for the rounding of `dtype`.

    Where all outputs of a regression are alike every basis is one of eigenvectors: rounding must not choose it.
    """
    level = total.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    equal = level * torch.eye(total.shape[-1], dtype=total.dtype, device=total.device)
    apart = (total - equal).abs().amax((-2, -1), keepdim=True)
    return torch.where(apart <= algebra.rounding(dtype) * level, equal, total)
