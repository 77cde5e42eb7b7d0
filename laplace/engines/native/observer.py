"""Watches PyTorch's functions during one forward pass, for the random parameters that no module's rule explains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from laplace.engines.native import attention, recurrent
from laplace.engines.native.calls import FunctionCall, LayerCall
from laplace.engines.native.function_calls import ConvolutionCall, LinearCall, Operand, SpreadCall, TableCall

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")

_ARGUMENTS = {
    "linear": ("input", "weight", "bias"),
    "addmm": ("input", "mat1", "mat2"),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "embedding": ("input", "weight", "padding_idx", "max_norm"),
} | dict.fromkeys(_CONVOLUTIONS, ("input", "weight", "bias", "stride", "padding", "dilation", "groups"))
"""Products, convolutions and tables, and what their arguments are called."""

_SUMS = {"add": 1.0, "add_": 1.0, "sub": -1.0, "sub_": -1.0}
_PRODUCTS = ("mul", "mul_")
_EXPANSIONS = ("expand", "expand_as", "broadcast_to", "repeat")


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among arguments, and in tuples and lists of them, as indices are."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += _tensors(value)
    return tensors


class Observer(TorchFunctionMode):
    """Records uses of random parameters by the function that is called, whichever module calls it.

    Attention and recurrent layers hide their projections inside one function; where these are random, they are run in
    its place by matrix products with the same values.

    Args:
        stand_ins: The random parameters of this pass, by name.
        keep_graph: True if inputs keep their graph.
    """

    def __init__(self, stand_ins: Mapping[str, Tensor], *, keep_graph: bool) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in stand_ins.items()}
        self.keep_graph = keep_graph
        self.calls: list[LayerCall] = []
        self._operands: dict[int, Operand] = {
            id(tensor): Operand(tensor, tensor, name) for name, tensor in stand_ins.items()
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in recurrent.CELLS and any(id(w) in self.names for w in recurrent.weights_of(args)):
            return recurrent.run(name, args, self.linear, self.recur)
        if name in recurrent.STEPS and not kwargs and any(id(w) in self.names for w in args):
            return recurrent.step(name, args, self.linear)
        if func is F.multi_head_attention_forward:
            outputs = attention.run(self.linear, self.names, *args, **kwargs)
            return func(*args, **kwargs) if outputs is None else outputs
        result = func(*args, **kwargs)
        if name in _ARGUMENTS:
            self._note(name, dict(zip(_ARGUMENTS[name], args, strict=False)) | kwargs, result)
        elif isinstance(result, (Tensor, tuple, list)) and not isinstance(result, torch.Size):
            self._follow(name, args, kwargs, result)
        return result

    # Products, convolutions and tables.

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`, of which the use is recorded if a tensor is random."""
        z = F.linear(x, weight, bias)
        self._product("F.linear", x, weight, bias, z)
        return z

    def _note(self, name: str, given: Mapping[str, Any], result: Any) -> None:
        """One of `_ARGUMENTS`; with options that they do not name, a product is left to the fallback."""
        known = all(argument in _ARGUMENTS[name] for argument in given)
        if name == "embedding":
            self._embedding(given, result)
        elif name in _CONVOLUTIONS:
            self._convolution(f"F.{name}", result, **given)
        elif known and name == "linear":
            self._product("F.linear", given["input"], given["weight"], given.get("bias"), result)
        elif known:
            *first, x, weight = (given[argument] for argument in _ARGUMENTS[name])
            self._product(f"torch.{name}", x, weight, first[0] if first else None, result, stored_by_input=True)

    def recur(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, products: Sequence[Tensor]
    ) -> None:
        """A product that is repeated step by step, from all its inputs `[B, T, I]` and zeros added to its outputs."""
        self._product("recurrence", x, weight, bias, offsets, steps=[product.grad_fn for product in products])

    def _product(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        z: Tensor,
        *,
        stored_by_input: bool = False,
        steps: Sequence[Any] = (),
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
        inputs = x if self.keep_graph else x.detach()
        if len({rows.get(role) for role in roles.values()}) < 2:
            together = [roles] if roles else []
        else:  # parts of different sizes share no output side
            together = [{tensor: role} for tensor, role in roles.items()]
        for some in together:
            self._record(LinearCall(name, some, inputs, rows, transposed), inputs, z, [x], steps)

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
        """The random parameter that this one is a view of, its first row there, and whether it is transposed."""
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

    # What has no data dimension, until it meets the data.

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        known = [self._operands[id(a)] for a in (*args, *kwargs.values()) if id(a) in self._operands]
        if not known:
            return
        tensors = _tensors((*args, *kwargs.values()))
        if name in _EXPANSIONS and self._expansion(known[0], tensors[0], result):
            return
        if len(tensors) == 1:
            for part in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(part, Tensor) and part.requires_grad and id(part) not in self._operands:
                    operand = known[0]
                    self._operands[id(part)] = Operand(part, operand.root, operand.name, operand.table)
        elif len(args) == len(tensors) == 2 and not kwargs and isinstance(result, Tensor):
            self._meeting(name, tensors[0], tensors[1], result)

    def _expansion(self, operand: Operand, value: Tensor, result: Any) -> bool:
        """O repeated along a first dimension that it does not have: that of the data, if the probe agrees."""
        repeated = operand.value is value and isinstance(result, Tensor) and result.shape[1:].numel() == value.numel()
        if repeated:
            self._spread("expanded", operand, result, [], 1.0)
        return repeated

    def _meeting(self, name: str, left: Tensor, right: Tensor, result: Tensor) -> None:
        for value, other, sign in ((left, right, 1.0), (right, left, _SUMS.get(name, 1.0))):
            operand = self._operands.get(id(value))
            if operand is None or value is result:
                continue
            if name in _SUMS:
                self._spread("sum with all data", operand, result, [other], sign)
            elif name in _PRODUCTS:
                factor = other if self.keep_graph else other.detach()
                self._spread("scale", operand, result, [other], 1.0, factor)

    def _spread(
        self,
        name: str,
        operand: Operand,
        result: Tensor,
        data: list[Tensor],
        sign: float,
        factor: Tensor | None = None,
    ) -> None:
        call = SpreadCall(name, {operand.name: "operand"}, operand, result.shape, factor, sign, self.keep_graph)
        leading = result.shape[:1]
        self._record(call, torch.empty((*leading, 0), device=result.device), result, data)

    def _record(self, call: FunctionCall, x: Tensor, z: Tensor, data: list[Tensor], steps: Sequence[Any] = ()) -> None:
        if z.requires_grad:
            fed, edge = tuple(tensor.grad_fn for tensor in data), get_gradient_edge(z)
            self.calls.append(LayerCall(call, x, edge, z.shape, fed, nodes=tuple(steps) or (edge.node,)))


def _per_dimension(setting: int | Sequence[int], kernel: tuple[int, ...]) -> tuple[int, ...]:
    """A setting of a convolution for every dimension of space."""
    values = (setting,) if isinstance(setting, int) else tuple(setting)
    return values * len(kernel) if len(values) == 1 else values
