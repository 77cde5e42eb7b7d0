"""Attributes of objects that users hold, whose values are those of the posterior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from laplace.posterior.manual_fit import with_parts
from laplace.posterior.posterior import Posterior

T = TypeVar("T")


class Part(Generic[T]):
    """An attribute by the name of a part of the posterior's data; assigning it makes another posterior.

    Args:
        read: Reads it of a posterior.
        doc: Its documentation.
    """

    def __init__(self, read: Callable[[Posterior], T], doc: str) -> None:
        self.__doc__ = doc
        self.read = read
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Takes the attribute's name."""
        self.name = name

    def __get__(self, la: Any, owner: type) -> T:
        """The part; of the class, this object."""
        return cast("T", self) if la is None else self.read(la._posterior)

    def __set__(self, la: Any, value: Any) -> None:
        """Puts a value in its place.

        Raises:
            InvalidArgument: It is not accepted; the posterior stays as it is.
        """
        la._posterior = with_parts(la._posterior, **{self.name: value})
