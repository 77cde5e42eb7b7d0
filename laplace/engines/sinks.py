"""Sinks: what structures sum over batches.

An engine adds blocks of a weighted Jacobian, a chunk of cotangents at a time, heads without a root of Λ, or the whole
quantity of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace.core.gram import group_product
from laplace.core.layout import Layout
from laplace.core.nested import move, named_tensors
from laplace.core.precision_policy import product_dtype, wide_dtype, widened
from laplace.engines.kron_parts import (
    DENSE_BLOCK_LIMIT,
    UNUSED,
    Factor,
    KronBlock,
    KronParts,
    Probe,
    ThinFactor,
    added,
    dense,
)
from laplace.errors import UnsupportedError
from laplace.jacobian.blocks import Block, from_state, total
from laplace.jacobian.full_sum import MatrixSum
from laplace.jacobian.heads import Head, HeadBlock, as_head, unrotated
from laplace.jacobian.jacobian import Jacobian
from laplace.jacobian.outer import FactoredBlock, OuterBlock
from laplace.jacobian.patches import Patches, as_tensor, gram_of
from laplace.likelihoods.base import OutputHessian
from laplace.weights.problem import Problem

Groups = tuple[tuple[int, ...], ...]
"""Indices of the random parameters whose entries share a dense block."""


class EntryBasis(Protocol):
    """An orthogonal basis of the entries of one tensor, or of a subspace of them."""

    @property
    def size(self) -> int:
        """Number of its vectors; without any, the tensor is left out."""
        ...

    def project(self, block: Block) -> Block:
        """A Jacobian block in this basis."""
        ...


Bases = Sequence[EntryBasis]
"""An orthogonal basis per random parameter."""


@dataclass(frozen=True)
class BlockSource:
    """The use that the block of a tensor comes from."""

    use: str  # Key of the use: a weight and its bias share the output side of one use
    # True if the tensor has one use only. With more, a small tensor has an exact block; the positions of all uses
    # are those of one layer in the factors of a large one.
    single: bool
    # True if the batch does not use the tensor, so that another batch decides the form of its block
    unused: bool = False
    # Weights of the samples on the input side (cotangents weight the output side alone), `[B]`; None for ones
    weights: Tensor | None = None


@dataclass(frozen=True)
class BatchForm:
    """What sinks need to know of a batch before its blocks."""

    problem: Problem  # The random parameters
    n_terms: int  # E, terms that are kept apart: one per output, or 1
    dtype: torch.dtype  # Curvature dtype
    block_dtype: torch.dtype  # Dtype of the blocks, which differs if the network casts
    reduce: bool = False  # KFAC-reduce (average positions before the outer product) instead of KFAC-expand
    sources: Callable[[], Sequence[BlockSource]] = tuple  # Gives the use that the block of every tensor comes from


class Sink(ABC):
    """A sum over the data that engines add batches to."""

    quantity: str  # What it sums, as errors and packages name it
    groups: Groups = ()  # Tensors of which it needs all blocks at once

    @property
    def parts(self) -> tuple[Sink, ...]:
        """Sinks that can be filled one after the other."""
        return (self,)

    @abstractmethod
    def begin(self, form: BatchForm) -> None:
        """Called before the blocks of every batch."""

    @abstractmethod
    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        """Adds the outer products of weighted blocks, by tensor, whose cotangents begin at term `first`."""

    @abstractmethod
    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        """Adds Σ_b J_bᵀ Λ_b J_b of the heads from `heads`, without a root of Λ."""

    @abstractmethod
    def put(self, values: Any) -> None:
        """Adds the whole quantity of a batch; the sink may keep its memory."""

    def put_matrix(self, matrix: Tensor, layout: Layout, name: str) -> None:
        """Adds what follows from the full curvature of a batch, `[E, P, P]`."""
        raise UnsupportedError(
            f"{name} gives a full curvature only, from which {self.quantity} does not follow; define `jacobians` as "
            "well, or use backend=NativeGGN."
        )

    def heads(self, heads: Mapping[int, HeadBlock]) -> Mapping[int, Head]:
        """The heads that it takes without a root of Λ: all, or those that make up whole groups."""
        if not self.groups:
            return heads
        return {i: heads[i] for group in self.groups if heads.keys() >= set(group) for i in group}


class DiagSink(Sink):
    """Diagonal of the curvature, `[E, P]` [Redux, appendix B, diagonal], or of Uᵀ H U, a basis U for every tensor."""

    def __init__(
        self, bases: Bases | None = None, values: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.bases = bases  # U of every tensor, or None for the identity
        self._values = values  # The sum to add to; None for zeros
        self._dtype = dtype  # In which blocks are rotated and squared; None for that of the curvature
        self._slices: tuple[slice, ...] = ()
        self.quantity = "diag" if bases is None else "diag in a basis"

    @property
    def values(self) -> Tensor:
        """The sum, `[E, P]`."""
        return torch.empty(0) if self._values is None else self._values

    def begin(self, form: BatchForm) -> None:
        sizes = form.problem.layout.sizes if self.bases is None else tuple(basis.size for basis in self.bases)
        starts = tuple(accumulate(sizes, initial=0))
        self._slices = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=False))
        if self._values is None:
            dtype = self._dtype or form.dtype
            self._values = torch.zeros(form.n_terms, starts[-1], dtype=dtype, device=form.problem.device)

    def heads(self, heads: Mapping[int, HeadBlock]) -> Mapping[int, Head]:
        """The heads in the bases, where they still are heads."""
        in_basis = {i: as_head(self._in_basis(i, block)) for i, block in heads.items()}
        return {i: head for i, head in in_basis.items() if head is not None}

    def _in_basis(self, slot: int, block: Block) -> Block:
        block = block if self._dtype is None else block.cast(self._dtype)
        return block if self.bases is None else self.bases[slot].project(block)

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        for slot, block in blocks.items():
            target = self.values[:, self._slices[slot]]
            if not target.shape[1]:
                continue
            own = self._in_basis(slot, block)
            if len(target) > 1:
                _add_terms(target, own.squares_per_cotangent(), first)
            else:
                own.add_squares(target[0])

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        for slot, block in blocks.items():
            per_output = len(self.values) > 1
            block = block if self._dtype is None else block.cast(self._dtype)
            self.values[:, self._slices[slot]].add_(block.ggn_diagonal(hessian, per_output=per_output))

    def put(self, values: Tensor) -> None:
        self._values = values if self._values is None else self._values.add_(values)

    def put_matrix(self, matrix: Tensor, layout: Layout, name: str) -> None:
        if self.bases is not None:
            super().put_matrix(matrix, layout, name)
        self.put(matrix.diagonal(dim1=1, dim2=2).clone())


class BlockSink(Sink):
    """Full curvatures of groups of tensors, `[E, p, p]` each, in float64."""

    quantity = "blocks"

    def __init__(self, groups: Groups, sums: Sequence[MatrixSum]) -> None:
        self.groups = groups  # Indices of the tensors that share a block
        self.sums = sums  # The sum of every group to add to
        self._n_terms = 1
        self._like = torch.empty(0)

    def begin(self, form: BatchForm) -> None:
        device = form.problem.device
        self._n_terms, self._like = form.n_terms, torch.empty(0, dtype=wide_dtype(device), device=device)

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        for group, running in zip(self.groups, self.sums, strict=True):
            if blocks.keys() >= set(group):
                running.add_blocks([blocks[i] for i in group], self._n_terms, first, self._like)

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        for group, running in zip(self.groups, self.sums, strict=True):
            if blocks.keys() >= set(group):
                running.add_head(unrotated([blocks[i] for i in group]), hessian, self._n_terms, self._like)

    def put(self, values: Sequence[Tensor]) -> None:
        for block, running in zip(values, self.sums, strict=True):
            running.add(block)

    def put_matrix(self, matrix: Tensor, layout: Layout, name: str) -> None:
        slices = layout.slices
        entries = [torch.cat([torch.arange(slices[i].start, slices[i].stop) for i in group]) for group in self.groups]
        self.put([matrix[:, at][:, :, at] for at in (some.to(matrix.device) for some in entries)])


class FullSink(BlockSink):
    """The full curvature of all tensors, `[E, P, P]`, in float64."""

    quantity = "full"

    def __init__(self, n_tensors: int, running: MatrixSum) -> None:
        super().__init__((tuple(range(n_tensors)),), (running,))

    def put_matrix(self, matrix: Tensor, layout: Layout, name: str) -> None:
        self.put([matrix])


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Rows whose outer products the curvature of some data is: a weighted Jacobian, or that of a head with Λ."""

    blocks: tuple[Block, ...]  # Of every tensor: weighted, or of a head
    hessian: OutputHessian | None = None  # Λ of a head, without a dense part
    first: int = 0  # Term of the first cotangent

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.blocks[0].n_data * (self.blocks[0].n_cotangents if self.hessian is None else self.hessian.n_columns)

    @property
    def n_bytes(self) -> int:
        """Bytes of floating point tensors."""
        return sum(tensor.nbytes for _, tensor in named_tensors(self))

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.blocks[0].device

    def jacobian(self) -> Jacobian:
        """The rows, weighted; of a head by a root of Λ in float64, in which sums of Λ are."""
        if self.hessian is None:
            return Jacobian(self.blocks)
        root = self.hessian.wide().root()[:, :, None, None]
        heads = unrotated(self.blocks)
        inputs = [None if head.is_bias else head.features[:, None, None].to(root) for head in heads]
        return Jacobian(tuple(OuterBlock(a, root) for a in inputs))

    def add_to(self, running: MatrixSum, n_terms: int) -> None:
        """Adds their outer products to a sum, as if they had never been kept."""
        like = torch.empty(0, dtype=wide_dtype(self.device), device=self.device)
        if self.hessian is None:
            running.add_blocks(self.blocks, n_terms, self.first, like)
        else:
            heads = unrotated(self.blocks)
            running.add_head(heads, self.hessian, n_terms, like)

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> KeptRows:
        """The same rows elsewhere."""
        hessian = None if self.hessian is None else OutputHessian.from_state(move(self.hessian.state(), device, dtype))
        blocks = tuple(from_state(move(block.state(), device, dtype)) for block in self.blocks)
        return KeptRows(blocks, hessian, self.first)


