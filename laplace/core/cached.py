"""A property that is computed once, without a lock."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")


class cached_property(functools.cached_property[_T]):  # noqa: N801  (the standard library's name)
    """`functools.cached_property` as it is from Python 3.12 on.

    Before, one lock is held for all owners while a value is computed: two threads, of which one computes and waits for
    a lock of ours that the other holds while it waits to compute, stop for ever. Of several threads that compute at
    once all get what the first kept.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> _T: ...
    def __get__(self, instance: object | None, owner: type[Any] | None = None) -> Self | _T:
        """The value, which the instance keeps."""
        if instance is None:
            return self
        return instance.__dict__.setdefault(self.func.__name__, self.func(instance))
