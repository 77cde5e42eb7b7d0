"""Checks of numbers that users give: hyper-parameters, counts and flags."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laplace.errors import InvalidArgument, InvalidType


def as_tensor(name: str, value: Any, *, like: Tensor) -> Tensor:
    """A copy of a real scalar or of a tensor of at most one dimension, like `like`, with the caller's graph.

    Raises:
        InvalidType: Neither a real number nor a tensor.
        InvalidArgument: More than one dimension, or empty.
    """
    if isinstance(value, Tensor):
        if value.ndim > 1 or value.numel() == 0:
            shape = tuple(value.shape)
            raise InvalidArgument(f"{name} must be a scalar or a vector; a tensor of shape {shape} was given.")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidType(f"{name} must be a real number or a tensor; {type(value).__name__} was given.")
    with torch.inference_mode(False):  # a tensor made in inference mode could never be differentiated
        if isinstance(value, Tensor):
            return value.to(device=like.device, dtype=like.dtype, copy=True)
        return torch.tensor(float(value), dtype=like.dtype, device=like.device)


def positive(name: str, value: Tensor) -> Tensor:
    """The value, if every entry is positive and finite.

    Raises:
        InvalidArgument: Some entry is not.
    """
    plain = value.detach()
    if plain.numel() == 1 and 0 < plain.item() < math.inf:
        return value
    accepted = (plain > 0) & (plain < math.inf)
    if not bool(accepted.all()):
        bad = plain[~accepted] if plain.ndim else plain
        raise InvalidArgument(f"{name} must be positive and finite; {bad.flatten()[0].item():g} was given.")
    return value


def finite(name: str, value: Tensor) -> Tensor:
    """The value, if every entry is finite.

    Raises:
        InvalidArgument: Some entry is not.
    """
    plain = value.detach()
    if not (math.isfinite(plain.item()) if plain.numel() == 1 else bool(plain.isfinite().all())):
        raise InvalidArgument(f"{name} must be finite.")
    return value


def check_length(name: str, value: Tensor, accepted: dict[str, int]) -> None:
    """Checks the length of a vector against the accepted ones.

    Raises:
        InvalidArgument: It is none of them.
    """
    if value.numel() not in accepted.values():
        lengths = ", ".join(f"{length} ({what})" for what, length in accepted.items())
        raise InvalidArgument(f"{name} has length {value.numel()}; accepted are {lengths}.")


def check_counts(least: int = 1, /, **counts: Any) -> None:
    """Refuses numbers of samples, steps or data that are none.

    Args:
        least: The smallest that is accepted.
        **counts: The numbers, by the names of the caller's arguments.

    Raises:
        InvalidArgument: One is no integer, or too small.
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            accepted = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise InvalidArgument(f"{name}={value!r}; it must be {accepted}.")


def check_flag(name: str, value: Any, remedy: str) -> None:
    """Refuses what is neither True nor False.

    Args:
        name: Of the argument.
        value: What was given.
        remedy: What to do, a sentence.

    Raises:
        InvalidType: It is something else.
    """
    if not isinstance(value, Integral | np.bool_):
        raise InvalidType(f"{name} must be True or False; {type(value).__name__} was given. {remedy}")
