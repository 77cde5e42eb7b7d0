"""Registries: names that are gone, and classes of users by their key."""

from __future__ import annotations

import gc

import pytest

from laplace import DiagLaplace
from laplace.errors import InvalidArgument
from laplace.structures import STRUCTURES, DiagCurvature
from tests import grid
from tests.registries import temporarily
from tests.test_grid import MeanCurvature


def test_what_is_no_longer_registered_is_unknown() -> None:
    with temporarily(STRUCTURES):
        STRUCTURES.register("one_number")(MeanCurvature)
        la = grid.make("all", "one_number")
    with pytest.raises(InvalidArgument, match=r"'diag'.*'lowrank_kron'") as raised:
        grid.make("all", "one_number")
    assert "'one_number'" not in str(raised.value).partition("accepted")[2]
    with temporarily(STRUCTURES):
        STRUCTURES.register("one_number")(DiagCurvature)
        other = grid.make("all", "one_number")
    assert type(other) is not type(la)
    assert other.structure is DiagCurvature


def test_of_several_classes_of_users_the_last_living_one_counts() -> None:
    class First(DiagLaplace):
        _key = ("all", "diag")

    class Second(DiagLaplace):
        _key = ("all", "diag")

    try:
        assert type(grid.make("all", "diag")) is Second
        del Second
        gc.collect()
        assert type(grid.make("all", "diag")) is First
    finally:
        del First
        gc.collect()
    assert type(grid.make("all", "diag")) is DiagLaplace


@pytest.mark.parametrize("key", ["diag", ("all",), ("all", 3), ("all", "gp", "sod", "more")])
def test_a_key_that_names_no_cell_is_refused(key: object) -> None:
    with pytest.raises(InvalidArgument, match="_key="):
        type("Mine", (DiagLaplace,), {"_key": key, "__module__": __name__})
