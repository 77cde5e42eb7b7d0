"""Conditions are read together, in their order, and name the batch that they are of."""

from __future__ import annotations

import pytest
import torch

from laplace.core import checks
from laplace.errors import InvalidData

GOOD, BAD = torch.tensor(True), torch.tensor(False)


def fault(text: str) -> checks.Fault:
    return lambda: InvalidData(text)


def test_the_first_that_fails_is_raised_at_the_end() -> None:
    reached = False
    with pytest.raises(InvalidData, match=r"^batch 3: second"), checks.together():
        checks.require(GOOD, fault("first"))
        with checks.named("batch 3"):
            checks.require(BAD, fault("second"))
        checks.require(BAD, fault("third"))
        reached = True
    assert reached
    with pytest.raises(InvalidData, match=r"^alone"):
        checks.require(torch.stack([GOOD, BAD]), fault("alone"))


def test_a_question_is_answered_together_with_what_waits() -> None:
    with checks.together():
        checks.require(GOOD, fault("never"))
        assert checks.is_true(GOOD) and not checks.is_true(BAD)
    with pytest.raises(InvalidData, match="waited"), checks.together():
        checks.require(BAD, fault("waited"))
        checks.is_true(GOOD)
        pytest.fail("the question was answered")
    with checks.unread():
        checks.require(BAD, fault("never"))
        assert not checks.is_true(GOOD) and not checks.numbers_are_known()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found(bad: float) -> None:
    values = torch.ones(4, 2)
    assert checks.all_finite([values, torch.ones(0)]) and checks.all_finite([]) and checks.are_finite(values, values)
    values[2, 1] = bad
    assert not checks.all_finite([torch.ones(1), values]) and not checks.are_finite(torch.ones(1), values)
    assert checks.where_not_finite(values) == " at row 2, of 4 rows that count, from 0"