class RowSink(FullSink):
    """Keeps rows in place of the sum of their outer products, which takes whatever is none."""

    def __init__(self, n_tensors: int, running: MatrixSum) -> None:
        super().__init__(n_tensors, running)
        self.kept: list[KeptRows] = []
        self.n_terms = 1

    def begin(self, form: BatchForm) -> None:
        super().begin(form)
        self.n_terms = form.n_terms

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        self._keep(blocks, None, first)

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        if hessian.dense is None:
            self._keep(blocks, hessian, 0)
        else:  # whose root may not exist: expectations of Λ are positive to rounding alone
            super().add_head(blocks, hessian)

    def _keep(self, blocks: Mapping[int, Block], hessian: OutputHessian | None, first: int) -> None:
        (tensors,) = self.groups
        if blocks.keys() >= set(tensors):
            # Copies: what a first layer reads is the loader's own, which may fill it anew.
            self.kept.append(KeptRows(tuple(blocks[i].detached() for i in tensors), hessian, first))


class ProductSink(Sink):
    """Products of the curvature of all tensors with vectors, `[E, R, P]`."""

    quantity = "matmul"

    def __init__(self, vectors: Tensor, products: Tensor | None = None) -> None:
        self.vectors = vectors  # V, `[E, R, P]`, or `[1, R, P]` for all terms; products are formed in their dtype
        self._products = products  # The sum to add to; None for zeros
        self._parts: tuple[Tensor, ...] = ()
        self._sums: tuple[Tensor, ...] = ()
        self._casts = False
        self.is_rounded = False  # Whether products were formed elsewhere, in the network's own dtype

    @property
    def products(self) -> Tensor:
        """The sum, `[E, R, P]`."""
        return torch.empty(0) if self._products is None else self._products

    def prepared(self, n_terms: int) -> tuple[Tensor, Tensor]:
        """Vectors of every term, and the sum to add to in place, `[E, R, P]` each."""
        vectors = self.vectors.expand(n_terms, -1, -1)
        if self._products is None:
            self._products = torch.zeros_like(vectors, memory_format=torch.contiguous_format)
        return vectors, self._products

    def begin(self, form: BatchForm) -> None:
        """Of blocks of a single term, Σ_kb J_kb (J_kb · v)."""
        layout = form.problem.layout
        vectors, products = self.prepared(1)
        dtype = torch.promote_types(form.block_dtype, vectors.dtype)
        self.groups = (tuple(range(len(layout.sizes))),)
        self._parts = tuple(layout.split(vectors[0].to(dtype)))
        self._sums = tuple(layout.split(products[0]))
        self._casts = form.block_dtype != dtype or form.block_dtype != form.dtype

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        del first
        if self._casts:
            blocks = {i: block.cast(self._parts[i].dtype) for i, block in blocks.items()}
        self._add(blocks, self._applied(blocks))

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        if self._casts:
            blocks = {i: block.cast(self._parts[i].dtype) for i, block in blocks.items()}
        applied = self._applied(blocks)
        hessian = hessian.wide() if applied.dtype == wide_dtype(applied.device) else hessian
        self._add(blocks, hessian.times(applied.to(hessian.diag)).to(applied))

    def _applied(self, blocks: Mapping[int, Block]) -> Tensor:
        return total(block.apply(self._parts[i]) for i, block in blocks.items())

    def _add(self, blocks: Mapping[int, Block], weights: Tensor) -> None:
        for i, block in blocks.items():
            self._sums[i].add_(block.combined(weights))

    def put(self, values: Tensor) -> None:
        self._products = values if self._products is None else self._products.add_(values)
        self.is_rounded = True

    def put_matrix(self, matrix: Tensor, layout: Layout, name: str) -> None:
        self.put(self.vectors @ matrix.to(self.vectors))


