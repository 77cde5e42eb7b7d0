"""Full matrices and outer products: sums Σ_b J_bᵀ J_b and products J_b Σ J_bᵀ by pairs of layers, without J.

For two layers with J[k, b] = g[k, b] ⊗ a[b] and J'[k, b] = g'[k, b] ⊗ a'[b], the part of a sum that they share is

    Σ_kb J J'ᵀ = Σ_b (Σ_k g_kb g'_kbᵀ) ⊗ (a_b a'_bᵀ),

one matrix product `[O·O', B] × [B, I·I']`: K times less work than with J multiplied out. The other way round,

    J_b S J'_bᵀ = g_b (S · (a_b ⊗ a'_b)) g'_bᵀ

contracts the inputs first, by a product `[B, I·I'] × [I·I', O·O']`. Of a layer with itself either holds little more
than a quarter of the numbers, since both sides are symmetric. So sums and matrices are held pair by pair,
`[I·I', O·O']`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from laplace.core.gram import add_gram, mirror
from laplace.jacobian.blocks import Block
from laplace.jacobian.contractions import CHUNK_BYTES, RankOne, TensorShape, total

_WORTHWHILE = 2**24
"""Multiplications with J from which pairs of layers are less work: each pair has a fixed cost of a few operations."""


_STRIP = 16
"""Inputs whose products with all others are taken at once: half of the products need not be taken twice."""


@dataclass(frozen=True)
class Part:
    """Entries of a full matrix that are seen as inputs × outputs.

    Attributes:
        blocks: Indices of the blocks: one weight, or all that are multiplied out.
        slices: Their entries.
        n_outputs: O; of what is multiplied out all entries.
        n_inputs: I; 1 of what is multiplied out.
        input_first: True if the entries are inputs × outputs, and not outputs × inputs.
    """

    blocks: tuple[int, ...]
    slices: tuple[slice, ...]
    n_outputs: int
    n_inputs: int = 1
    input_first: bool = False

    @property
    def is_product(self) -> bool:
        """True of one weight, whose factors are contracted."""
        return self.n_inputs > 1

    def pieces(self) -> Iterator[tuple[Part, slice, slice]]:
        """The part of every slice, its entries in the matrix, and which of the outputs O they are."""
        start = 0
        for index, entries in zip(self.blocks, self.slices, strict=True):
            n_outputs = self.n_outputs if self.is_product else entries.stop - entries.start
            piece = replace(self, blocks=(index,), slices=(entries,), n_outputs=n_outputs)
            yield piece, entries, slice(start, start + n_outputs)
            start += n_outputs

    @property
    def _shape(self) -> tuple[int, int]:
        return (self.n_inputs, self.n_outputs) if self.input_first else (self.n_outputs, self.n_inputs)

    def picked(self, other: Part, matrix: Tensor) -> Tensor:
        """Entries of this part and another one of a matrix `[P, P]`, `[I, I', O, O']`."""
        rows: list[Tensor] = []
        for one, r, _ in self.pieces():
            rows.append(_joined([one.viewed(second, matrix[r, c]) for second, c, _ in other.pieces()], 3))
        return _joined(rows, 2)

    def viewed(self, other: Part, block: Tensor) -> Tensor:
        """A view of entries `[p, p']` of this part and another one, of one slice each, as `[I, I', O, O']`."""
        rows, columns = (0, 1) if self.input_first else (1, 0), (2, 3) if other.input_first else (3, 2)
        return block.view(*self._shape, *other._shape).permute(rows[0], columns[0], rows[1], columns[1])

    def factors(self, blocks: Sequence[Block], dtype: torch.dtype) -> RankOne:
        """Factors of its blocks: dense rows and ones of what is multiplied out."""
        factors = blocks[self.blocks[0]].rank_one() if self.is_product else None
        if factors is None:
            dense = torch.cat([blocks[i].dense() for i in self.blocks], 2)
            factors = RankOne(dense, dense.new_ones(dense.shape[1], 1), self.n_outputs)
        return factors.to(dtype)


@dataclass(frozen=True)
class Pairs:
    """Every pair of the parts of some blocks that follow each other.

    Attributes:
        parts: Weights, and last what is multiplied out, if anything is.
        size: Number of entries P.
    """

    parts: tuple[Part, ...]
    size: int

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Pairs:
        """The pairs of some blocks."""
        parts: list[Part] = []
        rest: list[int] = []
        slices: list[slice] = []
        start = 0
        for i, block in enumerate(blocks):
            slices.append(slice(start, start + block.size))
            start += block.size
            factors = block.rank_one()
            if factors is None or factors.a.shape[1] == 1:
                rest.append(i)
            else:
                sizes = factors.n_outputs, factors.a.shape[1]
                parts.append(Part((i,), (slices[i],), *sizes, factors.input_first))
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
        layers = [shape for shape in shapes if shape.is_outer_product]
        if not layers or not _are_worthwhile(n_cotangents, n_data, size):
            return None
        parts = [Part((), (), shape.n_outputs, shape.n_inputs) for shape in layers]
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

    def shape(self, i: int, j: int) -> tuple[int, int]:
        """Shape in which the entries of two parts are held: `[I·I', O·O']`, of a part with itself with few repeats.

        What is multiplied out is held as it is, `[O, O]`; in sums its upper block triangle counts.
        """
        one, other = self.parts[i], self.parts[j]
        if i == j and not one.is_product:
            return one.n_outputs, one.n_outputs
        if i == j:
            return sum(strip.size for strip in strips(one.n_inputs)), _n_distinct(one.n_outputs)
        return one.n_inputs * other.n_inputs, one.n_outputs * other.n_outputs

    @property
    def n_numbers(self) -> int:
        """Numbers that are held of all pairs."""
        return sum(rows * columns for rows, columns in (self.shape(i, j) for i, j in self))

    @property
    def n_placed_at_once(self) -> int:
        """Numbers of the largest strip that is laid out to be written into a matrix."""
        return max(min(_STRIP, part.n_inputs) * part.n_inputs * part.n_outputs**2 for part in self.parts)

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
        inputs = [_STRIP * one.n_inputs if one is other else one.n_inputs * other.n_inputs for one, other in pairs]
        outputs = [one.n_outputs * other.n_outputs for one, other in pairs if one.is_product]
        return max(inputs) + max(outputs) + n_cotangents * sum(part.n_outputs for part in self.parts)


@dataclass(frozen=True, eq=False)
class PairSum:
    """Running sum Σ_kb J Jᵀ over data and cotangents, pair by pair.

    Attributes:
        pairs: The parts of the blocks that are added.
        sums: Of every pair.
    """

    pairs: Pairs
    sums: dict[tuple[int, int], Tensor]

    @classmethod
    def zeros(cls, pairs: Pairs, like: Tensor) -> PairSum:
        """The sum over nothing, in the dtype and on the device of a tensor."""
        return cls(pairs, {pair: like.new_zeros(pairs.shape(*pair)) for pair in pairs})

    def add(self, blocks: Sequence[Block]) -> None:
        """Adds blocks of these parts."""
        dtype = next(iter(self.sums.values())).dtype
        for _, factors in self.pairs.factors(blocks, dtype):
            for (i, j), values in self.sums.items():
                if i == j and not self.pairs.parts[i].is_product:
                    add_gram(values, factors[i].by_datum().flatten(0, 1))
                    continue
                outputs = factors[i].by_datum().mT @ factors[j].by_datum()  # [b, O, O']
                if i == j:
                    outputs = _distinct(outputs)
                    for strip in strips(self.pairs.parts[i].n_inputs):
                        values[strip.rows].addmm_(strip.inputs(factors[i].a).T, outputs)
                else:
                    values.addmm_(_products(factors[i].a, factors[j].a).T, outputs.flatten(1))

    def dense(self) -> Tensor:
        """`[P, P]`; beside it and the sums little is held."""
        matrix = next(iter(self.sums.values())).new_empty(self.pairs.size, self.pairs.size)
        for (i, j), values in self.sums.items():
            one, other = self.pairs.parts[i], self.pairs.parts[j]
            if i == j and one.is_product:
                _place_own(one, values, matrix)
                continue
            if i == j:
                values = mirror(values)
            values = values.view(one.n_inputs, other.n_inputs, one.n_outputs, other.n_outputs)
            for first, r, outputs in one.pieces():
                for second, c, other_outputs in other.pieces():
                    first.viewed(second, matrix[r, c]).copy_(values[:, :, outputs, other_outputs])
                    if i != j:
                        matrix[c, r] = matrix[r, c].T
        return matrix


def _place_own(part: Part, values: Tensor, matrix: Tensor) -> None:
    """Writes the sum of a layer with itself into a matrix, one strip after the other."""
    (entries,) = part.slices
    target = part.viewed(part, matrix[entries, entries])
    for strip in strips(part.n_inputs):
        rows = _repeated(values[strip.rows], part.n_outputs).unflatten(0, (strip.stop - strip.start, -1))
        target[strip.start : strip.stop, strip.start :] = rows
        target[strip.start :, strip.start : strip.stop] = rows.transpose(0, 1)


class PairedMatrix:
    """A symmetric matrix S, pair by pair, and its products J_b S J_bᵀ; differentiable in both.

    Args:
        pairs: The parts of the blocks.
        matrix: S, `[P, P]`.
    """

    def __init__(self, pairs: Pairs, matrix: Tensor) -> None:
        self.pairs = pairs
        self.values = {(i, j): self._ordered(matrix, i, j) for i, j in pairs}

    def _ordered(self, matrix: Tensor, i: int, j: int) -> Tensor:
        one, other = self.pairs.parts[i], self.pairs.parts[j]
        values = one.picked(other, matrix)
        if i != j:
            return values.flatten(2).flatten(0, 1)
        if not one.is_product:
            return values[0, 0].contiguous()
        return torch.cat([strip.weighed(values) for strip in strips(one.n_inputs)])

    def products(self, blocks: Sequence[Block], *, diagonal: bool = False) -> Tensor:
        """J_b S J_bᵀ `[B, K, K]`, or its diagonals `[B, K]`, in the dtype of S."""
        dtype = next(iter(self.values.values())).dtype
        parts: list[Tensor] = []
        for _, factors in self.pairs.factors(blocks, dtype):
            terms = (self._product(factors, i, j, diagonal=diagonal) for i, j in self.values)
            parts.append(total(terms))
        return torch.cat(parts)

    def _product(self, factors: Sequence[RankOne], i: int, j: int, *, diagonal: bool) -> Tensor:
        """The terms of two parts, `[b, K, K]` or `[b, K]`; of two different ones in either order."""
        one, other, values = factors[i], factors[j], self.values[i, j]
        if i == j and not self.pairs.parts[i].is_product:
            between = values
        elif i == j:
            strip_products = (strip.inputs(one.a) @ values[strip.rows] for strip in strips(one.a.shape[1]))
            between = _repeated(total(strip_products), one.n_outputs)
        else:
            between = (_products(one.a, other.a) @ values).unflatten(1, (one.n_outputs, -1))  # [b, O, O']
        left = between if one.g is None else one.by_datum() @ between
        if diagonal:
            own = left.diagonal(dim1=1, dim2=2) if other.g is None else (left * other.by_datum()).sum(2)
            return own if i == j else 2 * own
        product = left if other.g is None else left @ other.by_datum().mT
        return product if i == j else product + product.mT


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
    def rows(self) -> slice:
        """Places of the products among those of all strips."""
        return slice(self.first, self.first + self.size)

    def inputs(self, a: Tensor) -> Tensor:
        """The products of inputs `[b, I]`, `[b, size]`."""
        return _products(a[:, self.start : self.stop], a[:, self.start :])

    def weighed(self, values: Tensor) -> Tensor:
        """Of values `[I, I, O, O]` those that the products meet, `[size, O (O + 1) / 2]`: means of (i, j) and (j, i).

        A product with j beyond the strip stands for that of j and i, too.
        """
        own = values[self.start : self.stop, self.start :]
        twice = _distinct(own + values[self.start :, self.start : self.stop].transpose(0, 1))
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


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Products a ⊗ b of every datum, `[B, I·I']`."""
    return (a.unsqueeze(2) * b.unsqueeze(1)).flatten(1)


def _are_worthwhile(n_cotangents: int, n_data: int, size: int) -> bool:
    return n_cotangents > 1 and n_cotangents * n_data * size**2 >= _WORTHWHILE


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors joined in a dimension; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


@cache
def _places(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of a symmetric `[n, n]`: flat indices of its distinct entries, and the place of every entry among these."""
    with torch.inference_mode(False):  # autograd could never use what is kept from inference mode
        rows, columns = torch.triu_indices(n, n, device=device)
        places = torch.zeros(n, n, dtype=torch.long, device=device)
        places[rows, columns] = places[columns, rows] = torch.arange(len(rows), device=device)
        return rows * n + columns, places.flatten()


def _n_distinct(n: int) -> int:
    return n * (n + 1) // 2


def _distinct(matrices: Tensor) -> Tensor:
    """The entries of symmetric `[..., n, n]` that differ, `[..., n (n + 1) / 2]`."""
    return matrices.flatten(-2)[..., _places(matrices.shape[-1], matrices.device)[0]]


def _repeated(values: Tensor, n: int) -> Tensor:
    """Symmetric matrices `[..., n, n]` from the entries that differ."""
    return values[..., _places(n, values.device)[1]].unflatten(-1, (n, n))
