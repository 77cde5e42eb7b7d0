"""Finds the last layer of a network by watching one forward pass, and the heads whose outputs are the network's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.memory import ran_out
from laplace.errors import ApproximationWarning, InvalidArgument, UnsupportedError, warn
from laplace.network.input_errors import call_with_context
from laplace.network.model_guard import hooks_fire, private_copy, unwrap
from laplace.network.watch import DeterminismCheck

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Classes of modules that can be a last layer."""


def is_linear(module: nn.Module | None) -> bool:
    """True of an `nn.Linear`, a convolution (a linear layer on patches), and a module with the tensors of a linear one.

    Those are a weight `[C, D]`, with a bias `[C]` or none, and nothing else: `Linear` of PyTorch Geometric, for one.
    How its `forward` uses them is for a pass to say.
    """
    if module is None or isinstance(module, LINEAR):
        return module is not None
    own = {key: tensor for key, tensor in module.named_parameters() if tensor is not None}
    weight = own.get("weight")
    if weight is None or isinstance(module, _TABLES) or weight.ndim != 2 or own.keys() - {"weight", "bias"}:
        return False
    return "bias" not in own or own["bias"].shape == weight.shape[:1]


_TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Modules whose only tensor is a matrix that they read rows of."""


def require_linear(model: nn.Module, name: str) -> str:
    """The first name of the linear layer of the model that has this one, see `is_linear`.

    Args:
        model: The network.
        name: One of the layer's names.

    Raises:
        InvalidArgument: There is no module of this name, or it is of another type.
    """
    modules = dict(unwrap(model).named_modules())
    if is_linear(modules.get(name)):
        return name
    layer = dict(unwrap(model).named_modules(remove_duplicate=False)).get(name)
    if is_linear(layer):
        return next(first for first, module in modules.items() if module is layer)
    what = "not a module of this model" if layer is None else f"of type {type(layer).__name__}"
    raise _not_linear(name, what, [key for key, m in modules.items() if is_linear(m)])


def _not_linear(name: str, what: str, linear: list[str], heads: list[str] | None = None) -> InvalidArgument:
    """The error of a last layer that is none; of `heads`, where they are known, those alone are advised."""
    named = linear if heads is None else [head for head in heads if head in linear and head != name]
    remedy = f"Pass last_layer_name= with the name of one that the model calls last; it has {named[-5:]}."
    if not named:
        none = "The model has none" if not linear else "None that last_layer_name= could name gives the outputs"
        remedy = f"{none}: use subset_of_weights='all' or 'subnetwork'."
    return InvalidArgument(
        f"the last layer {name!r} is {what}; it must be an nn.Linear, a convolution, or a module whose forward is "
        f"F.linear(x, weight, bias). {remedy}"
    )


# ----------------------------------------------------------------------------------------------------------------------
# The last layer to run
# ----------------------------------------------------------------------------------------------------------------------


def find_last_layer(model: nn.Module, x: Inputs, forward_fn: ForwardFn | None = None) -> str:
    """Name of the last module with parameters that runs on `x`, past a trailing Flatten, Softmax, Dropout or Identity.

    A module counts if it holds parameters and none of its own submodules with parameters ran: a leaf, and also a
    module that reads its submodules' weights without calling them (`nn.MultiheadAttention`). So an attention layer
    at the end is reported instead of being overlooked in favour of an earlier `nn.Linear`.

    The model is run once in evaluation mode without gradients and left as it was found, also when it raises.

    Returns:
        Name for `unwrap(model).get_submodule`; `""` if the model itself is a linear layer.

    Raises:
        InvalidArgument: No such module ran, or the last one is no linear layer.
        InvalidInputs: The model cannot be run on x.
    """
    inner = unwrap(model)
    finished: list[str] = []

    def note(name: str, *_: object) -> None:
        finished.append(name)

    with _hooked(inner, forward_fn, note) as own, torch.no_grad():
        call_with_context(own, forward_fn, x)
    last = _last_to_run(finished)
    if last is None:
        raise InvalidArgument(
            f"no module with parameters was called by {type(inner).__name__}, so its last layer cannot be found; "
            "pass last_layer_name= with the name of an nn.Linear that the model calls."
        )
    layer = inner.get_submodule(last)
    if isinstance(layer, LINEAR) or (is_linear(layer) and last in _products(inner, x, forward_fn)):
        return last
    linear = [name for name, module in inner.named_modules() if name != last and is_linear(module)]
    seen = _last_and_heads(inner, x, forward_fn)
    heads = None if seen is None else seen[1]
    if heads is not None and all(tensor.ndim < 2 for tensor in layer.parameters()):  # a norm of what ran before it
        heads += [name for name in finished[: finished.index(last)] if name in linear][-1:]
    raise _not_linear(last, f"of type {type(layer).__name__}", linear, heads)


def _products(model: nn.Module, x: Inputs, forward_fn: ForwardFn | None) -> set[str]:
    """Names of the layers whose output is `F.linear` of their own weight, in a pass on `x`."""
    names: set[str] = set()

    def note(name: str, module: nn.Module, args: object, output: Any) -> None:
        if calls.output is output and calls.weight is module._parameters.get("weight"):
            names.add(name)

    with _hooked(model, forward_fn, note) as own, torch.no_grad(), _LinearCalls() as calls:
        call_with_context(own, forward_fn, x)
    return names


class _LinearCalls(TorchFunctionMode):
    """Knows the weight and the output of the latest call of `F.linear`."""

    weight: Any = None
    output: Any = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is functional.linear:
            self.weight, self.output = args[1] if len(args) > 1 else (kwargs or {}).get("weight"), output
        return output


@contextmanager
def _hooked(model: nn.Module, forward_fn: ForwardFn | None, hook: Callable[..., Any]) -> Iterator[nn.Module]:
    """What to run for a model whose every layer calls `hook(name, module, args, output)`."""
    with private_copy(model, forward_fn) as own, ExitStack() as stack:
        for name, module in own.named_modules():
            if _has_parameters(name, module):
                stack.callback(module.register_forward_hook(partial(hook, name)).remove)
        stack.enter_context(hooks_fire(own))
        yield own


def _has_parameters(name: str, module: nn.Module) -> bool:
    # The modules inside a parametrised layer (weight norm) make its weight; they are not layers.
    if "parametrizations" in name.split("."):
        return False
    is_leaf = any(parameter is not None for parameter in module._parameters.values())
    return is_leaf or (len(module._modules) > 0 and any(True for _ in module.parameters()))


def _last_to_run(finished: list[str]) -> str | None:
    """The last layer whose call ended, of those that hold no other that ran; None if there is none."""
    return next((name for name in reversed(finished) if not _has_run_inside(name, finished)), None)


def _has_run_inside(name: str, finished: list[str]) -> bool:
    prefix = f"{name}." if name else ""
    return any(other != name and other.startswith(prefix) for other in finished)


# ----------------------------------------------------------------------------------------------------------------------
# Heads: layers whose outputs reach the network's past no further layer
# ----------------------------------------------------------------------------------------------------------------------


def random_head(
    model: nn.Module, x: Inputs, forward_fn: ForwardFn | None = None, first: DeterminismCheck | None = None
) -> str:
    """Name of the layer that a last-layer posterior makes random.

    It is found by a pass of one input, or of the inputs that `first` looks at, which is spared a pass of its own; of
    the whole batch if the model does not take a part of it.

    Raises:
        InvalidArgument: No layer with parameters ran, or the last one is no linear layer.

    Warns:
        ApproximationWarning: There are several heads, or the features of an input depend on its batch.
    """
    _warn_of_batch_statistics(model)
    n_data = batches.size(x, "")
    few, call = (batches.select(x, slice(0, 1), n_data), forward_fn) if first is None else first.reuse(x, n_data)
    seen = _last_and_heads(model, few, call)
    if seen is None or not isinstance(unwrap(model).get_submodule(seen[0]), LINEAR):  # the pass that says what is wrong
        try:
            last = find_last_layer(model, few, forward_fn)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if ran_out(error):
                raise
            few, last = x, find_last_layer(model, x, forward_fn)
        # Of a network that autograd cannot follow as a whole the last layer is all that is known.
        seen = _last_and_heads(model, few, forward_fn) or (last, [last])
    return require_linear(model, _head(*seen))


def _warn_of_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.running_mean is None:
            warn(
                f"{name!r} normalises by the batch at hand, since it has no running statistics: the features of a "
                "datum, and with them fits and predictions, depend on the data beside it. Use "
                "track_running_stats=True, or another norm.",
                ApproximationWarning,
            )
            return


def _head(last: str, heads: list[str]) -> str:
    """Name of the head that a last-layer posterior is of: the last one to run that reaches the outputs.

    The last layer to run need not reach the outputs: an auxiliary head may run later.
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


