"""The user's model during a call: whatever the call does, the model is afterwards as it was before."""

from __future__ import annotations

import copy
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from operator import is_, methodcaller
from typing import Any, TypeVar

import torch
import tqdm
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from laplace.errors import InvalidArgument, InvalidType, UnsupportedError
from laplace.network.apart import copied, copies_of, leads_to, needs_itself, original
from laplace.network.fsdp import has_sharded_weights
from laplace.network.plain import PlainNetwork, plain
from laplace.network.tree import HOOKS, attributes_in, modules_of, parameters_of, tensors_of

_LOCKS: weakref.WeakKeyDictionary[nn.Module, tuple[int, threading.RLock]] = weakref.WeakKeyDictionary()
T = TypeVar("T")

_GUARD = threading.RLock()  # which a signal handler may want that interrupts its holder
_FUSED: dict[object, bool] = {}
"""Calls that have turned the switch of PyTorch's fused encoder layers off, with what it was set to before."""


def model_lock(model: nn.Module) -> AbstractContextManager[object]:
    """For every reader of parameters of networks that run as they are: another thread may have put others there."""
    return _held(_locks_of(modules_of(model))) if _LOCKS else AS_IT_IS


def _locks_of(modules: list[nn.Module], *, new: bool = False) -> list[threading.RLock]:
    """Locks of those modules that have one, or get one, in an order that all threads share: networks share modules."""
    if new:
        for module in modules:
            _LOCKS.setdefault(module, (next(_NUMBERS), threading.RLock()))  # at once, whatever other threads do
    return [lock for _, lock in sorted(filter(None, map(_LOCKS.get, modules)))]


_NUMBERS = itertools.count()


def _in_a_child() -> None:
    """After a fork: threads of the parent are not here, to release what they held and put back what they changed."""
    global _GUARD  # noqa: PLW0603
    _GUARD = threading.RLock()
    for module, (number, _) in list(_LOCKS.items()):
        _LOCKS[module] = number, threading.RLock()
    if _FUSED:
        torch.backends.mha.set_fastpath_enabled(next(iter(_FUSED.values())))
        _FUSED.clear()


_WAITED = 10.0
"""Seconds that a fork waits for every network that another thread runs as it is."""


class _Fork(threading.local):
    """Locks that a thread holds while it forks, so that a child finds networks that are put back."""

    def __init__(self) -> None:
        self.held: list[threading.RLock] = []

    def before(self) -> None:
        modules = [module for known in _LOCKS.keyrefs() if (module := known()) is not None]
        self.held = [lock for lock in _locks_of(modules) if lock.acquire(timeout=_WAITED)]

    def after(self) -> None:
        for lock in self.held:
            lock.release()
        self.held = []


_FORK = _Fork()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_FORK.before, after_in_parent=_FORK.after, after_in_child=_in_a_child)


@contextmanager
def _held(locks: list[threading.RLock]) -> Iterator[None]:
    held: list[threading.RLock] = []

    def release() -> None:
        with suppress(IndexError):  # of an empty list, at the end
            list(map(_RELEASE, iter(held.pop, None)))

    with surely(release):
        held.extend(filter(_ACQUIRE, locks))  # in no bytecode of Python, between which Ctrl-C comes
        yield


_ACQUIRE, _RELEASE = methodcaller("acquire"), methodcaller("release")


@contextmanager
def surely(put_back: Callable[[], object]) -> Iterator[None]:
    """A block after which something is put back, also if Ctrl-C comes while it is: then once more, from the start.

    Args:
        put_back: May be called when it was done in part, or altogether.
    """
    is_back = False
    try:
        try:
            yield
        finally:
            put_back()
            is_back = True
    finally:
        if not is_back:
            put_back()


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
    if len({parameter.device for parameter in parameters_of(modules_of(model))}) > 1:
        raise UnsupportedError(_spread(model))
    if needs_itself(model):
        _locks_of(modules_of(model), new=True)
    return model


def _spread(model: nn.Module) -> str:
    """The fault of a network whose weights lie on several devices."""
    (name, first), *rest = model.named_parameters()
    other, second = next((other, tensor) for other, tensor in rest if tensor.device != first.device)
    return (
        f"the model's weights lie on several devices, {name!r} on {first.device} and {other!r} on {second.device}, as "
        "device_map='auto' spreads them; curvature is summed on one. Load the model on one device "
        "(device_map={'': 0}); one that no device holds is sharded over processes by fully_shard (FSDP2) of "
        "torch.distributed.fsdp."
    )


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
    parameters = parameters_of(modules_of(model))
    if not parameters:
        return torch.zeros(())
    parameter = parameters[0]
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


