"""Calls of one object that meet inside of it: a barrier holds the first until the second is there as well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import grid
from tests.network.test_model_guard import prepared
from tests.robustness.faults import nothing_changes

PATIENCE, SHORT = 1.0, 0.2
"""Seconds that a forward pass waits for the other one: that comes, in its own copy; that a lock keeps off."""


class Meeting:
    """Counts how many threads are within a forward pass at once, and makes every pass wait for company."""

    def __init__(self, patience: float) -> None:
        self.barrier: threading.Barrier | None = None
        self.patience = patience
        self.guard, self.inside, self.most, self.passes = threading.Lock(), 0, 0, 0

    def __call__(self) -> None:
        if self.barrier is None:
            return
        with self.guard:
            self.inside, self.passes = self.inside + 1, self.passes + 1
            self.most = max(self.most, self.inside)
        try:
            self.barrier.wait(self.patience)
        except threading.BrokenBarrierError:
            self.barrier.reset()
        with self.guard:
            self.inside -= 1


class Waiting(nn.Module):
    """Keeps its input on itself while it waits: two passes at once would read each other's."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self.net, self.meeting = grid.network(), meeting
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        self.last.fill_(float(x.detach().sum()))
        self.meeting()
        return self.net(self.x) + (self.last - x.detach().sum())


class Held(Waiting):
    """One that an object of the user's holds, so that no copy can be made of it: it runs as it is."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        self.holder = SimpleNamespace(network=self)


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "glm": lambda la, x: la(x),
    "nn": lambda la, x: la(x, "nn", n_samples=2, generator=torch.Generator().manual_seed(len(x))),
    "predict": lambda la, x: la.predict(x).probabilities,
}


@pytest.mark.parametrize(("network", "patience", "at_once"), [(Waiting, PATIENCE, 2), (Held, SHORT, 1)])
@pytest.mark.parametrize("second", CALLS)
@pytest.mark.parametrize(("weights", "structure"), grid.DIAGONAL)
def test_two_predictions_that_meet_in_the_forward_pass(
    weights: str, structure: str, second: str, network: type[Waiting], patience: float, at_once: int
) -> None:
    meeting = Meeting(patience)
    model = prepared(lambda: network(meeting))
    la = grid.make(weights, structure, model=model)
    la.fit(grid.batches())
    inputs = [grid.data(seed=8)[0], grid.data(seed=9)[0][:5]]
    calls = [CALLS["glm"], CALLS[second]]
    expected = [call(la, x) for call, x in zip(calls, inputs, strict=True)]
    with nothing_changes(model):
        meeting.barrier = threading.Barrier(2)
        start = threading.Barrier(2)

        def run(i: int) -> Tensor:
            start.wait()
            return calls[i](la, inputs[i])

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(run, range(2)))
        meeting.barrier = None
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert meeting.passes >= 2
    assert meeting.most == at_once


def test_two_predictions_that_meet_in_the_contraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not touch the network runs free: both are there at once."""
    la = grid.fitted("all", "kron")
    inputs = [grid.data(seed=8)[0], grid.data(seed=9)[0][:5]]
    expected = [la(x) for x in inputs]
    precision = la.posterior()
    real, barrier = type(precision).variance, threading.Barrier(2)

    def contract(self: Any, jacobian: Any, form: Any) -> Tensor:
        barrier.wait(20)
        return real(self, jacobian, form)

    monkeypatch.setattr(type(precision), "variance", contract)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(la, inputs))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_prediction_while_another_fails_in_the_forward_pass() -> None:
    """The one that fails gives the network back, and the other one finds it as it should be."""
    meeting = Meeting(SHORT)
    model = prepared(lambda: Waiting(meeting))
    la = grid.make("all", "kron", model=model)
    la.fit(grid.batches())
    x = grid.data(seed=8)[0]
    expected = la(x)
    with nothing_changes(model):
        meeting.barrier = threading.Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            bad, good = pool.submit(la, torch.zeros(4, 7)), pool.submit(la, x)
            assert isinstance(bad.exception(), RuntimeError)
            assert torch.equal(good.result(), expected)
        meeting.barrier = None
