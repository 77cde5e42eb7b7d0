"""Reasons why a network cannot be run on inputs: the layer that refused them, what it was given, and what to do.

Nothing is looked at before a call has failed; then the traceback tells in which layer of PyTorch it did. Errors that a
user's own code raises, and those that the inputs do not explain, pass as they are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.memory import ran_out
from laplace.errors import InvalidInputs, InvalidType, LaplaceError
from laplace.network.model_guard import preserve_model

_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
"""What PyTorch raises for inputs that a layer does not take."""

_OF_DTYPES = re.compile(r"dtype|scalar type|Input type|not implemented for")
_OF_SHAPES = re.compile(r"shape|size|dimension|channels|elements|\b[1-5]D\b")
"""Words of PyTorch's layers about what they are given."""

_OF_PARTS = re.compile(r"invalid data type 'str'|too many indices for tensor")
"""What PyTorch says of a tensor that is indexed by a name, depending on the name's length."""

_TARGETS = ("labels", "label", "y", "target", "targets")
"""Keys that are not likely to hold inputs."""

_OF_OPERANDS = re.compile(r"shapes cannot be multiplied|size mismatch|must match the size|invalid for input of size")
"""Words of its operations, which a user's code is not likely to use."""


def called(model: nn.Module, forward_fn: ForwardFn | None, x: Inputs) -> Any:
    """Output of a model on inputs.

    Args:
        model: The network.
        forward_fn: How to call it; None for the default of `laplace.core.batch.call`.
        x: Inputs.

    Raises:
        InvalidInputs: They do not fit the network; the cause is PyTorch's own error.
    """
    try:
        return (forward_fn or batches.call)(model, x)
    except _FAILURES as error:
        if isinstance(error, LaplaceError) or ran_out(error):
            raise
        trace = error.__traceback__
        if forward_fn is not None and isinstance(error, TypeError) and trace is not None and trace.tb_next is None:
            raise InvalidType(
                f"forward_fn cannot be called with the model and the inputs ({error}); give forward_fn=lambda model, "
                "x: model(x), for example."
            ) from error
        reason = _misfit(error, model, x)
        if reason is None:
            raise
        raise InvalidInputs(reason) from error


@contextmanager
def noticing_swap(model: nn.Module, forward_fn: ForwardFn | None, y: Tensor) -> Iterator[None]:
    """A block that runs a model on inputs, in which targets given for inputs are noticed.

    Args:
        model: The network.
        forward_fn: How to call it; None for the default.
        y: The targets of these inputs.

    Raises:
        InvalidInputs: The block raised one; the message says if the network takes the targets instead.
    """
    try:
        yield
    except InvalidInputs as error:
        try:
            with preserve_model(model), torch.no_grad():
                output = (forward_fn or batches.call)(model, y)
        except (*_FAILURES, LookupError, AttributeError) as second:
            if ran_out(second):
                raise
            output = None
        if not isinstance(output, Tensor):
            raise
        raise InvalidInputs(
            f"{error} But it takes the targets, {describe(y)}: batches are (x, y), not (y, x)."
        ) from error.__cause__


def _misfit(error: Exception, model: nn.Module, x: Inputs) -> str | None:
    """The fault of the inputs, or None if nothing that is known of them explains the error."""
    layer, given = _refusing(error)
    if layer is None and isinstance(x, Tensor) and _OF_PARTS.search(str(error)):
        return (
            f"the inputs, {describe(x)}, are a tensor, of which the network or forward_fn takes a part that it has not "
            f"({error}). Give inputs in the form of the training data, e.g. a mapping, la({{'x': x}})."
        )
    if layer is None:
        return _of_operation(error, model, x) or _of_call(error, model, x, layer)
    if isinstance(error, TypeError) and not isinstance(given, Tensor):
        return _of_call(error, model, x, layer)
    words = _of_index(error, layer) or _of_dtype(error, model, x, layer, given) or _of_shape(error, layer, given)
    if words is None:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    named = f"layer {names[id(layer)]!r}" if names.get(id(layer)) else "layer"
    shown = f", was given {_shown(given)}" if isinstance(given, Tensor) else ""
    extra = layer.extra_repr() if not list(layer.children()) else ""
    return (
        f"the inputs, {describe(x)}, do not fit the network: its {named}, {type(layer).__name__}({extra}){shown}. "
        f"{words}"
    )


