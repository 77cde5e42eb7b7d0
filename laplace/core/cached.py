"""Properties that are computed once, without a lock, and values that are kept while what they follow from stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch import Tensor

from laplace.core.inference import kept_for_later

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


def version(tensor: Tensor) -> int:
    """Number of times that a tensor was written to; of inference mode, or through `.data`, no write is counted."""
    return 0 if tensor.is_inference() else tensor._version


class Kept:
    """Tensors by name, each with what it was computed of: that of the last call is kept.

    Numbers are not compared: other vectors are other objects, and so are those that were written to. Nothing is kept
    that requires a gradient, or of what does.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[list[Any], tuple[Any, ...], Tensor]] = {}

    def computed(self, name: str, given: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        """What `make` computes of what is `given`, anew where that is not the very same as before."""
        tensors = [value for value in given if isinstance(value, Tensor)]
        if any(tensor.requires_grad for tensor in tensors):
            return make()
        key = [_identity(value) for value in given]
        last = self._last.get(name)
        if last is not None and last[0] == key:
            return last[2]
        with kept_for_later():
            made = make()
        if not made.requires_grad:
            self._last[name] = key, given, made
        return made


def _identity(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), version(value)
    return value if isinstance(value, str | tuple) else id(value)
