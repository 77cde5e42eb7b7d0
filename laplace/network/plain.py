"""Plain networks: what was found out of one holds while it has the same modules, and its copies are used again.

Of most networks modules hold submodules, tensors, numbers, and short containers of these. Whether such a network is the
one that it was takes one comparison of identities per thing that it holds, in no loop of Python. Others are looked
through, and copied, at every call.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from sys import getrefcount
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

from torch import Tensor, nn

from laplace.network.apart import ATOMS, CONTAINERS, MOST, copied, copies_of, needs_itself
from laplace.network.fsdp import has_sharded_weights
from laplace.network.tree import HOOKS, OWN, Place, attributes_in, modules_of, places_of

T = TypeVar("T")

_WRITTEN = CONTAINERS - {tuple}
_FLAGS = ("training", "_is_full_backward_hook")
_HOOKS_OF = itemgetter(*HOOKS)

_MOST_COPIES = 8
"""Copies of a network that are kept."""

_NOTES = "_notes_of_laplace"
"""Attribute of a copy that holds what was found out of it."""


class Held:
    """What modules hold, buffers apart, to see later whether they hold the very same.

    Equal is not the same: 1 is not True, and a table may have its entries in another order. What may lead to a module
    by later additions, tables and containers, is not kept, so that nothing here keeps a network alive.

    Args:
        modules: Those of a plain network, or of a copy, each once, in the order of its tree.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        own = [module.__dict__ for module in modules]
        self._types, self._lengths = list(map(type, modules)), list(map(len, own))
        self._values_of: list[itemgetter[Any]] = []
        self._tables_of: list[itemgetter[Any]] = []
        for attributes in own:
            names = list(attributes_in(attributes))
            containers = [name for name in names if type(attributes[name]) in _WRITTEN]
            self._values_of.append(itemgetter(*_FLAGS, *(name for name in names if name not in containers)))
            self._tables_of.append(itemgetter("_parameters", "_modules", *containers))
        self._values = _got(self._values_of, own)
        tables = _got(self._tables_of, own)
        self._kinds, self._sizes, contents = list(map(type, tables)), list(map(len, tables)), _contents(tables)
        self._places = list(map(id, contents))
        self._kept = [part for part in contents if not isinstance(part, nn.Module)]  # whose places no others get

    def is_same(self, modules: list[nn.Module]) -> bool:
        """True if these modules hold the same, and no hooks."""
        own = [module.__dict__ for module in modules]
        if list(map(type, modules)) != self._types or list(map(len, own)) != self._lengths:
            return False
        try:
            if any(chain.from_iterable(map(_HOOKS_OF, own))):
                return False
            values, tables = _got(self._values_of, own), _got(self._tables_of, own)
        except KeyError:  # an attribute has another name
            return False
        if not all(map(is_, values, self._values)) or list(map(type, tables)) != self._kinds:
            return False  # of a table in whose place there is something else nothing more is asked
        return list(map(len, tables)) == self._sizes and list(map(id, _contents(tables))) == self._places


def _got(getters: list[itemgetter[Any]], own: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(itemgetter.__call__, getters, own)))


def _contents(tables: list[Any]) -> list[Any]:
    """What is in tables and containers."""
    full = list(filter(None, tables))
    keyed = [table for table in full if isinstance(table, dict)]
    return [*chain.from_iterable(full), *chain.from_iterable(map(dict.values, keyed))]


