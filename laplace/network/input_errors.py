"""Errors of a network that cannot be run on inputs: the layer that refused them, what it takes and what it was given.

Nothing is looked at before a call has failed. Then the traceback tells in which layer it did and by which operation;
shapes, dtypes and devices tell why. Errors that a user's own code raises pass as they are.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.arguments import came_from_inside
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.memory import ran_out
from laplace.errors import InvalidInputs, InvalidType, LaplaceError
from laplace.network.model_guard import private_copy

_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
"""What PyTorch raises for inputs that a layer does not take."""

_TARGETS = ("labels", "label", "y", "target", "targets")
"""Keys that are not likely to hold inputs."""

_RAISES = re.compile(r"^\s*([^#]*[:;]\s*)?(raise|assert)\b")
_LOOKUP = re.compile(r"""\[\s*["']""")
"""Code that raises an error of its own, and that asks for a part by its name: `x["name"]`."""

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_CASTS = {torch.float16: "half()", torch.bfloat16: "bfloat16()", torch.float32: "float()", torch.float64: "double()"}
_SIZE = "Give data of the size on which the network was trained, with the batch first."


def call_with_context(model: nn.Module, forward_fn: ForwardFn | None, x: Inputs) -> Any:
    """Output of a model on inputs; `forward_fn` is how to call it, None for `laplace.core.batch.call`."""
    try:
        return (forward_fn or batches.call)(model, x)
    except _FAILURES as error:
        if isinstance(error, LaplaceError) or ran_out(error):
            raise
        if forward_fn is not None and isinstance(error, TypeError) and not came_from_inside(error):
            raise InvalidType(
                f"forward_fn cannot be called with the model and the inputs ({error}); give forward_fn=lambda model, "
                "x: model(x), for example."
            ) from error
        reason = _reason(error, model, x)
        if reason is None:
            raise
        raise InvalidInputs(reason) from error


@contextmanager
def noticing_swap(model: nn.Module, forward_fn: ForwardFn | None, y: Tensor) -> Iterator[None]:
    """A block that runs a model on inputs, whose `InvalidInputs` says if the network takes the targets y instead."""
    try:
        yield
    except InvalidInputs as error:
        try:
            with private_copy(model, forward_fn) as own, torch.no_grad():
                output = (forward_fn or batches.call)(own, y)
        except (*_FAILURES, LookupError, AttributeError) as second:
            if ran_out(second):
                raise
            output = None
        if not isinstance(output, Tensor):
            raise
        raise InvalidInputs(
            f"{error} But it takes the targets, {describe(y)}: batches are (x, y), not (y, x)."
        ) from error.__cause__


def _reason(error: Exception, model: nn.Module, x: Inputs) -> str | None:
    """Words for inputs that explain an error; None for one that a user's own code raised, or that they do not."""
    layer, given, last = _place(error)
    theirs = last is not None and _module(last).startswith("torch.")
    if last is None or (not theirs and _RAISES.search(_source(last) or "raise")):
        return None
    if layer is not None and not (theirs and type(layer).__module__.startswith("torch.")):
        layer = None
    called = _module(last) == "torch.nn.modules.module" and last.tb_frame.f_locals.get("self") is model
    if isinstance(error, TypeError) and (called or (layer is not None and not isinstance(given, Tensor))):
        return _of_call(error, model, x)
    if layer is not None:
        names = {id(module): name for name, module in model.named_modules()}
        named = f"layer {names[id(layer)]!r}" if names.get(id(layer)) else "layer"
        extra = "" if list(layer.children()) else layer.extra_repr()
        shown = f", was given {_shown(given)}" if isinstance(given, Tensor) else ""
        words = _of_dtype(model, x, layer, given) or _of_layer(layer, given)
        if words is None:
            return None
        refusing = f"its {named}, {type(layer).__name__}({extra}){shown}"
        return f"the inputs, {describe(x)}, do not fit the network: {refusing}. {words}"
    if isinstance(x, Tensor) and isinstance(error, (TypeError, IndexError)) and _LOOKUP.search(_source(last)):
        return (
            f"the inputs, {describe(x)}, are a tensor, of which the network or forward_fn takes a part that it has not "
            f"({error}). Give inputs in the form of the training data, e.g. a mapping, la({{'x': x}})."
        )
    if isinstance(error, TypeError):
        return None
    words = _of_dtype(model, x, None, None) or f"{error}. {_SIZE}"
    return f"the inputs, {describe(x)}, do not fit the network. {words}"


def _place(error: Exception) -> tuple[nn.Module | None, Any, TracebackType | None]:
    """The innermost module in whose `forward` a call failed, its first argument, and the last place in foreign code.

    Without the last under a transformation (vmap, say), where operations fail that inputs do not explain.
    """
    layer: nn.Module | None = None
    given: Any = None
    last: TracebackType | None = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        # Of no other frame: Python keeps the locals that it was asked for, and among those of ours is the error itself.
        own = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(own, nn.Module):
            names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
            layer, given = own, frame.f_locals.get(names[0]) if names else None
        if _module(trace).startswith("torch._functorch"):
            return layer, given, None
        last, trace = last if _module(trace).partition(".")[0] == _LIBRARY else trace, trace.tb_next
    return layer, given, last


_LIBRARY = __name__.partition(".")[0]


def _module(trace: TracebackType) -> str:
    return trace.tb_frame.f_globals.get("__name__", "")


def _source(trace: TracebackType) -> str:
    """The line of code that failed, "" where it is not known."""
    return linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)