def _last_and_heads(model: nn.Module, x: Inputs, forward_fn: ForwardFn | None) -> tuple[str, list[str]] | None:
    """The last layer to run and the heads, of one pass; None where that fails, or no layer runs."""
    try:
        finished, heads = find_heads(model, x, forward_fn)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if ran_out(error):
            raise
        return None
    last = _last_to_run(finished)
    return None if last is None else (last, heads)


def find_heads(model: nn.Module, x: Inputs, forward_fn: ForwardFn | None = None) -> tuple[list[str], list[str]]:
    """Names of the layers with parameters, and of the heads among them, in the order in which their calls ended.

    In one forward pass the output of every layer with parameters is cut off from what it was computed of; the outputs
    to which the network's has a gradient then are those of heads. Two of them are concatenated, added or otherwise
    combined without parameters.

    Raises:
        UnsupportedError: A layer returns something other than tensors, tuples and lists.
        RuntimeError: Autograd's own, of outputs without a gradient.
    """
    inner = unwrap(model)
    finished: list[str] = []
    cuts: list[tuple[str, Tensor]] = []

    def cut(name: str, module: nn.Module, args: object, output: Any) -> Any:
        finished.append(name)
        return output if _has_run_inside(name, finished) else _cut(output, lambda leaf: cuts.append((name, leaf)))

    with _hooked(inner, forward_fn, cut) as own, torch.enable_grad():
        f = batches.latent((forward_fn or batches.call)(own, x))
        leaves = [leaf for _, leaf in cuts]
        reached = torch.autograd.grad(f.sum(), leaves, allow_unused=True) if leaves else ()
    names = [name for (name, _), gradient in zip(cuts, reached, strict=True) if gradient is not None]
    return finished, list(dict.fromkeys(names))


def _cut(output: Any, note: Callable[[Tensor], None]) -> Any:
    """The same numbers without their graph."""
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
