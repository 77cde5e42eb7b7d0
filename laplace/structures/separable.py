"""Curvature without entries between tensors, which can be taken apart and put together again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from laplace.core.layout import Layout
from laplace.structures.base import Curvature

S = TypeVar("S", bound="Separable")
T = TypeVar("T")


class Separable(Curvature):
    """A curvature whose precision is block-diagonal: log determinants and variances are sums over its blocks."""

    @abstractmethod
    def units(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        """Tensors that have a block, or sums, in common, by their indices: what is not taken apart.

        Args:
            layout: All tensors.
        """

    @abstractmethod
    def part(self: S, tensors: Sequence[int], layout: Layout) -> S:
        """The curvature of some tensors alone, which keeps no memory of the others.

        Args:
            tensors: Indices of one or more units' tensors, ascending.
            layout: All tensors.
        """

    @classmethod
    @abstractmethod
    def joined(cls: type[S], parts: Mapping[tuple[int, ...], Any], layout: Layout) -> S:
        """The curvature of all tensors.

        Args:
            parts: Parts of this structure by their tensors.
            layout: All tensors.
        """


def linked(keys: Sequence[Collection[str]]) -> tuple[tuple[int, ...], ...]:
    """Tensors that are linked by keys that they have in common, directly or by way of others.

    Args:
        keys: Of every tensor.
    """
    groups: list[tuple[set[int], set[str]]] = []
    for i, own in enumerate(keys):
        known = set(own)
        met = [group for group in groups if not known.isdisjoint(group[1])]
        groups = [group for group in groups if known.isdisjoint(group[1])]
        groups.append(({i}.union(*(tensors for tensors, _ in met)), known.union(*(theirs for _, theirs in met))))
    return tuple(sorted(tuple(sorted(members)) for members, _ in groups))


def in_order(parts: Mapping[tuple[int, ...], Sequence[T]]) -> tuple[T, ...]:
    """What there is of every tensor, in the order of the tensors.

    Args:
        parts: One for every tensor, by the indices of some tensors.
    """
    placed = {i: one for tensors, some in parts.items() for i, one in zip(tensors, some, strict=True)}
    return tuple(placed[i] for i in range(len(placed)))
