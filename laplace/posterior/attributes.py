"""Attributes of objects that users hold, whose values are those of the posterior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from laplace.errors import ReadOnlyError
from laplace.posterior.assembled import with_parts
from laplace.posterior.posterior import Posterior

T = TypeVar("T")


class Chosen(Generic[T]):
    """An attribute by the name of one of the posterior's choices; assigning it makes another posterior.

    Args:
        doc: Its documentation.
        fixed: Refuses assignments.
    """

    def __init__(self, doc: str, *, fixed: bool = False) -> None:
        self.__doc__ = doc
        self.fixed = fixed
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Takes the attribute's name."""
        self.name = name

    def __get__(self, la: Any, owner: type) -> T:
        """The choice; of the class, this object."""
        return cast("T", self) if la is None else getattr(la._posterior.choices, self.name)

    def __set__(self, la: Any, value: T) -> None:
        """Chooses again.

        Raises:
            ReadOnlyError: It is fixed.
        """
        if self.fixed:
            argument = self.name.removesuffix("_object")
            raise ReadOnlyError(
                f"{self.name} of {type(la).__name__} cannot be assigned; pass {argument}= to the constructor."
            )
        la.set_posterior(la.snapshot().with_choices(**{self.name: value}))


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
