"""The tensors of one layer as one block, where a curvature holds them together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.jacobian.blocks import Block
from laplace.jacobian.contractions import total


@dataclass(frozen=True)
class JoinedBlock(Block):
    """The tensors of one layer side by side, where they share a basis.

    Attributes:
        parts: A block of every tensor, in the order of their entries.
    """

    parts: tuple[Block, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def n_cotangents(self) -> int:
        return self.parts[0].n_cotangents

    @property
    def n_data(self) -> int:
        return self.parts[0].n_data

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts], 2)

    def bound(self) -> Tensor:
        return total(part.bound() for part in self.parts)

    def at(self, data: slice | Tensor) -> JoinedBlock:
        return JoinedBlock(tuple(part.at(data) for part in self.parts))
