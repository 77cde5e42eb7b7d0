"""Finds the heads of a network: layers whose outputs reach the network's past no further layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.memory import ran_out
from laplace.errors import ApproximationWarning, UnsupportedError, warn
from laplace.network.model_guard import hooks_fire, named_modules_of, preserve_model, unwrap
from laplace.network.watch import FirstBatch
from laplace.weights.discovery import (
    LINEAR,
    find_last_layer,
    has_parameters,
    has_run_inside,
    last_to_run,
    require_linear,
)


def random_head(
    model: nn.Module, x: Inputs, forward_fn: ForwardFn | None = None, first: FirstBatch | None = None
) -> str:
    """Name of the layer that a last-layer posterior makes random.

    It is found by a pass of one datum, or of the data that `first` looks at; of the whole batch if the model does not
    take a part of it.

    Args:
        model: The network, left as it was found.
        x: Inputs of a batch.
        forward_fn: How to call the network; None for the default.
        first: What looks at the first batch of a fit, and is spared a pass of its own; None without a fit.

    Raises:
        InvalidArgument: No layer with parameters ran, or the last one is neither an `nn.Linear` nor a convolution.

    Warns:
        ApproximationWarning: There are several heads, or the features of a datum depend on its batch.
    """
    _check_trunk(model)
    rows = batches.tensors(x)
    n_data = rows[0].shape[0] if rows and rows[0].ndim else 1
    few, call = (batches.select(x, slice(0, 1), n_data), forward_fn) if first is None else first.early(x, n_data)
    seen = _seen(model, few, call)
    if seen is None or not isinstance(unwrap(model).get_submodule(seen[0]), LINEAR):  # the pass that says what is wrong
        few, last = _last_layer(model, few, x, forward_fn)
        seen = _seen(model, few, forward_fn) or (last, [last])  # of a network that autograd cannot follow as a whole
    return require_linear(model, _head(*seen))


def _last_layer(model: nn.Module, few: Inputs, x: Inputs, forward_fn: ForwardFn | None) -> tuple[Inputs, str]:
    """Name of the last layer to run on few data, or on the whole batch; and which of them it was."""
    try:
        return few, find_last_layer(model, few, forward_fn)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if ran_out(error):
            raise
        return x, find_last_layer(model, x, forward_fn)


def _check_trunk(model: nn.Module) -> None:
    """Warns where the features of a datum depend on its batch, which the head alone does not show."""
    coupled = [
        name
        for name, module in named_modules_of(model)
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.running_mean is None
    ]
    if coupled:
        warn(
            f"{coupled[0]!r} normalises by the batch at hand, since it has no running statistics: the features of a "
            "datum, and with them fits and predictions, depend on the data beside it. Use track_running_stats=True, "
            "or another norm.",
            ApproximationWarning,
        )


def _head(last: str, heads: list[str]) -> str:
    """Name of the head that a last-layer posterior is of: the last one to run that reaches the outputs.

    Args:
        last: Name of the last layer to run, which need not reach the outputs: an auxiliary head may run later.
        heads: Names of those that reach them.

    Warns:
        ApproximationWarning: There are others, whose share in the outputs is taken for certain.
    """
    name = heads[-1] if heads and last not in heads else last
    others = [head for head in heads if head != name]
    if others:
        warn(
            f"the network's outputs are put together from those of several layers, {_listed([*others, name])}: a last "
            f"layer is one of them, here {name!r}, and what {_listed(others)} adds has no variance. Use "
            "subset_of_weights='all', or 'subnetwork' with the indices that "
            f"ModuleNameSubnetMask(model, {_listed([*others, name])}) selects; last_layer_name={name!r} says that this "
            "layer alone is meant.",
            ApproximationWarning,
        )
    return name


def _listed(names: list[str]) -> str:
    return str(names) if len(names) <= 4 else f"[{', '.join(map(repr, names[:3]))}, … {names[-1]!r}]"


def _seen(model: nn.Module, x: Inputs, forward_fn: ForwardFn | None) -> tuple[str, list[str]] | None:
    """The last layer to run and the heads, of one pass; None where that fails, or no layer runs."""
    try:
        finished, heads = _watched(model, x, forward_fn)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if ran_out(error):
            raise
        return None
    last = last_to_run(finished)
    return None if last is None else (last, heads)


def find_heads(model: nn.Module, x: Inputs, forward_fn: ForwardFn | None = None) -> list[str]:
    """Names of the heads, in the order in which they ended.

    In one forward pass the output of every layer with parameters is cut off from what it was computed of; the outputs
    to which the network's has a gradient then are those of heads. Two of them are concatenated, added or otherwise
    combined without parameters.

    Args:
        model: The network, left as it was found.
        x: Inputs.
        forward_fn: How to call it; None for the default.

    Raises:
        UnsupportedError: A layer returns something other than tensors, tuples and lists.
        RuntimeError: Autograd's own, of outputs without a gradient.
    """
    return _watched(model, x, forward_fn)[1]


def _watched(model: nn.Module, x: Inputs, forward_fn: ForwardFn | None) -> tuple[list[str], list[str]]:
    """Names of the layers with parameters in the order in which their calls ended, and of the heads."""
    inner = unwrap(model)
    finished: list[str] = []
    cuts: list[tuple[str, Tensor]] = []

    def cut(name: str, module: nn.Module, args: object, output: Any) -> Any:
        finished.append(name)
        return output if has_run_inside(name, finished) else _cut(output, lambda leaf: cuts.append((name, leaf)))

    with ExitStack() as stack:
        stack.enter_context(preserve_model(inner))
        for name, module in named_modules_of(inner):
            if has_parameters(name, module):
                stack.callback(module.register_forward_hook(partial(cut, name)).remove)
        stack.enter_context(hooks_fire(inner))
        stack.enter_context(torch.enable_grad())
        f = batches.latent((forward_fn or batches.call)(inner, x))
        leaves = [leaf for _, leaf in cuts]
        reached = torch.autograd.grad(f.sum(), leaves, allow_unused=True) if leaves else ()
    names = [name for (name, _), gradient in zip(cuts, reached, strict=True) if gradient is not None]
    return finished, list(dict.fromkeys(names))


def _cut(output: Any, note: Callable[[Tensor], None]) -> Any:
    """The same numbers without their past."""
    if isinstance(output, Tensor):
        if not output.is_floating_point():
            return output
        leaf = output.detach().requires_grad_()
        note(leaf)
        return leaf.clone()  # that the network may write to
    if type(output) in (list, tuple):
        return type(output)(_cut(part, note) for part in output)
    if output is None:
        return None
    raise UnsupportedError(f"a layer returned {type(output).__name__}; heads are found behind tensors alone.")
