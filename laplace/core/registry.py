"""Tables of interchangeable parts: by name, and classes by the cell of the grid that they are for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from laplace.core.lazy import imported
from laplace.enums import FunctionalApproximation
from laplace.errors import InvalidArgument

T = TypeVar("T")


class _Elsewhere(NamedTuple):
    """A part that is not imported yet."""

    target: str


class Registry(Generic[T]):
    """Maps the name of a part to the part, which is imported when it is asked for.

    Args:
        kind: What the entries are ("likelihood", "structure", ...), for messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T | _Elsewhere] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files a part under `name`.

        Raises:
            InvalidArgument: The name is taken.
        """

        def file(part: T) -> T:
            self._file(name, part)
            return part

        return file

    def refer(self, name: str, target: str) -> None:
        """Files under `name` the part at `"real.module:attribute"`, which is imported when it is asked for.

        Raises:
            InvalidArgument: The name is taken.
        """
        self._file(name, _Elsewhere(target))

    def _file(self, name: str, part: T | _Elsewhere) -> None:
        if name in self._entries:
            raise InvalidArgument(f"{self.kind} {name!r} is registered already.")
        self._entries[name] = part

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            known = ", ".join(map(repr, self._entries))
            raise InvalidArgument(f"{self.kind}={name!r} is unknown; accepted are {known}.")
        part = self._entries[name]
        if not isinstance(part, _Elsewhere):
            return part
        there: T = imported(part.target)
        self._entries[name] = there
        return there

    def get(self, name: str) -> T | None:
        """The part of a name, or None."""
        return self[name] if name in self else None

    def name_of(self, part: T | str) -> str:
        """The name of a registered part; a string is a name, whether it is known or not.

        Raises:
            InvalidArgument: The part is not registered.
        """
        if isinstance(part, str):
            return str(part)
        for name, entry in self.items():
            if entry is part:
                return name
        raise InvalidArgument(
            f"{self.kind}={part!r} is not registered; accepted are {', '.join(map(repr, self._entries))} and what is "
            "registered: decorate it with @….register('a name')."
        )

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[str, T]]:
        """All names with their parts, in order of registration."""
        return [(name, self[name]) for name in self]


class Cell(NamedTuple):
    """Names of one value of every axis."""

    weights: str  # `subset_of_weights`
    structure: str  # `hessian_structure`
    # `functional_approximation`; of a structure over weights the default
    family: str = str(FunctionalApproximation.SOD)

    @classmethod
    def from_key(cls, key: Any) -> Cell:
        """The cell that a class names as its `_key`."""
        if not isinstance(key, tuple) or len(key) not in (2, 3) or not all(isinstance(name, str) for name in key):
            raise InvalidArgument(
                f"_key={key!r} names no cell; give (subset_of_weights, hessian_structure), such as ('all', 'mine'), or "
                "with 'gp' a functional_approximation as a third name."
            )
        return cls(*map(str, key))


class KeyedClasses(Generic[T]):
    """Maps cells to users' classes, which live no longer than users keep them; of several the last one counts."""

    def __init__(self) -> None:
        self._classes: dict[Cell, list[weakref.ref[type[T]]]] = {}

    def add(self, key: Any, cls: type[T]) -> None:
        """Files a class under its `_key`."""
        cell = Cell.from_key(key)
        living = [ref for ref in self._classes.get(cell, []) if ref() is not None]
        self._classes[cell] = [*living, weakref.ref(cls)]

    def find(self, cell: Cell) -> type[T] | None:
        """The class of a cell, or None."""
        living = (ref() for ref in reversed(self._classes.get(cell, [])))
        return next((cls for cls in living if cls is not None), None)

    def __iter__(self) -> Iterator[Cell]:
        """Cells that have a class."""
        return (cell for cell in self._classes if self.find(cell) is not None)
