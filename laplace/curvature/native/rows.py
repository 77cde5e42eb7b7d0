"""Blocks of outputs with positions: rows, one per datum and position, in the place of data."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from laplace.curvature.blocks import Block, DenseBlock, LazyBlock, PickedBlock, SumBlock
from laplace.curvature.factors import IndexBlock, OuterBlock


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
        return replace(counted_head(block, kept), g=block.g[:, kept])
    return DenseBlock(block.dense()[:, kept])


def counted_head(block: OuterBlock, kept: Tensor) -> OuterBlock:
    """The same of a head, whose g is an identity."""
    return replace(block, a=None if block.a is None else block.a[kept], n_data=len(kept))


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


class RowColumns:
    """Columns `[K, B·T, C]`, of which every row has its own, as cotangents `[K', B, T·C]` of the whole outputs.

    A curvature that is a sum over rows needs their columns apart: column (t, k) is column k at position t and zero at
    the others, K' = T·K, built as they are asked for. Columns that are random, independent and of mean zero need not be
    kept apart, for their products vanish on average: K' = K.

    Args:
        columns: `[K, B·T, C]`; positions of which every entry is zero are left out.
        n_data: B.
        apart: Whether rows are kept apart.
    """

    def __init__(self, columns: Tensor, n_data: int, *, apart: bool) -> None:
        self.columns = columns.unflatten(1, (n_data, -1))  # [K, B, T, C]
        self.apart = apart and self.columns.shape[2] > 1
        self.used = self._places() if self.apart else None

    def _places(self) -> Tensor:
        """Positions of which some entry is not zero; the first one if there are none."""
        used = self.columns.ne(0).any(3).any(1).any(0)
        used[0] |= ~used.any()
        return used.nonzero().flatten()

    def __len__(self) -> int:
        return len(self.columns) * (1 if self.used is None else len(self.used))

    def __getitem__(self, part: slice) -> Tensor:
        """Consecutive cotangents, `[k, B, T·C]`."""
        if self.used is None:
            return self.columns[part].flatten(2)
        k, b, t, c = self.columns.shape
        index = torch.arange(*part.indices(len(self)), device=self.columns.device)
        column, position = index % k, self.used[index // k]
        rows = torch.arange(len(index), device=index.device)
        whole = self.columns.new_zeros(len(index), t, b, c)
        whole[rows, position] = self.columns[column, :, position]
        return whole.transpose(1, 2).reshape(len(index), b, t * c)
