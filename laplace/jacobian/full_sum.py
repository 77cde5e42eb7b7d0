"""Running sums of full curvatures over batches, by pairs of layers where that is less work than by dense rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.core.checks import all_finite
from laplace.core.gram import add_gram, mirror
from laplace.core.pieces import bytes_at_once, operations_are_dear
from laplace.jacobian.blocks import CHUNK_BYTES, Block, RankOne, TensorShape, all_of, total
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.jacobian import Jacobian

if TYPE_CHECKING:
    from laplace.likelihoods.output_hessian import OutputHessian

_DATA = 16
"""Batch size for which the form of a sum is chosen, whatever the size of the first batch."""


@dataclass(eq=False)
class MatrixSum:
    """Σ J Jᵀ `[E, p, p]`: the sum of a dense matrix and of one that is summed by pairs of layers."""

    size: int  # Number of entries p
    # The dense sum `[E, p, p]`, of which only the upper block triangle is used, or None
    values: Tensor | None = None
    paired: PairSum | None = None  # The sum by pairs of layers, or None
    n_terms: int = 1  # Number of terms E that are kept apart

    @classmethod
    def from_matrices(cls, values: Tensor) -> MatrixSum:
        """From complete matrices `[E, p, p]`."""
        return cls(values.shape[-1], values, n_terms=len(values))

    @property
    def is_empty(self) -> bool:
        """True if nothing was added."""
        return self.values is None and self.paired is None

    def add(self, values: Tensor) -> None:
        """Adds complete matrices `[E, p, p]`."""
        self.upper(len(values), values).add_(values)

    def upper(self, n_terms: int, like: Tensor) -> Tensor:
        """The dense sum `[E, p, p]`, to add to in place; only its upper block triangle is used."""
        if self.values is None:
            self.values, self.n_terms = like.new_zeros(n_terms, self.size, self.size), n_terms
        if self.values.dtype != like.dtype:  # a sum keeps what the wider of its terms holds
            self.values = self.values.to(torch.promote_types(self.values.dtype, like.dtype))
        return self.values

    def add_blocks(self, blocks: Sequence[Block], n_terms: int, first: int, like: Tensor) -> None:
        """Adds the outer products of weighted blocks of all tensors."""
        if self.paired is None and self.values is None and n_terms == 1 and BlockPairs.are_less_work(blocks, _DATA):
            self.paired = PairSum.zeros(BlockPairs.from_blocks(blocks), like)
        if self.paired is not None and self.paired.pairs == BlockPairs.from_blocks(blocks):
            self.paired.add(blocks)
            return
        total = self.upper(n_terms, like)
        for piece in Jacobian(tuple(blocks)).pieces():
            piece = piece.to(total.dtype)
            if n_terms == 1:
                add_gram(total[0], piece.flatten(0, 1))
                continue
            for k in range(piece.shape[1]):
                add_gram(total[(first + k) % n_terms], piece[:, k])

    def add_head(self, blocks: Sequence[HeadBlock], hessian: OutputHessian, n_terms: int, like: Tensor) -> None:
        """Adds Σ_b J_bᵀ Λ_b J_b of the blocks of a head, without a root of Λ."""
        form = SymmetricForm.from_hessian(hessian) if n_terms == 1 else SymmetricForm(n_terms, Entries.DIAGONAL)
        pairs = BlockPairs.from_blocks(blocks)
        if self.paired is not None and (self.paired.pairs, self.paired.forms) != (pairs, (form,)):
            self.complete()
        if self.paired is None:
            self.paired, self.n_terms = PairSum.zeros(pairs, like, form), n_terms
        self.paired.add_head(blocks, hessian)

    @staticmethod
    def form(shapes: Sequence[TensorShape], n_cotangents: int, n_terms: int, device: torch.device) -> BlockPairs | None:
        """Pairs by which the outer products of tensors of these shapes are summed; None for a dense sum."""
        is_head = all(shape.is_head for shape in shapes)
        return BlockPairs.of_shapes(shapes, n_cotangents, _DATA, device) if n_terms == 1 or is_head else None

    def complete(self) -> Tensor:
        """The matrices `[E, p, p]`; the sum by pairs is released."""
        if self.values is not None:
            mirror(self.values)
        if self.paired is not None:
            matrix = self.paired.dense(self.n_terms)
            self.values = matrix if self.values is None else matrix.add_(self.values)
            self.paired = None
        return self.upper(1, torch.empty(0))

    def is_finite(self) -> Tensor:
        """True, 0-dim, if all entries are finite, which the diagonals show."""
        own = [] if self.values is None else [self.values.diagonal(dim1=1, dim2=2)]
        if self.paired is not None:
            own += self.paired.squares()
        return all_finite(own)


# Packed symmetric products: of a_i a_j and a_j a_i, and of symmetric entries, one is stored.


_STRIP = 8
"""Inputs whose products with all others a CPU computes at once, nearly without duplicates (a_i a_j, a_j a_i)."""

_PRODUCTS = 2**17
"""Products of a sample that are computed at once where operations are dear, at the price of more duplicates."""


class Entries(Enum):
    """Which entries of a symmetric matrix are stored."""

    TRIANGLE = "those on and above the diagonal"
    ABOVE = "those above the diagonal, of a matrix whose rows sum to zero"
    DIAGONAL = "those of a diagonal matrix"


@dataclass(frozen=True)
class SymmetricForm:
    """Packed form of symmetric matrices `[n, n]`: the entries from which all others follow."""

    n: int  # Width of the matrices
    entries: Entries = Entries.TRIANGLE  # Those that are stored

    @classmethod
    def from_hessian(cls, hessian: OutputHessian) -> SymmetricForm:
        """The form of sums of output Hessians."""
        n = hessian.diag.shape[1]
        if hessian.is_diagonal:
            return cls(n, Entries.DIAGONAL)
        return cls(n, Entries.ABOVE if hessian.sums_to_zero else Entries.TRIANGLE)

    @property
    def size(self) -> int:
        """Number of stored entries."""
        off = self.n * (self.n - 1) // 2
        return {Entries.TRIANGLE: off + self.n, Entries.ABOVE: off, Entries.DIAGONAL: self.n}[self.entries]

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows and columns of the stored entries, `[size]` each."""
        return _indices(self, device)

    def picked(self, matrices: Tensor) -> Tensor:
        """The stored entries `[..., size]` of symmetric matrices `[..., n, n]`."""
        rows, columns = self.indices(matrices.device)
        return matrices.flatten(-2)[..., rows * self.n + columns]

    def completed(self, values: Tensor) -> Tensor:
        """Symmetric matrices `[..., n, n]` from stored entries `[..., size]`."""
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
    """Products a_i a_j of the inputs of one layer, for consecutive i and all j from the first i on."""

    start: int  # First i
    stop: int  # One past the last i
    width: int  # Number of inputs I
    first: int  # Place of the first product among those of all strips

    @property
    def size(self) -> int:
        """Number of products."""
        return (self.stop - self.start) * (self.width - self.start)

    @property
    def places(self) -> slice:
        """Places of the products among those of all strips."""
        return slice(self.first, self.first + self.size)

    def view(self, sums: Tensor, n: int) -> Tensor:
        """A view of this strip's sums `[n, i, j]` in the concatenated sums of all strips, `[n · products]`."""
        own = sums[n * self.first : n * (self.first + self.size)]
        return own.view(n, self.stop - self.start, self.width - self.start)

    def squares(self, n: int) -> list[int]:
        """Places of the sums of a_i a_i in the concatenated sums of all strips."""
        step = self.width - self.start + 1
        rows = range(n * self.first, n * (self.first + self.size), self.size)
        return [row + k * step for row in rows for k in range(self.stop - self.start)]

    def inputs(self, a: Tensor) -> Tensor:
        """The products of inputs `[b, I]`, `[b, size]`."""
        return products(a[:, self.start : self.stop], a[:, self.start :])

    def weighted(self, values: Tensor) -> Tensor:
        """Entries of values `[I, I, O, O]` that the products meet, `[size, O (O + 1) / 2]`: means of (i, j) and (j, i).

        A product with j beyond the strip stands for that of j and i, too.
        """
        own = values[self.start : self.stop, self.start :]
        other = values[self.start :, self.start : self.stop].transpose(0, 1)
        twice = SymmetricForm(values.shape[-1]).picked(own + other)
        inner, outer = twice.split([self.stop - self.start, self.width - self.stop], 1)
        return torch.cat([inner / 2, outer], 1).flatten(0, 1)


