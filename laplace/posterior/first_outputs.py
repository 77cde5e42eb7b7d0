"""What the outputs of one datum tell before data are summed: where the classes are, and an end in a sigmoid."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.memory import ran_out
from laplace.core.positions import channel_of, channels_last
from laplace.engines.engine import detached
from laplace.likelihoods.logits import require_logits
from laplace.network.misfits import called
from laplace.network.model_guard import lent
from laplace.weights.discovery import hooks_fire
from laplace.weights.problem import Problem

if TYPE_CHECKING:
    from laplace.posterior.weight_fit import WeightFit


def problem_of(la: WeightFit, x: Inputs, y: Tensor) -> Problem:
    """What backends see, with what only data tell: which layer runs last, and in which dimension the classes are.

    Args:
        la: The posterior, which takes over both.
        x: Inputs of the first batch.
        y: Its targets.

    Raises:
        InvalidData: Labels that fit two readings of the outputs, or a network that ends in a sigmoid under a
            likelihood that takes one of the outputs.
    """
    if not la.channels_known and y.ndim > 1 and not y.is_floating_point():
        model, call = la.weights.model, call_of(la)
        with lent(model), torch.no_grad():
            f = _of_one(lambda some: batches.latent(called(model, call, some)), detached(x))
        found = channel_of(f, y[: len(f)])
        if found is not None:
            set_channels(la, found)
    problem = la.weights.discover(x)
    if la.likelihood_object.activation == "sigmoid":
        with lent(problem.module), hooks_fire(problem.module), torch.enable_grad():
            f = _of_one(lambda some: problem.run(problem.stand_ins(), some), detached(x))
        require_logits(la.likelihood_object, f, problem.dtype)
    return problem


def call_of(la: WeightFit) -> ForwardFn:
    """How a posterior's network is called on inputs; its outputs are as it returns them."""
    return batches.caller(la.weights.model, la.forward_fn, la.dict_key_y) or batches.call


def set_channels(la: WeightFit, channel_dim: int) -> None:
    """Takes over where the outputs have their channels, which the posterior was not told."""
    la.channel_dim, la.channels_known = channel_dim, True
    la.weights.call_by(channels_last(batches.caller(la.weights.model, la.forward_fn, la.dict_key_y), channel_dim))
    la._backend = la._engine = None


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
