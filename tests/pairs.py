"""Which tests of a product of parameters run: as many as it takes for every pair of values to be tried.

A test of 8 problems, 5 choices of weights and 8 structures is 320 tests; 64 of them try every problem with every
structure, every problem with all weights, and all weights with every structure. These run, unless the environment
variable LAPLACE_TEST_ALL is set: then all of them do (`make test-all`).
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest

ALL = bool(os.environ.get("LAPLACE_TEST_ALL"))
FEW = 12
"""Tests of two parameters that all run, whatever they are."""


@dataclass(frozen=True)
class Once:
    """A value that is tried with no other one in particular: one test of a file that has it is enough."""

    value: Hashable


def chosen(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests of which each tries a pair that no other one tries; those with fewer than three parameters stay.

    Tests that are marked as `nightly` go: they start many processes, or repeat at length what others sample.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        if item.get_closest_marker("nightly"):
            continue
        groups[item.nodeid.partition("[")[0]].append(number)
    kept: set[int] = set()
    seen: dict[str, set[Any]] = defaultdict(set)  # values that are tried once, by file
    for name, numbers in groups.items():
        places = covering([_values(items[number]) for number in numbers], seen[name.partition("::")[0]])
        kept.update(numbers[place] for place in places)
    return [items[number] for number in sorted(kept)]


def covering(rows: Sequence[tuple[Hashable, ...]], tried: set[Any] | None = None) -> list[int]:
    """Places of rows that have every pair of values, in two columns, that any row has; many new pairs come first.

    Of more than `FEW` rows of two columns, which are nothing but pairs, every value is there.

    Args:
        rows: All of one length.
        tried: Of values that are tried `Once`, those that need no row any more; those of the rows are added.
    """
    if not rows or len(rows[0]) < 2 or (len(rows[0]) == 2 and len(rows) <= FEW):
        return list(range(len(rows)))
    if len(rows[0]) == 2:
        return _by_turns(rows)
    tried = set() if tried is None else tried
    wanted = [_wanted(row) for row in rows]
    seen = set(tried)
    found: list[int] = []
    for least in range(max(map(len, wanted)), 0, -1):
        for place, own in enumerate(wanted):
            if len(own - seen) >= least:
                seen |= own
                found.append(place)
    tried |= {value for value in seen if isinstance(value, Once)}
    return sorted(found)


def _by_turns(rows: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Places of rows that have every value; of equals comes first whose values are there least often."""
    uses: Counter[tuple[int, Hashable]] = Counter()
    found: list[int] = []
    left = [set(enumerate(row)) for row in rows]
    while new := max(len(own - uses.keys()) for own in left):
        equals = [place for place, own in enumerate(left) if len(own - uses.keys()) == new]
        found.append(min(equals, key=lambda place: sum(uses[value] for value in left[place])))
        uses.update(left[found[-1]])
    return sorted(found)


def _wanted(row: Sequence[Hashable]) -> set[Any]:
    """Pairs of values in two columns, and values of which one test is enough."""
    placed = [(i, value) for i, value in enumerate(row) if not isinstance(value, Once)]
    return {*combinations(placed, 2), *(value for value in row if isinstance(value, Once))}


def turns(first: Iterable[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every one of the first values with one of the others by turns; all combinations where LAPLACE_TEST_ALL is set."""
    if ALL:
        return list(product(first, *others))
    return [(value, *(other[i % len(other)] for other in others)) for i, value in enumerate(first)]


def _values(item: pytest.Item) -> tuple[Hashable, ...]:
    """The values of a test, one per decorator; what has `axes` counts as these."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    values: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        arguments = [given[name.strip()] for name in (names.split(",") if isinstance(names, str) else names)]
        split = [getattr(value, "axes", None) for value in arguments]
        if any(axes is not None for axes in split):
            for value, axes in zip(arguments, split, strict=True):
                values += [_key(value)] if axes is None else axes
        else:
            values.append(tuple(_key(value) for value in arguments))
    return tuple(values)


def _key(value: Any) -> Hashable:
    return value if isinstance(value, str | int | float | bool | type | None) else id(value)
