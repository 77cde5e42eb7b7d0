"""Structures by the fields of their dataclasses: their tensors by name, what is saved of them, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from laplace.core.checks import all_finite


def entries(value: Any) -> dict[str, Any]:
    """Fields of a dataclass, items of a mapping or of a sequence, by name; of anything else nothing."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return {str(i): item for i, item in enumerate(value)}
    return {}


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Floating point tensors of a value, however deep in it, by the names that lead to each."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
        return
    for key, entry in entries(value).items():
        yield from named_tensors(entry, f"{name}.{key}" if name else key)


def is_finite(value: Any) -> Tensor:
    """True, 0-dim, if every number in a value's tensors is finite."""
    return all_finite(tensor for _, tensor in named_tensors(value))


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same value with a function of every floating point tensor in its place."""
    if isinstance(value, Tensor):
        return function(value) if value.is_floating_point() else value
    parts = {key: mapped(entry, function) for key, entry in entries(value).items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **parts)
    if isinstance(value, Mapping):
        return parts
    return type(value)(parts.values()) if isinstance(value, list | tuple) else value


def state_of(value: Any) -> Any:
    """A value as tensors, numbers, strings, and lists and dicts of them."""
    parts = {key: state_of(entry) for key, entry in entries(value).items()}
    if isinstance(value, list | tuple):
        return list(parts.values())
    return parts if is_dataclass(value) or isinstance(value, Mapping) else value


def from_state(kind: Any, state: Any) -> Any:
    """The object that `state_of` was given.

    Args:
        kind: Its type, as annotations say it: a dataclass, or `tuple[X, ...]`, `dict[str, X]` and `X | None` of what
            `state_of` takes.
        state: What `state_of` gave.
    """
    if is_dataclass(kind):
        hints = _hints(kind)
        # Fields that are added to a structure later have defaults, for states that were saved before.
        names = [field.name for field in fields(kind) if field.name in state]
        return kind(**{name: from_state(hints[name], state[name]) for name in names})  # pyright: ignore
    container, parts = get_origin(kind), [part for part in get_args(kind) if part is not type(None)]
    if state is None or not parts:
        return state
    if container is tuple:
        return tuple(from_state(parts[0], item) for item in state)
    if container in (dict, Mapping):
        return {key: from_state(parts[1], item) for key, item in state.items()}
    return from_state(parts[0], state)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def move(state: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """A nested state with its tensors on another device and its floating point tensors in another dtype."""
    if isinstance(state, Tensor):
        return state.to(device=device, dtype=dtype if state.is_floating_point() else None)
    if isinstance(state, dict):
        return {key: move(value, device, dtype) for key, value in state.items()}
    if isinstance(state, list):
        return [move(value, device, dtype) for value in state]
    return state
