"""Sums of outer products of few rows: a Kronecker factor that is known by less than a matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.core.gram import group_gram
from laplace.core.precision_policy import wide_dtype, widened


@dataclass(frozen=True)
class ThinFactor:
    """V diag(λ) Vᵀ of fewer than n/2 columns; the other directions have eigenvalue 0, by their number and exactly.

    While a fit reads its data the columns are the rows that are summed, whose products need not be formed. What is kept
    of them are the eigenpairs (`algebra.thin_eigh`), all of these in float64, in which they take no more memory than
    the matrix would in float32.

    Attributes:
        values: λ, `[..., r]`.
        vectors: V, `[..., n, r]`, with the leading dimensions of the matrix, each of which is 1.
        orthonormal: True if these are eigenpairs, in ascending order.
    """

    values: Tensor
    vectors: Tensor
    orthonormal: bool = True

    def __len__(self) -> int:
        return len(self.values)

    def unsqueeze(self, dim: int) -> ThinFactor:
        """The same with one more leading dimension, as of a tensor."""
        return replace(self, values=self.values.unsqueeze(dim), vectors=self.vectors.unsqueeze(dim))

    @staticmethod
    def holds(rows: int, width: int) -> bool:
        """True if a sum over so many rows is held in this form; of none there is a matrix of zeros."""
        return 0 < 2 * rows < width

    @classmethod
    def of_rows(cls, rows: Tensor) -> ThinFactor:
        """Σ x xᵀ of the rows of `[..., R, n]`, which are copied."""
        vectors = rows.mT.to(wide_dtype(rows.device), copy=True)
        return cls(vectors.new_ones(vectors.shape[:-2] + vectors.shape[-1:]), vectors, orthonormal=False)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the matrix, the leading ones among them."""
        return self.vectors.ndim

    @property
    def rank(self) -> int:
        """Number of columns r."""
        return self.vectors.shape[-1]

    @property
    def width(self) -> int:
        """Width n of the matrix."""
        return self.vectors.shape[-2]

    @property
    def rows(self) -> Tensor:
        """Rows whose products the factor sums, √λ Vᵀ, `[..., r, n]`."""
        return (self.vectors * self.values.sqrt().unsqueeze(-2)).mT

    @property
    def trace(self) -> Tensor:
        """Trace of the matrix, `[...]`: finite in a dtype if all squares are."""
        return (self.values * self.vectors.square().sum(-2)).sum(-1)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The matrix itself, `[..., n, n]`, summed in this dtype."""
        total = group_gram(self.rows.to(dtype).reshape(self.rank, 1, self.width))
        return total.view(*self.vectors.shape[:-1], self.width)

    def scaled(self, factor: float) -> ThinFactor:
        """The factor of rows that are not ignored `factor` times each."""
        return replace(self, values=factor * self.values)

    def joined(self, other: ThinFactor) -> ThinFactor:
        """The factor of the rows of both."""
        values = torch.cat([widened(self.values), widened(other.values)], -1)
        vectors = torch.cat([widened(self.vectors), widened(other.vectors)], -1)
        return ThinFactor(values, vectors, orthonormal=False)


Factor = Tensor | ThinFactor
"""A sum of outer products: the matrix, or what stands for one of low rank."""


def dense(factor: Factor, dtype: torch.dtype) -> Tensor:
    """The matrix of a factor; one that is held as such, as it is."""
    return factor.matrix(dtype) if isinstance(factor, ThinFactor) else factor


def added(a: Factor, b: Factor, dtype: torch.dtype) -> Factor:
    """The sum of two factors: thin as long as their columns together are few enough, else a matrix of this dtype."""
    if isinstance(a, ThinFactor) and isinstance(b, ThinFactor):
        both = a.joined(b)
        return both if ThinFactor.holds(both.rank, both.width) else both.matrix(dtype)
    return dense(a, dtype) + dense(b, dtype)
