"""A copy of a network's tree of modules, for calls that must not touch the modules that others hold."""

from __future__ import annotations

import dis
import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from laplace.network.tree import HOOKS, OWN, attributes_in, modules_of

# The copy has modules, tables of parameters, buffers and submodules, hooks, containers and a training mode of its own;
# parameters and all other objects are shared. Whoever runs it can put other tensors in its tables, hang hooks on it and
# let it write buffers and attributes: the network stays as it is, and other threads may call it meanwhile. A copy needs
# no lock: a block of passes has one that is made anew, or one that no other has (`laplace.network.plain`).
#
# What refers to modules of the tree is made to refer to the copies: attributes, hooks, methods that are bound to a
# module, partial functions, variables of functions, weak references. What does so from within an object of another
# kind, and the kinds of modules below, take the network itself, with a lock (`laplace.network.model_guard`).

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Tensor,
    nn.Parameter,
    torch.dtype,
    torch.device,
    torch.Size,
)
ATOMS = frozenset(_PLAIN)
CONTAINERS = frozenset((list, tuple, dict, set, OrderedDict))
MOST = 1024
"""Entries of a container that is looked into."""

_DEPTH, _NEAR = 6, 3
"""Things inside each other, and those up to which a function's names count."""


def copied(model: nn.Module) -> nn.Module:
    """The copy, in evaluation mode."""
    own = shared(model)
    tables = [module._buffers for module in modules_of(own)]
    held = {id(buffer): buffer for table in tables for buffer in table.values() if buffer is not None}
    copies = dict(zip(held, copies_of(list(held.values())), strict=True))
    for module, table in zip(modules_of(own), tables, strict=True):
        table.update({key: copies[id(buffer)] for key, buffer in table.items() if buffer is not None})
        if module.training:
            module.training = False
    return own


def shared(model: nn.Module) -> nn.Module:
    """A copy that shares the buffers, too, and is in the same modes: a call writes the statistics of the network."""
    modules = modules_of(model)
    twins = {id(module): object.__new__(type(module)) for module in modules}
    move = _Move(twins)
    for module in modules:
        _fill(twins[id(module)], module, move)
    return twins[id(model)]


def original(module: nn.Module) -> nn.Module:
    """The module of which this one is a copy; itself if it is none."""
    known = module.__dict__.get(_ORIGINAL)
    return (known and known()) or module


_ORIGINAL = "_copied_by_laplace_from"


def _fill(twin: nn.Module, module: nn.Module, move: _Move) -> None:
    """Gives a copy what its original has."""
    own = module.__dict__.copy()
    for name in attributes_in(own):
        if type(own[name]) not in ATOMS:
            own[name] = move(own[name])
    own["_parameters"], own["_buffers"] = dict(own["_parameters"]), dict(own["_buffers"])
    own["_non_persistent_buffers_set"] = own["_non_persistent_buffers_set"].copy()
    own["_modules"] = {name: move.twins.get(id(child)) for name, child in own["_modules"].items()}
    for name in HOOKS:
        own[name] = OrderedDict([(key, move(hook)) for key, hook in own[name].items()] if own[name] else ())
    own[_ORIGINAL] = weakref.ref(original(module))
    twin.__dict__.update(own)


def copies_of(buffers: list[Tensor]) -> list[Tensor]:
    """Memory of its own for every buffer, which a pass may write to: in one operation for plain ones of a device."""
    copies = {i: buffer for i, buffer in enumerate(buffers) if buffer.is_inference()}
    plain: dict[torch.device, list[int]] = {}
    with torch.no_grad():
        for i, buffer in enumerate(buffers):
            if i in copies:
                continue
            if type(buffer) is Tensor and buffer.layout == torch.strided and buffer.is_contiguous():
                plain.setdefault(buffer.device, []).append(i)
                copies[i] = torch.empty_like(buffer)
            else:
                copies[i] = buffer.clone()
        for places in plain.values():
            torch._foreach_copy_([copies[i] for i in places], [buffers[i] for i in places])
    return [copies[i] for i in range(len(buffers))]