@cache
def strips(width: int, dear: bool = False) -> tuple[Strip, ...]:
    """All strips of I inputs, each of which takes one operation; on a CPU with little more than half of all a_i a_j."""
    result: list[Strip] = []
    first, step = 0, max(_STRIP, _PRODUCTS // max(1, width)) if dear else _STRIP
    for start in range(0, width, step):
        result.append(Strip(start, min(width, start + step), width, first))
        first += result[-1].size
    return tuple(result)


def n_products(width: int, dear: bool) -> int:
    """Number of products of all strips."""
    return sum(strip.size for strip in strips(width, dear))


def products(a: Tensor, b: Tensor) -> Tensor:
    """Products a ⊗ b of every sample, `[B, I·I']`."""
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


# Full matrices and outer products by pairs of layers, without J: the parts of a matrix, and how they are counted.
#
# For two layers with J[k, b] = g[k, b] ⊗ a[b] and J'[k, b] = g'[k, b] ⊗ a'[b], the part of a sum that they share is
#
#     Σ_kb J J'ᵀ = Σ_b (Σ_k g_kb g'_kbᵀ) ⊗ (a_b a'_bᵀ),
#
# one matrix product `[O·O', B] × [B, I·I']`: K times less work than with a dense J. The other way round,
#
#     J_b S J'_bᵀ = g_b (S · (a_b ⊗ a'_b)) g'_bᵀ
#
# contracts the inputs first, by a product `[B, I·I'] × [I·I', O·O']`. Of a layer with itself either holds little more
# than a quarter of the numbers, since both sides are symmetric. So sums (`PairSum`) and matrices (`PairedMatrix`) are
# stored pair by pair. A head, whose outputs are the network's, is one layer with inputs [φ, 1] and g = I:
# Σ_b Λ_b ⊗ (φ_b φ_bᵀ).


_WORTHWHILE = 2**24
"""Multiplications of a dense sum from which pairs of layers are less work: each pair takes a few operations."""


@dataclass(frozen=True)
class MatrixSection:
    """Entries of a full matrix as inputs × outputs: of a layer, a head, or all dense blocks together."""

    blocks: tuple[int, ...]  # Indices of the blocks: of one weight, of a head, or of all dense blocks
    slices: tuple[slice, ...]  # Their entries
    n_outputs: int  # O; all entries of dense blocks
    # Number of inputs of every block; empty for dense blocks
    inputs: tuple[int, ...] = ()
    input_first: bool = False  # True if the entries are inputs × outputs, and not outputs × inputs

    @property
    def is_product(self) -> bool:
        """True for a layer or head, whose factors are contracted; False for dense blocks."""
        return bool(self.inputs)

    @property
    def n_inputs(self) -> int:
        """Number of inputs I; 1 for dense blocks."""
        return sum(self.inputs) or 1

    def pieces(self) -> Iterator[tuple[MatrixSection, slice, slice, slice]]:
        """For every block its part, its entries in the matrix, and which of the inputs I and outputs O they are."""
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

    def picked(self, other: MatrixSection, matrix: Tensor) -> Tensor:
        """Entries of this part and another one of a matrix `[P, P]`, `[I, I', O, O']`."""
        rows: list[Tensor] = []
        for one, r, _, _ in self.pieces():
            columns = [one.viewed(second, matrix[r, c]) for second, c, _, _ in other.pieces()]
            rows.append(_joined(columns, 1 if other.is_product else 3))
        return _joined(rows, 0 if self.is_product else 2)

    def viewed(self, other: MatrixSection, block: Tensor) -> Tensor:
        """A view of entries `[p, p']` of this part and another one, of one block each, as `[I, I', O, O']`."""
        rows, columns = (0, 1) if self.input_first else (1, 0), (2, 3) if other.input_first else (3, 2)
        return block.view(*self._shape, *other._shape).permute(rows[0], columns[0], rows[1], columns[1])

    def rows(self, block: Tensor) -> Tensor:
        """A view of rows `[p, q]` of this part, of one block, as `[O, I, q]`."""
        view = block.unflatten(0, self._shape)
        return view.transpose(0, 1) if self.input_first else view

    def factors(self, blocks: Sequence[Block], dtype: torch.dtype) -> RankOne:
        """Factors of its blocks; of dense blocks their rows and ones."""
        own = [blocks[i] for i in self.blocks]
        factors = [factor for factor in (block.rank_one() for block in own) if factor is not None]
        if not self.is_product:
            dense = torch.cat([block.dense() for block in own], 2)
            factors = [RankOne(dense, dense.new_ones(dense.shape[1], 1), self.n_outputs)]
        return replace(factors[0], a=_joined([factor.a for factor in factors], 1)).to(dtype)


@dataclass(frozen=True)
class BlockPairs:
    """All pairs of the parts of some blocks."""

    parts: tuple[MatrixSection, ...]  # Layers, then the dense blocks, if there are any
    size: int  # Number of entries P
    device: torch.device  # Where they are multiplied

    @classmethod
    def from_blocks(cls, blocks: Sequence[Block]) -> BlockPairs:
        """From the blocks of all tensors."""
        slices: list[slice] = []
        start = 0
        for block in blocks:
            slices.append(slice(start, start + block.size))
            start += block.size
        heads = all_of(HeadBlock, blocks)
        if heads is not None:
            return cls((_head(heads, slices),), start, blocks[0].device)
        parts: list[MatrixSection] = []
        rest: list[int] = []
        for i, block in enumerate(blocks):
            factors = block.rank_one()
            if factors is None or factors.a.shape[1] == 1:
                rest.append(i)
            else:
                inputs = (factors.a.shape[1],)
                parts.append(MatrixSection((i,), (slices[i],), factors.n_outputs, inputs, factors.input_first))
        if rest:
            own = tuple(slices[i] for i in rest)
            parts.append(MatrixSection(tuple(rest), own, sum(s.stop - s.start for s in own)))
        return cls(tuple(parts), start, blocks[0].device)

    @classmethod
    def of_shapes(
        cls, shapes: Sequence[TensorShape], n_cotangents: int, n_data: int, device: torch.device
    ) -> BlockPairs | None:
        """The pairs of tensors of these shapes; None where a dense sum is less work.

        The order of the parts and of the entries is not that of the blocks: they serve to count.
        """
        size = sum(shape.size for shape in shapes)
        if all(shape.is_head for shape in shapes):
            return cls(
                (MatrixSection((), (), shapes[0].n_outputs, tuple(shape.n_inputs for shape in shapes)),), size, device
            )
        layers = [shape for shape in shapes if shape.is_outer_product]
        if not layers or not _are_worthwhile(n_cotangents, n_data, size):
            return None
        parts = [MatrixSection((), (), shape.n_outputs, (shape.n_inputs,)) for shape in layers]
        rest = size - sum(shape.size for shape in layers)
        return cls((*parts, *([MatrixSection((), (), rest)] if rest else [])), size, device)

    @staticmethod
    def are_less_work(blocks: Sequence[Block], n_data: int) -> bool:
        """True if pairs are less work than a dense sum: there are layers, and several outputs."""
        n_cotangents = blocks[0].n_cotangents
        if not _are_worthwhile(n_cotangents, n_data, sum(block.size for block in blocks)):
            return False
        factors = [block.rank_one() for block in blocks]
        return any(factor is not None and factor.a.shape[1] > 1 for factor in factors)

    def strips(self, width: int) -> tuple[Strip, ...]:
        """All strips of I inputs."""
        return strips(width, operations_are_dear(self.device))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Pairs of indices of parts, each once."""
        return combinations_with_replacement(range(len(self.parts)), 2)

    def size_of(self, i: int, j: int) -> int:
        """Numbers that are stored for a pair of parts."""
        one, other = self.parts[i], self.parts[j]
        if i == j and one.is_product:
            return n_products(one.n_inputs, operations_are_dear(self.device)) * SymmetricForm(one.n_outputs).size
        return one.n_inputs * other.n_inputs * one.n_outputs * other.n_outputs

    @property
    def n_numbers(self) -> int:
        """Numbers that are stored for all pairs."""
        return sum(self.size_of(i, j) for i, j in self)

    @property
    def n_placed_at_once(self) -> int:
        """Numbers of the largest strip as it is written into a matrix."""
        layers = [part for part in self.parts if part.is_product]
        return max(self.strips(part.n_inputs)[0].size * part.n_outputs**2 for part in layers)

    def numbers_at_once(self, n_cotangents: int, n_data: int) -> int:
        """Largest number of temporary numbers in a pass over the data."""
        return min(n_data, self._data_at_once(n_cotangents)) * self._numbers_per_datum(n_cotangents)

    def _data_at_once(self, n_cotangents: int) -> int:
        return max(1, bytes_at_once(CHUNK_BYTES, self.device) // (8 * self._numbers_per_datum(n_cotangents)))

    def factors(self, blocks: Sequence[Block], dtype: torch.dtype) -> Iterator[tuple[slice, list[RankOne]]]:
        """Factors of all parts, a few data at a time."""
        step = self._data_at_once(blocks[0].n_cotangents)
        for start in range(0, blocks[0].n_data, step):
            data = slice(start, start + step)
            some = [block.at(data) for block in blocks]
            yield data, [part.factors(some, dtype) for part in self.parts]

    def _numbers_per_datum(self, n_cotangents: int) -> int:
        """Temporary numbers of one sample: products of the largest pair, and dense factors."""
        pairs = [(self.parts[i], self.parts[j]) for i, j in self]
        inputs = [
            self.strips(one.n_inputs)[0].size if one is other else one.n_inputs * other.n_inputs for one, other in pairs
        ]
        outputs = [one.n_outputs * other.n_outputs for one, other in pairs if one.is_product]
        return max(inputs) + max(outputs) + n_cotangents * sum(part.n_outputs for part in self.parts)


def _head(blocks: Sequence[HeadBlock], slices: Sequence[slice]) -> MatrixSection:
    """The part of a head: one layer whose inputs are the features and, of a bias, ones."""
    indices = tuple(range(len(blocks)))
    return MatrixSection(indices, tuple(slices), blocks[0].n_outputs, tuple(block.n_inputs for block in blocks))


def _are_worthwhile(n_cotangents: int, n_data: int, size: int) -> bool:
    return n_cotangents > 1 and n_cotangents * n_data * size**2 >= _WORTHWHILE


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat`, without a copy of a single tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


# Products J S Jᵀ and J M by layers, without J: the inputs are contracted first, then the outputs.


class PairedMatrix:
    """A symmetric matrix S, pair by pair, and its products J_b S J_bᵀ; differentiable in both."""

    def __init__(self, pairs: BlockPairs, matrix: Tensor) -> None:
        self.pairs = pairs  # The parts of the blocks
        self.values = {(i, j): self._ordered(matrix, i, j) for i, j in pairs}

    def _ordered(self, matrix: Tensor, i: int, j: int) -> Tensor:
        """Coefficients of a pair of layers, `[I·I', O·O']`; packed for a layer with itself, S for dense blocks."""
        one, other = self.pairs.parts[i], self.pairs.parts[j]
        values = one.picked(other, matrix)
        if i != j:
            return values.flatten(2).flatten(0, 1)
        if not one.is_product:
            return values[0, 0].contiguous()
        return torch.cat([strip.weighted(values) for strip in self.pairs.strips(one.n_inputs)])

    def products(self, blocks: Sequence[Block], *, diagonal: bool = False) -> Tensor:
        """J_b S J_bᵀ `[B, K, K]`, or its diagonals `[B, K]`, in the dtype of S."""
        dtype = next(iter(self.values.values())).dtype
        parts: list[Tensor] = []
        for _, factors in self.pairs.factors(blocks, dtype):
            terms = (self._product(factors, i, j, diagonal=diagonal) for i, j in self.values)
            parts.append(total(terms))
        return torch.cat(parts)

    def _product(self, factors: Sequence[RankOne], i: int, j: int, *, diagonal: bool) -> Tensor:
        """The terms of two parts, `[b, K, K]` or `[b, K]`, in both orders."""
        one, other, values = factors[i], factors[j], self.values[i, j]
        if i == j and not self.pairs.parts[i].is_product:
            between = values
        elif i == j:
            strip_products = (strip.inputs(one.a) @ values[strip.places] for strip in self.pairs.strips(one.a.shape[1]))
            between = SymmetricForm(one.n_outputs).completed(total(strip_products))
        else:
            between = (products(one.a, other.a) @ values).unflatten(1, (one.n_outputs, -1))  # [b, O, O']
        left = between if one.g is None else one.by_datum() @ between
        if diagonal:
            own = left.diagonal(dim1=1, dim2=2) if other.g is None else (left * other.by_datum()).sum(2)
            return own if i == j else 2 * own
        product = left if other.g is None else left @ other.by_datum().mT
        return product if i == j else product + product.mT


def jacobian_product(pairs: BlockPairs, blocks: Sequence[Block], matrix: Tensor) -> Tensor:
    """J_b M of every input, `[B, K, Q]`, for M `[P, Q]`: g_b (M a_b) of every layer, about B·P·Q products."""
    result: list[Tensor] = []
    for _, factors in pairs.factors(blocks, matrix.dtype):
        widest = len(factors[0].a) * max(part.n_outputs for part in pairs.parts if part.is_product)
        columns = matrix.split(max(1, bytes_at_once(CHUNK_BYTES, matrix.device) // (8 * widest)), 1)
        each = list(zip(pairs.parts, factors, strict=True))
        result.append(torch.cat([total(_times(part, own, some) for part, own in each) for some in columns], 2))
    return torch.cat(result)


def _times(part: MatrixSection, factors: RankOne, matrix: Tensor) -> Tensor:
    if not part.is_product:
        return factors.by_datum() @ torch.cat([matrix[entries] for entries in part.slices])
    terms: list[Tensor] = []
    for piece, entries, inputs, _ in part.pieces():
        terms.append(factors.a[:, inputs] @ piece.rows(matrix[entries]))
    outputs = total(terms).transpose(0, 1)  # [b, O, q]
    return outputs if factors.g is None else factors.by_datum() @ outputs


# Sums Σ_b J_bᵀ J_b by pairs of layers, and Σ_b J_bᵀ Λ_b J_b of a head, without J or a root of Λ.


@dataclass(eq=False)
class PairSum:
    """Running sum Σ_kb J Jᵀ over data and cotangents, pair by pair."""

    pairs: BlockPairs  # The parts of the blocks that are added
    forms: tuple[SymmetricForm, ...]  # For every part, the packed form of the outputs in its pair with itself
    # By pair, outputs × inputs: `[O·O', I·I']`; for a layer with itself packed, one strip of inputs after the other;
    # for the dense blocks with themselves `[O, O]`, of which only the upper block triangle is used
    sums: dict[tuple[int, int], Tensor]

    @classmethod
    def zeros(cls, pairs: BlockPairs, like: Tensor, head: SymmetricForm | None = None) -> PairSum:
        """An empty sum in the dtype and on the device of a tensor."""
        forms = tuple(SymmetricForm(part.n_outputs) if head is None else head for part in pairs.parts)
        return cls(pairs, forms, {pair: like.new_zeros(_shape(pairs, forms, *pair)) for pair in pairs})

    def add(self, blocks: Sequence[Block]) -> None:
        """Adds weighted blocks of these parts."""
        for _, factors in self.pairs.factors(blocks, self._dtype):
            for (i, j), values in self.sums.items():
                if i == j and not self.pairs.parts[i].is_product:
                    add_gram(values, factors[i].by_datum().flatten(0, 1))
                    continue
                outputs = factors[i].by_datum().mT @ factors[j].by_datum()  # [b, O, O']
                if i == j:
                    self._add_own(values, factors[i].a, self.forms[i].picked(outputs))
                else:
                    values.addmm_(outputs.flatten(1).T, products(factors[i].a, factors[j].a))

    def add_head(self, blocks: Sequence[HeadBlock], hessian: OutputHessian) -> None:
        """Adds Σ_b Λ_b ⊗ (φ_b φ_bᵀ) of the blocks of a head."""
        ((pair, values),) = self.sums.items()
        entries = hessian.entries(*self.forms[pair[0]].indices(values.device))
        for data, (factors,) in self.pairs.factors(blocks, self._dtype):
            self._add_own(values, factors.a, entries[data])

    def _add_own(self, sums: Tensor, a: Tensor, outputs: Tensor) -> None:
        """Adds Σ_b outputs ⊗ (a aᵀ) of a layer with itself, for outputs `[b, n]` and inputs `[b, I]`.

        Of the three factors, outputs, a_i and a_j, those are multiplied before the matrix product that make fewer
        numbers: outputs and a_i, or a_i and a_j.
        """
        n, columns, rows = outputs.shape[1], outputs.T.contiguous(), a.T.contiguous()
        for strip in self.pairs.strips(a.shape[1]):
            total = strip.view(sums, n)
            if n < total.shape[2]:
                weighted = (columns.unsqueeze(1) * rows[strip.start : strip.stop]).flatten(0, 1)
                total.view(-1, total.shape[2]).addmm_(weighted, a[:, strip.start :])
            else:
                total.view(n, -1).addmm_(columns, strip.inputs(a))

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self.sums.values())).dtype

    def squares(self) -> list[Tensor]:
        """Diagonal sums: if they are finite, all sums are."""
        result: list[Tensor] = []
        for i, part in enumerate(self.pairs.parts):
            own = self.sums[i, i]
            if part.is_product:
                own = own.index_select(0, _squares(self.pairs.strips(part.n_inputs), self.forms[i].size, own.device))
            result.append(own if part.is_product else own.diagonal())
        return result

    def dense(self, n_terms: int = 1) -> Tensor:
        """The matrices `[E, P, P]`."""
        size = self.pairs.size
        values = next(iter(self.sums.values()))
        if n_terms > 1:
            matrices = values.new_zeros(n_terms, size, size)
            for term, matrix in enumerate(matrices):
                self._place(matrix, term)
            return matrices
        matrix = values.new_empty(1, size, size)
        self._place(matrix[0])
        return matrix

    def _place(self, matrix: Tensor, output: int | None = None) -> None:
        """Writes the sum into a matrix `[P, P]`, or for a head with a diagonal Λ the part of one output."""
        for (i, j), values in self.sums.items():
            one, other = self.pairs.parts[i], self.pairs.parts[j]
            if i == j and one.is_product:
                _place_own(one, self.pairs.strips(one.n_inputs), self.forms[i], values, matrix, output)
                continue
            if i == j:
                values = mirror(values)
            values = values.view(one.n_outputs, other.n_outputs, one.n_inputs, other.n_inputs).permute(2, 3, 0, 1)
            for first, r, inputs, outputs in one.pieces():
                for second, c, other_inputs, other_outputs in other.pieces():
                    block = values[inputs, other_inputs, outputs, other_outputs]
                    first.viewed(second, matrix[r, c]).copy_(block)
                    if i != j:
                        matrix[c, r] = matrix[r, c].T


def _shape(pairs: BlockPairs, forms: Sequence[SymmetricForm], i: int, j: int) -> tuple[int, ...]:
    one, other = pairs.parts[i], pairs.parts[j]
    if i == j and one.is_product:
        return (forms[i].size * n_products(one.n_inputs, operations_are_dear(pairs.device)),)
    if i == j:
        return one.n_outputs, one.n_outputs
    return one.n_outputs * other.n_outputs, one.n_inputs * other.n_inputs


@cache
def _squares(every: tuple[Strip, ...], n: int, device: torch.device) -> Tensor:
    """Places of the sums of all products a_i a_i with n numbers each, `[n · I]`."""
    places = [place for strip in every for place in strip.squares(n)]
    with torch.inference_mode(False):
        return torch.tensor(places, device=device)


def _place_own(
    part: MatrixSection, every: Sequence[Strip], form: SymmetricForm, values: Tensor, matrix: Tensor, output: int | None
) -> None:
    for strip in every:
        packed = strip.view(values, form.size).flatten(1).T
        if output is not None:
            packed = packed * (torch.arange(form.size, device=packed.device) == output)
        rows = form.completed(packed).unflatten(0, (strip.stop - strip.start, -1))  # [i, j, O, O]
        for first, r, inputs, _ in part.pieces():
            for second, c, others, _ in part.pieces():
                i, j = _overlap(inputs, strip.start, strip.stop), _overlap(others, strip.start, strip.width)
                if i is None or j is None:
                    continue
                block = rows[_moved(i, strip.start), _moved(j, strip.start)]
                i, j = _moved(i, inputs.start), _moved(j, others.start)
                first.viewed(second, matrix[r, c])[i, j] = block
                second.viewed(first, matrix[c, r])[j, i] = block.transpose(0, 1)


def _overlap(one: slice, start: int, stop: int) -> slice | None:
    start, stop = max(one.start, start), min(one.stop, stop)
    return slice(start, stop) if start < stop else None


def _moved(one: slice, start: int) -> slice:
    return slice(one.start - start, one.stop - start)
