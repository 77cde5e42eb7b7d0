"""Finds the last layer of a network by watching one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn

from laplace.core.batch import ForwardFn, Inputs
from laplace.errors import InvalidArgument
from laplace.network.misfits import called
from laplace.network.model_guard import hooks_fire, named_modules_of, preserve_model, unwrap

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules that can be a last layer."""


def find_last_layer(model: nn.Module, x: Inputs, forward_fn: ForwardFn | None = None) -> str:
    """Name of the last module with parameters that runs on `x`, past a trailing Flatten, Softmax, Dropout or Identity.

    A module counts if it holds parameters and none of its own submodules with parameters ran: a leaf, and also a
    module that reads its submodules' weights without calling them (`nn.MultiheadAttention`). So an attention layer
    at the end is reported instead of being overlooked in favour of an earlier `nn.Linear`.

    The model is run once in evaluation mode without gradients and left as it was found, also when it raises.

    Args:
        model: The network; the inner module of a compiled one is watched.
        x: Inputs, a tensor, a tuple or a mapping.
        forward_fn: How to call the model on inputs; None for the default of `laplace.core.batch.call`.

    Returns:
        Name for `unwrap(model).get_submodule`; `""` if the model itself is a linear layer.

    Raises:
        InvalidArgument: No such module ran, or the last one is neither `nn.Linear` nor a convolution.
        InvalidInputs: The model cannot be run on x.
    """
    inner = unwrap(model)
    watched = {name: module for name, module in named_modules_of(inner) if has_parameters(name, module)}
    finished = _watch(inner, watched, lambda: called(inner, forward_fn, x))
    last = last_to_run(finished)
    if last is None:
        raise InvalidArgument(
            f"no module with parameters was called by {type(inner).__name__}, so its last layer cannot be found; "
            "pass last_layer_name= with the name of an nn.Linear that the model calls."
        )
    return require_linear(inner, last)


def require_linear(model: nn.Module, name: str) -> str:
    """The first name of the `nn.Linear` of the model, or convolution (a linear layer on patches), that has this one.

    Raises:
        InvalidArgument: There is no module of this name, or it is of another type.
    """
    modules = dict(named_modules_of(unwrap(model)))
    if isinstance(modules.get(name), LINEAR):
        return name
    layer = dict(unwrap(model).named_modules(remove_duplicate=False)).get(name)
    if isinstance(layer, LINEAR):
        return next(first for first, module in modules.items() if module is layer)
    linear = [key for key, module in modules.items() if isinstance(module, LINEAR)]
    what = "not a module of this model" if layer is None else f"of type {type(layer).__name__}"
    remedy = f"Pass last_layer_name= with the name of one that the model calls last; it has {linear[-5:]}."
    if not linear:
        remedy = "The model has none: use subset_of_weights='all' or 'subnetwork'."
    raise InvalidArgument(f"the last layer {name!r} is {what}; it must be an nn.Linear or a convolution. {remedy}")


def has_parameters(name: str, module: nn.Module) -> bool:
    """True if a module of this name is a layer, or holds one."""
    # The modules inside a parametrised layer (weight norm) make its weight; they are not layers.
    if "parametrizations" in name.split("."):
        return False
    own = any(parameter is not None for parameter in module._parameters.values())
    return own or (len(module._modules) > 0 and any(True for _ in module.parameters()))


def last_to_run(finished: list[str]) -> str | None:
    """The last layer whose call ended, of those that hold no other that ran; None if there is none."""
    return next((name for name in reversed(finished) if not has_run_inside(name, finished)), None)


def has_run_inside(name: str, finished: list[str]) -> bool:
    """True if a call of one of a module's own submodules is among those that ended."""
    prefix = f"{name}." if name else ""
    return any(other != name and other.startswith(prefix) for other in finished)


def _watch(model: nn.Module, watched: dict[str, nn.Module], run: Callable[[], object]) -> list[str]:
    """Names of the watched modules in the order in which their calls ended; the hooks live for this call only."""
    finished: list[str] = []

    def note(name: str, *_: object) -> None:
        finished.append(name)

    with ExitStack() as stack:
        stack.enter_context(preserve_model(model))
        for name, module in watched.items():
            stack.callback(module.register_forward_hook(partial(note, name)).remove)
        stack.enter_context(hooks_fire(model))
        stack.enter_context(torch.no_grad())
        run()
    return finished
