"""Blocks of factors, sums of outer products Σ_t g ⊗ a over the positions t that share a tensor, for any form of a."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.jacobian.blocks import Block, PickedBlock, all_of
from laplace.jacobian.contractions import CHUNK_BYTES, KroneckerFactored
from laplace.jacobian.rows import by_row, of_each

_DOUBLE = 8
"""Bytes of a number in float64."""


F = TypeVar("F", bound="FactoredBlock")


class FactoredBlock(Block, KroneckerFactored):
    """A sum of outer products of output gradients and inputs, over T positions and in G groups.

    Attributes:
        g: Output gradients `[K, B, T, ..., O]`.
    """

    g: Tensor

    @abstractmethod
    def with_factors(self: F, inputs: Callable[[Tensor], Tensor], g: Tensor) -> F:
        """The block with other factors.

        Args:
            inputs: Maps every tensor of the input side, `[B, T, ...]`.
            g: Output gradients.
        """

    @property
    @abstractmethod
    def gradients(self) -> Tensor:
        """Output gradients with their groups, `[K, B, T, G, O]`."""

    @property
    def n_positions(self) -> int:
        """Number of positions T that share the tensor."""
        return self.gradients.shape[2]

    @property
    def groups(self) -> int:
        """Number of groups G with weights of their own."""
        return self.gradients.shape[3]

    @property
    def n_outputs(self) -> int:
        """Number of outputs O of a group."""
        return self.gradients.shape[4]

    @property
    def n_cotangents(self) -> int:
        return self.g.shape[0]

    @property
    def n_data(self) -> int:
        return self.g.shape[1]

    @property
    def product(self) -> KroneckerFactored:
        return self

    def at(self: F, data: slice | Tensor) -> F:
        return self.with_factors(lambda inputs: inputs[data], self.g[:, data])

    def select_outputs(self, outputs: Tensor) -> Block:
        return self.with_factors(lambda inputs: inputs, of_each(self.g, outputs))

    def join(self, others: Sequence[Block]) -> Block:
        alike = all_of(type(self), others)
        if alike is None:
            return super().join(others)
        return self.with_factors(lambda inputs: inputs, torch.cat([self.g, *(other.g for other in alike)]))

    def fold_positions(self, n_positions: int) -> Block | None:
        if self.n_positions != n_positions:
            return None
        return self.with_factors(lambda inputs: inputs.flatten(0, 1).unsqueeze(1), self.g.flatten(1, 2).unsqueeze(2))

    def fold_cotangents(self, n_positions: int) -> Block:
        return self.with_factors(lambda inputs: inputs.repeat_interleave(n_positions, 0), by_row(self.g, n_positions))

    def cast(self, dtype: torch.dtype) -> Block:
        return self.with_factors(lambda inputs: inputs.to(dtype) if inputs.is_floating_point() else inputs,
                                 self.g.to(dtype))  # fmt: skip

    def detached(self) -> Block:
        return self.with_factors(lambda inputs: inputs.detach().contiguous(), self.g.detach().contiguous())


def unpicked(block: Block) -> Block:
    """The block that a block is single entries of; itself where it is none."""
    return unpicked(block.whole) if isinstance(block, PickedBlock) else block


def kernel_by_grams(
    x: FactoredBlock, y: FactoredBlock, input_products: Callable[[slice, slice], Tensor]
) -> Callable[[], Tensor]:
    """Σ_g Σ_tt' (a·a')(g·g') of two blocks of one tensor, `[K, B, L, M]`, float64, in chunks of their data.

    Args:
        x: A block of B data.
        y: A block of M data.
        input_products: Gives a · a' of slices of the data of both, `[G, b, T, m, T']`, float64.
    """

    def products(i: slice, j: slice) -> Tensor:
        inputs = input_products(i, j)
        outputs = torch.einsum("kbtgo,lmsgo->gkbtlms", widened(x.gradients[:, i]), widened(y.gradients[:, j]))
        if x.n_positions == y.n_positions == 1:
            return (outputs[:, :, :, 0, :, :, 0] * inputs[:, None, :, 0, None, :, 0]).sum(0)
        return torch.einsum("gkbtlms,gbtms->kblm", outputs, inputs)

    def kernel() -> Tensor:
        return torch.cat([torch.cat([products(i, j) for j in _chunks(y, x)], 3) for i in _chunks(x, y)], 1)

    return kernel


def _chunks(x: FactoredBlock, y: FactoredBlock) -> Iterator[slice]:
    """Consecutive data of x, so few that the Gram of output gradients with as many of y fits a chunk."""
    pairs = x.n_cotangents * y.n_cotangents * x.n_positions * y.n_positions * x.groups
    step = max(1, int((CHUNK_BYTES / (_DOUBLE * pairs)) ** 0.5))
    for start in range(0, x.n_data, step):
        yield slice(start, start + step)


def flat_product(x: Tensor, y: Tensor) -> Tensor:
    """Scalar products of `[K, B, ...]` and `[L, M, ...]`, `[K, B, L, M]`."""
    return (x.flatten(0, 1).flatten(1) @ y.flatten(0, 1).flatten(1).T).view(*x.shape[:2], *y.shape[:2])
