"""A copy of a network's tree of modules, for calls that must not touch the modules that others hold."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from itertools import filterfalse
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from laplace.network.tree import modules_of

# The copy has modules, tables of parameters, buffers and submodules, hooks, containers and a training mode of its own;
# parameters and all other objects are shared. Whoever runs it can put other tensors in its tables, hang hooks on it and
# let it write buffers and attributes: the network stays as it is, and other threads may call it meanwhile. Made anew
# for every block of passes, a copy needs no lock, and no look at what the user has changed since.
#
# What refers to modules of the tree is made to refer to the copies: attributes, hooks, methods that are bound to a
# module, partial functions, variables of functions, weak references. What does so from within an object of another
# kind, and the kinds of modules below, take the network itself, with a lock (`laplace.network.model_guard`).

_OWN = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_")))
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
_ATOMS = frozenset(_PLAIN)

_MOST, _DEPTH, _NEAR = 1024, 6, 2
"""Entries of a container that is looked into; things inside each other; and those up to which a function's names count.
"""


def copied(model: nn.Module) -> nn.Module:
    """The copy, in evaluation mode."""
    own = shared(model)
    tables = [module._buffers for module in modules_of(own)]
    held = {id(buffer): buffer for table in tables for buffer in table.values() if buffer is not None}
    copies = dict(zip(held, _copies_of(list(held.values())), strict=True))
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
    for name in filterfalse(_OWN.__contains__, own):
        if type(own[name]) not in _ATOMS:
            own[name] = move(own[name])
    own["_parameters"], own["_buffers"] = dict(own["_parameters"]), dict(own["_buffers"])
    own["_modules"] = {name: move.twins.get(id(child)) for name, child in own["_modules"].items()}
    for name in _HOOKS:
        own[name] = OrderedDict([(key, move(hook)) for key, hook in own[name].items()] if own[name] else ())
    own[_ORIGINAL] = weakref.ref(original(module))
    twin.__dict__.update(own)


def _copies_of(buffers: list[Tensor]) -> list[Tensor]:
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
        if kind in _ATOMS:
            return value
        if isinstance(value, nn.Module):
            return self.twins.get(id(value), value)
        if id(value) in self._known:  # one object in several places stays one
            return self._known[id(value)][1]
        moved = self._moved(value, kind, depth + 1)
        self._known[id(value)] = value, moved
        return moved

    def _moved(self, value: Any, kind: type, depth: int) -> Any:
        if kind in (list, dict, set, OrderedDict):
            copy = value.copy()
            self._known[id(value)] = value, copy  # which may hold itself
            if len(value) <= _MOST and depth < _DEPTH:
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
            parts = tuple([self(part, depth) for part in value]) if len(value) <= _MOST else value
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
        moved.__kwdefaults__, moved.__dict__ = value.__kwdefaults__, dict(value.__dict__)
        return moved


def is_set(cell: CellType) -> bool:
    """True if a variable of the functions around a function has a value by now."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _refers(modules: dict[int, Any], cell: CellType) -> bool:
    """True if a variable leads to a module of the tree by things that are moved."""
    return is_set(cell) and _leads(modules, cell.cell_contents, 0, {}, moved=True)


# The networks that are run as they are.


def needs_itself(model: nn.Module, call: object = None) -> bool:
    """True if a network, or the function that calls it, could reach modules of the tree past the copy.

    Those are parts of `torch.jit.script` and `torch.compile`, which hold a network within; modules of FSDP2; and other
    objects, functions of the user's among them, that hold modules or parameters of the network.
    """
    if _ORIGINAL in model.__dict__:
        return False
    modules = modules_of(model)
    form = [(id(module), len(module.__dict__), len(module._forward_hooks), len(module._forward_pre_hooks))
            for module in modules]  # fmt: skip
    known = _VERDICTS.get(model)
    if known is None or known[0] != form:
        known = _VERDICTS[model] = form, _is_held(modules)
    return known[1] or (call is not None and _leads(_identities(modules), call, 0, {}, moved=False))


_VERDICTS: weakref.WeakKeyDictionary[nn.Module, tuple[list[tuple[int, ...]], bool]] = weakref.WeakKeyDictionary()


def _is_held(modules: list[nn.Module]) -> bool:
    """True if copies of these modules would not be complete, or could reach the originals."""
    if any(_is_bound(module) for module in modules):
        return True
    inside = _identities(modules)
    seen: dict[int, Any] = {}
    return any(
        _leads(inside, value, 0, seen, moved=None)
        for module in modules
        for name, value in module.__dict__.items()
        if (value and name in _HOOKS if name in _OWN else type(value) not in _ATOMS)
    )


def _identities(modules: list[nn.Module]) -> dict[int, Any]:
    held: dict[int, Any] = {id(module): module for module in modules}
    for module in modules:
        held.update((id(tensor), tensor) for tensor in module._parameters.values() if tensor is not None)
    return held


def _is_bound(module: nn.Module) -> bool:
    """True of a module whose code or weights are not those that its attributes say."""
    if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        return True
    if "_orig_mod" in module._modules or type(module).__new__ is not object.__new__:
        return True
    return any(base.__module__.startswith("torch.distributed") for base in type(module).__mro__)


def _leads(inside: dict[int, Any], value: Any, depth: int, seen: dict[int, Any], *, moved: bool | None) -> bool:
    """True if a value leads to modules or parameters of the tree.

    With `moved` by things that `_Move` follows alone, with None by others alone; else by any.
    """
    kind = type(value)
    if kind in _ATOMS and not isinstance(value, Tensor):
        return False
    if id(value) in inside:
        return moved is not None
    if isinstance(value, Tensor | nn.Module) or depth >= _DEPTH or id(value) in seen:
        return False
    seen[id(value)] = value
    known, others = _followed(value, depth)
    if any(_leads(inside, part, depth + 1, seen, moved=moved) for part in known):
        return True
    return not moved and any(_leads(inside, part, depth + 1, seen, moved=False) for part in others)


def _followed(value: Any, depth: int) -> tuple[Iterator[Any], list[Any]]:
    """What `_Move` follows of a value, and other things that it holds."""
    kind = type(value)
    if kind in (list, set, tuple, dict, OrderedDict):
        parts = value.values() if isinstance(value, dict) else value
        return iter(parts if len(value) <= _MOST else ()), list(value) if isinstance(value, dict) and len(
            value
        ) <= _MOST else []
    if kind is functools.partial:
        return iter((value.func, *value.args, *value.keywords.values())), []
    if kind is MethodType:
        return iter((value.__self__,)), [value.__func__]
    if kind is FunctionType:
        closed = [cell.cell_contents for cell in value.__closure__ or () if is_set(cell)]
        names = value.__code__.co_names if depth <= _NEAR else ()
        named = [value.__globals__[name] for name in names if name in value.__globals__]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return iter(closed), [part for part in (*named, *defaults) if not _is_of_a_package(part)]
    if kind is weakref.ReferenceType:
        return iter((value(),)), []
    if isinstance(value, type) or _is_of_a_package(value):
        return iter(()), []
    held = list(getattr(value, "__dict__", {}).values())
    if type(value).__module__.startswith("laplace."):  # what this library holds of the network it does not call
        held = [part for part in held if not isinstance(part, nn.Module)]
    return iter(()), held


def _is_of_a_package(value: Any) -> bool:
    """True of Python modules, and of functions and classes of PyTorch or of this library: they hold no network."""
    if isinstance(value, FunctionType | type):
        return (value.__module__ or "").startswith(("torch.", "builtins", "laplace."))
    return isinstance(value, ModuleType | BuiltinFunctionType)
