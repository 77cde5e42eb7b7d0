"""Sums over a batch: from the blocks of a weighted Jacobian to a diagonal, Kronecker factors or a full matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from laplace.core.gram import group_product
from laplace.core.layout import Layout
from laplace.core.precision_policy import wide_dtype
from laplace.engines.engine import Bases, Groups
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
from laplace.jacobian.blocks import Block, total
from laplace.jacobian.heads import Head, unrotated
from laplace.jacobian.matrix_sum import MatrixSum
from laplace.jacobian.outer import FactoredBlock
from laplace.jacobian.patches import Patches, as_tensor, gram_of
from laplace.likelihoods.base import OutputHessian
from laplace.weights.problem import Problem


class DiagSum:
    """Diagonal of the curvature, `[E, P]`, or of Uᵀ H U with a basis U for every tensor, of its number of vectors.

    Args:
        problem: The random parameters.
        n_terms: E.
        dtype: Curvature dtype.
        bases: U of every tensor, or None for the identity.
        running: The sum to add to; None for zeros.
    """

    def __init__(
        self,
        problem: Problem,
        n_terms: int,
        dtype: torch.dtype,
        bases: Bases | None = None,
        running: Tensor | None = None,
    ) -> None:
        sizes = problem.layout.sizes if bases is None else tuple(basis.size for basis in bases)
        starts = tuple(accumulate(sizes, initial=0))
        self.slices = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=False))
        self.bases = bases
        zeros = (n_terms, starts[-1])
        self.values = torch.zeros(zeros, dtype=dtype, device=problem.device) if running is None else running

    def in_basis(self, slot: int, block: Block) -> Block:
        """The block in the basis of its tensor."""
        return block if self.bases is None else self.bases[slot].project(block)

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        """Adds the squares of weighted blocks whose cotangents begin at term `first`."""
        for slot, block in blocks.items():
            target = self.values[:, self.slices[slot]]
            if not target.shape[1]:
                continue
            own = self.in_basis(slot, block)
            if len(target) > 1:
                _add_terms(target, own.squares_apart(), first)
            else:
                own.add_squares(target[0])

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        """Adds the diagonal of Σ_b J_bᵀ Λ_b J_b of a head, without a root of Λ; the blocks are in their bases."""
        for slot, block in blocks.items():
            self.values[:, self.slices[slot]].add_(block.ggn_diagonal(hessian, apart=len(self.values) > 1))


class FullSum:
    """The full curvature of some tensors, `[E, p, p]`, in float64.

    Args:
        slots: Indices of the tensors; their entries follow each other.
        problem: All random parameters.
        n_terms: E.
        running: The sum to add to.
    """

    def __init__(self, slots: Sequence[int], problem: Problem, n_terms: int, running: MatrixSum) -> None:
        self.slots = tuple(slots)
        self.n_terms = n_terms
        self.like = torch.empty(0, dtype=wide_dtype(problem.device), device=problem.device)
        self.running = running

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        """Adds Σ_kb J Jᵀ of weighted blocks whose cotangents begin at term `first`."""
        self.running.add_blocks([blocks[i] for i in self.slots], self.n_terms, first, self.like)

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        """Adds Σ_b J_bᵀ Λ_b J_b of a head that is the whole sum, without a root of Λ."""
        heads = unrotated([blocks[i] for i in self.slots])
        self.running.add_head(heads, hessian, self.n_terms, self.like)


class BlockSum:
    """Full curvatures of groups of tensors: what lies on the block diagonal.

    Args:
        groups: Indices of the tensors that share a block.
        problem: All random parameters.
        n_terms: E.
        running: The sum of every group to add to.
    """

    def __init__(self, groups: Groups, problem: Problem, n_terms: int, running: Sequence[MatrixSum]) -> None:
        self.sums = [FullSum(g, problem, n_terms, r) for g, r in zip(groups, running, strict=True)]

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        """Adds the blocks to the sums of their groups."""
        for part in self.sums:
            if blocks.keys() >= set(part.slots):
                part.add(blocks, first)

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        """Adds a head to the sums of which it is the whole."""
        for part in self.sums:
            if blocks.keys() >= set(part.slots):
                part.add_head(blocks, hessian)


class ProductSum:
    """Products of the curvature of all tensors with vectors, Σ_kb J_kb (J_kb · v), of a single term.

    Args:
        layout: The random parameters.
        vectors: V, `[R, P]`.
        running: The sum to add to, `[R, P]`.
        mixed: Whether gradients of the outputs may have another dtype than those of the weights, since the network
            casts on the way.
    """

    def __init__(self, layout: Layout, vectors: Tensor, running: Tensor, *, mixed: bool = False) -> None:
        self.vectors, self.running = layout.split(vectors), layout.split(running)
        self.mixed = mixed

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        """Adds the products of weighted blocks of all tensors, the number of whose cotangents does not matter."""
        del first
        if self.mixed:
            blocks = {i: block.cast(self.vectors[i].dtype) for i, block in blocks.items()}
        self._add(blocks, self._applied(blocks))

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        """Adds those of a head that is the whole sum, without a root of Λ."""
        applied = self._applied(blocks)
        self._add(blocks, hessian.times(applied.to(hessian.diag)).to(applied))

    def _applied(self, blocks: Mapping[int, Block]) -> Tensor:
        return total(block.apply(self.vectors[i]) for i, block in blocks.items())

    def _add(self, blocks: Mapping[int, Block], weights: Tensor) -> None:
        for i, block in blocks.items():
            self.running[i].add_(block.combined(weights))


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


@dataclass(frozen=True)
class Origin:
    """The use that the block of a tensor comes from.

    Attributes:
        use: Key of the use: a weight and its bias share the output side of one use.
        single: True if the tensor has one use only. Of more, a small tensor has an exact block; the positions of all
            uses are those of one layer in the factors of a large one.
        unused: True if the batch does not need the tensor, so that another batch says in which form it is held.
        weights: How often every datum counts on the input side, whose rows no cotangent weighs, `[B]`; None for once.
    """

    use: str
    single: bool
    unused: bool = False
    weights: Tensor | None = None


class KronSum:
    """Kronecker factors by key; exact dense or diagonal blocks where a tensor has none.

    Args:
        problem: The random parameters.
        n_terms: E.
        dtype: Curvature dtype.
        origins: Where each tensor's block comes from.
        reduce: KFAC-reduce (average positions before the outer product) instead of KFAC-expand.
        probe: Matrices with which factors are multiplied as they are summed, so that none is formed; tensors without
            factors are left out then.
    """

    def __init__(
        self,
        problem: Problem,
        n_terms: int,
        dtype: torch.dtype,
        origins: Sequence[Origin],
        *,
        reduce: bool,
        probe: Probe | None = None,
    ) -> None:
        self.problem = problem
        self.n_terms = n_terms
        self.dtype = dtype
        self.origins = origins
        self.reduce = reduce
        self.probe = probe
        self.factors: dict[str, Factor] = {}
        self.blocks: dict[int, KronBlock] = {}

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        """Adds weighted blocks whose cotangents begin at term `first` (the first chunk has `first` = 0)."""
        seen: set[str] = set()
        for slot, block in blocks.items():
            if self.origins[slot].unused:
                self._put_diagonal(UNUSED, slot, block, first)
                continue
            product = block.product
            if product is not None and (self.origins[slot].single or block.size > DENSE_BLOCK_LIMIT):
                self._kronecker(slot, block, product, first, seen)
            else:
                self._exact(slot, block, first)

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        """Adds A = Σ φφᵀ and B = Σ Λ of a head, without a root of Λ."""
        for slot, block in blocks.items():
            output = f"out:{self.origins[slot].use}"
            if output not in self.factors:
                self.factors[output] = self._head_side(output, hessian)
            weights, features = self.origins[slot].weights, block.features
            count = features.new_full((), block.n_data)
            if weights is not None:
                features, count = features * weights.to(features).sqrt().unsqueeze(1), weights.sum()
            inputs = None if block.is_bias else self._gram(f"in:{slot}", features.unsqueeze(1))
            self._put(slot, block, output, inputs, count)

    def _head_side(self, key: str, hessian: OutputHessian) -> Tensor:
        """B = Σ Λ, `[E, 1, C, C]`, or its products `[E, 1, C, w]`."""
        n_outputs = hessian.diag.shape[1]
        if self.probe is None:
            total = hessian.total()
            total = total if self.n_terms == 1 else torch.diag_embed(torch.diag(total.diagonal()))
        else:
            matrix = self.probe(key, 1, n_outputs)[0].to(hessian.diag)
            total = hessian.total_times(matrix)
            if self.n_terms > 1:
                total = torch.diag(hessian.diagonal().sum(0)).unsqueeze(2) * matrix
        return total.reshape(self.n_terms, 1, n_outputs, -1).to(self.dtype)

    def _kronecker(self, slot: int, block: Block, product: FactoredBlock, first: int, seen: set[str]) -> None:
        output = self._output_key(slot, product)
        if output not in seen:
            seen.add(output)
            self._put_output(output, product.output_rows(reduce=self.reduce), first)
        if first == 0:
            weights = self.origins[slot].weights
            inputs = product.input_side(partial(self._gram, f"in:{slot}"), weights, reduce=self.reduce)
            count = product.input_count(weights, reduce=self.reduce)
            self._put(slot, block, output, inputs, count, input_first=product.input_first)

    def _put(
        self, slot: int, block: Block, output: str, inputs: Factor | None, count: Tensor, *, input_first: bool = False
    ) -> None:
        """Puts down the input side of a tensor, and how its block is held."""
        key, positions = f"in:{slot}", f"positions:{slot}"
        self.factors |= ({} if inputs is None else {key: inputs}) | {positions: count.to(self.dtype)}
        self.blocks[slot] = KronBlock(
            "kron", block.size, output, None if inputs is None else key, positions, input_first, block.product_index
        )

    def _output_key(self, slot: int, product: FactoredBlock) -> str:
        """Shared by a weight and its bias, unless one of them sees other gradients than the layer's outputs'."""
        shared = product.shares_outputs and self.problem.slots[slot].entries is None
        return f"out:{self.origins[slot].use}" if shared else f"own:{slot}"

    def _gram(self, key: str, rows: Tensor | Patches) -> Factor:
        """Σ x xᵀ of rows `[..., G, n]`, `[G, n, n]` or thin, or its product with this side's probe, `[G, n, w]`."""
        groups, width = rows.shape[-2:]
        if self.probe is None and groups == 1 and ThinFactor.holds(rows.shape.numel() // width, width):
            return ThinFactor.of_rows(as_tensor(rows).reshape(1, -1, width))
        return self._product(key, rows)

    def _product(self, key: str, rows: Tensor | Patches) -> Tensor:
        """The same, as a matrix."""
        if self.probe is None:
            return gram_of(rows)
        rows = as_tensor(rows)
        return group_product(rows, self.probe(key, *rows.shape[-2:]).to(rows))

    def _put_output(self, key: str, g: Tensor, first: int) -> None:
        """Adds Σ g gᵀ of `[k, ..., G, O]` over data and positions, and over cotangents unless terms are kept apart."""
        if self.n_terms > 1:
            self._put_terms(key, torch.stack([self._product(key, term) for term in g]), first)
            return
        side = self._gram(key, g).unsqueeze(0)
        self.factors[key] = added(self.factors[key], side, self.dtype) if key in self.factors else side

    def _exact(self, slot: int, block: Block, first: int) -> None:
        if block.size > DENSE_BLOCK_LIMIT or self.probe is not None:
            self._put_diagonal("diag", slot, block, first)
            return
        self.blocks[slot] = KronBlock("dense", block.size, f"dense:{slot}")
        for piece in block.pieces():
            self._put_terms(f"dense:{slot}", torch.bmm(piece.mT, piece), first)

    def _put_diagonal(self, kind: str, slot: int, block: Block, first: int) -> None:
        self.blocks[slot] = KronBlock(kind, block.size, f"{kind}:{slot}")
        key = f"{kind}:{slot}"
        if self.probe is None and self.n_terms > 1:
            self._put_terms(key, block.squares_apart(), first)
        elif self.probe is None:
            if key not in self.factors:
                self.factors[key] = torch.zeros(1, block.size, dtype=self.dtype, device=self.problem.device)
            block.add_squares(dense(self.factors[key], self.dtype)[0])

    def _put_terms(self, key: str, values: Tensor, first: int) -> None:
        """Adds values `[k, ...]` of the terms from `first` on, or their sum where terms are not kept apart."""
        if self.n_terms == 1:
            values, first = values if len(values) == 1 else values.sum(0, keepdim=True), 0
        if key not in self.factors and len(values) == self.n_terms and first == 0:
            self.factors[key] = values
            return
        if key not in self.factors:
            self.factors[key] = values.new_zeros(self.n_terms, *values.shape[1:])
        _add_terms(dense(self.factors[key], self.dtype), values, first)

    def result(self) -> KronParts:
        """All factors."""
        return KronParts.made_of(self.factors, tuple(self.blocks[i] for i in range(len(self.problem.slots))))
