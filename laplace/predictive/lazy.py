"""Quantities that are computed when they are first read, and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch

from laplace.network.model_guard import own_mode

_T = TypeVar("_T")


class LazyQuantity(Generic[_T]):
    """Computed when it is first read, whatever grad mode the reader is in.

    Its owner says by `create_graph` whether it can be differentiated. Before Python 3.12 `functools.cached_property`
    has one lock for all owners: predictions in several threads would wait for each other.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self.compute = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, cls: type) -> LazyQuantity[_T]: ...

    @overload
    def __get__(self, owner: object, cls: type) -> _T: ...

    def __get__(self, owner: Any, cls: type) -> LazyQuantity[_T] | _T:
        if owner is None:
            return self
        with own_mode(), torch.set_grad_enabled(owner.create_graph):
            # Of two threads that read one object at once the first has its result kept; both drew the same numbers.
            return owner.__dict__.setdefault(self.name, self.compute(owner))


def lazy(compute: Callable[[Any], _T]) -> LazyQuantity[_T]:
    """A method as a `LazyQuantity`."""
    return LazyQuantity(compute)