def _refusing(error: Exception) -> tuple[nn.Module | None, Any]:
    """The module of PyTorch in whose own forward pass the call failed, and its first argument; None for others."""
    layer: nn.Module | None = None
    given: Any = None
    where = ""
    for frame, _ in walk_tb(error.__traceback__):
        own, where = frame.f_locals.get("self"), frame.f_globals.get("__name__", "")
        if isinstance(own, nn.Module) and frame.f_code.co_name == "forward":
            names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
            layer, given = own, frame.f_locals.get(names[0]) if names else None
    theirs = layer is not None and type(layer).__module__.startswith("torch.") and where.startswith("torch.")
    return (layer, given) if theirs else (None, None)


def _of_operation(error: Exception, model: nn.Module, x: Inputs) -> str | None:
    """The fault where an operation outside of PyTorch's own layers failed."""
    words = _of_dtype(error, model, x, None, None)
    if words is None and _OF_OPERANDS.search(str(error)):
        words = f"{error}. {_SIZE}"
    return None if words is None else f"the inputs, {describe(x)}, do not fit the network. {words}"


def _of_dtype(error: Exception, model: nn.Module, x: Inputs, layer: nn.Module | None, given: Any) -> str | None:
    """The fault of inputs whose dtype is not the network's; None where two layers of its own differ."""
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if own is None or not _OF_DTYPES.search(str(error)):
        return None
    if isinstance(layer, _TABLES):
        return "Indices are integers: give x.long()."
    reached = {given.dtype} if isinstance(given, Tensor) else {tensor.dtype for tensor in batches.tensors(x)}
    wrong = (reached & {tensor.dtype for tensor in batches.tensors(x)}) - {own}
    if layer is None and any(isinstance(module, _TABLES) for module in model.modules()):
        wrong = {dtype for dtype in wrong if dtype.is_floating_point}  # integers are words there
    if not wrong:
        return None
    casts = [f", or convert the network once, before fit, by model.{_CASTS[dtype]}" for dtype in wrong & _CASTS.keys()]
    dtypes = " and ".join(sorted(map(str, wrong)))
    cast = _CASTS.get(own, f"to({own})")
    return f"The inputs are of dtype {dtypes}, the network of {own}: give x.{cast}{''.join(casts[:1])}."


_TABLES = (nn.Embedding, nn.EmbeddingBag)

_CASTS = {
    torch.float16: "half()",
    torch.bfloat16: "bfloat16()",
    torch.float32: "float()",
    torch.float64: "double()",
}


def _of_index(error: Exception, layer: nn.Module) -> str | None:
    """The fault of an index that is out of the range of an embedding."""
    if isinstance(error, IndexError) and isinstance(layer, _TABLES):
        return f"It takes indices from 0 to {layer.num_embeddings - 1}: another vocabulary than the network's was used."
    return None


_SIZE = "Give data of the size on which the network was trained, with the batch first."


def _of_shape(error: Exception, layer: nn.Module, given: Any) -> str | None:
    """The shape that a layer takes, where PyTorch's error is about shapes."""
    if not _OF_SHAPES.search(str(error)) or _OF_DTYPES.search(str(error)):
        return None
    if isinstance(layer, nn.Linear):
        return f"It takes [B, …, {layer.in_features}]. {_SIZE}"
    channels = getattr(layer, "in_channels", None)
    if channels is None or not isinstance(given, Tensor) or (given.ndim > 1 and given.shape[1] == channels):
        return _SIZE
    return (
        f"It takes [B, {channels}, …], channels after the batch: of channels last give x.movedim(-1, 1), of a single "
        "datum x.unsqueeze(0)."
    )


def _of_call(error: Exception, model: nn.Module, x: Inputs, layer: nn.Module | None) -> str | None:
    """The fault of inputs whose parts are not what the network's `forward` takes."""
    name = f"{getattr(model.forward, '__qualname__', 'forward')}()"
    if not isinstance(error, TypeError) or (layer is None and name not in str(error)):
        return None
    parameters = ", ".join(inspect.signature(model.forward).parameters)
    fault = f"the inputs, {describe(x)}, are not what {type(model).__name__}.forward({parameters}) takes"
    entries = batches.entries(x)
    if entries:
        listed = sorted(key for key, value in entries.items() if isinstance(value, list | tuple))
        if listed and not batches.tensors(x):
            return f"the inputs under {listed} are lists: give tensors, of a tokenizer by return_tensors='pt'."
        key = next((key for key in entries if key not in _TARGETS), next(iter(entries)))
        return f"{fault}: say what it takes of them, e.g. forward_fn=lambda model, x: model(x[{key!r}])."
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
    return f"{len(x)} parts" if keys is None else f"a mapping with keys {keys}"


def _shown(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
