"""Properties that are computed once, without a lock, and values that are kept while what they follow from stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from laplace.core.inference import kept_for_later

if TYPE_CHECKING:
    from typing_extensions import Self

K = TypeVar("K")
S = TypeVar("S")
T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801  (the standard library's name)
    """`functools.cached_property` as it is from Python 3.12 on.

    Before, one lock is held for all owners while a value is computed: two threads, of which one computes and waits for
    a lock of ours that the other holds while it waits to compute, stop for ever. Of several threads that compute at
    once all get what the first kept.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...
    def __get__(self, instance: object | None, owner: type[Any] | None = None) -> Self | T:
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


# What takes long and depends on more than the curvature: ratios of weights, or what is done about negative eigenvalues.


def keeps_last(method: Callable[[S, K], T]) -> Callable[[S, K], T]:
    """A method of one argument, a key of `Recent`, whose last value is kept with the object."""
    name = f"_last_{method.__name__}"

    @functools.wraps(method)
    def value(self: S, key: K) -> T:
        recent: Recent[T] = vars(self).setdefault(name, Recent())  # also of a frozen dataclass
        return recent(key, lambda: method(self, key))

    return value


class Recent(Generic[T]):
    """Keeps what was computed last, with what it was computed from.

    A frozen curvature has one for everything that takes long and depends on more than the curvature: the ratios of the
    weights of its terms, or what is done about negative eigenvalues.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, T] | None = None

    @property
    def value(self) -> T | None:
        """The value that was computed last; None before."""
        return None if self._last is None else self._last[1]

    def __call__(self, key: Any, compute: Callable[[], T]) -> T:
        """The value of a key, computed unless it is the last one's."""
        if isinstance(key, Tensor) and key.requires_grad and torch.is_grad_enabled():
            return compute()
        last = self._last
        if last is not None and _equal(last[0], key):
            return last[1]
        self._last = last = None  # two factorisations would be held at once
        with kept_for_later():
            value = compute()
            self._last = key.detach().clone() if isinstance(key, Tensor) else key, value
        return value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)