class _Move:
    """Maps values that refer to modules of a tree to values that refer to their copies.

    Args:
        twins: Copies, by the identity of their originals.
    """

    def __init__(self, twins: dict[int, nn.Module]) -> None:
        self.twins = twins
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, nn.Module):
            return self.twins.get(id(value), value)
        if id(value) in self._known:  # one object in several places stays one
            return self._known[id(value)][1]
        moved = self._moved(value, kind, depth + 1)
        self._known[id(value)] = value, moved
        return moved

    def _moved(self, value: Any, kind: type, depth: int) -> Any:
        if kind in CONTAINERS and kind is not tuple:
            copy = value.copy()
            self._known[id(value)] = value, copy  # which may hold itself
            if len(value) <= MOST and depth < _DEPTH:
                if isinstance(copy, dict):
                    for key, part in value.items():
                        copy[key] = self(part, depth)
                elif isinstance(copy, list):
                    copy[:] = [self(part, depth) for part in value]
                elif any(isinstance(part, nn.Module) for part in value):
                    copy = {self(part, depth) for part in value}
            return copy
        if depth >= _DEPTH:
            return value
        if kind is tuple:
            parts = tuple([self(part, depth) for part in value]) if len(value) <= MOST else value
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
        if kind is MethodType:
            owner = self(value.__self__, depth)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if kind is functools.partial:
            return self._partial(value, depth)
        if kind is FunctionType and value.__closure__:
            return self._function(value, depth)
        if kind is weakref.ReferenceType:
            target = value()
            return weakref.ref(self.twins[id(target)]) if id(target) in self.twins else value
        return value

    def _partial(self, value: functools.partial[Any], depth: int) -> Any:
        func, args = self(value.func, depth), tuple([self(part, depth) for part in value.args])
        keywords = {key: self(part, depth) for key, part in value.keywords.items()}
        same = func is value.func and all(a is b for a, b in zip(args, value.args, strict=True))
        if same and all(keywords[key] is part for key, part in value.keywords.items()):
            return value
        moved = functools.partial(func, *args, **keywords)
        moved.__dict__.update(value.__dict__)
        return moved

    def _function(self, value: FunctionType, depth: int) -> FunctionType:
        cells = [(cell, self(cell.cell_contents, depth) if is_set(cell) else None) for cell in value.__closure__ or ()]
        if not any(_refers(self.twins, cell) for cell, _ in cells):
            return value
        closure = tuple([CellType(part) if _refers(self.twins, cell) else cell for cell, part in cells])
        moved = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
        moved.__kwdefaults__ = value.__kwdefaults__
        moved.__dict__.update({name: self(part, depth) for name, part in value.__dict__.items()})  # `__wrapped__`, say
        return moved


def is_set(cell: CellType) -> bool:
    """True if a variable of the functions around a function has a value by now."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _refers(twins: dict[int, Any], cell: CellType) -> bool:
    """True if a variable leads to a module of the tree by things that are moved."""
    waiting, seen = ([(cell.cell_contents, 0)] if is_set(cell) else []), set[int]()
    for value, depth in waiting:
        if id(value) in twins:
            return True
        if depth < _DEPTH and id(value) not in seen:
            seen.add(id(value))
            waiting.extend((part, depth + 1) for part in _parts_moved(value))
    return False


# The networks that are run as they are.


def needs_itself(model: nn.Module, call: object = None) -> bool:
    """True if a network, or the function that calls it, could reach modules of the tree past the copy.

    Those are parts of `torch.jit.script` and `torch.compile`, which hold a network within; modules of FSDP2; and other
    objects, functions and classes of the user's among them, that hold modules or parameters of the network.
    """
    if _ORIGINAL in model.__dict__:
        return False
    modules = modules_of(model)
    form = list(map(_form, modules))
    known = _VERDICTS.get(model)
    if known is None or known[0] != form:
        known = _VERDICTS[model] = form, _is_held(modules)
    return known[1] or leads_to(modules, call)


def leads_to(modules: list[nn.Module], call: object) -> bool:
    """True if the function that calls a network, None for the default, could reach modules of it past a copy."""
    return call is not None and _Search(modules).leads(call)


_VERDICTS: weakref.WeakKeyDictionary[nn.Module, tuple[list[tuple[int, ...]], bool]] = weakref.WeakKeyDictionary()


def _form(module: nn.Module) -> tuple[int, ...]:
    """What tells that a module may hold other things than it did."""
    own = module.__dict__
    held = [id(value) for value in islice(own.values(), len(OWN), None) if type(value) not in ATOMS]
    return id(module), len(own), *module._forward_hooks, *module._forward_pre_hooks, *held


def _is_held(modules: list[nn.Module]) -> bool:
    """True if copies of these modules would not be complete, or could reach the originals."""
    if any(_is_bound(module) for module in modules):
        return True
    search = _Search(modules)
    types = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    return any(search.leads(kind) for kind in types if not _is_of_a_package(kind)) or any(
        search.leads(value, past_copies=True)
        for module in modules
        for name, value in module.__dict__.items()
        if (value and name in HOOKS if name in OWN else type(value) not in ATOMS)
    )


def _is_bound(module: nn.Module) -> bool:
    """True of a module whose code or weights are not those that its attributes say."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        return True
    if "_orig_mod" in module._modules or kind.__new__ is not object.__new__ or hasattr(kind, "__del__"):
        return True
    return any(base.__module__.startswith("torch.distributed") or vars(base).get("__slots__") for base in kind.__mro__)


