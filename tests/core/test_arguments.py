"""Checks of arguments: what is accepted comes back unchanged, all else is an error that names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from laplace.core import arguments
from laplace.errors import InvalidArgument, InvalidCall, InvalidType

LIKE = torch.zeros((), dtype=torch.float64)


def test_numbers_become_tensors_with_the_callers_graph() -> None:
    assert arguments.as_tensor("x", 2, like=LIKE).equal(torch.tensor(2.0, dtype=torch.float64))
    given = torch.ones(3, requires_grad=True)
    made = arguments.as_tensor("x", given, like=LIKE)
    assert made.dtype == torch.float64 and made.requires_grad
    with torch.inference_mode():
        assert not arguments.as_tensor("x", 1.0, like=LIKE).is_inference()


@pytest.mark.parametrize(
    ("value", "error"),
    [(True, InvalidType), ("1", InvalidType), (torch.ones(2, 2), InvalidArgument), (torch.ones(0), InvalidArgument),
     (torch.ones(1, dtype=torch.complex64), InvalidArgument)],
)  # fmt: skip
def test_what_is_no_number_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^x must be"):
        arguments.as_tensor("x", value, like=LIKE)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_positive_is_every_entry(bad: float) -> None:
    good = torch.tensor([1.0, 2.0])
    assert arguments.positive("x", good) is good
    for value in (torch.tensor(bad), torch.tensor([1.0, bad])):
        with pytest.raises(InvalidArgument, match=f"positive and finite; {bad:g}"):
            arguments.positive("x", value)


def test_counts_and_flags() -> None:
    arguments.check_counts(n=1, m=np.int64(3))
    arguments.check_flag("joint", np.bool_(True), "")
    for count in (0, True, 1.0):
        with pytest.raises(InvalidArgument, match="n="):
            arguments.check_counts(n=count)
    with pytest.raises(InvalidType, match="joint must be True or False; str was given"):
        arguments.check_flag("joint", "yes", "")


def test_a_call_that_does_not_fit_names_what_was_meant() -> None:
    @arguments.checked
    def fit(loader: Any, *, decay: float = 1.0) -> float:
        return loader / decay

    assert fit(4, decay=2) == 2
    with pytest.raises(InvalidCall, match="no argument 'dekay'; did you mean 'decay'"):
        fit(4, dekay=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidCall, match=r"fit\(\) needs 'loader'"):
        fit()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unsupported operand"):
        fit("4")
