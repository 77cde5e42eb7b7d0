"""The block of an embedding: a is one-hot, and stored as row indices of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core import nested
from laplace.core.checks import numbers_are_known
from laplace.core.precision_policy import widened
from laplace.jacobian.blocks import (
    Block,
    PickedBlock,
    ProductBasis,
    TensorShape,
    all_of,
    concatenated,
    entries_of,
    total,
)
from laplace.jacobian.outer import FactoredBlock, kernel_by_grams

if TYPE_CHECKING:
    from laplace.weights.problem import Selection


@dataclass(frozen=True, eq=False)
class IndexBlock(FactoredBlock):
    """Rows of an embedding: a is one-hot and held as indices, never as `[B, T, V]`."""

    index: Tensor  # Row of each position `[B, T]`, −1 where it is none of the selected ones
    g: Tensor  # Gradients of the embedded positions `[K, B, T, D]`
    n_rows: int  # V, the number of rows of the table
    counted: Tensor  # Positions that are no padding, `[B, T]`
    input_first: bool = field(default=True, init=False)
    kind = "index"

    @classmethod
    def from_index(cls, index: Tensor, g: Tensor, n_rows: int) -> IndexBlock:
        """The block of positions `[B, T]`, where −1 reads no row."""
        # Of positions without numbers PyTorch would import its compiler.
        counted = index.new_empty(index.shape, dtype=torch.bool) if index.is_meta else index >= 0
        return cls(index, g, n_rows, counted)

    @property
    def n_inputs(self) -> int:
        return self.n_rows

    def has_valid_indices(self) -> bool:
        return nested.are_indices(self.index, -1, self.n_rows)

    def shape(self, inputs: Sequence[Tensor]) -> TensorShape:
        return replace(super().shape(inputs), indexed=True)

    # Other data, outputs and entries.

    def with_factors(self, inputs: Callable[[Tensor], Tensor], g: Tensor) -> IndexBlock:
        return replace(self, index=inputs(self.index), g=g, counted=inputs(self.counted))

    def select_entries(self, selection: Selection, entries: Tensor) -> Block:
        part = self if selection.cols is None else replace(self, g=entries_of(self.g, selection.cols))
        if selection.rows is not None:
            part = replace(part, index=self._places(selection.rows), n_rows=len(selection.rows))
        return part if selection.index is None else PickedBlock(part, selection.index)

    def _places(self, rows: Tensor) -> Tensor:
        """The index within some rows `[R]`, −1 for other rows."""
        if self.index.is_meta:
            return self.index
        place = self.index.new_full((self.n_rows + 1,), -1)  # the last one is that of −1
        place[rows] = torch.arange(len(rows), device=place.device)
        return place[self.index]

    def add(self, others: Sequence[Block]) -> Block:
        uses = all_of(IndexBlock, (self, *others))
        if uses is None:
            return super().add(others)
        index, counted = (concatenated(parts, 1) for parts in zip(*((u.index, u.counted) for u in uses), strict=True))
        return replace(self, index=index, g=concatenated([use.g for use in uses], 2), counted=counted)

    # The same values in another form.

    def in_basis(self, basis: ProductBasis) -> Block:
        if basis.left is not None or basis.right is None:
            return super().in_basis(basis)
        return replace(self, g=basis.right.rotate_folded(self.g))

    # Factors.

    @property
    def gradients(self) -> Tensor:
        return self.g.unsqueeze(3)

    @property
    def shares_outputs(self) -> bool:
        return False

    def output_rows(self, *, reduce: bool) -> Tensor:
        """Always every position: the mean of one-hot vectors has no diagonal second moment."""
        del reduce
        return self.g[:, self.counted].unsqueeze(2)

    def input_side(self, gram: Callable[[Any], object], weights: Tensor | None = None, *, reduce: bool) -> Tensor:
        del gram, reduce
        valid = self.index >= 0
        if weights is None:
            return torch.bincount(self.index[valid], minlength=self.n_rows).to(self.g.dtype)
        each = weights.to(self.g).unsqueeze(1).expand_as(self.index)[valid]
        return self.g.new_zeros(self.n_rows).index_add(0, self.index[valid], each)

    def input_count(self, weights: Tensor | None = None, *, reduce: bool) -> Tensor:
        del reduce
        counted = self.counted if weights is None else self.counted * weights.unsqueeze(1)
        return counted.sum().to(self.g.dtype)

    def kernel_by_factors(self, other: Block) -> Callable[[], Tensor] | None:
        if (
            not isinstance(other, IndexBlock)
            or self.n_positions * other.n_positions * (self.n_outputs + 1) >= self.size
        ):
            return None
        return kernel_by_grams(self, other, lambda i, j: _same_rows(self.index[i], other.index[j]))

    # Contractions.

    @property
    def contracts_factors(self) -> bool:
        return True

    def dense(self) -> Tensor:
        k, b, _, d = self.g.shape
        out = self.g.new_zeros(k, b, self.n_rows + 1, d)
        where = self.index.where(self.index >= 0, self.n_rows)
        out = out.scatter_add(2, where[None, :, :, None].expand(k, -1, -1, d), self.g)
        return out[:, :, : self.n_rows].flatten(2)

    def bound(self) -> Tensor:
        return self.g.norm() * self.index.numel() ** 0.5

    def entries(self, index: Tensor) -> Tensor:
        row, col = index // self.n_outputs, index % self.n_outputs
        return total((self.index[:, t, None] == row) * self.g[:, :, t, col] for t in range(self.n_positions))

    def pull(self, cotangents: Tensor) -> Tensor:
        valid = self.index >= 0
        g = (self.g * cotangents[:, :, None, None]).sum(0)[valid]
        return g.new_zeros(self.n_rows, g.shape[1]).index_add(0, self.index[valid], g).flatten()

    def _merged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sums the positions of a sample that share a row: gradients `[K, U, D]`, their sample and row `[U]`."""
        datum = torch.arange(self.n_data, device=self.index.device).unsqueeze(1)
        valid = self.index >= 0
        if not numbers_are_known():
            return self._merged_where_first(datum, valid)
        keys, group = (datum * self.n_rows + self.index)[valid].unique(return_inverse=True)
        g = self.g[:, valid]
        merged = g.new_zeros(g.shape[0], len(keys), g.shape[2]).index_add(1, group, g)
        return merged, keys // self.n_rows, keys % self.n_rows

    def _merged_where_first(self, datum: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same with U = B·T, for a trace, which cannot count: sums are where their row occurs first, else zeros."""
        same = (self.index.unsqueeze(1) == self.index.unsqueeze(2)) & valid.unsqueeze(1) & valid.unsqueeze(2)
        first = valid & ~same.tril(-1).any(2)
        merged = (same & first.unsqueeze(2)).to(self.g) @ self.g  # [K, B, T, D]
        return merged.flatten(1, 2), datum.expand_as(self.index).flatten(), self.index.clamp(min=0).flatten()

    def add_squares(self, running: Tensor) -> None:
        merged, _, row = self._merged()
        running.view(self.n_rows, -1).index_add_(0, row, merged.square().sum(0).to(running))

    def squares_per_cotangent(self) -> Tensor:
        merged, _, row = self._merged()
        zeros = merged.new_zeros(len(merged), self.n_rows, merged.shape[2])
        return zeros.index_add(1, row, merged.square()).flatten(1)

    def weighted_norms(self, weights: Tensor) -> Tensor:
        merged, datum, row = self._merged()
        norms = (merged.square() * weights.view(self.n_rows, -1)[row]).sum(2)
        return norms.new_zeros(self.n_data, norms.shape[0]).index_add(0, datum, norms.T)

    def weighted_gram(self, weights: Tensor) -> Tensor:
        merged, datum, row = self._merged()
        g = merged.transpose(0, 1).to(weights.dtype)
        grams = (g * weights.view(self.n_rows, 1, -1)[row]) @ g.transpose(1, 2)
        return grams.new_zeros(self.n_data, *grams.shape[1:]).index_add(0, datum, grams)

    def apply(self, vectors: Tensor) -> Tensor:
        merged, datum, row = self._merged()
        table = vectors.view(len(vectors), self.n_rows, -1)
        values = torch.einsum("kud,sud->suk", merged, table[:, row])
        return values.new_zeros(len(vectors), self.n_data, values.shape[2]).index_add(1, datum, values)


def _same_rows(x: Tensor, y: Tensor) -> Tensor:
    """1 where two positions `[B, T]` and `[M, T']` read the same row, `[1, B, T, M, T']`, float64."""
    return widened((x[:, :, None, None] == y) & (x >= 0)[:, :, None, None]).unsqueeze(0)
