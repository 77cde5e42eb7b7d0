"""Ways to take apart a curvature without entries between tensors, and to put it together again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

from laplace.core.layout import Layout

C = TypeVar("C")
T = TypeVar("T")


class Separation(ABC, Generic[C]):
    """Parts of a curvature whose precision is block-diagonal: log determinants and variances are sums over them."""

    @abstractmethod
    def units(self, curvature: C, layout: Layout) -> tuple[tuple[int, ...], ...]:
        """Tensors that have a block, or sums, in common, by their indices: they are not taken apart.

        Args:
            curvature: That of all tensors.
            layout: All tensors.
        """

    @abstractmethod
    def part(self, curvature: C, tensors: Sequence[int], layout: Layout) -> C:
        """The curvature of some tensors alone, which keeps no memory of the others.

        Args:
            curvature: That of all tensors.
            tensors: Indices of the tensors of one or more units, ascending.
            layout: All tensors.
        """

    @abstractmethod
    def joined(self, parts: Mapping[tuple[int, ...], C], layout: Layout) -> C:
        """The curvature of all tensors.

        Args:
            parts: Parts by the indices of their tensors.
            layout: All tensors.
        """


def first(parts: Mapping[tuple[int, ...], T]) -> T:
    """A part, of which the whole is made: also that of a user's class, with what else it has."""
    return next(iter(parts.values()))


def linked(keys: Sequence[Collection[str]]) -> tuple[tuple[int, ...], ...]:
    """Tensors that are linked by keys that they have in common, directly or by way of others."""
    groups: list[tuple[set[int], set[str]]] = []
    for i, own in enumerate(keys):
        known = set(own)
        met = [group for group in groups if not known.isdisjoint(group[1])]
        groups = [group for group in groups if known.isdisjoint(group[1])]
        groups.append(({i}.union(*(tensors for tensors, _ in met)), known.union(*(theirs for _, theirs in met))))
    return tuple(sorted(tuple(sorted(members)) for members, _ in groups))


def in_order(parts: Mapping[tuple[int, ...], Sequence[T]]) -> tuple[T, ...]:
    """Entries of parts, one for every tensor, in the order of the tensors."""
    placed = {i: one for tensors, some in parts.items() for i, one in zip(tensors, some, strict=True)}
    return tuple(placed[i] for i in range(len(placed)))