@contextmanager
def private_copy(model: nn.Module, call: object = None) -> Iterator[nn.Module]:
    """What to run for a network in a block of passes: a copy of its modules, in evaluation mode, that nobody else has.

    The network is not written to, and other threads may call it meanwhile, or fit it. Networks of which no copy can be
    made (`needs_itself`) run as they are: one thread at a time, by locks of their modules, and put back afterwards.

    Args:
        model: The network.
        call: The function that calls it, if it is the user's: it may know the network by other ways.
    """
    model = original(model)
    modules = modules_of(model)
    known = plain(modules)
    with _same_numbers(model), _one_network(modules, known):
        if known is not None and not leads_to(modules, call):
            with known.copy(modules) as own:
                yield own
            return
        if not needs_itself(model, call):
            yield copied(model)
            return
        with _held(_locks_of(modules, new=True)):
            state = _ModuleState(modules)
            with surely(state.restore):
                state.evaluate()
                yield model


@contextmanager
def users_own(model: nn.Module) -> Iterator[None]:
    """The network itself in evaluation mode, for foreign code that holds it; it is put back afterwards."""
    modules = modules_of(model)
    with _held(_locks_of(modules, new=True)), _same_numbers(model), _one_network(modules):
        state = _ModuleState(modules)
        with surely(state.restore):
            state.evaluate()
            yield


_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def _attends(modules: list[nn.Module]) -> bool:
    return any(isinstance(module, _ATTENTION) for module in modules)


@contextmanager
def _one_network(modules: list[nn.Module], known: PlainNetwork | None = None) -> Iterator[None]:
    """Turns PyTorch's fused encoder layers off, which run without gradients only and give zeros where data are padded.

    With them a network would be one function where it is differentiated and another where it is not. The switch is one
    of the process: the first call in any thread turns it, the last one puts it back.
    """
    if not (_attends(modules) if known is None else known.found(modules, _attends)):
        yield
        return
    with without_fused_layers():
        yield


def without_fused_layers() -> AbstractContextManager[None]:
    """A block in which PyTorch's fused encoder layers are off."""
    return switched_off(_FUSED, torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled)


@contextmanager
def switched_off(
    calls: dict[object, bool], read: Callable[[], bool], write: Callable[[bool], object]
) -> Iterator[None]:
    """Turns a switch of the process off while any thread is in such a block.

    Args:
        calls: Blocks that are under way, with what the switch was set to before the first of them.
        read: What it is set to.
        write: Sets it.
    """
    call = object()

    def put_back() -> None:
        with _held([_GUARD]):
            if len(calls) == 1 and call in calls:  # not of a child of a fork, which has put it back
                write(calls[call])
            calls.pop(call, None)

    with surely(put_back):
        with _held([_GUARD]):
            calls[call] = next(iter(calls.values())) if calls else read()
            write(False)
        yield


@contextmanager
def _put_back_of(holders: Iterable[Any], name: str) -> Iterator[None]:
    """Restores an attribute of every holder."""
    values = [(holder, getattr(holder, name)) for holder in holders]

    def put_back() -> None:
        for holder, value in values:
            setattr(holder, name, value)

    with surely(put_back):
        yield


@contextmanager
def gradients_set_aside(model: nn.Module) -> Iterator[None]:
    """Takes the gradients off: a backward pass would add to them in place."""
    with _put_back_of(model.parameters(), "grad"):
        for parameter in model.parameters():
            parameter.grad = None
        yield


def flags_put_back(model: nn.Module) -> AbstractContextManager[None]:
    """Restores the train or eval flag of every module; for training loops, which may change everything else."""
    return _put_back_of(model.modules(), "training")


@contextmanager
def hooks_put_back(model: nn.Module) -> Iterator[None]:
    """Takes off the hooks that foreign code registers, and puts back those that it removes."""
    tables = [value for module in model.modules() for name, value in vars(module).items() if name.endswith("_hooks")]
    contents = [(table, copy.copy(table)) for table in tables if isinstance(table, MutableMapping)]

    def put_back() -> None:
        for table, content in contents:
            table.clear()
            table.update(content)

    with surely(put_back):
        yield


