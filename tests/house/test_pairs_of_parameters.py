"""Of large products of parameters, those tests run that try every pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairs import covering

SHAPES = [(8, 5, 8), (3, 3, 3, 3), (66, 8, 5), (2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_is_tried(shape: tuple[int, ...]) -> None:
    rows = [row for row in product(*map(range, shape)) if row[:2] != (1, 0)]  # as where a problem has no last layer
    found = [rows[place] for place in covering(rows)]
    for i, j in combinations(range(len(shape)), 2):
        assert {(row[i], row[j]) for row in found} == {(row[i], row[j]) for row in rows}
    first, second = sorted(shape)[-2:]
    assert len(found) <= 1.6 * first * second


def test_two_parameters_are_tried_in_every_combination() -> None:
    rows = list(product(range(4), range(3)))
    assert covering(rows) == list(range(12))
    assert covering([]) == []
