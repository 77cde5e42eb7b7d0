"""What a question is asked about: the object, its value and a mixture; before a fit and of anything else an error."""

from __future__ import annotations

import pytest

from laplace import MixtureLaplace
from laplace.errors import InvalidType, NotFittedError
from laplace.extensions.asked import group_of, posterior_of
from tests import grid


def test_an_object_and_its_value_are_one_posterior() -> None:
    la = grid.fitted("all", "diag")
    value = la.snapshot()
    assert posterior_of(value) is value
    assert group_of(value).posteriors == (value,)
    assert len(group_of(MixtureLaplace([la, grid.fitted("all", "diag")])).posteriors) == 2


def test_what_is_no_fitted_posterior_is_refused() -> None:
    with pytest.raises(InvalidType, match="other is a Linear; a fitted posterior"):
        posterior_of(grid.network()[0], "other")
    with pytest.raises(NotFittedError):
        group_of(grid.make("all", "diag"))
