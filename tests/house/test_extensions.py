"""Extensions stand outside: nothing of the library imports them, and an object says where its question went."""

from __future__ import annotations

import pytest

import laplace
from laplace import MixtureLaplace
from laplace.core.extensions import EXTENSIONS, NAMES
from laplace.errors import InvalidType
from tests import grid
from tests.source import PACKAGE, imports


def test_nothing_else_imports_extensions() -> None:
    """But by the lazy names of `laplace`, of which one table knows."""
    assert not [
        f"{path.name}: {name}"
        for path, _, name in imports()
        if name.startswith("laplace.extensions") and "extensions" not in path.relative_to(PACKAGE).parts
    ]


@pytest.mark.parametrize("module", EXTENSIONS)
def test_names_of_the_table_are_there(module: str) -> None:
    for name in EXTENSIONS[module].split():
        assert getattr(laplace, name).__module__ == module
        assert name in laplace.__all__


@pytest.mark.parametrize("name", sorted(NAMES))
def test_an_object_says_where_its_question_went(name: str) -> None:
    la = grid.make("all", "diag")
    for asked in (la, MixtureLaplace([la])):
        with pytest.raises(AttributeError, match=rf"laplace\.{name}\(la, \.\.\.\)"):
            getattr(asked, name)


def test_another_object_is_refused() -> None:
    with pytest.raises(InvalidType, match="fitted posterior over weights"):
        laplace.saliency(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_what_is_listed_of_an_object_can_be_read_at_once(weights: str, structure: str) -> None:
    la = grid.make(weights, structure)
    listed = dir(la)
    assert len(listed) <= 60
    assert {"fit", "predict", "calibrate", "compare", "plan", "coverage", "refine", "forget", "leave_one_out"} <= {
        *listed
    }
    assert not any(name.startswith("_") for name in listed)
    for name in ("H_facs", "marglik", "functional_variance_fast"):
        assert name not in listed
