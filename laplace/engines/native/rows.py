"""Blocks of outputs with positions: rows, one per datum and position, in the place of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from laplace.jacobian.blocks import Block, DenseBlock, LazyBlock, PickedBlock, SumBlock
from laplace.jacobian.factors import IndexBlock, OuterBlock
from laplace.jacobian.heads import Head, HeadBlock


def as_rows(block: Block, n_positions: int) -> Block | None:
    """A block `[K, B, p]` of a layer with T positions as one of B·T data with one position each.

    That is the Jacobian of rows only where position t of the layer alone reaches row t. None where the block does not
    have T positions.
    """
    if isinstance(block, PickedBlock):
        whole = as_rows(block.whole, n_positions)
        return None if whole is None else replace(block, whole=whole)
    if isinstance(block, IndexBlock) and block.index.shape[1] == n_positions:
        g = block.g.flatten(1, 2).unsqueeze(2)
        return replace(block, index=block.index.reshape(-1, 1), g=g, counted=block.counted.reshape(-1, 1))
    if isinstance(block, OuterBlock) and block.n_positions == n_positions and not block.unfolded:
        a = None if block.a is None else block.a.flatten(0, 1).unsqueeze(1)
        return replace(block, a=a, g=block.g.flatten(1, 2).unsqueeze(2), n_data=block.n_data * n_positions)
    return None


def counted(block: Block, kept: Tensor) -> Block:
    """A block `[K, n, p]` of the data `kept` alone, indices `[n]`; of a block from `as_rows`."""
    if isinstance(block, PickedBlock):
        return replace(block, whole=counted(block.whole, kept))
    if isinstance(block, IndexBlock):
        return replace(block, index=block.index[kept], g=block.g[:, kept], counted=block.counted[kept])
    if isinstance(block, OuterBlock):
        return replace(_with_inputs(block, kept), g=block.g[:, kept])
    return DenseBlock(block.dense()[:, kept])


def counted_head(block: Head, kept: Tensor) -> Head:
    """The same of a head, whose output gradients are those of all data."""
    return block.counted(kept) if isinstance(block, HeadBlock) else _with_inputs(block, kept)


def _with_inputs(block: OuterBlock, kept: Tensor) -> OuterBlock:
    return replace(block, a=None if block.a is None else block.a[kept], n_data=len(kept))


def joined(blocks: Sequence[Block]) -> Block:
    """Blocks `[K_i, B, p]` of several sets of cotangents as one, `[Σ K_i, B, p]`."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    if isinstance(first, PickedBlock):
        return replace(first, whole=joined([b.whole for b in blocks if isinstance(b, PickedBlock)]))
    if isinstance(first, SumBlock):
        parts = zip(*(b.parts for b in blocks if isinstance(b, SumBlock)), strict=True)
        return SumBlock(tuple(joined(part) for part in parts))
    if isinstance(first, OuterBlock | IndexBlock):
        return replace(first, g=torch.cat([b.g for b in blocks if isinstance(b, OuterBlock | IndexBlock)]))
    if isinstance(first, LazyBlock):
        lazy = [b for b in blocks if isinstance(b, LazyBlock)]
        norm = torch.stack([b.norm for b in lazy]).norm()
        count = sum(b.n_cotangents for b in lazy)
        return replace(
            first, compute=lambda rows: torch.cat([b.compute(rows) for b in lazy]), n_cotangents=count, norm=norm
        )
    return DenseBlock(torch.cat([b.dense() for b in blocks]))


def spread(block: Block, count: int) -> Block:
    """A block `[S·C, B, p]` of S positions' cotangents as one of rows, `[C, B·S, p]`, data major."""
    if isinstance(block, PickedBlock):
        return replace(block, whole=spread(block.whole, count))
    if isinstance(block, SumBlock):
        return SumBlock(tuple(spread(part, count) for part in block.parts))
    if isinstance(block, IndexBlock):
        index, read = (part.repeat_interleave(count, 0) for part in (block.index, block.counted))
        return replace(block, index=index, counted=read, g=_by_row(block.g, count))
    if isinstance(block, OuterBlock):
        a = None if block.a is None else block.a.repeat_interleave(count, 0)
        return replace(block, a=a, g=_by_row(block.g, count), n_data=block.n_data * count)
    if isinstance(block, LazyBlock):
        return _spread_lazily(block, count)
    return DenseBlock(_by_row(block.dense(), count))


def _by_row(values: Tensor, count: int) -> Tensor:
    """`[S·C, B, …]` as `[C, B·S, …]`."""
    return values.unflatten(0, (count, -1)).movedim(0, 2).flatten(1, 2)


def _spread_lazily(block: LazyBlock, count: int) -> Block:
    first = block.span[0]

    def compute(rows: slice) -> Tensor:
        data = slice(first + rows.start // count, first + -(-rows.stop // count))
        skipped = rows.start % count
        return _by_row(block.compute(data), count)[:, skipped : skipped + rows.stop - rows.start]

    n_rows = block.n_data * count
    return replace(block, compute=compute, n_cotangents=block.n_cotangents // count, span=(0, n_rows))
