"""Plain attributes of modules: what decides a forward pass and is no tensor, as the name of an active adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import nn

Attributes = dict[str, tuple[tuple[str, Any], ...]]
"""By the attribute's name, every module that has it, with its value."""

_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: tables of parameters, submodules and hooks, and the flag of the training mode."""

_NO_SETTINGS = frozenset({"name_or_path", "gradient_checkpointing", "activation_checkpointing", "_attn_implementation"})
"""Where a network of transformers was loaded from, and ways of computing the same outputs."""

_PLAIN = frozenset({bool, int, float, str, type(None)})
_MOST, _DEPTH = 1024, 4
_OTHER = object()


def attributes_of(model: nn.Module) -> Attributes:
    """Numbers, strings, None, and short lists, tuples, dicts and sets of them, on the model and its submodules."""
    attributes: dict[str, list[tuple[str, Any]]] = {}
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OWN | _NO_SETTINGS and (plain := _plain(value, _DEPTH)) is not _OTHER:
                attributes.setdefault(name, []).append((place, plain))
    return {name: tuple(values) for name, values in attributes.items()}


def _plain(value: Any, depth: int) -> Any:
    """A copy that later writes do not reach, or `_OTHER`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind not in (list, tuple, dict, set) or len(value) > _MOST or depth == 0:
        return _OTHER
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


def changed(before: Mapping[str, str], now: Mapping[str, str], *, common: bool = False) -> list[str]:
    """Names of attributes whose digests differ.

    Args:
        before: Digests at one time.
        now: Digests at another.
        common: Leave out names that only one side has: other versions of a package give modules other attributes.
    """
    names = before.keys() & now.keys() if common else before.keys() | now.keys()
    return sorted(name for name in names if before.get(name) != now.get(name))