class PairOfSinks(Sink):
    """Two sums of the same blocks: one backward pass for both."""

    def __init__(self, first: Sink, second: Sink) -> None:
        self.sinks = first, second
        self.quantity = first.quantity

    @property
    def parts(self) -> tuple[Sink, ...]:
        return self.sinks

    def begin(self, form: BatchForm) -> None:
        for sink in self.sinks:
            sink.begin(form)

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        for sink in self.sinks:
            sink.add(blocks, first)

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        for sink in self.sinks:
            sink.add_head(blocks, hessian)

    def put(self, values: Any) -> None:
        for sink, own in zip(self.sinks, values, strict=True):
            sink.put(own)


class KronSink(Sink):
    """Kronecker factors of one batch [Redux, appendix eq. 10] [Linearization, eq. A.2], by key; exact blocks elsewhere.

    Blocks of tensors without factors are dense or diagonal. Products are formed and summed in float64, or summed alone
    (`product_dtype`). A posterior variance in a direction that the data leave open is 1/δ, and 1/(δ + ε λ) with the
    rounding ε of the largest eigenvalue λ: of inputs in the thousands ε λ exceeds δ in float32.
    """

    quantity = "kron"

    def __init__(self, probe: Probe | None = None) -> None:
        # Matrices with which factors are multiplied as they are summed, so that none is formed; tensors
        # without factors are left out then
        self.probe = probe
        self.factors: dict[str, Factor] = {}
        self.blocks: dict[int, KronBlock] = {}

    def begin(self, form: BatchForm) -> None:
        self.problem, self.n_terms, self.reduce = form.problem, form.n_terms, form.reduce
        self.dtype, self.sources = wide_dtype(form.problem.device), form.sources()
        self.product_dtype = product_dtype(form.block_dtype, form.problem.device)

    def put(self, values: KronParts) -> None:
        factors = values.every if self.probe is None else values.dense().factors
        for slot, block in enumerate(values.blocks):
            self.put_block(slot, block, {key: factors[key] for key in block.reads if key in factors})

    def put_block(self, slot: int, block: KronBlock, factors: Mapping[str, Factor]) -> None:
        """Adds the block of a tensor with the factors that it reads, computed elsewhere."""
        self.blocks[slot] = block
        if self.probe is None:
            self.factors |= factors
        elif block.kind == "kron":
            for key, factor in factors.items():
                if isinstance(factor, Tensor) and factor.ndim > 2:  # a side, and no number of positions
                    factor = factor @ self.probe(key, *factor.shape[-3:-1]).to(factor)
                self.factors[key] = factor

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        seen: set[str] = set()
        for slot, block in blocks.items():
            if self.sources[slot].unused:
                self._put_diagonal(UNUSED, slot, block, first)
                continue
            product = block.product
            if product is not None and (self.sources[slot].single or block.size > DENSE_BLOCK_LIMIT):
                self._kronecker(slot, block, product, first, seen)
            else:
                self._exact(slot, block, first)

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        """Adds A = Σ φφᵀ and B = Σ Λ of a head, without a root of Λ."""
        for slot, block in blocks.items():
            output = f"out:{self.sources[slot].use}"
            if output not in self.factors:
                self.factors[output] = self._head_side(output, hessian)
            weights, features = self.sources[slot].weights, block.features
            # A tensor of its own for every slot: sums of shards are added in place.
            count = torch.full((), block.n_data, dtype=self.dtype, device=features.device)
            if weights is not None:
                features, count = widened(features) * widened(weights).sqrt().unsqueeze(1), weights.sum()
            inputs = None if block.is_bias else self._gram(f"in:{slot}", features.unsqueeze(1))
            self._put(slot, block, output, inputs, count)

    def _head_side(self, key: str, hessian: OutputHessian) -> Tensor:
        """B = Σ Λ, `[E, 1, C, C]`, or its products `[E, 1, C, w]`."""
        n_outputs, hessian = hessian.diag.shape[1], hessian.wide()
        if self.probe is None:
            total = hessian.total()
            total = total if self.n_terms == 1 else torch.diag_embed(torch.diag(total.diagonal()))
        else:
            matrix = widened(self.probe(key, 1, n_outputs)[0])
            total = hessian.total_times(matrix)
            if self.n_terms > 1:
                total = torch.diag(hessian.diagonal().sum(0)).unsqueeze(2) * matrix
        return total.reshape(self.n_terms, 1, n_outputs, -1)

    def _kronecker(self, slot: int, block: Block, product: FactoredBlock, first: int, seen: set[str]) -> None:
        # A weight and its bias share the output side if both see the gradients of the layer's outputs.
        shared = product.shares_outputs and self.problem.slots[slot].entries is None
        output = f"out:{self.sources[slot].use}" if shared else f"own:{slot}"
        if output not in seen:
            seen.add(output)
            g = product.output_rows(reduce=self.reduce)  # [k, ..., G, O]
            if self.n_terms > 1:
                self._put_terms(output, torch.stack([self._product(output, term) for term in g]), first)
            else:
                side = self._gram(output, g).unsqueeze(0)
                known = self.factors.get(output)
                self.factors[output] = side if known is None else added(known, side)
        if first == 0:
            weights = self.sources[slot].weights
            inputs = product.input_side(partial(self._gram, f"in:{slot}"), weights, reduce=self.reduce)
            count = product.input_count(weights, reduce=self.reduce)
            self._put(slot, block, output, inputs, count, input_first=product.input_first)

    def _put(
        self, slot: int, block: Block, output: str, inputs: Factor | None, count: Tensor, *, input_first: bool = False
    ) -> None:
        """Stores the input side of a tensor and the form of its block."""
        key, positions = f"in:{slot}", f"positions:{slot}"
        self.factors |= ({} if inputs is None else {key: inputs}) | {positions: count.to(self.dtype)}
        self.blocks[slot] = KronBlock(
            "kron", block.size, output, None if inputs is None else key, positions, input_first, block.product_index
        )

    def _gram(self, key: str, rows: Tensor | Patches) -> Factor:
        """Σ x xᵀ of rows `[..., G, n]`, `[G, n, n]` or thin, or its product with this side's probe, `[G, n, w]`."""
        groups, width = rows.shape[-2:]
        if self.probe is None and groups == 1 and ThinFactor.holds(rows.shape.numel() // width, width):
            return ThinFactor.of_rows(as_tensor(rows).reshape(1, -1, width))
        return self._product(key, rows)

    def _product(self, key: str, rows: Tensor | Patches) -> Tensor:
        """`_gram`, never of low rank."""
        if self.probe is None:
            return gram_of(rows, self.product_dtype).to(self.dtype)
        rows = as_tensor(rows)
        return group_product(rows, self.probe(key, *rows.shape[-2:]).to(self.product_dtype)).to(self.dtype)

    def _exact(self, slot: int, block: Block, first: int) -> None:
        if block.size > DENSE_BLOCK_LIMIT or self.probe is not None:
            self._put_diagonal("diag", slot, block, first)
            return
        self.blocks[slot] = KronBlock("dense", block.size, f"dense:{slot}")
        for piece in block.cast(self.dtype).pieces():
            self._put_terms(f"dense:{slot}", torch.bmm(piece.mT, piece), first)

    def _put_diagonal(self, kind: str, slot: int, block: Block, first: int) -> None:
        self.blocks[slot] = KronBlock(kind, block.size, f"{kind}:{slot}")
        key = f"{kind}:{slot}"
        if self.probe is None and self.n_terms > 1:
            self._put_terms(key, block.squares_per_cotangent(), first)
        elif self.probe is None:
            if key not in self.factors:
                self.factors[key] = torch.zeros(1, block.size, dtype=self.dtype, device=self.problem.device)
            block.add_squares(dense(self.factors[key])[0])

    def _put_terms(self, key: str, values: Tensor, first: int) -> None:
        """Adds values `[k, ...]` of the terms from `first` on, or their sum where terms are not kept apart."""
        if self.n_terms == 1:
            values, first = values if len(values) == 1 else values.sum(0, keepdim=True), 0
        if key not in self.factors and len(values) == self.n_terms and first == 0:
            self.factors[key] = values
            return
        if key not in self.factors:
            self.factors[key] = values.new_zeros(self.n_terms, *values.shape[1:])
        _add_terms(dense(self.factors[key]), values, first)

    def result(self) -> KronParts:
        """All factors of the batch."""
        return KronParts.made_of(self.factors, tuple(self.blocks[i] for i in sorted(self.blocks)))


def _add_terms(total: Tensor, values: Tensor, first: int) -> None:
    """Adds values `[k, …]` of the cotangents from `first` on to their terms `[E, …]`.

    A term is an output. Of outputs with positions the cotangents of one position follow each other, E at a time.
    """
    if len(total) == 1:
        total += values
    elif first + len(values) <= len(total):
        total[first : first + len(values)] += values
    else:
        terms = torch.arange(first, first + len(values), device=total.device) % len(total)
        total.index_add_(0, terms, values.to(total))
