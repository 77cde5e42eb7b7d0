"""Structures by the fields of their dataclasses: their tensors by name, what is saved of them, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from laplace.core.checks import all_finite
from laplace.core.precision_policy import held_dtype


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
    if isinstance(value, str | int | float | None):
        return
    for key, entry in entries(value).items():
        yield from named_tensors(entry, f"{name}.{key}" if name else key)


def is_finite(value: Any) -> Tensor:
    """True, 0-dim, if every number in a value's tensors is finite."""
    return all_finite(tensor for _, tensor in named_tensors(value))


def mapped(
    value: Any, function: Callable[[Tensor], Tensor], of_others: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Any:
    """The same value with a function of every floating point tensor in its place, and another one of other tensors."""
    if isinstance(value, Tensor):
        return function(value) if value.is_floating_point() else of_others(value)
    parts = {key: mapped(entry, function, of_others) for key, entry in entries(value).items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **parts)
    if isinstance(value, Mapping):
        return parts
    return type(value)(parts.values()) if isinstance(value, list | tuple) else value


def form_of(value: Any) -> Any:
    """A state without its numbers: floating point tensors on the device "meta", others on the CPU."""
    return mapped(value, lambda tensor: tensor.to("meta"), lambda tensor: tensor.cpu())


def zeros_of(form: Any, device: torch.device) -> Any:
    """A state of a form, with zeros."""
    return move(mapped(form, lambda tensor: torch.zeros_like(tensor, device=device)), device, None)


def has_room(form: Any, other: Any) -> bool:
    """True if a form has every floating point tensor of another one, of the same shape and dtype."""
    return _shapes(other).items() <= _shapes(form).items()


def _shapes(value: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named_tensors(value)}


def state_of(value: Any) -> Any:
    """A value as tensors, numbers, strings, and lists and dicts of them."""
    if isinstance(value, Tensor | str | int | None):
        return value
    if isinstance(value, Enum):  # no string, which was returned above
        return value.name
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    parts = {key: state_of(entry) for key, entry in entries(value).items()}
    if isinstance(value, list | tuple):
        return list(parts.values())
    return parts if is_dataclass(value) or isinstance(value, Mapping) else value


def from_state(kind: Any, state: Any) -> Any:
    """The object that `state_of` was given."""
    hints, container, part = _annotation(kind)
    if hints is not None:
        # Fields that are added to a structure later have defaults, for states that were saved before.
        return kind(**{name: from_state(hint, state[name]) for name, hint in hints.items() if name in state})
    if state is None:
        return None
    if part is None:
        return slice(*state) if kind is slice else kind[state] if _is_enum(kind) else state
    if container is tuple:
        return tuple(from_state(part, item) for item in state)
    if container in (dict, Mapping):
        return {key: from_state(part, item) for key, item in state.items()}
    return from_state(part, state)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum) and not issubclass(kind, str)  # those are strings


@cache
def _annotation(kind: Any) -> tuple[dict[str, Any] | None, Any, Any]:
    """Types of a dataclass' fields; of another type its container, and the type of what that holds, if it says so."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in fields(kind)}, None, None
    container, parts = get_origin(kind), [part for part in get_args(kind) if part is not type(None)]
    return None, container, parts[1 if container in (dict, Mapping) else 0] if parts else None


def move(state: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """A nested state with its tensors on another device and its floating point tensors in another dtype.

    What is float64 becomes the widest type of a device that has none.
    """
    if isinstance(state, Tensor):
        if not state.is_floating_point():
            return state.to(device=device)
        return state.to(device=device, dtype=held_dtype(dtype or state.dtype, device or state.device))
    if isinstance(state, dict):
        return {key: move(value, device, dtype) for key, value in state.items()}
    if isinstance(state, list):
        return [move(value, device, dtype) for value in state]
    return state
