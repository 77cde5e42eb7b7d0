"""From captured uses and gradients to the block of one tensor: merged over uses, restricted to the selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.engines.native.layer_calls import FunctionCall, LayerCall
from laplace.engines.native.layers import BatchAxis, rule_for
from laplace.errors import CurvatureError
from laplace.jacobian.blocks import Block
from laplace.weights.feature_extractor import reduce_features
from laplace.weights.problem import Problem


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


def block_of(
    problem: Problem,
    slot: int,
    uses: Sequence[UseOfParameter],
    calls: Sequence[LayerCall],
    gradients: Sequence[Tensor],
    n_data: int,
) -> Block:
    """The block of one slot.

    Args:
        problem: The network and its random parameters.
        slot: Which tensor.
        uses: Its uses.
        calls: All recorded calls.
        gradients: `[K, *output shape]` of every recorded call.
        n_data: B.
    """
    blocks = [_of_use(problem, use, calls[use.call], gradients[use.call], n_data) for use in uses]
    block = blocks[0].add(blocks[1:]) if len(blocks) > 1 else blocks[0]
    selection, entries = problem.slots[slot].selection, problem.slots[slot].entries
    return block if selection is None or entries is None else block.select_entries(selection, entries)


def _of_use(problem: Problem, use: UseOfParameter, call: LayerCall, g: Tensor, n_data: int) -> Block:
    # A network may compute in fewer digits than its weights have.
    dtype = torch.promote_types(torch.promote_types(g.dtype, problem.dtype), torch.float32)
    if isinstance(call.by, FunctionCall):
        return call.by.block(use.attribute, g.to(dtype), n_data, use.axis)
    rule = rule_for(call.by)
    if rule is None:
        raise CurvatureError(f"no layer rule for {type(call.by).__name__}")
    x = call.x if not call.x.is_floating_point() else call.x.to(dtype)
    a = rule.activation(call.by, use.attribute, reduce_features(x, problem.reduction), n_data, use.axis)
    return rule.block(call.by, use.attribute, a, g.to(dtype), n_data, use.axis)
