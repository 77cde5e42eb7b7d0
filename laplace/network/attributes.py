"""Plain attributes of a network's modules, which decide its outputs without being tensors, and changes of them."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import filterfalse, repeat
from operator import is_
from typing import Any

from torch import nn

from laplace.network.model_guard import named_modules_of

Attributes = dict[str, tuple[tuple[str, Any], ...]]
"""Every module that has an attribute, with its value, by the attribute's name."""

_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: tables of parameters, submodules and hooks, and the flag of the training mode."""

_NO_SETTINGS = frozenset({"name_or_path", "gradient_checkpointing", "activation_checkpointing", "_attn_implementation"})
"""Where a network of transformers was loaded from, and ways of computing the same outputs."""

_PASSED_OVER = _OWN | _NO_SETTINGS
_PLAIN = frozenset({bool, int, float, str, type(None)})
_SHARED = "modules of several names"
_MOST, _DEPTH = 1024, 4
_OTHER = object()


def attributes_of(model: nn.Module) -> Attributes:
    """Numbers, strings, None, and short lists, tuples, dicts and sets of them, on the model and its submodules."""
    return Seen(model).attributes


def _plain(value: Any, depth: int) -> Any:
    """A copy that later writes do not reach, or `_OTHER`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind not in (list, tuple, dict, set) or len(value) > _MOST or depth == 0:
        return _OTHER
    if kind is tuple and len(value) > 1 and _PLAIN.issuperset(map(type, value)):
        return (kind.__name__, *value)
    parts = [_plain(part, depth - 1) for part in (value.items() if kind is dict else value)]
    if any(part is _OTHER for part in parts):
        return _OTHER
    if len(parts) == 1 and kind in (list, tuple):  # packages write one adapter as its name, or as a list with it
        return parts[0]
    return (kind.__name__, *(sorted(parts, key=repr) if kind is set else parts))


def digests(attributes: Attributes) -> dict[str, str]:
    """A short hash per name of an attribute, the same in every process."""
    return {
        name: hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest() for name, values in attributes.items()
    }


def changed_names(before: Mapping[str, str], now: Mapping[str, str], *, common: bool = False) -> list[str]:
    """Names of attributes whose digests differ.

    Args:
        before: Digests at one time.
        now: Digests at another.
        common: Leave out names that only one side has: other versions of a package give modules other attributes.
    """
    names = before.keys() & now.keys() if common else before.keys() | now.keys()
    return sorted(name for name in names if before.get(name) != now.get(name))


class Seen:
    """Attributes of a network at one time, with what tells at little cost that they still are what they were.

    Args:
        model: The network.
    """

    def __init__(self, model: nn.Module) -> None:
        named = named_modules_of(model)
        self._modules = [_Module(name, module) for name, module in named]
        self._places = {id(module): name for name, module in named}

    @cached_property
    def attributes(self) -> Attributes:
        """As of `attributes_of`."""
        attributes: dict[str, list[tuple[str, Any]]] = {}
        for module in self._modules:
            for name, value in module.plain.items():
                attributes.setdefault(name, []).append((module.place, value))
        if shared := self._shared():
            attributes[_SHARED] = shared
        return {name: tuple(values) for name, values in attributes.items()}

    def _shared(self) -> list[tuple[str, Any]]:
        """Further names of modules that have several, each with the first one."""
        children = [(module.place, name, child) for module in self._modules for name, child in module.children]
        names = [(f"{place}.{name}" if place else name, self._places.get(child)) for place, name, child in children]
        return [(name, first) for name, first in names if first not in (None, name)]

    def __getstate__(self) -> dict[str, Any]:
        """State that is copied and pickled, of which the modules may be others."""
        return {"attributes": self.attributes, "_modules": [], "_places": {}}

    def holds(self, modules: Sequence[nn.Module]) -> bool:
        """True if these are the modules of then, with the same objects or equal containers for attributes.

        False says nothing: other objects may be equal.

        Args:
            modules: Those of the network now.
        """
        return len(modules) == len(self._modules) and all(
            map(_Module.holds, self._modules, modules, map(vars, modules))
        )


class _Module:
    """Attributes of one module, which is not kept alive.

    Args:
        place: Its name.
        module: The module.

    Attributes:
        place: Its name.
        plain: Plain attributes by name, as copies.
        children: Names and identities of the modules directly below.
    """

    __slots__ = ("_containers", "_fixed", "_module", "_others", "_passed_over", "_size", "_values", "children", "place",
                 "plain")  # fmt: skip

    def __init__(self, place: str, module: nn.Module) -> None:
        own = vars(module)
        self.place = place
        self.plain: dict[str, Any] = {}
        self._module, self._size, self.children = weakref.ref(module), len(own), _children_of(module)
        self._fixed: list[str] = []
        self._values: list[Any] = []  # of attributes that cannot be written to, only replaced
        self._containers: list[str] = []
        self._others: list[str] = []
        self._passed_over = [name for name in _NO_SETTINGS if name in own]
        for name in filterfalse(_PASSED_OVER.__contains__, own):  # most names are passed over, in no loop of Python
            value = own[name]
            plain = _plain(value, _DEPTH)
            if plain is _OTHER:
                self._others.append(name)
                continue
            self.plain[name] = plain
            if plain is value or (type(value) is tuple and _PLAIN.issuperset(map(type, value))):
                self._fixed.append(name)
                self._values.append(value)
            else:
                self._containers.append(name)

    def holds(self, module: nn.Module, own: dict[str, Any]) -> bool:
        """True if the module is the same, and its attributes.

        Args:
            module: The module.
            own: Its attributes.
        """
        children = module._modules
        return (
            self._module() is module
            and len(own) == self._size
            and (not self._fixed or all(map(is_, map(own.get, self._fixed, repeat(_OTHER)), self._values)))
            and (_children_of(module) == self.children if children else not self.children)
            and (not self._passed_over or all(map(own.__contains__, self._passed_over)))  # else others may be there
            and (not self._containers or self._contain_the_same(own))
            and (not self._others or all(name in own and _plain(own[name], _DEPTH) is _OTHER for name in self._others))
        )

    def _contain_the_same(self, own: dict[str, Any]) -> bool:
        return all(_plain(own.get(name, _OTHER), _DEPTH) == self.plain[name] for name in self._containers)


def _children_of(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Names and identities of the modules directly below one, which live as long as the network has them."""
    return tuple([(name, id(child)) for name, child in module._modules.items()])