class _Search:
    """Looks for modules and parameters of a tree in what values hold.

    Args:
        modules: Those of the tree.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.inside: dict[int, Any] = {id(module): module for module in modules}
        for module in modules:
            self.inside.update((id(tensor), tensor) for tensor in module._parameters.values() if tensor is not None)
        self._seen: dict[tuple[int, bool], Any] = {}

    def leads(self, value: Any, depth: int = 0, *, past_copies: bool = False) -> bool:
        """True if a value leads to the tree; with `past_copies` only if by things that `_Move` does not follow."""
        kind = type(value)
        if kind in weakref.ProxyTypes:  # of which nobody can tell whose they are
            return True
        if id(value) in self.inside:
            return not past_copies
        if kind in ATOMS or depth >= _DEPTH or (id(value), past_copies) in self._seen:
            return False
        self._seen[id(value), past_copies] = value
        return any(self.leads(part, depth + 1, past_copies=past_copies) for part in _parts_moved(value)) or any(
            self.leads(part, depth + 1) for part in _other_parts(value, depth)
        )


def _parts_moved(value: Any) -> Iterable[Any]:
    """What `_Move` follows of a value."""
    kind = type(value)
    if kind in CONTAINERS and len(value) <= MOST:
        return value.values() if isinstance(value, dict) else value
    if kind is functools.partial:
        return (value.func, *value.args, *value.keywords.values())
    if kind is MethodType:
        return (value.__self__,)
    if kind is FunctionType:
        closed = [cell.cell_contents for cell in value.__closure__ or () if is_set(cell)]
        return [*closed, *vars(value).values()] if closed else ()
    return (value(),) if kind is weakref.ReferenceType else ()


def _other_parts(value: Any, depth: int) -> Iterable[Any]:
    """What else a value holds."""
    kind = type(value)
    if kind in CONTAINERS:
        return value.keys() if isinstance(value, dict) and len(value) <= MOST else ()
    if kind in (functools.partial, MethodType, weakref.ReferenceType) or _is_of_a_package(value):
        return (value.__func__,) if kind is MethodType else ()
    if kind is FunctionType:
        read = _globals_of(value) if depth <= _NEAR else []
        parts = [*read, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        parts += () if value.__closure__ else vars(value).values()
    elif isinstance(value, weakref.ReferenceType):
        parts = [value()]
    elif kind.__module__.startswith("laplace."):  # what this library holds of the network it does not call
        parts = [part for part in vars(value).values() if not isinstance(part, nn.Module)]
    else:
        parts = gc.get_referents(value)
    return [part for part in parts if not _is_of_a_package(part)]


def _globals_of(function: FunctionType) -> list[Any]:
    """Values of the global variables that a function reads, and those within it."""
    known = function.__globals__
    return [known[name] for name in _names_read(function.__code__) if name in known]


@functools.lru_cache(maxsize=4096)
def _names_read(code: CodeType) -> frozenset[str]:
    within = [part for part in code.co_consts if isinstance(part, CodeType)]
    own = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own).union(*map(_names_read, within))


def _is_of_a_package(value: Any) -> bool:
    """True of Python modules, and of functions and classes of PyTorch or of this library: they hold no network."""
    if isinstance(value, FunctionType | type):
        return (value.__module__ or "").partition(".")[0] in ("torch", "builtins", "laplace")
    return isinstance(value, ModuleType | BuiltinFunctionType)