_AUTOCAST = tuple(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


AS_IT_IS = nullcontext()


def own_precision() -> AbstractContextManager[object]:
    """Turns the caller's `torch.autocast` off: sums of a curvature in half precision are not even positive.

    A network that enters autocast in its own forward pass still does.
    """
    kinds = [kind for kind in _AUTOCAST if torch.is_autocast_enabled(kind)]
    return _without_autocast(kinds) if kinds else AS_IT_IS


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
    devices = sorted({p.device.index for p in parameters_of(modules_of(model)) if p.is_cuda})
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]


def is_alone() -> bool:
    """True if no other thread can draw random numbers: those of backward passes and of progress bars do not."""
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    return all(isinstance(thread, threading._DummyThread | tqdm.TMonitor) for thread in others)


class ThreadDraws(TorchDispatchMode):
    """A block that tells the global random numbers that this thread draws from those that others draw meanwhile.

    Attributes:
        drew: Whether an operation of this thread drew some.
        others_drew: Whether the state of the CPU's generator has changed by anything else.
        left: That state after the last draw of this thread.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.drew = self.others_drew = False
        self.left = torch.default_generator.get_state()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, or the first operation imports PyTorch's compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or given.get("generator") is not None:
            return func(*args, **given)
        self.look()
        result = func(*args, **given)
        self.drew, self.left = True, torch.default_generator.get_state()
        return result

    def look(self) -> None:
        """Notes if others have drawn since the last draw of this thread."""
        self.others_drew |= not _is_at(self.left)


def _is_at(state: Tensor) -> bool:
    """True if the CPU's generator is in a state; other threads do not run while it is compared."""
    return torch.default_generator.get_state().numpy().tobytes() == state.numpy().tobytes()


def _put_states_back(generators: list[torch.Generator], states: list[Tensor], left: Tensor) -> bool:
    """Puts states back, unless another thread has drawn since the CPU's generator was in the one that was `left`.

    Such numbers would come twice. Where this thread drew nothing nothing is written. Else no other thread runs Python
    between the looks and the writing: they change every 5 ms, and have just done so; one that was drawing then has
    ended before the second look.
    """
    if not is_alone():
        if not torch.equal(states[0], left):
            time.sleep(0)
        if not (_is_at(left) and _is_at(left)):
            return False
    for generator, state in zip(generators, states, strict=True):
        if not torch.equal(generator.get_state() if generator.device.type != "cpu" else left, state):
            generator.set_state(state)
    return True


class _OpenBlocks(threading.local):
    """Blocks of a thread after which random state is to be put back, unless another thread has drawn meanwhile."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []


@dataclass(eq=False)
class _Block:
    left: Tensor  # State of the CPU's generator at the beginning, or after what this thread drew last
    others_drew: bool = False

    def compare(self) -> None:
        """Notes if another thread has drawn: nothing of this library does, but what is put back or noted.

        Of a process with one thread nobody else has.
        """
        if not self.others_drew and not is_alone():
            self.others_drew = not _is_at(self.left)


_OPEN = _OpenBlocks()


@contextmanager
def same_random_state(model: nn.Module) -> Iterator[None]:
    """Puts the global random state of the CPU and of the model's devices back, whatever this thread draws in between.

    Not where another thread has drawn as well, whose numbers would come twice.
    """
    generators = generators_of(model)
    states = [generator.get_state() for generator in generators]
    block = _Block(states[0])

    def put_back() -> None:
        if block in _OPEN.blocks:
            _OPEN.blocks.remove(block)
        if not block.others_drew and not _put_states_back(generators, states, block.left):
            block.others_drew = True
        for outer in _OPEN.blocks:
            outer.others_drew |= block.others_drew

    with surely(put_back):
        _OPEN.blocks.append(block)
        yield


@contextmanager
def own_draws() -> Iterator[None]:
    """A block in which this thread draws global random numbers, which are put back with the rest."""
    for block in _OPEN.blocks:
        block.compare()
    draws = AS_IT_IS if is_alone() else ThreadDraws()
    try:
        with draws:
            yield
    finally:
        if isinstance(draws, ThreadDraws):
            draws.look()
        for block in _OPEN.blocks:
            block.left = torch.default_generator.get_state()
            block.others_drew |= isinstance(draws, ThreadDraws) and draws.others_drew


def reading(loader: Iterable[T]) -> Iterator[T]:
    """Batches of a loader, whose random numbers are told from those that other threads draw meanwhile.

    A loader draws before its first batch. What changes later, as where data are augmented, may be of other threads.
    """
    with own_draws():
        rest = iter(loader)
        batch = next(rest, _END)
    while batch is not _END:
        yield batch  # pyright: ignore[reportReturnType]
        alone = is_alone()
        batch = next(rest, _END)
        if alone:
            for block in _OPEN.blocks:
                block.left = torch.default_generator.get_state()


_END = object()
_QUIET: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Networks of which a pass was seen to draw no random numbers: most, in evaluation mode."""


