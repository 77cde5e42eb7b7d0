"""The user's model during a call: whatever the call does, the model is afterwards as it was before."""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import filterfalse
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from laplace.errors import InvalidArgument, InvalidType, UnsupportedError

_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_GUARD = threading.Lock()
_FUSED_GUARD = threading.Lock()
_FUSED: list[bool] = []
"""What the switch of PyTorch's fused encoder layers was set to before the calls that are under way."""


def model_lock(model: nn.Module) -> threading.RLock:
    """The lock of a model, for every reader of its parameters: another thread may have put others in their place."""
    with _LOCKS_GUARD:
        return _LOCKS.get(model) or _LOCKS.setdefault(model, threading.RLock())


def require_module(model: nn.Module) -> nn.Module:
    """The model, if it is one, and its weights hold numbers."""
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module; {type(model).__name__} was given.")
    if isinstance(model, torch.jit.RecursiveScriptModule):
        raise InvalidType(
            "model is a ScriptModule of torch.jit.script, whose weights cannot be put in place of others; give the "
            "nn.Module that was scripted."
        )
    if not all(map(_holds_numbers, tensors_of(modules_of(model)))):  # which asks for no names
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _require_numbers(name, tensor)
    return model


def tensors_of(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers of these modules themselves."""
    for module in modules:
        for table in (module._parameters, module._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)


def _holds_numbers(tensor: Tensor) -> bool:
    """True if a tensor is initialised and on a device, and if it is trained, real."""
    if is_lazy(tensor) or tensor.is_meta:
        return False
    return not (tensor.is_complex() and tensor.requires_grad)


def _require_numbers(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise InvalidArgument(
            f"the model's {name!r} is not initialised (a lazy layer): run the network once, and train it, before."
        )
    if tensor.is_meta:
        raise InvalidArgument(
            f"the model's {name!r} is on the meta device, which holds no numbers: load the trained weights first, by "
            "model.load_state_dict(state, assign=True), or by model.to_empty(device='cpu') and load_state_dict(state); "
            "a model that was offloaded by device_map must be loaded whole."
        )
    if tensor.is_complex() and tensor.requires_grad:
        raise InvalidArgument(f"the model's {name!r} is complex; a posterior is over real weights: freeze it.")


def zero_like(model: nn.Module) -> Tensor:
    """Zero, on the device of a model and in its dtype, at least float32."""
    parameters = (tensor for module in modules_of(model) for tensor in module._parameters.values())
    parameter = next((tensor for tensor in parameters if tensor is not None), None)
    if parameter is None:
        return torch.zeros(())
    dtype = torch.promote_types(parameter.dtype, torch.float32) if parameter.is_floating_point() else None
    return torch.zeros((), device=parameter.device, dtype=dtype)


def unwrap(model: nn.Module) -> nn.Module:
    """The module behind `torch.compile` and data parallelism, on which hooks fire and torch.func works."""
    while True:
        parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        inner: nn.Module = getattr(model, "module" if parallel else "_orig_mod", model)
        if inner is model:
            return model
        model = inner


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The module and all below it, each once, in the order of `model.modules()`, of whose time it takes a fifth."""
    modules: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in modules:
            modules[id(module)] = module
            if children := module._modules:
                waiting.extend(reversed(children.values()))
    return list(modules.values())


def named_modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The same with their names, as `model.named_modules()` has them."""
    modules: dict[int, tuple[str, nn.Module]] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) not in modules:
            modules[id(module)] = name, module
            if children := module._modules:
                prefix = f"{name}." if name else ""
                waiting.extend((prefix + key, child) for key, child in reversed(children.items()) if child is not None)
    return list(modules.values())


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the length of a call; flags, attributes, buffers and the global random state are put back.

    A forward pass may write too (a counter, a stored activation, which would keep a graph alive), so attributes and
    buffers are put back along with the flags. Calls on one model are serialised by a lock, since hooks and
    substituted parameters live on the module while a forward pass runs.
    """
    with model_lock(model):
        state = _State(modules_of(model))
        try:
            with same_random_state(model), _one_network():
                state.evaluate()
                yield
        finally:
            state.restore()


@contextmanager
def _one_network() -> Iterator[None]:
    """Turns PyTorch's fused encoder layers off, which run without gradients only and give zeros where data are padded.

    With them a network would be one function where it is differentiated and another where it is not. The switch is one
    of the process: the first call in any thread turns it, the last one puts it back.
    """
    with _FUSED_GUARD:
        _FUSED.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _FUSED_GUARD:
            before = _FUSED[0]
            _FUSED.pop()
            if not _FUSED:
                torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def gradients_set_aside(model: nn.Module) -> Iterator[None]:
    """Takes the gradients off: a backward pass would add to them in place."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def flags_put_back(model: nn.Module) -> Iterator[None]:
    """Restores the train or eval flag of every module; for training loops, which may change everything else."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def hooks_put_back(model: nn.Module) -> Iterator[None]:
    """Takes off the hooks that foreign code registers, and puts back those that it removes."""
    tables = [value for module in model.modules() for name, value in vars(module).items() if name.endswith("_hooks")]
    contents = [(table, copy.copy(table)) for table in tables if isinstance(table, MutableMapping)]
    try:
        yield
    finally:
        for table, content in contents:
            table.clear()
            table.update(content)


_AUTOCAST = tuple(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


_AS_IT_IS = nullcontext()


def own_precision() -> AbstractContextManager[object]:
    """Turns the caller's `torch.autocast` off: sums of a curvature in half precision are not even positive.

    A network that enters autocast in its own forward pass still does.
    """
    kinds = [kind for kind in _AUTOCAST if torch.is_autocast_enabled(kind)]
    return _without_autocast(kinds) if kinds else _AS_IT_IS


@contextmanager
def _without_autocast(kinds: Sequence[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def autograd_mode() -> AbstractContextManager[object]:
    """Outside of the caller's inference mode, in which autograd does not work, and of the caller's autocast."""
    return _outside_of_inference() if torch.is_inference_mode_enabled() else own_precision()


@contextmanager
def _outside_of_inference() -> Iterator[None]:
    with torch.inference_mode(False), own_precision():
        yield


def generators_of(model: nn.Module) -> list[torch.Generator]:
    """The global generators of the CPU and of the model's devices."""
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    tensors = (p for module in modules_of(model) for p in module._parameters.values() if p is not None)
    devices = sorted({p.device.index for p in tensors if p.is_cuda})
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]


@contextmanager
def same_random_state(model: nn.Module) -> Iterator[None]:
    """Puts the global random state of the CPU and of the model's devices back, whatever is drawn in between."""
    generators = generators_of(model)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class _State:
    """State that modules must have after a call, their submodules apart.

    Args:
        modules: Each once.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = [(module, module.training, module.__dict__.copy()) for module in modules]
        self.contents = [
            (attributes[name], attributes[name].copy())
            for _, _, attributes in self.modules
            for name in filterfalse(_OWN.__contains__, attributes)  # most names, and no loop in Python
            if type(attributes[name]) in _CONTAINERS
        ]
        tables = ((module, module._buffers) for module in modules)
        self.buffers = [(module, dict(table.items()) if len(table) else {}) for module, table in tables]
        groups: dict[object, list[tuple[nn.Module, Tensor, int]]] = {}
        for module, buffers in self.buffers:
            for buffer in buffers.values():
                if _is_counted(buffer):
                    groups.setdefault(_form(buffer), []).append((module, buffer, buffer._version))
        with torch.no_grad():
            self.values = [(group, _copies([buffer for _, buffer, _ in group])) for group in groups.values()]

    def evaluate(self) -> None:
        """Turns the training mode off where it is on."""
        for module, training, _ in self.modules:
            if training:
                module.training = False

    def restore(self) -> None:
        """Puts attributes, flags and buffers back; buffers are written only if they were written to."""
        # A forward pass may turn the training mode on: batch norm writes then, which autograd does not count.
        written = [(buffer, copies[i]) for group, copies in self.values
                   for i, (module, buffer, version) in enumerate(group)
                   if buffer._version != version or module.training]  # fmt: skip
        for module, training, attributes in self.modules:
            own = module.__dict__
            own.update(attributes)
            if len(own) > len(attributes):
                for name in own.keys() - attributes.keys():
                    del own[name]
            if module.training != training:  # a class may compute it
                module.training = training
        for container, content in self.contents:
            _refill(container, content)
        for module, buffers in self.buffers:
            table = module._buffers
            if buffers or len(table):
                _put_back(table, buffers)
        with torch.no_grad():
            for buffer, value in written:
                buffer.copy_(value)


def _put_back(table: dict[str, Tensor | None], buffers: dict[str, Tensor | None]) -> None:
    """Gives a table of buffers, of a scripted module no dict, those that it had."""
    for name in table.keys() - buffers.keys():
        del table[name]
    for name, buffer in buffers.items():
        if name not in table or table[name] is not buffer:
            table[name] = buffer


def _is_counted(buffer: Tensor | None) -> TypeGuard[Tensor]:
    """True if autograd counts the writes to a buffer; inference tensors cannot be written to outside of their mode."""
    return buffer is not None and not buffer.is_inference()


def _form(buffer: Tensor) -> object:
    """Shape, dtype and device, by which buffers are copied together: of running statistics many are alike."""
    is_dense = type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_quantized
    return (buffer.shape, buffer.dtype, buffer.device) if is_dense else id(buffer)


def _copies(buffers: list[Tensor]) -> Sequence[Tensor] | Tensor:
    """Copies of buffers of one form, by one operation: on a GPU each takes as long as the copy of many."""
    return torch.stack(buffers) if len(buffers) > 1 else [buffers[0].clone()]


_OWN = frozenset(nn.Module().__dict__)
"""Attributes of every module: tables of its parameters, submodules and hooks."""

_CONTAINERS = frozenset({list, dict, set})


def _refill(container: Any, content: Any) -> None:
    """Gives a list, dict or set of the model the entries that it had."""
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


@contextmanager
def hooks_fire(model: nn.Module, *, required: bool = False) -> Iterator[None]:
    """Runs compiled submodules eagerly: compiled code ignores hooks that were added after compilation.

    PyTorch before 2.6 cannot: an error if that is `required`, where nothing else notices hooks that do not fire.
    """
    set_stance: Callable[[str], Any] | None = None
    if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in modules_of(model)):
        set_stance = getattr(torch.compiler, "set_stance", None)
        if set_stance is None and required:
            raise UnsupportedError(
                "derivatives of derivatives (enable_backprop=True, say) of a network with parts that torch.compile "
                "compiled need PyTorch 2.6 or newer, which can run these eagerly; or give the network as it was before."
            )
    with ExitStack() as stack:
        if set_stance is not None:
            stack.enter_context(set_stance("force_eager"))
        yield


# Activation checkpointing: parts of a network that run once more in every backward pass, as the network is then.
#
# `torch.utils.checkpoint` keeps no activations: where a backward pass asks for them, their part of the network runs
# again. It must find the network as it was in the forward pass, since tensors that require gradients decide what is
# saved. Of a reentrant checkpoint PyTorch gives no gradients of chosen tensors.

COMPUTED_AGAIN = "activations of this pass are to be computed once more"
"""The message of `disable_saved_tensors_hooks`, by which a pass is told that does not keep its activations."""

_OFF = (
    "switch activation checkpointing off for the calls of this library (model.gradient_checkpointing_disable() of "
    "transformers, model.set_grad_checkpointing(False) of timm)"
)

GRADIENTS_LATER = (
    "gradients through predictions (enable_backprop=True) of a network that checkpoints activations would be computed "
    f"when the network is no longer as it was: {_OFF}."
)
"""The message of a refusal of graphs that outlive the call in which activations can be computed once more."""


@contextmanager
def computable_again() -> Iterator[None]:
    """A block of backward passes, through checkpoints that allow it."""
    try:
        yield
    except RuntimeError as error:
        if "torch.utils.checkpoint" not in str(error):
            raise
        if "use_reentrant" in str(error):
            raise UnsupportedError(
                "the network checkpoints activations with use_reentrant=True, of which PyTorch gives no gradients of "
                f"chosen tensors. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or {_OFF}."
            ) from error
        raise UnsupportedError(
            "a part of the network that checkpoints activations does not run a second time as it did before: "
            f"{_OFF}. PyTorch says: {error}"
        ) from error


# Adapters of the package PEFT: small trained tensors beside frozen layers.


def has_adapters(model: Any) -> bool:
    """True if the network is a model of PEFT, or one of its layers is: nothing is imported to find out."""
    if "peft" not in sys.modules:  # which made the adapters, if there are any
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, PeftModel | BaseTunerLayer) for module in modules_of(model))


def are_idle(model: Any) -> bool:
    """True if no adapter of a model that has some takes part: all are merged into their layers, or switched off."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in modules_of(model) if isinstance(module, BaseTunerLayer)]
    return bool(layers) and all(layer.merged or layer.disable_adapters for layer in layers)
