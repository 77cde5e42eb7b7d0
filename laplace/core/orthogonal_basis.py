"""Orthogonal bases of one side of a Kronecker product: dense, or of few vectors and a complement that is not formed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class OrthogonalBasis(ABC):
    """An orthogonal U `[G, n, n]` of the n entries of a side, one for each of G groups."""

    @property
    @abstractmethod
    def n_columns(self) -> int:
        """Number of columns: n, or fewer of a basis of a subspace, `[G, n, r]`, in which nothing is rotated back."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of last columns that are given eigenvectors; the others share the eigenvalue 0."""

    @abstractmethod
    def rotate(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Uᵀ x of rows x `[..., G, n]`, or U x."""

    @abstractmethod
    def rotate_folded(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """The same of rows `[..., G, m, n]`, m for every group."""

    @abstractmethod
    def rotate_columns(self, columns: Tensor, *, back: bool = False) -> Tensor:
        """The same of columns `[..., G, n, m]`."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """U, `[G, n, n]`."""

    @abstractmethod
    def squares(self) -> Tensor:
        """U² entry by entry, `[G, n, n]`; its mean over columns that share an eigenvalue, which no choice moves.

        Its rows sum up what a diagonal in the basis is outside of it; its columns are the weights of the best diagonal
        in the basis.
        """

    @abstractmethod
    def to(self, dtype: torch.dtype) -> OrthogonalBasis:
        """The same in another dtype."""


@dataclass(frozen=True)
class DenseBasis(OrthogonalBasis):
    """A basis by its vectors."""

    vectors: Tensor  # U, `[G, n, n]`; orthonormal columns `[G, n, r]` of a subspace

    @property
    def n_columns(self) -> int:
        return self.vectors.shape[-1]

    @property
    def rank(self) -> int:
        return self.vectors.shape[-1]

    def rotate(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """As one flat matrix product where there is one group."""
        vectors = self.vectors.mT if back else self.vectors
        if vectors.shape[0] == 1:
            return (rows.reshape(-1, vectors.shape[1]) @ vectors[0]).view(*rows.shape[:-1], vectors.shape[2])
        return torch.einsum("...go,gop->...gp", rows, vectors)

    def rotate_folded(self, rows: Tensor, *, back: bool = False) -> Tensor:
        vectors = self.vectors.mT if back else self.vectors
        return rows @ (vectors if vectors.shape[0] > 1 else vectors[0])

    def rotate_columns(self, columns: Tensor, *, back: bool = False) -> Tensor:
        if columns.shape[-1] == 1:  # as one product of rows, of many samples of a bias too
            return self.rotate(columns.squeeze(-1), back=back).unsqueeze(-1)
        return (self.vectors if back else self.vectors.mT) @ columns

    def matrix(self) -> Tensor:
        return self.vectors

    def squares(self) -> Tensor:
        return self.vectors.square()

    def to(self, dtype: torch.dtype) -> DenseBasis:
        return self if self.vectors.dtype == dtype else DenseBasis(self.vectors.to(dtype))


@dataclass(frozen=True)
class ThinBasis(OrthogonalBasis):
    """U = I − Y M Yᵀ whose last r columns are given vectors; the first n − r span their complement.

    With Z the vectors, E the last r columns of I, Y = Z − E and M = (I − Z_rᵀ)⁻¹, Z_r the last r rows of Z: then U is
    orthogonal and U E = Z (Sun and Bischof, "A Basis-Kernel Representation of Orthogonal Matrices", 1995). Signs are
    those of Householder's vectors, at which I − Z_r is far from singular. A rotation takes 2 n r + r² multiplications
    instead of n².

    Only functions of a matrix are asked of it whose null space is the complement, and these do not depend on the basis
    of that: V f(λ) Vᵀ + f(0) (I − V Vᵀ).
    """

    shift: Tensor  # Y, `[n, r]`
    kernel: Tensor  # M, `[r, r]`

    @property
    def n_columns(self) -> int:
        return len(self.shift)

    @classmethod
    def from_last_columns(cls, vectors: Tensor) -> ThinBasis:
        """The basis that ends with orthonormal columns `[n, r]`, up to their signs."""
        r = vectors.shape[1]
        triangle, reflections = torch.geqrf(vectors.flip(0, 1))  # from below: the last rows meet the last columns
        negative = (triangle.diagonal() < 0) ^ (reflections == 0)  # a unit vector is left as it is, and turned here
        signs = torch.where(negative, -1.0, 1.0).to(vectors).flip(0)
        shift = vectors * signs
        shift[-r:].diagonal().sub_(1)
        return cls(shift, torch.linalg.inv(-shift[-r:].mT))

    @property
    def rank(self) -> int:
        return self.shift.shape[1]

    @property
    def _vectors(self) -> Tensor:
        """Z, `[n, r]`."""
        vectors = self.shift.clone()
        vectors[-self.rank :].diagonal().add_(1)
        return vectors

    def rotate(self, rows: Tensor, *, back: bool = False) -> Tensor:
        return rows - (rows @ self.shift) @ (self.kernel.mT if back else self.kernel) @ self.shift.mT

    def rotate_folded(self, rows: Tensor, *, back: bool = False) -> Tensor:
        return self.rotate(rows, back=back)

    def rotate_columns(self, columns: Tensor, *, back: bool = False) -> Tensor:
        kernel = self.kernel if back else self.kernel.mT
        return columns - self.shift @ (kernel @ (self.shift.mT @ columns))

    def matrix(self) -> Tensor:
        eye = torch.eye(len(self.shift), dtype=self.shift.dtype, device=self.shift.device)
        return self.rotate(eye).unsqueeze(0)

    def squares(self) -> Tensor:
        squares = self._vectors.square()
        n, r = squares.shape
        rest = (1 - squares.sum(1, keepdim=True)).clamp(min=0) / (n - r)
        return torch.cat([rest.expand(-1, n - r), squares], 1).unsqueeze(0)

    def to(self, dtype: torch.dtype) -> ThinBasis:
        same = self.shift.dtype == dtype
        return self if same else ThinBasis(self.shift.to(dtype), self.kernel.to(dtype))
