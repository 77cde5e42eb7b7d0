"""Calls that a forward pass records, of modules and functions with random parameters, and the blocks that they give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from laplace.engines.native.layers import BatchAxis, RoutedRows, rule_for
from laplace.errors import CurvatureError
from laplace.jacobian.blocks import Block
from laplace.weights.problem import Problem, reduce_features


class FunctionCall(ABC):
    """One call of a function of PyTorch with random parameters among its arguments, and the blocks that it gives them.

    Attributes:
        name: Name in the coverage report.
        roles: Which argument each tensor is, by the tensor's name.
    """

    name: str
    roles: Mapping[str, str]

    @property
    def whole(self) -> bool:
        """True if the tensors are used whole and as a linear layer uses them, so that the call may be a head."""
        return False

    @property
    def instead_of(self) -> FunctionCall | None:
        """The call whose output this one spreads over the data: both explain the same derivative."""
        return None

    @property
    def weight_alone(self) -> Tensor | None:
        """The tensor that was computed from the parameter alone before it meets the data here; mostly None."""
        return None

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that calls share for which one rule holds: the function, and which tensor is which argument."""
        return self.name, tuple(self.roles.items())

    @abstractmethod
    def positions(self, n_data: int) -> int:
        """Positions per datum in the leading dimensions, 0 if they cannot hold `n_data` data."""

    @abstractmethod
    def block(self, role: str, g: Tensor, n_data: int, axis: BatchAxis) -> Block:
        """The block from the gradients `[K, *shape of the output]`, at least float32."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a module or of a function: its first input and the place of its output in autograd's graph.

    The place is an edge of the graph and not the output tensor, so that a later in-place operation on the
    output does no harm and no copy is needed.

    Attributes:
        by: The module, or the call of a function.
        x: The first input.
        edge: Where the output's gradient is found.
        shape: The output's shape.
        fed: Nodes of the data that went in, which the call only reads.
        is_known: True if what runs between the two is PyTorch's, or that of the class that has the rule: not a method
            or a hook of the user's besides.
        nodes: Nodes of the graph that give its results: that of the output, or of all products that it stands for.
    """

    by: nn.Module | FunctionCall
    x: Tensor
    edge: GradientEdge
    shape: torch.Size
    fed: tuple[Any, ...] = ()
    is_known: bool = True
    nodes: tuple[Any, ...] = ()

    @property
    def weight_alone(self) -> Tensor | None:
        """That of the function's call."""
        return None if isinstance(self.by, nn.Module) else self.by.weight_alone

    @property
    def kind(self) -> object:
        """A key that calls share for which one rule holds: the module, or the kind of function call."""
        return id(self.by) if isinstance(self.by, nn.Module) else self.by.kind

    @property
    def module(self) -> nn.Module:
        """The module, where it is one.

        Raises:
            CurvatureError: A function was called.
        """
        if not isinstance(self.by, nn.Module):
            raise CurvatureError(f"{self.by.name} is no layer")
        return self.by


@dataclass(frozen=True)
class UseOfParameter:
    """One use of a tensor.

    Attributes:
        call: Index of the recorded call.
        attribute: Attribute of the module, or argument of the function, that the tensor is.
        axis: Dimension of the data.
    """

    call: int
    attribute: str
    axis: BatchAxis


Activations = dict[tuple[int, str, bool, torch.dtype], Any]
"""Parts of a forward pass that blocks need, as they were computed for the first cotangents.

By the use, whose axis is the leading one or not, and the dtype.
"""


def block_of(
    problem: Problem,
    slot: int,
    uses: Sequence[UseOfParameter],
    calls: Sequence[LayerCall],
    gradients: Mapping[int, Tensor] | Sequence[Tensor],
    n_data: int,
    dtype: torch.dtype,
    activations: Activations | None = None,
) -> Block:
    """The block of one slot.

    Args:
        problem: The network and its random parameters.
        slot: Which tensor.
        uses: Its uses.
        calls: All recorded calls.
        gradients: `[K, *output shape]` of the calls of these uses, by their numbers.
        n_data: B.
        dtype: That of the weights, at least float32.
        activations: What earlier cotangents of these calls needed, to which is added; None to keep nothing.
    """
    memory = {} if activations is None else activations
    blocks: list[Block] = []
    for use in uses:
        own = _of_use(problem, use, calls[use.call], gradients[use.call], n_data, dtype, memory)
        blocks.append(own.at_places(use.axis.present) if isinstance(use.axis, RoutedRows) else own)
    block = blocks[0].add(blocks[1:]) if len(blocks) > 1 else blocks[0]
    random = problem.slots[slot]
    if random.entries is not None:
        random = random.on(problem.device)
    selection, entries = random.selection, random.entries
    return block if selection is None or entries is None else block.select_entries(selection, entries)


def _of_use(
    problem: Problem,
    use: UseOfParameter,
    call: LayerCall,
    g: Tensor,
    n_data: int,
    dtype: torch.dtype,
    activations: Activations,
) -> Block:
    if g.dtype != dtype:  # a network may compute in fewer digits than its weights have
        dtype = torch.promote_types(g.dtype, dtype)
    if not isinstance(call.by, nn.Module):
        return call.by.block(use.attribute, g.to(dtype), n_data, use.axis)
    rule = rule_for(call.by)
    if rule is None:
        raise CurvatureError(f"no layer rule for {type(call.by).__name__}")
    key = use.call, use.attribute, use.axis is BatchAxis.LEADING, dtype
    if key not in activations:
        x = call.x if not call.x.is_floating_point() else call.x.to(dtype)
        x = reduce_features(x, problem.reduction)
        activations[key] = rule.activation(call.by, use.attribute, x, n_data, use.axis)
    return rule.block(call.by, use.attribute, activations[key], g.to(dtype), n_data, use.axis)
