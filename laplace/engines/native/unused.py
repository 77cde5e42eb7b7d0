"""Tensors that autograd does not reach: the network does not use them, or hides from autograd that it does.

Under `torch.no_grad()`, behind `detach()` or a step function a tensor has no derivative although the outputs depend
on it. Its curvature would be zero and its posterior the prior, which is right of unused tensors alone. So where tensors
are not reached, which is rare, two forward passes say whether the outputs depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.memory import ran_out
from laplace.errors import ApproximationWarning, CurvatureError, warn
from laplace.network.model_guard import same_random_state
from laplace.weights.problem import Problem

_CHANGE = 1e-3
"""Change of the outputs, relative to the largest, above which they depend on a tensor: far above rounding."""


def check_unreached(problem: Problem, x: Inputs, unreached: list[str]) -> None:
    """Warns of tensors without a derivative on which the outputs depend all the same.

    Args:
        problem: The network and its random parameters.
        x: Inputs of B data.
        unreached: Random parameters that autograd does not reach.

    Raises:
        CurvatureError: There is no random parameter that autograd reaches.

    Warns:
        ApproximationWarning: There are some.
    """
    if not _depends(problem, x, unreached):
        return
    several = len(unreached) > 1
    named = f"{unreached[0]!r}" + (f" (and {len(unreached) - 1} more)" if several else "")
    what = (
        f"the network's outputs depend on {named}, of which autograd knows no derivative: its forward runs under "
        "torch.no_grad(), or detaches, or takes a step function of them, or checkpoints with use_reentrant=True. "
    )
    if len(unreached) == len(problem.slots):
        raise CurvatureError(f"{what}No random weight is left: let gradients through.")
    warn(
        f"{what}Their posterior is the prior. Let gradients through, or freeze them by requires_grad_(False), so that "
        "they are not random.",
        ApproximationWarning,
    )


def _depends(problem: Problem, x: Inputs, names: list[str]) -> bool:
    """True if the outputs change with tensors that are made larger; False where they cannot be."""
    tensors = problem.detached()
    moved = {name: 2 * tensors[name] + 1 for name in names}
    try:
        before, after = _outputs(problem, x, tensors), _outputs(problem, x, {**tensors, **moved})
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if ran_out(error):
            raise
        return False
    if before.shape != after.shape:
        return True
    change = (after - before).abs().max()
    return not bool(change <= _CHANGE * before.abs().max())


def _outputs(problem: Problem, x: Inputs, tensors: Mapping[str, Tensor]) -> Tensor:
    """Outputs with these tensors; random numbers are the same in every call."""
    with torch.no_grad(), same_random_state(problem.module):
        torch.manual_seed(0)
        return problem.run(tensors, x)
