"""Recorded calls of layers and of PyTorch's functions, and the observer that records the latter.

A layer rule knows a module; a function call knows one operation, whichever module it is written in: a weight used
through `F.linear`, stored as `[in, out]`, or packed with others, a convolution whose module pads the images by
itself, a scale w ⊙ h, a table of positions that is added to all data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from laplace.core.batch import dense
from laplace.core.cached import cached_property
from laplace.engines.kron_parts import DENSE_BLOCK_LIMIT
from laplace.engines.native.autograd import BackwardPasses
from laplace.engines.native.rules import BatchAxis, RoutedRows, evenly, output_gradients, patches_of
from laplace.engines.native.steps import CELLS, STEPS, Span, attend, run_cell, run_recurrent, weights_of
from laplace.errors import CurvatureError
from laplace.jacobian.blocks import Block, DenseBlock
from laplace.jacobian.index import IndexBlock
from laplace.jacobian.outer import OuterBlock
from laplace.network.apart import original


@dataclass(frozen=True, eq=False)
class FunctionCall(ABC):
    """A call of a function of PyTorch with random parameters among its arguments, and the blocks of these."""

    name: str  # Name in the coverage report
    roles: Mapping[str, str]  # Which argument each tensor is, by the tensor's name

    @property
    def whole(self) -> bool:
        """True if it is a linear layer with whole tensors, so that the call may be a head."""
        return False

    @property
    def instead_of(self) -> FunctionCall | None:
        """The call whose output this one broadcasts over the data: both explain the same derivative."""
        return None

    @property
    def weight_alone(self) -> Tensor | None:
        """A tensor that was computed from the parameter alone before it meets the data in this call, or None."""
        return None

    @property
    def kind(self) -> tuple[object, ...]:
        """Calls of the same kind share a rule: the function, and which tensor is which argument."""
        return self.name, tuple(self.roles.items())

    @abstractmethod
    def positions(self, n_data: int) -> int:
        """Positions per sample in the leading dimensions, 0 if they cannot hold `n_data` data."""

    @abstractmethod
    def block(self, role: str, g: Tensor, n_data: int, axis: BatchAxis) -> Block:
        """The block from the gradients `[K, *shape of the output]`, at least float32."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a module or of a function: its first input and the place of its output in autograd's graph.

    The place is an edge of the graph and not the output tensor, so that a later in-place operation on the
    output does no harm and no copy is needed.
    """

    by: nn.Module | FunctionCall  # The module, or the call of a function
    x: Tensor  # The first input
    edge: GradientEdge  # Where the output's gradient is found
    shape: torch.Size  # The output's shape
    fed: tuple[Any, ...] = ()  # Nodes of its input data
    # True if nothing but PyTorch's code, or that of the rule's class, runs in between: no method or hook of the
    # user's
    is_known: bool = True
    # Nodes of the graph that give its results: of the output, or of all products in a recurrence
    nodes: tuple[Any, ...] = ()
    steps: Span | None = None  # Of a recurrence that was run step by step, the nodes that its length repeats

    @property
    def weight_alone(self) -> Tensor | None:
        """The tensor of this name of a function's call; None of a module."""
        return None if isinstance(self.by, nn.Module) else self.by.weight_alone

    @property
    def kind(self) -> object:
        """Calls of the same kind share a rule: the module, or the kind of function call."""
        return id(original(self.by)) if isinstance(self.by, nn.Module) else self.by.kind

    @property
    def module(self) -> nn.Module:
        """The called module."""
        if not isinstance(self.by, nn.Module):
            raise CurvatureError(f"{self.by.name} is no layer")
        return self.by


# Calls of functions: products, convolutions, tables, and sums or products with what has no batch dimension.


