"""Which tests of a product of parameters run: as many as it takes for every pair of values to be tried.

A test of 7 likelihoods, 5 choices of weights and 8 structures is 280 tests; 56 of them try every likelihood with every
structure, every likelihood with all weights, and all weights with every structure. These run, unless the environment
variable LAPLACE_TEST_ALL is set: then all of them do (`make test-all`). Where a problem stands for its likelihood,
every problem has its turn in every folder. Products of two parameters alone give every value its turn, and so do tests
that are marked `turns`, whose parameters have little to do with each other.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest

ALL = bool(os.environ.get("LAPLACE_TEST_ALL"))
FEW = 6
"""Tests of two parameters that all run, whatever they are."""


@dataclass(frozen=True)
class Once:
    """A value that is tried with no other one in particular: one test of a folder that has it is enough."""

    value: Hashable


def chosen(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests of which each tries a pair, or a value, that no other one tries; those with one parameter stay.

    Tests that are marked as `nightly` go: they start many processes, or repeat at length what others sample.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        if item.get_closest_marker("nightly"):
            continue
        groups[item.nodeid.partition("[")[0]].append(number)
    kept: set[int] = set()
    seen: dict[str, set[Any]] = defaultdict(set)  # values that are tried once, by folder
    for name, numbers in groups.items():
        rows = split([_values(items[number]) for number in numbers])
        pairs = items[numbers[0]].get_closest_marker("turns") is None
        places = covering(rows, seen[name.partition("::")[0].rpartition("/")[0]], pairs)
        kept.update(numbers[place] for place in places)
    return [items[number] for number in sorted(kept)]


def split(rows: Sequence[tuple[Hashable, ...]]) -> list[tuple[Hashable, ...]]:
    """Rows of a single list of cells, such as weights with structures, as rows of their values.

    Such a list is a product in all but name; a table with a value that no two rows share is none.
    """
    if len(rows[0]) != 1 or not isinstance(rows[0][0], tuple):
        return list(rows)
    cells: list[tuple[Hashable, ...]] = [cell for (cell,) in rows]
    recur = all(len(set(values)) < len(cells) for values in zip(*cells, strict=True))
    return cells if recur else list(rows)


def covering(rows: Sequence[tuple[Hashable, ...]], tried: set[Once] | None = None, pairs: bool = True) -> list[int]:
    """Places of rows that have every pair of values, in two columns, that any row has; many new pairs come first.

    Where only two columns vary, pairs are all that there is: of more than `FEW` rows those with every value by turns.

    Args:
        rows: All of one length.
        tried: Of values that are tried `Once`, those that need no row any more; those of the rows are added.
        pairs: False for every value by turns, but for those that are tried `Once` in other tests.
    """
    columns = [column for column in zip(*rows, strict=True) if len(set(column)) > 1]
    if not pairs:
        columns = [column for column in columns if not isinstance(column[0], Once)]
    once = sum(isinstance(column[0], Once) for column in columns)
    varied = len(columns) - once
    if not columns or (varied < 2 and not once) or (pairs and varied <= 2 and len(rows) <= FEW):
        return list(range(len(rows)))
    pairs = pairs and varied > 2
    tried = set() if tried is None else tried
    wanted = [_wanted(row, pairs) - tried for row in zip(*columns, strict=True)]
    uses: Counter[Any] = Counter()
    found: list[int] = []
    for least in range(max(map(len, wanted)), 0, -1):
        # Of values, those rows are first whose own others have least; of pairs there are too many to count.
        order = range(len(wanted)) if pairs else _by_turns(wanted, uses, least)
        for place in order:
            if len(wanted[place] - uses.keys()) >= least:
                uses.update(wanted[place])
                found.append(place)
    tried |= {value for value in uses if isinstance(value, Once)}
    return sorted(found)


def _by_turns(wanted: Sequence[set[Any]], uses: Counter[Any], least: int) -> Iterator[int]:
    """Places of rows of which so many values are new; that whose values were used least comes first, at every step."""
    while equals := [place for place, own in enumerate(wanted) if len(own - uses.keys()) >= least]:
        yield min(equals, key=lambda place: sum(uses[one] for one in wanted[place]))


def _wanted(row: Sequence[Hashable], pairs: bool) -> set[Any]:
    """Pairs of values in two columns, or the values alone; and values of which one test is enough."""
    placed = [(i, value) for i, value in enumerate(row) if not isinstance(value, Once)]
    return {*(combinations(placed, 2) if pairs else placed), *(value for value in row if isinstance(value, Once))}


def nightly(*values: Any) -> list[Any]:
    """Values of a parameter, or tuples of those of several, that `make test-all` alone tries."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly) for value in values
    ]


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
