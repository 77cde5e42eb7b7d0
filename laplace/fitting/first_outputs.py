"""What the outputs of one datum tell before data are summed: where the classes are, and an end in a sigmoid."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from laplace import batch as batches
from laplace.batch import ForwardFn, Inputs
from laplace.curvature.engine import detached
from laplace.lending import lent
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.logits import require_logits
from laplace.memory import ran_out
from laplace.positions import channel_of
from laplace.weights.discovery import hooks_fire
from laplace.weights.problem import Problem


def channels(model: nn.Module, forward_fn: ForwardFn | None, x: Inputs, y: Tensor) -> int | None:
    """The dimension of the classes as labels of positions say, 1 or −1; None where there are no such labels.

    Raises:
        InvalidData: The labels fit both.
    """
    if y.ndim < 2 or y.is_floating_point():
        return None
    call = forward_fn or batches.call
    with lent(model), torch.no_grad():
        f = _of_one(lambda some: batches.latent(call(model, some)), detached(x))
    return channel_of(f, y[: len(f)])


def require_no_sigmoid(problem: Problem, likelihood: Likelihood, x: Inputs) -> None:
    """Refuses a network that ends in a sigmoid under a likelihood that takes one; no values tell, only autograd's graph.

    Raises:
        InvalidData: It does.
    """
    if likelihood.activation != "sigmoid":
        return
    with lent(problem.module), hooks_fire(problem.module), torch.enable_grad():
        f = _of_one(lambda some: problem.run(problem.stand_ins(), some), detached(x))
    require_logits(likelihood, f, problem.dtype)


def _of_one(outputs: Callable[[Inputs], Tensor], x: Inputs) -> Tensor:
    """Outputs of the first datum, or of all data of a batch for a network that takes no single one."""
    rows = batches.tensors(x)
    n_data = rows[0].shape[0] if rows and rows[0].ndim else 1
    try:
        return outputs(batches.select(x, slice(0, 1), n_data))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if ran_out(error):
            raise
        return outputs(x)
