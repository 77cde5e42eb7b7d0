"""Of large products of parameters, those tests run that try every pair of values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations, product

import pytest

from laplace.likelihoods import LIKELIHOODS
from laplace.structures import STRUCTURES
from tests import grid
from tests.conformance.backends import BACKENDS
from tests.conformance.cases import WEIGHTS, cases, few
from tests.pairs import FEW, Once, covering

SHAPES = [(8, 5, 8), (3, 3, 3, 3), (66, 8, 5), (2, 2, 2)]


def pairs(rows: Sequence[Sequence[Hashable]], *columns: int) -> set[tuple[Hashable, ...]]:
    """Values that rows have in some columns at once."""
    return {tuple(row[column] for column in columns) for row in rows}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_is_tried(shape: tuple[int, ...]) -> None:
    rows = [row for row in product(*map(range, shape)) if row[:2] != (1, 0)]  # as where a problem has no last layer
    found = [rows[place] for place in covering(rows)]
    for columns in combinations(range(len(shape)), 2):
        assert pairs(found, *columns) == pairs(rows, *columns)
    first, second = sorted(shape)[-2:]
    assert len(found) <= 1.6 * first * second


def test_generated_cases_try_all_pairs() -> None:
    """Of structure, choice of weights and likelihood, and every problem."""
    rows = [case.values[0].axes for case in cases()]
    found = [rows[place] for place in covering(rows)]
    structure, weights, likelihood, problem = range(4)
    for columns in combinations((structure, weights, likelihood), 2):
        assert pairs(found, *columns) == pairs(rows, *columns)
    assert pairs(found, problem) == pairs(rows, problem)
    assert pairs(found, structure, weights) == set(product(STRUCTURES, WEIGHTS))
    assert pairs(found, structure, likelihood) == set(product(STRUCTURES, LIKELIHOODS))
    without_head = ("reward_modeling", "last_layer")
    assert pairs(found, likelihood, weights) | {without_head} == set(product(LIKELIHOODS, WEIGHTS))
    assert len(found) < len(rows) / 20


def test_generated_cases_try_all_pairs_with_backends() -> None:
    rows = [(*case.values[0].axes, backend) for case in few() for backend in BACKENDS]
    found = [rows[place] for place in covering(rows)]
    for column in (0, 1, 2):
        assert pairs(found, column, 4) == pairs(rows, column, 4)
    assert pairs(found, 0, 4) == set(product(STRUCTURES, BACKENDS))


def test_a_problem_that_was_tried_has_had_its_turn() -> None:
    rows = [(i, j, k, Once(number)) for number, (i, j, k) in enumerate(product(range(3), range(3), range(3)))]
    tried: set[Once] = set()
    assert len(covering(rows, tried)) == len(rows) == len(tried)
    again = covering(rows, tried)
    assert len(again) < len(rows)
    assert pairs([rows[place] for place in again], 0, 1) == set(product(range(3), range(3)))


def test_few_tests_of_two_parameters_all_run() -> None:
    rows = list(product(range(3), range(2)))
    assert len(rows) == FEW and covering(rows) == list(range(FEW))
    assert covering([]) == []


def test_of_many_tests_of_two_parameters_every_value_is_tried_by_turns() -> None:
    rows = list(product(range(8), range(3)))
    found = [rows[place] for place in covering(rows)]
    assert len(found) == 8 and pairs(found, 0) == pairs(rows, 0)
    times = [sum(second == value for _, second in found) for value in range(3)]
    assert max(times) - min(times) <= 1


def test_every_structure_is_tried_with_all_weights() -> None:
    assert {structure for _, structure in grid.CELLS} == set(STRUCTURES)
    assert set(grid.CELLS) >= set(product(grid.WEIGHTS, grid.FIRST))


def test_of_parameters_that_have_little_to_do_with_each_other_every_value_is_tried_by_turns() -> None:
    rows = list(product(range(8), range(5), range(3)))
    found = [rows[place] for place in covering(rows, pairs=False)]
    assert len(found) == 8
    assert all(pairs(found, column) == pairs(rows, column) for column in range(3))
    assert covering([(0, 1, Once(1)), (1, 0, Once(2)), (0, 0, Once(3)), (1, 1, Once(4))], pairs=False) == [0, 1]
