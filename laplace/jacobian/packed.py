"""Symmetric products in packed form: of a_i a_j and a_j a_i, and of the entries of symmetric matrices, one is held."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch
from torch import Tensor

from laplace.likelihoods.output_hessian import OutputHessian

_STRIP = 8
"""Inputs whose products with all others are taken at once: half of the products need not be taken twice."""


class Entries(Enum):
    """Entries of a symmetric matrix that are held."""

    TRIANGLE = "those on and above the diagonal"
    ABOVE = "those above the diagonal, of a matrix whose rows sum to zero"
    DIAGONAL = "those of a diagonal matrix"


@dataclass(frozen=True)
class SymmetricForm:
    """Form of symmetric `[n, n]`: entries from which the others follow.

    Attributes:
        n: Width of the matrices.
        entries: Those that are held.
    """

    n: int
    entries: Entries = Entries.TRIANGLE

    @classmethod
    def of(cls, hessian: OutputHessian) -> SymmetricForm:
        """The form of sums over output Hessians of a likelihood."""
        n = hessian.diag.shape[1]
        if hessian.is_diagonal:
            return cls(n, Entries.DIAGONAL)
        return cls(n, Entries.ABOVE if hessian.sums_to_zero else Entries.TRIANGLE)

    @property
    def size(self) -> int:
        """Number of entries that are held."""
        off = self.n * (self.n - 1) // 2
        return {Entries.TRIANGLE: off + self.n, Entries.ABOVE: off, Entries.DIAGONAL: self.n}[self.entries]

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows and columns of the entries that are held, `[size]` each."""
        return _indices(self, device)

    def picked(self, matrices: Tensor) -> Tensor:
        """The entries of symmetric `[..., n, n]` that are held, `[..., size]`."""
        rows, columns = self.indices(matrices.device)
        return matrices.flatten(-2)[..., rows * self.n + columns]

    def completed(self, values: Tensor) -> Tensor:
        """Symmetric matrices `[..., n, n]` of the entries that are held, `[..., size]`."""
        if self.entries is Entries.DIAGONAL:
            return torch.diag_embed(values)
        if self.entries is Entries.TRIANGLE:
            return values[..., _places(self.n, values.device)].unflatten(-1, (self.n, self.n))
        rows, columns = self.indices(values.device)
        matrices = values.new_zeros(*values.shape[:-1], self.n, self.n)
        matrices[..., rows, columns] = values
        matrices[..., columns, rows] = values
        matrices.diagonal(dim1=-2, dim2=-1).copy_(-matrices.sum(-1))
        return matrices


@dataclass(frozen=True)
class Strip:
    """Products a_i a_j of the inputs of one layer for some i, and all j from the first of them on.

    Attributes:
        start: First i.
        stop: Last i, and one.
        width: Number of inputs I.
        first: Place of the first product among those of all strips.
    """

    start: int
    stop: int
    width: int
    first: int

    @property
    def size(self) -> int:
        """Number of products."""
        return (self.stop - self.start) * (self.width - self.start)

    @property
    def at(self) -> slice:
        """Places of the products among those of all strips."""
        return slice(self.first, self.first + self.size)

    def of(self, sums: Tensor, n: int) -> Tensor:
        """A view of this strip's sums `[n, i, j]`, among those of all strips one after the other, `[n · products]`."""
        own = sums[n * self.first : n * (self.first + self.size)]
        return own.view(n, self.stop - self.start, self.width - self.start)

    def squares(self, n: int) -> list[int]:
        """Places of the sums of a_i a_i among those of all strips."""
        step = self.width - self.start + 1
        rows = range(n * self.first, n * (self.first + self.size), self.size)
        return [row + k * step for row in rows for k in range(self.stop - self.start)]

    def inputs(self, a: Tensor) -> Tensor:
        """The products of inputs `[b, I]`, `[b, size]`."""
        return products(a[:, self.start : self.stop], a[:, self.start :])

    def weighed(self, values: Tensor) -> Tensor:
        """Entries of values `[I, I, O, O]` that the products meet, `[size, O (O + 1) / 2]`: means of (i, j) and (j, i).

        A product with j beyond the strip stands for that of j and i, too.
        """
        own = values[self.start : self.stop, self.start :]
        other = values[self.start :, self.start : self.stop].transpose(0, 1)
        twice = SymmetricForm(values.shape[-1]).picked(own + other)
        inner, outer = twice.split([self.stop - self.start, self.width - self.stop], 1)
        return torch.cat([inner / 2, outer], 1).flatten(0, 1)


@cache
def strips(width: int) -> tuple[Strip, ...]:
    """All strips of I inputs: a little more than half of the products a_i a_j, each strip by one operation."""
    result: list[Strip] = []
    first = 0
    for start in range(0, width, _STRIP):
        result.append(Strip(start, min(width, start + _STRIP), width, first))
        first += result[-1].size
    return tuple(result)


def n_products(width: int) -> int:
    """Number of products of all strips."""
    return sum(strip.size for strip in strips(width))


def products(a: Tensor, b: Tensor) -> Tensor:
    """Products a ⊗ b of every datum, `[B, I·I']`."""
    return (a.unsqueeze(2) * b.unsqueeze(1)).flatten(1)


@cache
def _indices(form: SymmetricForm, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # autograd could never use what is kept from inference mode
        if form.entries is Entries.DIAGONAL:
            index = torch.arange(form.n, device=device)
            return index, index
        rows, columns = torch.triu_indices(form.n, form.n, int(form.entries is Entries.ABOVE), device=device)
        return rows, columns


@cache
def _places(n: int, device: torch.device) -> Tensor:
    """The place of every entry of a symmetric `[n, n]` among those on and above the diagonal, `[n²]`."""
    with torch.inference_mode(False):
        rows, columns = SymmetricForm(n).indices(device)
        places = torch.zeros(n, n, dtype=torch.long, device=device)
        places[rows, columns] = places[columns, rows] = torch.arange(len(rows), device=device)
        return places.flatten()