def _of_dtype(model: nn.Module, x: Inputs, layer: nn.Module | None, given: Any) -> str | None:
    """The fault of inputs whose dtype is not the network's; None where two layers of its own differ."""
    if isinstance(layer, _TABLES):
        is_float = isinstance(given, Tensor) and given.is_floating_point()
        return "Indices are integers: give x.long()." if is_float else None
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if own is None:
        return None
    known = {tensor.dtype for tensor in batches.tensors(x)}
    wrong = (known & {given.dtype} if isinstance(given, Tensor) else known) - {own}
    if layer is None and any(isinstance(module, _TABLES) for module in model.modules()):
        wrong = {dtype for dtype in wrong if dtype.is_floating_point}  # integers are words there
    if not wrong:
        return None
    casts = [f", or convert the network once, before fit, by model.{_CASTS[dtype]}" for dtype in wrong & _CASTS.keys()]
    dtypes = " and ".join(sorted(map(str, wrong)))
    cast = _CASTS.get(own, f"to({own})")
    return f"The inputs are of dtype {dtypes}, the network of {own}: give x.{cast}{''.join(casts[:1])}."


def _of_layer(layer: nn.Module, given: Any) -> str | None:
    """What a layer takes; None where it was given that, or numbers of another dtype or device by the layer before."""
    if isinstance(layer, _TABLES):
        return f"It takes indices from 0 to {layer.num_embeddings - 1}: another vocabulary than the network's was used."
    weight = next(layer.parameters(recurse=False), None)
    if (
        isinstance(given, Tensor)
        and weight is not None
        and (given.dtype, given.device) != (weight.dtype, weight.device)
    ):
        return None
    if isinstance(layer, nn.Linear):
        if isinstance(given, Tensor) and given.ndim and given.shape[-1] == layer.in_features:
            return None
        return f"It takes [B, …, {layer.in_features}]. {_SIZE}"
    channels = getattr(layer, "in_channels", None)
    if channels is None or not isinstance(given, Tensor) or (given.ndim > 1 and given.shape[1] == channels):
        return _SIZE
    return (
        f"It takes [B, {channels}, …], channels after the batch: of channels last give x.movedim(-1, 1), of a single "
        "datum x.unsqueeze(0)."
    )


def _of_call(error: Exception, model: nn.Module, x: Inputs) -> str:
    """The fault of inputs whose parts are not what the network's `forward` takes."""
    parameters = ", ".join(inspect.signature(model.forward).parameters)
    fault = f"the inputs, {describe(x)}, are not what {type(model).__name__}.forward({parameters}) takes"
    entries = batches.entries(x)
    if entries:
        listed = sorted(key for key, value in entries.items() if isinstance(value, list | tuple))
        if listed and not batches.tensors(x):
            return f"the inputs under {listed} are lists: give tensors, of a tokenizer by return_tensors='pt'."
        key = next((key for key in entries if key not in _TARGETS), next(iter(entries)))
        return f"{fault}: say what it takes of them, e.g. forward_fn=lambda model, x: model(x[{key!r}])."
    if not isinstance(x, Tensor | tuple | list):
        return (
            f"{fault} ({error}): give a tensor (see torch.as_tensor), a tuple or a mapping, or say by "
            "forward_fn=lambda model, x: model(...) what it takes of them."
        )
    return (
        f"{fault} ({error}). Batches are (x, y), or (x1, …, y), whose inputs are spread; predictions take inputs "
        "alone, la(x); anything else is said by forward_fn=lambda model, x: model(...)."
    )


def describe(x: Inputs) -> str:
    """Shapes and dtypes of inputs."""
    if isinstance(x, Tensor):
        return _shown(x)
    if batches.are_graphs(x):
        return f"a batch of {x.num_graphs} graphs"
    keys = batches.keys(x)
    if keys is None and not isinstance(x, tuple | list):
        return f"of type {type(x).__name__}"
    return f"{len(x)} parts" if keys is None else f"a mapping with keys {keys}"


def _shown(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
