"""Scalars of the legacy matrix classes, and how they are spread over factors."""

from __future__ import annotations

from numbers import Real
from typing import TypeGuard

from torch import Tensor

from laplace.errors import InvalidArgument

Scalar = float | Tensor


def is_scalar(value: object) -> TypeGuard[Scalar]:
    """True if `value` is a real number (not a bool) or a tensor with one element and at most one dimension."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.ndim <= 1
    return isinstance(value, Real) and not isinstance(value, bool)


def as_scalar(value: object) -> Scalar:
    """`value` as a float or a 0-dim tensor with its graph.

    Raises:
        InvalidArgument: It is not a scalar, or negative.
    """
    if not is_scalar(value):
        raise InvalidArgument(
            f"a curvature can be multiplied by a real number or a tensor with one element, not by {value!r}."
        )
    scalar = value.reshape(()) if isinstance(value, Tensor) else float(value)
    if not bool(scalar >= 0):
        raise InvalidArgument(f"a curvature is scaled by {value!r}; the factor must be at least 0.")
    return scalar


def spread(scalar: Scalar, n_factors: int) -> Scalar:
    """scalar^(1/n), so that n factors scaled by it give a product scaled by `scalar`; the graph of a tensor is kept."""
    return scalar if n_factors == 1 else scalar ** (1.0 / n_factors)