class PlainNetwork:
    """What is known of a plain network, and copies of it that no call has at the moment.

    Args:
        modules: Its own; here and below the network comes first. They are not kept.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._held = Held(modules)
        self._copies: deque[_Copy] = deque(maxlen=_MOST_COPIES)
        self._found: dict[Any, Any] = {}

    def is_same(self, modules: list[nn.Module]) -> bool:
        """True if the network still holds what it did."""
        return self._held.is_same(modules)

    def found(self, modules: list[nn.Module], look: Callable[[list[nn.Module]], T]) -> T:
        """What a look at the modules finds, at all but their buffers; it is taken once."""
        if look not in self._found:
            self._found[look] = look(modules)
        return self._found[look]

    @contextmanager
    def copy(self, modules: list[nn.Module]) -> Iterator[nn.Module]:
        """A copy in evaluation mode, for one block alone; one that the block has changed is not used again."""
        copy = self._free() or _Copy(modules[0])
        copy.fill([module._buffers for module in modules])
        yield copy.module
        if copy.is_same():
            self._copies.append(copy)

    def _free(self) -> _Copy | None:
        """A copy to which nobody refers: what was recorded in a block may still read its modules afterwards."""
        for _ in range(len(self._copies)):
            try:
                copy = self._copies.popleft()  # in one step, whatever other threads do
            except IndexError:
                return None
            if copy.is_free():
                return copy
            self._copies.append(copy)
        return None


@dataclass(frozen=True, eq=False)
class _Notes:
    places: list[Place]


class _Copy:
    """A copy of a plain network that is used again and again, with memory of its own for buffers every time."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copied(model)
        self._modules = modules_of(self.module)
        self.module.__dict__[_NOTES] = _Notes(places=places_of(self.module))
        self._buffers = [module._buffers for module in self._modules]
        self._held = Held(self._modules)
        self._references = list(map(getrefcount, self._modules))

    def is_free(self) -> bool:
        """True if nothing refers to one of its modules but itself."""
        return list(map(getrefcount, self._modules)) == self._references

    def fill(self, tables: list[dict[str, Tensor | None]]) -> None:
        """Copies the network's present buffers."""
        full = [(own, table) for own, table in zip(self._buffers, tables, strict=True) if table or own]
        if not full:
            return
        held = {id(buffer): buffer for _, table in full for buffer in table.values() if buffer is not None}
        copies = dict(zip(held, copies_of(list(held.values())), strict=True))
        for own, table in full:
            own.clear()
            own.update({key: None if buffer is None else copies[id(buffer)] for key, buffer in table.items()})

    def is_same(self) -> bool:
        """True if nothing was written to the copy but its buffers."""
        return self._held.is_same(self._modules)


_KNOWN: weakref.WeakKeyDictionary[nn.Module, PlainNetwork | int] = weakref.WeakKeyDictionary()
"""Plain networks; of others, how many times they pass as such until the next look."""

_PASSES = 64


def plain(modules: list[nn.Module]) -> PlainNetwork | None:
    """What is known of the network of these modules, if it is a plain one that can be copied; else None."""
    model = modules[0]
    known = _KNOWN.get(model, 0)
    if isinstance(known, PlainNetwork):
        if known.is_same(modules):
            return known
    elif known > 0:
        _KNOWN[model] = known - 1
        return None
    is_plain = all(map(_is_plain, modules)) and not any(model in module._modules.values() for module in modules)
    if not is_plain or has_sharded_weights(model) or needs_itself(model):
        _KNOWN[model] = _PASSES
        return None
    network = _KNOWN[model] = PlainNetwork(modules)
    return network


def known_places(module: nn.Module) -> list[Place] | None:
    """Places of the parameters of a copy that is used again; None of other networks."""
    notes: _Notes | None = module.__dict__.get(_NOTES)
    return None if notes is None else notes.places


def _is_plain(module: nn.Module) -> bool:
    """True if nothing that a module holds leads to other modules but the table of its own, and no hook is on it."""
    own = module.__dict__
    if not own.keys() >= OWN or any(own[name] for name in HOOKS):
        return False
    if any(map(_leads_further, own["_parameters"].values())):
        return False
    return all(_holds_little(own[name]) for name in attributes_in(own))


def _leads_further(parameter: nn.Parameter | None) -> bool:
    """True if a parameter has hooks or attributes that may lead to the network: its copies would keep it alive."""
    if parameter is None:
        return False
    return bool(parameter._backward_hooks) or not ATOMS.issuperset(map(type, vars(parameter).values()))


def _holds_little(value: Any) -> bool:
    """True of a value without parts, and of a container of such values."""
    if type(value) not in CONTAINERS:
        return _is_single(value)
    return len(value) <= MOST and all(map(_is_single, value.values() if isinstance(value, dict) else value))


def _is_single(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, Tensor):  # which says of every entry whether it is equal
        return False
    is_plain_function = kind is FunctionType and not value.__closure__ and not value.__dict__
    return kind in ATOMS or kind is BuiltinFunctionType or is_plain_function
