"""Last layer and dimension of the classes, as the first outputs of a network tell them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.memory import ran_out
from laplace.core.positions import channel_of, channels_last
from laplace.engines.engine import detached
from laplace.errors import UnsupportedError
from laplace.likelihoods.logits import require_logits, warn_of_sigmoid
from laplace.network.misfits import called
from laplace.network.model_guard import autograd_mode, hooks_fire, preserve_model, same_random_state
from laplace.network.spread import require_whole
from laplace.network.witness import FirstBatch, Witness
from laplace.posterior.posterior import Posterior
from laplace.weights.problem import Problem


def discovered(posterior: Posterior, x: Inputs, y: Tensor, first: FirstBatch | None = None) -> Posterior:
    """The posterior with what only data tell: which layer runs last, and in which dimension the classes are.

    Args:
        posterior: Fitted or not.
        x: Inputs of the first batch.
        y: Its targets.
        first: What looks at the first batch of a fit; None without one.

    Raises:
        InvalidData: Labels that fit two readings of the outputs, or a network that ends in a sigmoid under a
            likelihood that takes one of the outputs.
        UnsupportedError: Random weights of several dtypes.
    """
    posterior = with_channels_of(posterior, x, y)
    problem = posterior.weights.discover(x, first)
    _require_one_dtype(posterior, problem)
    if posterior.likelihood.activation == "sigmoid" and problem.processes is None:
        require_logits(posterior.likelihood, _with_graph(problem, x), problem.dtype)
    return posterior.with_problem(problem)


def look_for_sigmoid(posterior: Posterior, witness: Witness | None) -> None:
    """Warns of a softmax of a sigmoid's outputs; only where those of the first data lie in (0, 1) is there a pass.

    Args:
        posterior: Fitted.
        witness: Data of the first batch with the outputs there, or None.
    """
    if witness is None or posterior.likelihood.activation != "softmax":
        return
    if bool((witness.outputs >= 0).all() & (witness.outputs <= 1).all()):
        with autograd_mode(), same_random_state(posterior.model):
            f = _with_graph(posterior.problem, witness.x)
        warn_of_sigmoid(posterior.likelihood, f)


def _with_graph(problem: Problem, x: Inputs) -> Tensor:
    """Outputs of the first datum, with the graph that leads to the random weights."""
    with preserve_model(problem.module), hooks_fire(problem.module), torch.enable_grad():
        return _of_one(lambda some: problem.run(problem.stand_ins(), some), detached(x))


def _require_one_dtype(posterior: Posterior, problem: Problem) -> None:
    """Refuses random weights of float32, or less, and of float64: a curvature has one dtype, as its prior has.

    Raises:
        UnsupportedError: There are both, or the random weights have another dtype than the first of the network.
    """
    random = ((slot.name, problem.tensor(slot.name)) for slot in problem.slots)
    first: dict[torch.dtype, str] = {}
    for name, tensor in (next(posterior.model.named_parameters()), *random):
        first.setdefault(torch.promote_types(tensor.dtype, torch.float32), f"{name!r} of {tensor.dtype}")
    if len(first) > 1:
        raise UnsupportedError(
            f"the network has weights of several dtypes: {' and '.join(first.values())}; a posterior has one. Cast the "
            "network, by model.double() or model.float(), and the inputs that it does not cast itself."
        )


def with_channels_of(posterior: Posterior, x: Inputs, y: Tensor) -> Posterior:
    """The posterior with the dimension of the channels, if it is unknown and labels of positions tell it.

    Args:
        posterior: Fitted or not.
        x: Inputs of a batch.
        y: Its targets.

    Raises:
        InvalidData: Labels that fit two readings of the outputs.
    """
    if posterior.choices.channel_dim is not None or y.ndim < 2 or y.is_floating_point():
        return posterior
    require_whole(posterior.model, "the classes would be found by a pass of one process (give channel_dim=)")
    call = call_of(posterior)
    with preserve_model(posterior.model), torch.no_grad():
        f = _of_one(lambda some: batches.latent(called(posterior.model, call, some)), detached(x))
    channel_dim = channel_of(f, y[: len(f)])
    return posterior if channel_dim is None else with_channels(posterior, channel_dim)


def informed(posterior: Posterior, channel_dim: int | None, layer: str | None) -> Posterior:
    """The posterior with what first outputs tell, as they were seen elsewhere.

    Args:
        posterior: Fitted or not.
        channel_dim: Dimension of the channels, if it is known.
        layer: Name of the last layer, where one is random.
    """
    if posterior.choices.channel_dim is None and channel_dim is not None:
        posterior = with_channels(posterior, channel_dim)
    problem = posterior.weights.problem if layer is None else posterior.weights.named(layer)
    return posterior if problem is None else posterior.with_problem(problem)


def with_channels(posterior: Posterior, channel_dim: int) -> Posterior:
    """The posterior of a network whose outputs have their channels in this dimension."""
    choices = posterior.choices
    call = batches.caller(posterior.model, choices.forward_fn, choices.dict_key_y)
    weights = posterior.weights.called_by(channels_last(call, channel_dim))
    return replace(posterior.with_choices(channel_dim=channel_dim), weights=weights)


def call_of(posterior: Posterior) -> ForwardFn:
    """The call of a posterior's network on inputs; its outputs are as it returns them."""
    choices = posterior.choices
    return batches.caller(posterior.model, choices.forward_fn, choices.dict_key_y) or batches.call


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
