"""What a call leaves behind: no object that a failed one held, and no filter of warnings."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import laplace
from laplace.errors import LaplaceError
from tests import grid

X = grid.data(seed=8)[0]
WRONG = torch.randn(5, X.shape[1] + 4)  # of another width than the network takes
LABELS = torch.zeros(len(WRONG), dtype=torch.long)
CALLS: dict[str, Callable[[Any], Any]] = {
    "predict": lambda la: la(WRONG),
    "predict by samples": lambda la: la(WRONG, "nn", link_approx="mc"),
    "predict NaN": lambda la: la(X * torch.nan),
    "argument": lambda la: la(X, no_argument=1),
    "no argument": lambda la: la.fit(),
    "fit": lambda la: la.fit([(WRONG, LABELS)]),
    "fit labels": lambda la: la.fit([(X, 7 + torch.arange(len(X)))]),
    "fit NaN": lambda la: la.fit([(X * torch.nan, torch.zeros(len(X), dtype=torch.long))]),
    "calibrate": lambda la: la.calibrate([(WRONG, LABELS)]),
    "draw": lambda la: laplace.draw(la, 1)[0](WRONG),
}


@pytest.fixture(scope="module")
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_failed_call_keeps_neither_network_nor_posterior(call: Callable[[Any], Any]) -> None:
    """They are gone with the last name of them, as after one that succeeded: on a card that is memory."""
    la: Any = grid.fitted("all", "kron")
    held = weakref.ref(la), weakref.ref(la.model)
    with pytest.raises(LaplaceError) as caught:
        call(la)
    del la, caught
    assert [what() for what in held] == [None, None]


def test_no_filter_is_needed_where_operations_are_batched_by_a_loop() -> None:
    """Filters of warnings are the process's: a thread that puts them back undoes what others have set since."""
    assert torch.vmap(lambda row: torch.histc(row, 3))(X).shape == (len(X), 3)  # warnings are errors here
