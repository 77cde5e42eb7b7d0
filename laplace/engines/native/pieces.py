"""From captured uses and gradients to the block of one tensor: merged over uses, restricted to the selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.engines.native.layers import Reading, rule_for
from laplace.engines.native.uses import Call, Use
from laplace.errors import CurvatureError
from laplace.jacobian.blocks import Block
from laplace.weights.feature_extractor import reduce_features
from laplace.weights.problem import Problem


@dataclass(frozen=True)
class Term:
    """One use of a tensor: the n-th captured call, the attribute or argument that it is, the data's dimension."""

    use: int
    attribute: str
    reading: Reading


def block_of(
    problem: Problem,
    slot: int,
    terms: Sequence[Term],
    uses: Sequence[Use],
    gradients: Sequence[Tensor],
    n_data: int,
) -> Block:
    """The block of one slot.

    Args:
        problem: The network and its treated tensors.
        slot: Which tensor.
        terms: Its uses.
        uses: All captured uses.
        gradients: `[K, *output shape]` of every captured use.
        n_data: B.
    """
    blocks = [_of_use(problem, term, uses[term.use], gradients[term.use], n_data) for term in terms]
    block = blocks[0].add(blocks[1:]) if len(blocks) > 1 else blocks[0]
    selection, entries = problem.slots[slot].selection, problem.slots[slot].entries
    return block if selection is None or entries is None else block.select_entries(selection, entries)


def _of_use(problem: Problem, term: Term, use: Use, g: Tensor, n_data: int) -> Block:
    # A network may compute in fewer digits than its weights have.
    dtype = torch.promote_types(torch.promote_types(g.dtype, problem.dtype), torch.float32)
    if isinstance(use.by, Call):
        return use.by.block(term.attribute, g.to(dtype), n_data, term.reading)
    rule = rule_for(use.by)
    if rule is None:
        raise CurvatureError(f"no layer rule for {type(use.by).__name__}")
    x = use.x if not use.x.is_floating_point() else use.x.to(dtype)
    a = rule.activation(use.by, term.attribute, reduce_features(x, problem.reduction), n_data, term.reading)
    return rule.block(use.by, term.attribute, a, g.to(dtype), n_data, term.reading)
