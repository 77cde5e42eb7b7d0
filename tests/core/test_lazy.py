"""Names that are imported when they are first read, and what is none."""

from __future__ import annotations

import sys
import types

import pytest

import laplace
from laplace.core import lazy


@pytest.mark.parametrize("name", ["a.b", "enums.x", ".x", "", "no name"])
def test_what_is_no_name_is_no_attribute(name: str) -> None:
    assert getattr(laplace, name, None) is None


def test_stubs_of_modules_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = types.ModuleType("laplace.mine")
    monkeypatch.setitem(sys.modules, "laplace.mine", stub)
    monkeypatch.setattr(laplace, "mine", None, raising=False)
    monkeypatch.delattr(laplace, "mine")  # both are undone: what is read once would stay
    assert laplace.mine is stub  # pyright: ignore[reportAttributeAccessIssue]


def test_an_error_within_a_module_is_not_a_missing_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An `AttributeError` would make `hasattr` false, and `from … import` speak of a name that is not there."""
    broken = types.ModuleType("laplace.broken")
    monkeypatch.setitem(sys.modules, "laplace.broken", broken)
    read, _, _ = lazy.attach("laplace", {"laplace.broken": "Thing"})
    with pytest.raises(ImportError, match=r"laplace.broken:Thing cannot be imported: .*'Thing'"):
        read("Thing")
