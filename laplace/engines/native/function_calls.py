"""Calls of PyTorch's functions with random parameters: products, convolutions, tables, sums with what has no data.

A layer rule knows a module; these know one operation, whichever module it is written in: a weight used through
`F.linear`, stored as `[in, out]`, or packed with others, a convolution whose module pads the images by itself, a scale
w ⊙ h, a table of positions that is added to all data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from laplace.engines.kron_parts import DENSE_BLOCK_LIMIT
from laplace.engines.native.autograd import BackwardPasses
from laplace.engines.native.calls import FunctionCall
from laplace.engines.native.layers import BatchAxis, RoutedRows
from laplace.engines.native.layers.base import evenly
from laplace.engines.native.layers.convolution import output_gradients, patches_of
from laplace.jacobian.blocks import Block, DenseBlock
from laplace.jacobian.index import IndexBlock
from laplace.jacobian.outer import OuterBlock


@dataclass(frozen=True, eq=False)
class LinearCall(FunctionCall):
    """z = x Wᵀ + b, or z = x W + b of a weight that is stored `[in, out]`.

    Attributes:
        x: Inputs `[..., I]`.
        rows: By role, rows of the tensor that are used, of how many: parts of a packed projection.
        transposed: True if the weight is stored `[in, out]`.
    """

    name: str
    roles: Mapping[str, str]
    x: Tensor
    rows: Mapping[str, tuple[int, int]]
    transposed: bool = False

    @property
    def whole(self) -> bool:
        return not self.rows and not self.transposed

    def positions(self, n_data: int) -> int:
        return evenly(self.x.shape[:-1].numel(), n_data) if self.x.ndim >= 2 else 0

    def block(self, role: str, g: Tensor, n_data: int, axis: BatchAxis) -> Block:
        g = axis.positions(g, n_data, 1, batched=True).unsqueeze(3)
        if role in self.rows:
            first, total = self.rows[role]
            g = F.pad(g, (first, total - first - g.shape[-1]))
        if role == "bias":
            return OuterBlock(a=None, g=g)
        a = axis.positions(self.x, n_data, 1).unsqueeze(2).to(g.dtype)
        return OuterBlock(a=a, g=g, input_first=self.transposed)


@dataclass(frozen=True, eq=False)
class ConvolutionCall(FunctionCall):
    """z = W ∗ x + b.

    Attributes:
        x: Images `[N, channels, *space]`.
        kernel: Spatial shape of W.
        stride: One number per dimension of space, as of `padding` and `dilation`.
        padding: Zeros before and after each dimension of space.
        dilation: Between entries of the kernel.
        groups: G.
    """

    name: str
    roles: Mapping[str, str]
    x: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def positions(self, n_data: int) -> int:
        return evenly(self.x.shape[0], n_data)

    @cached_property
    def _padded(self) -> Tensor:
        amount = [side for both in reversed(self.padding) for side in both]
        return F.pad(self.x, amount) if any(amount) else self.x

    def block(self, role: str, g: Tensor, n_data: int, axis: BatchAxis) -> Block:
        gradients = output_gradients(self.groups, g, n_data, axis)
        if role == "bias":
            return OuterBlock(a=None, g=gradients)
        images = axis.positions(self._padded.to(g.dtype), n_data, self.x.ndim - 1)
        return OuterBlock(patches_of(images, self.kernel, self.stride, self.dilation, self.groups), gradients)


@dataclass(frozen=True, eq=False)
class TableCall(FunctionCall):
    """z = W[index] of a table that is used as a function.

    Attributes:
        index: Rows that are read.
        n_rows: V.
        padding: A row that gets no gradient.
    """

    name: str
    roles: Mapping[str, str]
    index: Tensor
    n_rows: int
    padding: int | None

    def positions(self, n_data: int) -> int:
        return evenly(self.index.numel(), n_data) if self.index.ndim >= 1 else 0

    def block(self, role: str, g: Tensor, n_data: int, axis: BatchAxis) -> Block:
        return self.rows_of(axis.positions(self.index, n_data, 0), axis.positions(g, n_data, 1, batched=True))

    def rows_of(self, index: Tensor, g: Tensor) -> IndexBlock:
        """The block of rows `[B, T]` with gradients `[K, B, T, D]`."""
        index = index if self.padding is None else index.where(index != self.padding, -1)
        return IndexBlock.of(index, g, self.n_rows)


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor computed from one random parameter alone, without a data dimension: 1 + w, a cast, a row of a table.

    Attributes:
        value: The result, with its graph.
        root: The random parameter, or what a table gave.
        name: The random parameter's name.
        table: The call that read the table, or None.
    """

    value: Tensor
    root: Tensor
    name: str
    table: TableCall | None = None


