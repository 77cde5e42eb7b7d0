"""What the data say adds up over them, fades and is taken away: sums by hand."""

from __future__ import annotations

import pytest
import torch

from laplace.errors import InvalidData
from tests import grid


def test_fits_add_up_fade_and_are_taken_away() -> None:
    x, y = grid.data(dtype := "classification")
    whole, first, rest = (grid.make("all", "diag", dtype, model=grid.network()) for _ in range(3))
    for la, part in ((whole, slice(None)), (first, slice(5)), (rest, slice(5, None))):
        la.fit([(x[part], y[part])])
    whole, first, rest = (la.fitted() for la in (whole, first, rest))
    both = first + rest
    assert both.n_data == whole.n_data == len(x)
    torch.testing.assert_close(both.loss_terms, whole.loss_terms)
    torch.testing.assert_close(both.H, whole.H)
    torch.testing.assert_close(whole.minus(first).H, rest.H, rtol=1e-4, atol=1e-6)
    faded = whole.scaled(0.5)
    assert faded.n_data == 6 and torch.equal(faded.H, 0.5 * whole.H)
    nothing = whole.minus(whole)
    assert nothing.n_data == 0 and not nothing.H.any()
    with pytest.raises(InvalidData, match="12 data are to be removed, but the fit has seen 5"):
        first.minus(whole)
