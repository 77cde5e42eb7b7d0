"""Full matrices and outer products by pairs of layers, without J: the parts of a matrix, and how they are counted.

For two layers with J[k, b] = g[k, b] ⊗ a[b] and J'[k, b] = g'[k, b] ⊗ a'[b], the part of a sum that they share is

    Σ_kb J J'ᵀ = Σ_b (Σ_k g_kb g'_kbᵀ) ⊗ (a_b a'_bᵀ),

one matrix product `[O·O', B] × [B, I·I']`: K times less work than with J multiplied out. The other way round,

    J_b S J'_bᵀ = g_b (S · (a_b ⊗ a'_b)) g'_bᵀ

contracts the inputs first, by a product `[B, I·I'] × [I·I', O·O']`. Of a layer with itself either holds little more
than a quarter of the numbers, since both sides are symmetric. So sums (`PairSum`) and matrices (`PairedMatrix`) are
held pair by pair. A head, whose outputs are the network's, is one layer with inputs [φ, 1] and g = I:
Σ_b Λ_b ⊗ (φ_b φ_bᵀ).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from laplace.jacobian.blocks import CHUNK_BYTES, Block, RankOne, TensorShape
from laplace.jacobian.heads import HeadBlock, heads_alone
from laplace.jacobian.packed import SymmetricForm, n_products, strips

_WORTHWHILE = 2**24
"""Multiplications with J from which pairs of layers are less work: each pair has a fixed cost of a few operations."""


@dataclass(frozen=True)
class Part:
    """Entries of a full matrix that are seen as inputs × outputs.

    Attributes:
        blocks: Indices of the blocks: one weight, those of a head, or all that are multiplied out.
        slices: Their entries.
        n_outputs: O; of what is multiplied out all entries.
        inputs: Number of inputs of every block, which follow each other; none of what is multiplied out.
        input_first: True if the entries are inputs × outputs, and not outputs × inputs.
    """

    blocks: tuple[int, ...]
    slices: tuple[slice, ...]
    n_outputs: int
    inputs: tuple[int, ...] = ()
    input_first: bool = False

    @property
    def is_product(self) -> bool:
        """True of a layer, whose factors are contracted."""
        return bool(self.inputs)

    @property
    def n_inputs(self) -> int:
        """I; 1 of what is multiplied out."""
        return sum(self.inputs) or 1

    def pieces(self) -> Iterator[tuple[Part, slice, slice, slice]]:
        """The part of every block, its entries in the matrix, and which of the inputs I and outputs O they are."""
        start = 0
        for k, (index, entries) in enumerate(zip(self.blocks, self.slices, strict=True)):
            size = self.inputs[k] if self.is_product else entries.stop - entries.start
            own, every = slice(start, start + size), slice(0, self.n_outputs if self.is_product else 1)
            one = replace(self, blocks=(index,), slices=(entries,))
            if self.is_product:
                yield replace(one, inputs=(size,)), entries, own, every
            else:
                yield replace(one, n_outputs=size), entries, every, own
            start += size

    @property
    def _shape(self) -> tuple[int, int]:
        return (self.n_inputs, self.n_outputs) if self.input_first else (self.n_outputs, self.n_inputs)

    def picked(self, other: Part, matrix: Tensor) -> Tensor:
        """Entries of this part and another one of a matrix `[P, P]`, `[I, I', O, O']`."""
        rows: list[Tensor] = []
        for one, r, _, _ in self.pieces():
            columns = [one.viewed(second, matrix[r, c]) for second, c, _, _ in other.pieces()]
            rows.append(_joined(columns, 1 if other.is_product else 3))
        return _joined(rows, 0 if self.is_product else 2)

    def viewed(self, other: Part, block: Tensor) -> Tensor:
        """A view of entries `[p, p']` of this part and another one, of one block each, as `[I, I', O, O']`."""
        rows, columns = (0, 1) if self.input_first else (1, 0), (2, 3) if other.input_first else (3, 2)
        return block.view(*self._shape, *other._shape).permute(rows[0], columns[0], rows[1], columns[1])

    def rows(self, block: Tensor) -> Tensor:
        """A view of rows `[p, q]` of this part, of one block, as `[O, I, q]`."""
        view = block.unflatten(0, self._shape)
        return view.transpose(0, 1) if self.input_first else view

    def factors(self, blocks: Sequence[Block], dtype: torch.dtype) -> RankOne:
        """Factors of its blocks: dense rows and ones of what is multiplied out."""
        own = [blocks[i] for i in self.blocks]
        factors = [factor for factor in (block.rank_one() for block in own) if factor is not None]
        if not self.is_product:
            dense = torch.cat([block.dense() for block in own], 2)
            factors = [RankOne(dense, dense.new_ones(dense.shape[1], 1), self.n_outputs)]
        return replace(factors[0], a=_joined([factor.a for factor in factors], 1)).to(dtype)


@dataclass(frozen=True)
class Pairs:
    """Every pair of the parts of some blocks that follow each other.

    Attributes:
        parts: Layers, and last what is multiplied out, if anything is.
        size: Number of entries P.
    """

    parts: tuple[Part, ...]
    size: int

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Pairs:
        """The pairs of some blocks."""
        slices: list[slice] = []
        start = 0
        for block in blocks:
            slices.append(slice(start, start + block.size))
            start += block.size
        heads = heads_alone(blocks)
        if heads is not None:
            return cls((_head(heads, slices),), start)
        parts: list[Part] = []
        rest: list[int] = []
        for i, block in enumerate(blocks):
            factors = block.rank_one()
            if factors is None or factors.a.shape[1] == 1:
                rest.append(i)
            else:
                inputs = (factors.a.shape[1],)
                parts.append(Part((i,), (slices[i],), factors.n_outputs, inputs, factors.input_first))
        if rest:
            own = tuple(slices[i] for i in rest)
            parts.append(Part(tuple(rest), own, sum(s.stop - s.start for s in own)))
        return cls(tuple(parts), start)

    @classmethod
    def of_shapes(cls, shapes: Sequence[TensorShape], n_cotangents: int, n_data: int) -> Pairs | None:
        """The pairs of tensors of these shapes; None where multiplying them out is less work.

        The order of the parts and of the entries is not that of the blocks: they serve to count.
        """
        size = sum(shape.size for shape in shapes)
        if all(shape.is_head for shape in shapes):
            return cls((Part((), (), shapes[0].n_outputs, tuple(shape.n_inputs for shape in shapes)),), size)
        layers = [shape for shape in shapes if shape.is_outer_product]
        if not layers or not _are_worthwhile(n_cotangents, n_data, size):
            return None
        parts = [Part((), (), shape.n_outputs, (shape.n_inputs,)) for shape in layers]
        rest = size - sum(shape.size for shape in layers)
        return cls((*parts, *([Part((), (), rest)] if rest else [])), size)

    @staticmethod
    def are_less_work(blocks: Sequence[Block], n_data: int) -> bool:
        """True if pairs are less work than J of so many data multiplied out: there are layers, and several outputs."""
        n_cotangents = blocks[0].n_cotangents
        if not _are_worthwhile(n_cotangents, n_data, sum(block.size for block in blocks)):
            return False
        factors = [block.rank_one() for block in blocks]
        return any(factor is not None and factor.a.shape[1] > 1 for factor in factors)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Pairs of indices of parts, each once."""
        return combinations_with_replacement(range(len(self.parts)), 2)

    def size_of(self, i: int, j: int) -> int:
        """Numbers that are held of a pair of parts: of what is multiplied out all, of a layer with itself few twice."""
        one, other = self.parts[i], self.parts[j]
        if i == j and one.is_product:
            return n_products(one.n_inputs) * SymmetricForm(one.n_outputs).size
        return one.n_inputs * other.n_inputs * one.n_outputs * other.n_outputs

    @property
    def n_numbers(self) -> int:
        """Numbers that are held of all pairs."""
        return sum(self.size_of(i, j) for i, j in self)

    @property
    def n_placed_at_once(self) -> int:
        """Numbers of the largest strip that is laid out to be written into a matrix."""
        layers = [part for part in self.parts if part.is_product]
        return max(strips(part.n_inputs)[0].size * part.n_outputs**2 for part in layers)

    def numbers_at_once(self, n_cotangents: int, n_data: int) -> int:
        """Numbers that a pass over so many data multiplies out and drops."""
        return min(n_data, self._data_at_once(n_cotangents)) * self._numbers_per_datum(n_cotangents)

    def _data_at_once(self, n_cotangents: int) -> int:
        return max(1, CHUNK_BYTES // (8 * self._numbers_per_datum(n_cotangents)))

    def factors(self, blocks: Sequence[Block], dtype: torch.dtype) -> Iterator[tuple[slice, list[RankOne]]]:
        """Factors of all parts, a few data at a time."""
        step = self._data_at_once(blocks[0].n_cotangents)
        for start in range(0, blocks[0].n_data, step):
            data = slice(start, start + step)
            some = [block.at(data) for block in blocks]
            yield data, [part.factors(some, dtype) for part in self.parts]

    def _numbers_per_datum(self, n_cotangents: int) -> int:
        """Size of the products that one pair makes of a datum, and of what is multiplied out."""
        pairs = [(self.parts[i], self.parts[j]) for i, j in self]
        inputs = [
            strips(one.n_inputs)[0].size if one is other else one.n_inputs * other.n_inputs for one, other in pairs
        ]
        outputs = [one.n_outputs * other.n_outputs for one, other in pairs if one.is_product]
        return max(inputs) + max(outputs) + n_cotangents * sum(part.n_outputs for part in self.parts)


def _head(blocks: Sequence[HeadBlock], slices: Sequence[slice]) -> Part:
    """The part of a head: one layer whose inputs are the features and, of a bias, ones."""
    indices = tuple(range(len(blocks)))
    return Part(indices, tuple(slices), blocks[0].n_outputs, tuple(block.n_inputs for block in blocks))


def _are_worthwhile(n_cotangents: int, n_data: int, size: int) -> bool:
    return n_cotangents > 1 and n_cotangents * n_data * size**2 >= _WORTHWHILE


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors joined in a dimension; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
