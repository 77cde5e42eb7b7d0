"""A named table of interchangeable parts: one line of registration per part, duplicates refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from laplace.errors import InvalidArgument

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps the name of a part to the part.

    Args:
        kind: What the entries are ("likelihood", "structure", ...), for messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files a part under `name`.

        Raises:
            InvalidArgument: The name is taken.
        """

        def file(part: T) -> T:
            if name in self._entries:
                raise InvalidArgument(f"{self.kind} {name!r} is registered already.")
            self._entries[name] = part
            return part

        return file

    @contextmanager
    def temporarily(self) -> Iterator[None]:
        """Forgets at the end of a block what is registered in it."""
        former = dict(self._entries)
        try:
            yield
        finally:
            self._entries = former

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(map(repr, self._entries))
            raise InvalidArgument(f"{self.kind}={name!r} is unknown; accepted are {known}.") from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[str, T]]:
        """All names with their parts, in order of registration."""
        return list(self._entries.items())
