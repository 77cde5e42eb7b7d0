"""Factorisations of a fit, for as long as they are asked for at the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from laplace.structures import algebra

T = TypeVar("T")


class Recent(Generic[T]):
    """Keeps what was computed last, with what it was computed from.

    A frozen curvature has one for everything that takes long and depends on more than the curvature: the ratios of the
    weights of its terms, or what is done about negative eigenvalues.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, T] | None = None

    def __call__(self, key: Any, compute: Callable[[], T]) -> T:
        """The value of a key, computed unless it is the last one's.

        Args:
            key: A tensor, or anything that is compared by `==`. A tensor that requires a gradient belongs to a graph of
                its caller's, with what is computed from it: nothing is kept then.
            compute: Computes the value.
        """
        if isinstance(key, Tensor) and key.requires_grad and torch.is_grad_enabled():
            return compute()
        last = self._last
        if last is not None and _equal(last[0], key):
            return last[1]
        self._last = last = None  # two factorisations would be held at once
        with algebra.kept_for_later():
            value = compute()
            self._last = key.detach().clone() if isinstance(key, Tensor) else key, value
        return value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)
