"""Cached properties: computed at once by several threads, of which all get one value."""

from __future__ import annotations

import threading

from laplace.core.cached import cached_property
from tests.robustness.test_threads import together


class _Meeting:
    """A property that two owners compute at once, or never."""

    met = threading.Barrier(2)

    @cached_property
    def value(self) -> object:
        self.met.wait(timeout=20)
        return object()


def test_cached_properties_are_computed_at_once() -> None:
    """Of one owner, too, which keeps one value."""
    for owners in ([_Meeting(), _Meeting()], [_Meeting()] * 2):
        found = together(lambda i, owners=owners: owners[i].value, 2)
        assert found == [owner.value for owner in owners]
    assert isinstance(_Meeting.value, cached_property)
