"""The Jacobian of a problem, one block per random parameter, and kernels between Jacobians."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core import nested
from laplace.core.layout import Layout
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import InvalidArgument, StateError, UnsupportedError
from laplace.jacobian.blocks import Block, DenseBlock, MappedBlock, ProductBasis, RankOne, chunks, from_state, total
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.outer import flat_product

if TYPE_CHECKING:
    from laplace.core.positions import OutputChoice


@dataclass(frozen=True, eq=False)
class GroupedBlock(Block):
    """A block `[K, b·n, p]` of b·n rows as one of b groups, `[n·K, b, p]`: rows of a group major, cotangents minor."""

    whole: Block  # The block of the rows
    group_size: int  # n

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.group_size * self.whole.n_cotangents, self.whole.n_data // self.group_size, self.whole.size

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def _grouped(self, values: Tensor) -> Tensor:
        """Values `[K, b·n, …]` as `[n·K, b, …]`."""
        return values.unflatten(1, (-1, self.group_size)).movedim(2, 0).flatten(0, 1)

    def at(self, data: slice | Tensor) -> GroupedBlock:
        if isinstance(data, slice):
            start, stop, _ = data.indices(self.n_data)
            return replace(self, whole=self.whole.at(slice(start * self.group_size, stop * self.group_size)))
        rows = data.unsqueeze(1) * self.group_size + torch.arange(self.group_size, device=data.device)
        return replace(self, whole=self.whole.at(rows.flatten()))

    def cast(self, dtype: torch.dtype) -> GroupedBlock:
        return replace(self, whole=self.whole.cast(dtype))

    def in_basis(self, basis: ProductBasis) -> GroupedBlock:
        return replace(self, whole=self.whole.in_basis(basis))

    def kernel_by_factors(self, other: Block) -> Callable[[], Tensor] | None:
        kernel = self.whole.kernel_by_factors(other)
        return None if kernel is None else lambda: self._grouped(kernel())

    # Contractions: those of single rows are the rows' own.

    @property
    def contracts_factors(self) -> bool:
        return self.whole.rank_one() is not None

    def dense(self) -> Tensor:
        return self._grouped(self.whole.dense())

    def bound(self) -> Tensor:
        return self.whole.bound()

    def entries(self, index: Tensor) -> Tensor:
        return self._grouped(self.whole.entries(index))

    def apply(self, vectors: Tensor) -> Tensor:
        return self.whole.apply(vectors).unflatten(1, (-1, self.group_size)).flatten(2)

    def weighted_norms(self, weights: Tensor) -> Tensor:
        return self.whole.weighted_norms(weights).unflatten(0, (-1, self.group_size)).flatten(1)

    def weighted_gram(self, weights: Tensor) -> Tensor:
        """Gram within every group; of outer products Σ_o g_ko (Σ_i a_i w_oi a'_i) g'_lo, without dense pieces."""
        factors = self.whole.rank_one()
        if factors is None:
            return super().weighted_gram(weights)
        shape = (-1, factors.n_outputs) if factors.input_first else (factors.n_outputs, -1)
        matrix = weights.view(shape) if factors.input_first else weights.view(shape).T  # [I, O]
        factors, n = factors.to(weights.dtype), self.group_size
        per_group = n**2 * (sum(matrix.shape) + self.whole.n_cotangents * factors.n_outputs)
        groups = chunks(self.n_data, per_group, self.device)
        parts = [self._gram(factors, matrix, slice(n * some.start, n * some.stop)) for some in groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gram(self, factors: RankOne, matrix: Tensor, rows: slice) -> Tensor:
        a = factors.a[rows].unflatten(0, (-1, self.group_size))
        between = (a.unsqueeze(2) * a.unsqueeze(1)) @ matrix  # [b, n, n, O]
        if factors.g is None:
            values = torch.diag_embed(between)  # an output of a head has weights of its own
        else:
            g = factors.g[:, rows].movedim(0, 1).unflatten(0, (-1, self.group_size))  # [b, n, K, O]
            values = (g.unsqueeze(2) * between.unsqueeze(3)) @ g.unsqueeze(1).mT  # [b, n, n, K, K]
        return values.transpose(2, 3).flatten(3).flatten(1, 2)


@dataclass(frozen=True)
class Jacobian:
    """All blocks of a problem, in the order of its slots."""

    blocks: tuple[Block, ...]  # One per random parameter
    # Dimensions of positions, if the outputs have them: samples are rows then, data × positions
    positions: tuple[int, ...] = ()
    # True if covariances of its outputs are summed in float64, since they are to be factored: the root of a sum
    # that was rounded in float32 is known to three digits (`laplace.core.gaussian`)
    wide: bool = False
    # Which of the network's outputs the cotangents of every sample are, `[B, K]`; None for all of them, or for
    # other cotangents
    outputs: Tensor | None = None
    group_size: int = 1  # Number of rows of a sample, whose cotangents are those of all its rows

    @property
    def n_data(self) -> int:
        """Number of samples B."""
        return self.blocks[0].n_data

    @property
    def n_cotangents(self) -> int:
        """Number of cotangents K (= C for the Jacobian of the network)."""
        return self.blocks[0].n_cotangents

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.blocks[0].device

    @property
    def is_head(self) -> bool:
        """True if every tensor belongs to a layer whose outputs are the network's: J = I ⊗ [φ, 1]."""
        return all(isinstance(block, HeadBlock) for block in self.blocks)

    def head_features(self) -> Tensor:
        """Features φ of a head, `[B, D]`, with a 1 for the bias."""
        return torch.cat([block.features for block in self.blocks if isinstance(block, HeadBlock)], 1)

    def last_layer_inputs(self) -> Tensor | None:
        """Inputs of the layer whose outputs are the network's, `[B, D]`; None where its weight is not among these."""
        weights = [block for block in self.blocks if isinstance(block, HeadBlock) and not block.is_bias]
        return weights[0].features if len(weights) == 1 and not self.positions else None

    def head_places(self) -> Tensor:
        """The place of every (output, feature) of a head among the weights, `[C, D]`."""
        places: list[Tensor] = []
        start = 0
        for block in self.blocks:
            if isinstance(block, HeadBlock):
                entries = torch.arange(start, start + block.size, device=block.features.device)
                places.append(entries.view(-1, block.n_inputs))
            start += block.size
        return torch.cat(places, 1)

    def dense(self) -> Tensor:
        """The dense Jacobian `[B, K, P]`."""
        return torch.cat([block.dense() for block in self.blocks], 2).transpose(0, 1)

    def pieces(self) -> Iterator[Tensor]:
        """Dense pieces `[b, K, P]` over consecutive data, each at most about `CHUNK_BYTES`."""
        for data in chunks(self.n_data, self.n_cotangents * sum(block.size for block in self.blocks), self.device):
            yield self.at(data).dense()

    def at(self, data: slice | Tensor) -> Jacobian:
        """The Jacobian of some of the data: a slice, or indices `[n]`."""
        outputs = None if self.outputs is None else self.outputs[data]
        return replace(self, blocks=tuple(block.at(data) for block in self.blocks), positions=(), outputs=outputs)

    def select_outputs(self, outputs: Tensor) -> Jacobian:
        """The Jacobian of K outputs of every sample, `outputs` `[B, K]`."""
        return replace(self, blocks=tuple(block.select_outputs(outputs) for block in self.blocks), outputs=outputs)

    def centred(self) -> Jacobian:
        """The Jacobian of the outputs less their mean over the cotangents of every sample, Π J."""
        return replace(self, blocks=tuple(block.centred() for block in self.blocks))

    def grouped(self, size: int) -> Jacobian:
        """The Jacobian of groups of consecutive rows, each of which is a sample with size · K outputs."""
        blocks = tuple(GroupedBlock(block, size) for block in self.blocks)
        outputs = None if self.outputs is None else self.outputs.unflatten(0, (-1, size)).flatten(1)
        return replace(self, blocks=blocks, outputs=outputs, group_size=size)

    def detached(self) -> Jacobian:
        """The Jacobian as plain tensors of its own, without graphs or references to a network, as states hold it.

        Parameters without factors are multiplied out.
        """
        return Jacobian(tuple(block.detached() for block in self.blocks))

    def cast(self, dtype: torch.dtype) -> Jacobian:
        """The same in another dtype."""
        return replace(self, blocks=tuple(block.cast(dtype) for block in self.blocks))

    def apply(self, vectors: Tensor) -> Tensor:
        """J v of vectors `[S, P]`, `[S, B, K]`."""
        parts = vectors.split([block.size for block in self.blocks], 1)
        return self.sum_over_blocks(lambda i, block: block.apply(parts[i]))

    def combined(self, weights: Tensor) -> Tensor:
        """Σ_kb w_sbk J_kb of weights `[S, B, K]`, `[S, P]`: the transpose of `apply`."""
        return torch.cat([block.combined(weights) for block in self.blocks], 1)

    def summed_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which covariances are summed: this one, or float64 if they are `wide`."""
        return wide_dtype(self.device) if self.wide else dtype

    def sum_over_blocks(self, function: Callable[[int, Block], Tensor]) -> Tensor:
        """Adds up what `function(index, block)` gives for every block."""
        return total(function(i, block) for i, block in enumerate(self.blocks))

    @classmethod
    def from_dense(cls, values: Tensor, sizes: tuple[int, ...]) -> Jacobian:
        """Wraps a dense Jacobian `[B, C, P]`."""
        return cls(tuple(DenseBlock(part) for part in values.transpose(0, 1).split(list(sizes), 2)))

    def state(self) -> list[dict[str, Any]]:
        """A detached Jacobian as tensors, numbers and strings."""
        return [block.state() for block in self.blocks]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> Jacobian:
        """The Jacobian of a state."""
        return cls(tuple(from_state(block) for block in state))


def require_rows(parts: Sequence[Sequence[Block]], layout: Layout) -> None:
    """Refuses blocks from a state, of consecutive data, that are not of these tensors or of data that differ.

    Raises:
        StateError: They are not; the message names the sizes.
    """
    for blocks in parts:
        sizes, rows = [block.size for block in blocks], {block.dims[:2] for block in blocks}
        if sizes != list(layout.sizes) or len(rows) != 1:
            raise StateError(
                f"H has Jacobians of {sizes} entries for {sorted(rows)} outputs and data; the random tensors have "
                f"{list(layout.sizes)}, and all are of one number of outputs and data."
            )
        for name, tensor in ((n, t) for block in blocks for n, t in nested.entries(block).items()):
            if isinstance(tensor, Tensor) and name in _REAL and not tensor.is_floating_point():
                raise StateError(f"the part {name!r} of a Jacobian in H is {tensor.dtype}; it was changed or damaged.")
        if not all(block.has_valid_indices() for block in blocks):
            raise StateError("a Jacobian in H has indices outside of its table; it was changed or damaged.")


_REAL = frozenset({"a", "g", "features", "values"})
"""Fields of blocks that hold real numbers."""


def chosen(
    pieces: Generator[tuple[Jacobian, Tensor]], choice: OutputChoice | None
) -> Generator[tuple[Jacobian, Tensor]]:
    """Selects the K outputs of a choice from Jacobians and outputs `[b, C]`; None for all."""
    start = 0
    with closing(pieces):
        for jacobian, f in pieces:
            if choice is None:
                yield jacobian, f
                continue
            outputs = choice.chosen(f, jacobian.positions, start)
            start += len(f)
            yield jacobian.select_outputs(outputs), f.gather(1, outputs)
    if choice is not None:
        choice.require_all(start)


def each_output(jacobian: Jacobian) -> Iterator[Jacobian]:
    """The Jacobian of every output by itself, of Gaussian processes of their own."""
    if jacobian.outputs is not None:
        raise UnsupportedError(
            "outputs= with independent_outputs=True, where every output is a Gaussian process of its own: ask for all "
            "outputs, or use independent_outputs=False."
        )
    for c in range(jacobian.n_cotangents // jacobian.group_size):
        yield jacobian.select_outputs(one_output(jacobian, c))


def moved_by(jacobian: Jacobian, step: Tensor) -> Tensor:
    """J v of a step v `[P]`, or of one per output, `[C, P]`, where every output has weights of its own: `[B, C]`."""
    if step.ndim == 1:
        return jacobian.apply(step.unsqueeze(0))[0]
    pairs = zip(each_output(jacobian), step, strict=True)
    return torch.cat([one.apply(own.unsqueeze(0))[0] for one, own in pairs], 1)


def one_output(jacobian: Jacobian, c: int) -> Tensor:
    """The output c of every datum, `[B, 1]`, for `Jacobian.select_outputs`; of groups that of all of their rows."""
    device = jacobian.device
    step = jacobian.n_cotangents // jacobian.group_size
    return torch.arange(c, jacobian.n_cotangents, step, device=device).expand(jacobian.n_data, -1)


def joined(parts: Sequence[tuple[Jacobian, Tensor]]) -> tuple[Jacobian, Tensor]:
    """Concatenates Jacobians and outputs; several Jacobians become dense."""
    first, f = parts[0]
    if len(parts) == 1:
        return first, f
    sizes = tuple(block.size for block in first.blocks)
    whole = Jacobian.from_dense(torch.cat([jacobian.dense() for jacobian, _ in parts]), sizes)
    chosen_outputs = [jacobian.outputs for jacobian, _ in parts if jacobian.outputs is not None]
    outputs = torch.cat(chosen_outputs) if chosen_outputs else None
    return replace(first, blocks=whole.blocks, outputs=outputs), torch.cat([f for _, f in parts])


def whole_groups(pieces: Generator[tuple[Jacobian, Tensor]], size: int) -> Generator[tuple[Jacobian, Tensor]]:
    """Regroups pieces of any length into whole groups of `size` samples, with the outputs of their rows.

    Of outputs with positions a group has the rows of all positions of its data.
    """
    begun: list[tuple[Jacobian, Tensor]] = []
    with closing(pieces):
        for jacobian, f in pieces:
            n_rows = size * prod(jacobian.positions)
            first = min(len(f), -_count(begun) % n_rows)
            end = first + (len(f) - first) // n_rows * n_rows
            for part in (slice(0, first), slice(first, end), slice(end, len(f))):
                if part.start < part.stop:
                    some = jacobian if part == slice(0, len(f)) else jacobian.at(part)
                    begun.append((replace(some, positions=jacobian.positions), f[part]))
                if begun and _count(begun) % n_rows == 0:
                    whole, rows = joined(begun)
                    yield whole.grouped(n_rows), rows
                    begun = []
    if begun:
        raise group_left_over(size, _count(begun))


def _count(parts: list[tuple[Jacobian, Tensor]]) -> int:
    return sum(len(f) for _, f in parts)


def group_left_over(size: int | None, rows: int) -> InvalidArgument:
    """The error for a number of rows that is no multiple of the group size."""
    return InvalidArgument(
        f"group_size={size} does not divide the number of inputs: {rows} of their rows are left over. Give as many "
        "inputs as there are groups of this size."
    )


Scales = Sequence[Tensor] | None
"""Prior variances of every random parameter, 0-dim or `[1]`, or `[p]` of its entries; None for ones."""


def kernel(first: Jacobian, second: Jacobian, scales: Scales = None) -> Tensor:
    """The kernel J D⁻¹ J'ᵀ between samples of two Jacobians, `[B, C, M, C]`, float64 [Linearization, eq. 14]."""
    pairs = zip(first.blocks, second.blocks, strict=True)
    return total(_scaled_kernel(x, y, scales, i) for i, (x, y) in enumerate(pairs)).permute(1, 0, 3, 2)


def kernel_at(jacobian: Jacobian, scales: Scales = None) -> Tensor:
    """k(x_b, x_b) of every sample, `[B, C, C]`, float64."""
    return jacobian.sum_over_blocks(lambda i, block: _scaled(_double(block).weighted_gram, block, scales, i))


def kernel_diagonal(jacobian: Jacobian, scales: Scales = None) -> Tensor:
    """Diagonals of `kernel_at`, `[B, C]`, float64."""
    return jacobian.sum_over_blocks(lambda i, block: _scaled(_double(block).weighted_norms, block, scales, i))


def block_kernel(x: Block, y: Block) -> Tensor:
    """Σ_p J[k, b, p] J'[l, m, p] of the blocks of one tensor, `[K, B, L, M]`, float64."""
    kernels = [_by_factors(u, v) for u in x.terms for v in y.terms]
    if None in kernels:
        return _multiplied_out(x, y)
    return total(kernel() for kernel in kernels if kernel is not None)


def _by_factors(x: Block, y: Block) -> Callable[[], Tensor] | None:
    by_first = x.kernel_by_factors(y)
    if by_first is not None:
        return by_first
    by_second = y.kernel_by_factors(x)
    return None if by_second is None else lambda: by_second().permute(2, 3, 0, 1)


def _multiplied_out(x: Block, y: Block) -> Tensor:
    others = [widened(y.dense())] if isinstance(y, DenseBlock) else None
    rows: list[Tensor] = []
    for piece in x.pieces():
        columns = [flat_product(widened(piece), widened(other)) for other in (others or y.pieces())]
        rows.append(torch.cat(columns, 3))
    return torch.cat(rows, 1)


def _scaled_kernel(x: Block, y: Block, scales: Scales, i: int) -> Tensor:
    """The kernel of one tensor, of which each entry may have a variance of its own: then there are no factors."""
    if scales is None:
        return block_kernel(x, y)
    scale = widened(scales[i])
    if scale.numel() == 1:
        return scale.reshape(()) * block_kernel(x, y)
    return block_kernel(MappedBlock(x, lambda piece: widened(piece) * scale), y)


def _scaled(contract: Callable[[Tensor], Tensor], block: Block, scales: Scales, i: int) -> Tensor:
    """A contraction with the variances of a tensor's entries."""
    ones = torch.ones(block.size, dtype=wide_dtype(block.device), device=block.device)
    if scales is None:
        return contract(ones)
    scale = widened(scales[i])
    return scale.reshape(()) * contract(ones) if scale.numel() == 1 else contract(scale)


def _double(block: Block) -> Block:
    return block.cast(wide_dtype(block.device))
