"""What a process says to the others of its group, and when it says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from laplace.core.processes import Processes
from laplace.errors import ProcessError


class Alone(Processes):
    """Two processes, of which the other takes the same steps and never fails; notes what this one says."""

    said: list[Any] = []  # noqa: RUF012

    def gather(self, value: Any) -> list[Any]:
        self.said.append(value)
        return [value, value]


@pytest.fixture
def processes() -> Alone:
    Alone.said = []
    return Alone(None)  # pyright: ignore[reportArgumentType]


def test_errors_between_passes_are_told(processes: Alone) -> None:
    def attempt() -> None:
        with processes.collective_region():
            pass
        raise ValueError("a label")

    with pytest.raises(ValueError, match="a label"):
        processes.gather_results(attempt)
    assert len(processes.said) == 1


def test_an_error_within_a_pass_meets_no_call_of_the_others(processes: Alone) -> None:
    def attempt() -> None:
        processes.barrier("a forward pass")
        with processes.collective_region():
            raise ValueError("the network's own")

    for _ in range(2):
        with pytest.raises(ValueError, match="own"):
            processes.gather_results(attempt)
    assert len(processes.said) == 2  # the steps
    assert processes.gather_results(lambda: 3) == [3, 3]  # later work is told again
    with pytest.raises(ProcessError), processes.collective_region():  # outside of work that is agreed on
        raise ProcessError
