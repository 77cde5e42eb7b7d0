"""Which tests of a product of parameters run: as many as it takes for every pair of values to be tried.

A test of 8 problems, 5 choices of weights and 8 structures is 320 tests; 64 of them try every problem with every
structure, every problem with all weights, and all weights with every structure. These run, unless the environment
variable LAPLACE_TEST_ALL is set: then all of them do (`make test-all`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest

ALL = bool(os.environ.get("LAPLACE_TEST_ALL"))


@dataclass(frozen=True)
class Once:
    """A value that is tried with no other one in particular: one test that has it is enough."""

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
    for numbers in groups.values():
        kept.update(numbers[place] for place in covering([_values(items[number]) for number in numbers]))
    return [items[number] for number in sorted(kept)]


def covering(rows: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Places of rows that have every pair of values, in two columns, that any row has; many new pairs come first."""
    if not rows or len(rows[0]) < 3:
        return list(range(len(rows)))
    wanted = [_wanted(row) for row in rows]
    seen: set[tuple[Any, ...]] = set()
    found: list[int] = []
    for least in range(max(map(len, wanted)), 0, -1):
        for place, own in enumerate(wanted):
            if len(own - seen) >= least:
                seen |= own
                found.append(place)
    return sorted(found)


def _wanted(row: Sequence[Hashable]) -> set[tuple[Any, ...]]:
    """Pairs of values in two columns, and values of which one test is enough, each with its column."""
    placed = list(enumerate(row))
    alone = {(i, value) for i, value in placed if isinstance(value, Once)}
    return {pair for pair in combinations(placed, 2) if not alone.intersection(pair)} | {(one,) for one in alone}


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
