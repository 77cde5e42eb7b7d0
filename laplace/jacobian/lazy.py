"""Dense blocks that are too large to hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.jacobian.blocks import Block, DenseBlock
from laplace.jacobian.rows import by_row


@dataclass(frozen=True, eq=False)
class LazyBlock(Block):
    """A dense block whose pieces are computed when they are asked for.

    Attributes:
        compute: Gives `[K, b, p]` of a slice of the data.
        dims: K and p.
        span: First and last + 1 datum of this block.
        norm: The bound.
    """

    compute: Callable[[slice], Tensor]
    dims: tuple[int, int]
    span: tuple[int, int]
    norm: Tensor

    @property
    def size(self) -> int:
        return self.dims[1]

    @property
    def n_cotangents(self) -> int:
        return self.dims[0]

    @property
    def n_data(self) -> int:
        return self.span[1] - self.span[0]

    def dense(self) -> Tensor:
        return self.compute(slice(*self.span))

    def bound(self) -> Tensor:
        return self.norm

    def at(self, data: slice | Tensor) -> Block:
        if isinstance(data, Tensor):
            return DenseBlock(self.dense()[:, data])
        start, stop, _ = data.indices(self.n_data)
        return replace(self, span=(self.span[0] + start, self.span[0] + stop))

    def join(self, others: Sequence[Block]) -> LazyBlock:
        blocks = (self, *others)
        return LazyBlock(
            compute=lambda data: torch.cat([block.at(data).dense() for block in blocks]),
            dims=(sum(block.n_cotangents for block in blocks), self.size),
            span=(0, self.n_data),
            norm=torch.stack([block.bound() for block in blocks]).norm(),
        )

    def fold_cotangents(self, n_positions: int) -> LazyBlock:
        def compute(rows: slice) -> Tensor:
            data = slice(rows.start // n_positions, -(-rows.stop // n_positions))
            skipped = rows.start % n_positions
            return by_row(self.at(data).dense(), n_positions)[:, skipped : skipped + rows.stop - rows.start]

        dims = self.n_cotangents // n_positions, self.size
        return replace(self, compute=compute, dims=dims, span=(0, self.n_data * n_positions))