@dataclass(frozen=True, eq=False)
class LinearCall(FunctionCall):
    """z = x Wᵀ + b, or z = x W + b of a weight that is stored `[in, out]`."""

    x: Tensor  # Inputs `[..., I]`
    # For parts of a packed tensor, by role: the first used row, and the number of all rows
    rows: Mapping[str, tuple[int, int]]
    transposed: bool = False  # True if the weight is stored `[in, out]`

    @property
    def whole(self) -> bool:
        return not self.rows and not self.transposed

    def positions(self, n_data: int) -> int:
        return evenly(self.x.shape[:-1].numel(), n_data)

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
    """z = W ∗ x + b."""

    x: Tensor  # Images `[N, channels, *space]`
    kernel: tuple[int, ...]  # Spatial shape of W
    stride: tuple[int, ...]  # One number per dimension of space, as of `padding` and `dilation`
    padding: tuple[tuple[int, int], ...]  # Zeros before and after each dimension of space
    dilation: tuple[int, ...]  # Between entries of the kernel
    groups: int  # G

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
    """z = W[index] of a table that is used as a function."""

    index: Tensor  # Rows that are read
    n_rows: int  # V
    padding: int | None  # A row that gets no gradient

    def positions(self, n_data: int) -> int:
        return evenly(self.index.numel(), n_data)

    def block(self, role: str, g: Tensor, n_data: int, axis: BatchAxis) -> Block:
        return self.rows_of(axis.positions(self.index, n_data, 0), axis.positions(g, n_data, 1, batched=True))

    def rows_of(self, index: Tensor, g: Tensor) -> IndexBlock:
        """The block of rows `[B, T]` with gradients `[K, B, T, D]`."""
        index = index if self.padding is None else index.where(index != self.padding, -1)
        return IndexBlock.from_index(index, g, self.n_rows)


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor computed from one random parameter alone, without a batch dimension: 1 + w, a cast, a row of a table."""

    value: Tensor  # The result, with its graph
    root: Tensor  # The random parameter, or what a table gave
    name: str  # The random parameter's name
    table: TableCall | None = None  # The call that read the table, or None


@dataclass(frozen=True, eq=False)
class SpreadCall(FunctionCall):
    """z = h ⊙ o or z = h ± o with an operand o that has no batch dimension, or o expanded over the batch.

    The gradient of one sample with respect to o is that of z (times h), summed over all dimensions along which o is
    repeated but the data's; from o to the random parameter it goes through the graph.
    """

    operand: Operand  # o
    shape: torch.Size  # Of z
    factor: Tensor | None = None  # h of a product, or None
    sign: float = 1.0  # −1 where o is subtracted
    create_graph: bool = False  # True if gradients are differentiated again

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
        return IndexBlock.from_index(index, rows, rows.shape[2])

    def _of_root(self, g: Tensor, n_data: int, axis: BatchAxis) -> Tensor:
        """Gradients `[K, *z]` as gradients of the random parameter, `[K, B, *root]`."""
        if g.is_meta:
            return g.new_empty(len(g), n_data, *self.operand.root.shape)
        g = g if self.factor is None else g * self.factor.to(g.dtype)
        return self._to_root(self.sign * self._summed(g, n_data, axis))

    def _summed(self, g: Tensor, n_data: int, axis: BatchAxis) -> Tensor:
        """Gradients `[K, *z]` as `[K, B, *o]`."""
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
        """Gradients of o `[K, B, *o]` as gradients of the random parameter, by a vectorised pass from o to it."""
        value, root = self.operand.value, self.operand.root
        if value is root:
            return g
        (pulled,) = BackwardPasses([value], [root], create_graph=self.create_graph).vectorised(g.flatten(0, 1))
        if pulled is None:  # the operand does not depend on it
            return g.new_zeros(*g.shape[:2], *root.shape)
        return pulled.unflatten(0, g.shape[:2]).to(g.dtype)


# The observer of PyTorch's functions.


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")

_ARGUMENTS = {
    "linear": ("input", "weight", "bias"),
    "addmm": ("input", "mat1", "mat2"),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "_sparse_mm": ("mat1", "mat2"),
    "embedding": ("input", "weight", "padding_idx", "max_norm"),
} | dict.fromkeys(_CONVOLUTIONS, ("input", "weight", "bias", "stride", "padding", "dilation", "groups"))
"""Products, convolutions and tables, and what their arguments are called."""

_SUMS = {"add": 1.0, "add_": 1.0, "sub": -1.0, "sub_": -1.0}
_PRODUCTS = ("mul", "mul_")
_EXPANSIONS = ("expand", "expand_as", "broadcast_to", "repeat")


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += _tensors(value)
    return tensors


def _adds_dimension(value: Tensor, result: Any) -> bool:
    """True if a value is repeated along a new first dimension: that of the batch, if the probe agrees."""
    return isinstance(result, Tensor) and result.shape[1:].numel() == value.numel()


class Observer(TorchFunctionMode):
    """Records calls of functions with random parameters, whichever module makes them.

    Attention and recurrent layers hide their projections inside one function; where these are random, they are run in
    its place by matrix products with the same values.
    """

    def __init__(self, stand_ins: Mapping[str, Tensor], *, keep_graph: bool) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in stand_ins.items()}
        self.keep_graph = keep_graph  # True if inputs keep their graph
        self.calls: list[LayerCall] = []
        self._operands: dict[int, Operand] = {
            id(tensor): Operand(tensor, tensor, name) for name, tensor in stand_ins.items()
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in CELLS and any(id(w) in self.names for w in weights_of(args)):
            return run_recurrent(name, args, self.linear, self.recur)
        if name in STEPS and not kwargs and any(id(w) in self.names for w in args):
            return run_cell(name, args, self.linear)
        if func is F.multi_head_attention_forward:
            outputs = attend(self.linear, self.names, *args, **kwargs)
            return func(*args, **kwargs) if outputs is None else outputs
        result = func(*args, **kwargs)
        if name in _ARGUMENTS:
            self._note(name, dict(zip(_ARGUMENTS[name], args, strict=False)) | kwargs, result)
        elif isinstance(result, (Tensor, tuple, list)) and not isinstance(result, torch.Size):
            self._follow(name, args, kwargs, result)
        return result

    # Products, convolutions and tables.

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`, recorded if a tensor is random."""
        z = F.linear(x, weight, bias)
        self._product("F.linear", x, weight, bias, z)
        return z

    def _note(self, name: str, given: Mapping[str, Any], result: Any) -> None:
        """Records a call of one of `_ARGUMENTS`; products with other options are left to the fallbacks."""
        known = all(argument in _ARGUMENTS[name] for argument in given)
        if name == "embedding":
            self._embedding(given, result)
        elif name in _CONVOLUTIONS:
            self._convolution(f"F.{name}", result, **given)
        elif known and name == "linear":
            self._product("F.linear", given["input"], given["weight"], given.get("bias"), result)
        elif known:
            *first, x, weight = (given[argument] for argument in _ARGUMENTS[name])
            self._product(
                f"torch.{name.replace('_sparse_', 'sparse.')}",
                x,
                weight,
                first[0] if first else None,
                result,
                stored_by_input=True,
            )

    def recur(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, products: Sequence[Tensor],
        span: Span | None,
    ) -> None:  # fmt: skip
        """Records a product that is repeated step by step, by its inputs `[B, T, I]` and zeros added to its outputs."""
        nodes = [product.grad_fn for product in products]
        self._product("recurrence", x, weight, bias, offsets, nodes=nodes, steps=span)

    def _product(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        z: Tensor,
        *,
        stored_by_input: bool = False,
        nodes: Sequence[Any] = (),
        steps: Span | None = None,
    ) -> None:
        roles: dict[str, str] = {}
        rows: dict[str, tuple[int, int]] = {}
        transposed = False
        if weight.ndim == 2 and (place := self._place(weight)) is not None:
            root, first, turned = place
            transposed = turned is not stored_by_input
            in_part = not turned and len(root) != len(weight)
            if not (in_part and transposed):
                roles[self.names[id(root)]] = "weight"
            if in_part:
                rows["weight"] = (first, len(root))
        if bias is not None and bias.ndim == 1 and (place := self._place(bias)) is not None:
            root, first, _ = place
            roles[self.names[id(root)]] = "bias"
            if len(root) != len(bias):
                rows["bias"] = (first, len(root))
        inputs = dense(x if self.keep_graph else x.detach())
        if len({rows.get(role) for role in roles.values()}) < 2:
            together = [roles] if roles else []
        else:  # parts of different sizes share no output side
            together = [{tensor: role} for tensor, role in roles.items()]
        for some in together:
            self._record(LinearCall(name, some, inputs, rows, transposed), inputs, z, [x], nodes, steps)

    def _convolution(
        self,
        name: str,
        z: Tensor,
        input: Tensor,  # noqa: A002 - the names of PyTorch's function
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> None:
        roles = {self.names[id(t)]: role for t, role in ((weight, "weight"), (bias, "bias")) if id(t) in self.names}
        kernel = tuple(weight.shape[2:])
        if not roles or input.ndim != weight.ndim:  # one image without a dimension for the data
            return
        steps, apart = _per_dimension(stride, kernel), _per_dimension(dilation, kernel)
        if isinstance(padding, str):
            missing = [d * (k - 1) if padding == "same" else 0 for d, k in zip(apart, kernel, strict=True)]
            sides = tuple((both // 2, both - both // 2) for both in missing)
        else:
            sides = tuple((p, p) for p in _per_dimension(padding, kernel))
        inputs = input if self.keep_graph else input.detach()
        self._record(ConvolutionCall(name, roles, inputs, kernel, steps, sides, apart, groups), inputs, z, [input])

    def _place(self, tensor: Tensor) -> tuple[Tensor, int, bool] | None:
        """Finds the parameter that a tensor is a view of, with the row offset and whether it is transposed."""
        if id(tensor) in self.names:
            return tensor, 0, False
        root = tensor._base
        if root is None or id(root) not in self.names or root.ndim != tensor.ndim:
            return None
        start = tensor.storage_offset() - root.storage_offset()
        if tensor.shape[1:] == root.shape[1:] and tensor.stride() == root.stride():
            return None if start % root.stride(0) else (root, int(start // root.stride(0)), False)
        turned = tensor.ndim == 2 and tensor.shape == root.shape[::-1] and tensor.stride() == root.stride()[::-1]
        return (root, 0, True) if turned and start == 0 else None

    def _embedding(self, given: Mapping[str, Any], result: Tensor) -> None:
        index, weight, padding_idx = given["input"], given["weight"], given.get("padding_idx")
        if id(weight) not in self.names or given.get("max_norm") is not None:
            return
        padding = padding_idx if padding_idx is None or padding_idx >= 0 else padding_idx + len(weight)
        name = self.names[id(weight)]
        call = TableCall("F.embedding", {name: "weight"}, index, len(weight), padding)
        self._record(call, index, result, [])
        self._operands[id(result)] = Operand(result, result, name, call)

    # Tensors without a batch dimension, up to the sum or product in which they meet the data.

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        given = (*args, *kwargs.values())
        operand = next((self._operands[id(value)] for value in given if id(value) in self._operands), None)
        if operand is None:
            return
        tensors = _tensors(given)
        if name in _EXPANSIONS and operand.value is tensors[0] and _adds_dimension(tensors[0], result):
            self._spread("expanded", operand, result, [])
        elif len(tensors) == 1:
            for part in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(part, Tensor) and part.requires_grad and id(part) not in self._operands:
                    self._operands[id(part)] = Operand(part, operand.root, operand.name, operand.table)
        elif len(args) == len(tensors) == 2 and not kwargs and isinstance(result, Tensor):
            left, right = tensors
            for value, other, sign in ((left, right, 1.0), (right, left, _SUMS.get(name, 1.0))):
                operand = self._operands.get(id(value))
                if operand is None or value is result:
                    continue
                if name in _SUMS:
                    self._spread("sum with all data", operand, result, [other], sign)
                elif name in _PRODUCTS:
                    factor = other if self.keep_graph else other.detach()
                    self._spread("scale", operand, result, [other], factor=factor)

    def _spread(
        self, name: str, operand: Operand, result: Tensor, data: list[Tensor], sign: float = 1.0,
        factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        call = SpreadCall(name, {operand.name: "operand"}, operand, result.shape, factor, sign, self.keep_graph)
        self._record(call, torch.empty((*result.shape[:1], 0), device=result.device), result, data)

    def _record(
        self, call: FunctionCall, x: Tensor, z: Tensor, data: list[Tensor], nodes: Sequence[Any] = (),
        steps: Span | None = None,
    ) -> None:  # fmt: skip
        if z.requires_grad:
            fed, edge = tuple(tensor.grad_fn for tensor in data), get_gradient_edge(z)
            self.calls.append(LayerCall(call, x, edge, z.shape, fed, nodes=tuple(nodes) or (edge.node,), steps=steps))


def _per_dimension(setting: int | Sequence[int], kernel: tuple[int, ...]) -> tuple[int, ...]:
    values = (setting,) if isinstance(setting, int) else tuple(setting)
    return values * len(kernel) if len(values) == 1 else values
