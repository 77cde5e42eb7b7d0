"""Attributes of objects that users hold, whose values are those of the posterior."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

from laplace.errors import ReadOnlyError

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
        return cast("T", self) if la is None else getattr(la.snapshot().choices, self.name)

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
