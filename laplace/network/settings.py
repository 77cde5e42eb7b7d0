"""All that modules hold besides parameters, buffers and submodules, as far as it can be compared."""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from laplace.network.model_guard import modules_of

_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: most hold hooks, and of most modules none."""

_NO_SETTINGS = frozenset({"_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set"})

_PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range}
)
_MOST, _DEPTH = 1024, 6
"""Entries of a container that is looked into, and containers inside each other."""

_OBJECT = 4
"""Depth from which objects are not looked into, nor are those that an object holds: a trainer holds all there is."""

_OPAQUE = (nn.Module, type, ModuleType, BuiltinFunctionType)


def settings_of(model: nn.Module, call: object = None) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Values that do not change as long as nobody changes them, and the tensors among them.

    Args:
        model: The network.
        call: The function that calls it, or None.
    """
    values = _Found()
    for module in modules_of(model):
        values.settings.append(type(module))
        for name, value in vars(module).items():
            if name not in _OWN or (value and name not in _NO_SETTINGS):
                values.add(name, value, 0)
    values.add("", call, 0)
    return tuple(values.settings), values.tensors


class _Found:
    """Values and tensors in the order in which they were met."""

    def __init__(self) -> None:
        self.settings: list[Any] = []
        self.tensors: list[Tensor] = []
        self._seen: dict[int, object] = {}

    def add(self, name: object, value: Any, depth: int) -> None:
        """Adds a value, with what it holds; of what lies too deep, or is of a kind that tells nothing, its identity."""
        kind = type(value)
        if kind in _PLAIN:
            self.settings.append((name, kind, value))
            return
        self.settings.append((name, kind, id(value)))
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif depth < _DEPTH and id(value) not in self._seen:
            self._seen[id(value)] = value
            for key, part in _parts(value):
                self.add(key if type(key) in _PLAIN else id(key), part, depth + 1)
            if depth < _OBJECT and not isinstance(value, _OPAQUE):
                for key, part in getattr(value, "__dict__", {}).items():
                    self.add(key, part, max(depth + 1, _OBJECT))


def _parts(value: Any) -> list[tuple[object, Any]]:
    """Parts of a container or a function, with names."""
    if isinstance(value, dict):
        return list(value.items()) if len(value) <= _MOST else []
    if isinstance(value, list | tuple | set | frozenset):
        return list(enumerate(value)) if len(value) <= _MOST else []
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [("self", value.__self__), ("func", value.__func__)]
    if isinstance(value, FunctionType):
        return [("defaults", value.__defaults__), *enumerate(_cells(value))]
    return []


def _cells(function: FunctionType) -> list[Any]:
    """Variables of the functions around it that a function uses."""
    return [_content(cell) for cell in function.__closure__ or ()]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
