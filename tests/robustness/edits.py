"""Edits of saved states, one place at a time: other kinds, numbers that are not finite, other shapes, missing parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

OTHERS: dict[str, Any] = {
    "None": None, "a word": "x", "0": 0, "3": 3, "-1": -1, "2.5": 2.5, "NaN": float("nan"), "∞": float("inf"),
    "10³⁰": 10**30, "True": True, "a list": [], "a dict": {}, "a vector": torch.ones(2), "a scalar": torch.tensor(1.0),
}  # fmt: skip
"""What is put in the place of anything."""

Place = tuple[Any, ...]


def places(value: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every part of a nested value, itself included, by the keys that lead there."""
    yield path, value
    parts: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


def edits(value: Any) -> dict[str, Any]:
    """What stands in the place of a value in turn, by names."""
    if isinstance(value, Tensor):
        return OTHERS | _of_tensor(value)
    if isinstance(value, dict):
        less = {f"without {key}": {k: v for k, v in value.items() if k != key} for key in value}
        return OTHERS | less | {"one more": value | {"new": 1}, "its values": list(value.values()), "numbered": {1: 2}}
    if isinstance(value, list):
        more = {"shorter": value[:-1], "longer": value + value[-1:], "backwards": value[::-1]}
        return OTHERS | more | {"named": {str(i): part for i, part in enumerate(value)}}
    if isinstance(value, bool):
        return OTHERS | {"not": not value}
    if isinstance(value, str):
        return OTHERS | {"longer": value + "x", "empty": ""}
    if isinstance(value, int | float):
        return OTHERS | {"+1": value + 1, "-1": value - 1, "negative": -value, "+½": value + 0.5}
    return OTHERS


def _of_tensor(value: Tensor) -> dict[str, Any]:
    flat, shape = value.flatten(), value.shape
    dtypes = (torch.bool, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64)
    changed: dict[str, Any] = {str(dtype): value.to(dtype) for dtype in dtypes}
    changed |= {"one more dimension": value[None], "flat": flat, "empty": flat[:0], "plain": value.tolist()}
    if value.ndim:
        turned = value.mT if value.ndim > 1 else value.flip(0)
        changed |= {
            "shorter": value[:-1],
            "narrower": value[..., :-1],
            "turned": turned,
            "twice": torch.cat([value] * 2),
        }
        changed |= {"sparse": value.to_sparse(), "meta": value.to("meta")}
    if not value.is_floating_point():
        return changed | {"others": ~value if value.dtype == torch.bool else value + 1}
    for number in (torch.nan, torch.inf, -1e5):
        with_number = flat.clone()
        with_number[len(flat) // 2 : len(flat) // 2 + 1] = number
        changed[f"with {number}"] = with_number.reshape(shape)
    scaled = {f"times {factor:g}": factor * value for factor in (1e30, 1e-30, -1, 0, torch.inf)}
    return changed | scaled | {"with a graph": value.clone().requires_grad_()}


def edited(state: Any, path: Place, new: Any) -> Any:
    """The state with something else at a place; the rest is shared."""
    if not path:
        return new
    changed = dict(state) if isinstance(state, dict) else list(state)
    changed[path[0]] = edited(state[path[0]], path[1:], new)
    return changed
