"""Operations of a traced graph that say more than they need to: which change nothing, and which fill a tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten: Any = torch.ops.aten

_VIEWS = frozenset({
    aten.detach.default, aten.alias.default, aten.slice.Tensor, aten.expand.default, aten.view.default,
    aten._unsafe_view.default, aten.cat.default, aten._to_copy.default,
})  # fmt: skip
"""Operations that change nothing where shape and dtype stay as they are."""

_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor})
"""Operations that change nothing where there is one part."""

_FILLS: dict[Any, Callable[..., Any]] = {
    packet: value
    for packets, value in {
        (aten.zeros, aten.new_zeros, aten.zeros_like): lambda *_: 0,
        (aten.ones, aten.new_ones, aten.ones_like): lambda *_: 1,
        (aten.full, aten.new_full, aten.full_like): lambda *args: args[1],
    }.items()
    for packet in packets
}
"""Operations that fill a tensor, and with what."""


SAME = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Operations by others that do the same, whatever the strides of a tensor, which compilers choose."""


def output(node: fx.Node) -> Tensor | None:
    """A tensor without numbers, of the shape and dtype that an operation gave; None where it is no single tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def changes_nothing(node: fx.Node) -> bool:
    """True if an operation gave the only tensor that it was given.

    A slice of all data, say, up to a number that this batch has not, or a split into parts of which this batch is one:
    batches of any size are not cut. The only part of such a split counts, too.
    """
    given = node.all_input_nodes
    if node.target is operator.getitem and given[0].target in _SPLITS:
        return changes_nothing(given[0])
    if node.target not in _VIEWS | _SPLITS or len(given) != 1:
        return False
    before, after = output(given[0]), _only_part(node) if node.target in _SPLITS else output(node)
    if before is None or after is None:
        return False
    return (before.shape, before.dtype, before.device) == (after.shape, after.dtype, after.device)


def _only_part(node: fx.Node) -> Tensor | None:
    """The tensor that a split gave, if it is one."""
    parts = node.meta.get("val", ())
    return parts[0] if len(parts) == 1 else None


def filled_with(node: fx.Node) -> Any:
    """The number that an operation fills a tensor with; None of others, or if the number is computed."""
    value = _FILLS.get(getattr(node.target, "overloadpacket", None), lambda *_: None)(*node.args)
    return value if isinstance(value, int | float) else None


def inverse_of(triangle: Tensor, upper: bool = False, unitriangular: bool = False) -> Tensor:
    """The inverse of a triangular matrix: by it a solve is a product, which every runtime has."""
    eye = torch.eye(len(triangle), dtype=triangle.dtype, device=triangle.device)
    return torch.linalg.solve_triangular(triangle, eye, upper=upper, unitriangular=unitriangular)


def is_random(node: fx.Node) -> bool:
    """True if an operation draws numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def reads_numbers(node: fx.Node) -> bool:
    """True if the shape that an operation gives depends on the numbers that it is given: the rows of a mask, say."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    given = [output(parent) for parent in node.all_input_nodes]
    masks = [value for value in given[1:] if value is None or value.dtype in (torch.bool, torch.uint8)]
    return node.target is not aten.index.Tensor or bool(masks)


def input_gradient(node: fx.Node, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """Arguments of the transposed convolution that is the backward pass to a convolution's input.

    None where an operation is another one, or gives the other gradients, too.
    """
    if node.target is not aten.convolution_backward.default or list(args[10]) != [True, False, False] or args[7]:
        return None
    gradient, before, kernel = (output(parent) for parent in node.all_input_nodes)
    if gradient is None or before is None or kernel is None:
        return None
    _, _, _, _, stride, padding, dilation, _, _, groups, _ = args
    missing = tuple(
        size - ((small - 1) * s - 2 * p + d * (k - 1) + 1)
        for size, small, k, s, p, d in zip(
            before.shape[2:], gradient.shape[2:], kernel.shape[2:], stride, padding, dilation, strict=True
        )
    )
    return args[0], args[2], None, stride, padding, dilation, True, missing, groups