@contextmanager
def _same_numbers(model: nn.Module) -> Iterator[None]:
    """Passes of a network, after which random state is as it was, but for what other threads draw.

    Where there are other threads a network's first passes are watched. Of one that drew nothing then they drew what
    changes the state later.
    """
    network, generators, alone = original(model), generators_of(model), is_alone()
    states = [generator.get_state() for generator in generators]
    draws = ThreadDraws() if not alone and network not in _QUIET else None

    def put_back() -> None:
        if not all(map(torch.equal, states, [generator.get_state() for generator in generators])):
            if draws is not None:
                draws.look()
            left = torch.default_generator.get_state() if draws is None else draws.left
            is_own = alone and is_alone() if draws is None else draws.drew and not draws.others_drew
            is_back = is_own and _put_states_back(generators, states, left)
            for block in _OPEN.blocks:
                block.left, block.others_drew = states[0] if is_back else block.left, block.others_drew or not is_back
        if draws is not None and not draws.drew:
            _QUIET.add(network)

    with surely(put_back), draws or AS_IT_IS:
        yield


class _ModuleState:
    """State that modules must have after a call, their submodules apart.

    Args:
        modules: Of a network, which is the first, each once.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = [(module, module.training, module.__dict__.copy()) for module in modules]
        self.contents = [
            (attributes[name], attributes[name].copy())
            for _, _, attributes in self.modules
            for name in attributes_in(attributes)
            if type(attributes[name]) in _CONTAINERS
        ]
        tables = ((module, module._buffers) for module in modules)
        self.buffers = [(module, dict(table.items()) if len(table) else {}) for module, table in tables]
        written = [b for _, buffers in self.buffers for b in buffers.values() if b is not None and not b.is_inference()]
        self.values = list(zip(written, copies_of(written), strict=True))
        # Stand-ins and hooks of ours are taken off by whoever put them there, unless Ctrl-C came in between. FSDP2 puts
        # gathered weights into these tables, and knows which are there.
        known = [] if has_sharded_weights(modules[0]) else modules
        held = (module.__dict__.get(name) for module in known for name in _TABLES)
        self.tables = [(table, table.copy()) for table in held if isinstance(table, dict)]

    def evaluate(self) -> None:
        """Turns the training mode off where it is on."""
        for module, training, _ in self.modules:
            if training:
                module.training = False

    def restore(self) -> None:
        """Puts attributes, flags and buffers back; buffers are written only if they have other numbers."""
        # Autograd does not count all writes, so that values are compared.
        written = [(buffer, copy) for buffer, copy in self.values if not same_numbers(buffer, copy)]
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
        for table, content in self.tables:
            if len(table) != len(content) or not all(map(is_, table.values(), content.values())):
                table.clear()
                table.update(content)
        for buffer, value in written:
            # In no block of `no_grad`, which Ctrl-C could leave open; of a sparse one `detach` has indices of its own.
            (buffer.detach() if buffer.requires_grad else buffer).copy_(value)


def _put_back(table: dict[str, Tensor | None], buffers: dict[str, Tensor | None]) -> None:
    """Gives a table of buffers, of a scripted module no dict, those that it had."""
    for name in table.keys() - buffers.keys():
        del table[name]
    for name, buffer in buffers.items():
        if name not in table or table[name] is not buffer:
            table[name] = buffer


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """True if a buffer is as its copy, NaN and all."""
    if a.layout is not torch.strided or a.is_quantized:
        return False
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


_TABLES = ("_parameters", *HOOKS)

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