@dataclass(frozen=True, eq=False)
class SpreadCall(FunctionCall):
    """z = h ⊙ o or z = h ± o with an operand o that has no data dimension, or o expanded over the data.

    The gradient of one datum with respect to o is that of z (times h), summed over all dimensions along which o is
    repeated but the data's; from o to the random parameter it goes through the graph.

    Attributes:
        operand: o.
        shape: Of z.
        factor: h of a product, or None.
        sign: −1 where o is subtracted.
        create_graph: True if gradients are differentiated again.
    """

    name: str
    roles: Mapping[str, str]
    operand: Operand
    shape: torch.Size
    factor: Tensor | None = None
    sign: float = 1.0
    create_graph: bool = False

    @property
    def instead_of(self) -> FunctionCall | None:
        return self.operand.table

    @property
    def weight_alone(self) -> Tensor | None:
        return None if self.operand.value is self.operand.root else self.operand.value

    def positions(self, n_data: int) -> int:
        return evenly(self.shape.numel(), n_data) if self.shape else 0

    def block(self, role: str, g: Tensor, n_data: int, axis: BatchAxis) -> Block:
        root, table = self.operand.root, self.operand.table
        values = self._of_root(g, n_data, axis)
        if table is not None:
            index = table.index.reshape(1, -1).expand(n_data, -1)
            return table.rows_of(index, values.reshape(*values.shape[:2], -1, root.shape[-1]))
        if root.ndim < 2 or root.numel() <= DENSE_BLOCK_LIMIT:
            return DenseBlock(values.reshape(*values.shape[:2], -1))
        # A table of positions that is read from its first to its last row.
        rows = values.reshape(*values.shape[:2], -1, root.shape[-1])
        index = torch.arange(rows.shape[2], device=root.device).expand(n_data, -1)
        return IndexBlock.of(index, rows, rows.shape[2])

    def _of_root(self, g: Tensor, n_data: int, axis: BatchAxis) -> Tensor:
        """Gradients `[K, *z]` as those of the random parameter, `[K, B, *root]`; without numbers no sums."""
        if g.is_meta:
            return g.new_empty(len(g), n_data, *self.operand.root.shape)
        g = g if self.factor is None else g * self.factor.to(g.dtype)
        return self._to_root(self.sign * self._summed(g, n_data, axis))

    def _summed(self, g: Tensor, n_data: int, axis: BatchAxis) -> Tensor:
        """Gradients `[K, *z]` as `[K, B, *o]`.

        Raises:
            IndexError: o varies along the dimension of the data, or both axes are one reading.
        """
        shape = (1,) * (len(self.shape) - self.operand.value.ndim) + tuple(self.operand.value.shape)
        second = axis is BatchAxis.TRAILING and len(shape) > 1 and shape[1] == 1 and self.shape[1] == n_data
        at = 1 if second else 0
        if shape[at] != 1:
            raise IndexError("the operand has a dimension for the data")
        if axis is BatchAxis.TRAILING and not second and self.shape[0] == n_data:
            raise IndexError("the data are first whichever axis is meant")
        if isinstance(axis, RoutedRows):
            g = axis.positions(g, n_data, len(self.shape) - 1, batched=True)
        elif second or axis is BatchAxis.LEADING:
            g = g.unflatten(1 + at, (n_data, -1)).movedim(1 + at, 1)
        else:
            g = g.unflatten(1, (-1, n_data)).movedim(2, 1)
        repeated = [2 + d for d, size in enumerate(shape) if size == 1]
        g = g.sum(repeated, keepdim=True) if repeated else g
        return g.reshape(*g.shape[:2], *self.operand.value.shape)

    def _to_root(self, g: Tensor) -> Tensor:
        """Gradients of o `[K, B, *o]` as those of the random parameter, by a vectorised pass from o to it."""
        value, root = self.operand.value, self.operand.root
        if value is root:
            return g
        (pulled,) = BackwardPasses([value], [root], create_graph=self.create_graph).vectorised(g.flatten(0, 1))
        if pulled is None:  # the operand does not depend on it
            return g.new_zeros(*g.shape[:2], *root.shape)
        return pulled.unflatten(0, g.shape[:2]).to(g.dtype)
