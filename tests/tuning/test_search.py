"""The engine on functions whose minimum is known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laplace.core import pieces
from laplace.errors import InvalidArgument
from laplace.tuning import search as search_module
from laplace.tuning.search import BOUND, Evaluate, SearchOptions, minimise
from tests.reference.compare import assert_close

ROOT = Path(__file__).parents[2]

AT = torch.tensor([1.0, -2.0], dtype=torch.float64)
START = torch.zeros(2, dtype=torch.float64)
OPTIONS = {"n_steps": 100, "lr": 0.1, "tolerance": 1e-6}
both = pytest.mark.parametrize("method", ["adam", "lbfgs"])


def smooth(logs: Tensor) -> tuple[Tensor, Tensor]:
    """A skewed bowl around `AT`, at least 3."""
    offset = logs - AT
    curved = torch.stack([offset[0].exp() - offset[0] - 1, 2 * offset[1] ** 2])
    return 3 + curved.sum(), torch.stack([offset[0].exp() - 1, 4 * offset[1]])


@both
def test_the_minimum_is_found(method: str) -> None:
    search = minimise(smooth, START, SearchOptions(method=method, n_steps=400, lr=0.1, tolerance=1e-6))
    torch.testing.assert_close(search.best, AT, atol=1e-5, rtol=0)
    assert search.converged
    assert search.best_value == pytest.approx(3, abs=1e-10) == min(search.values)
    assert search.slope <= 1e-6 * 3


def test_lbfgs_needs_few_evaluations() -> None:
    assert len(minimise(smooth, START, SearchOptions(method="lbfgs", **OPTIONS)).values) < 30


@both
def test_too_few_steps_are_no_convergence(method: str) -> None:
    search = minimise(smooth, START, SearchOptions(method=method, n_steps=2, lr=0.1, tolerance=1e-8))
    assert not search.converged
    assert search.best_value == min(search.values)


@both
def test_the_start_is_kept_where_every_step_is_worse(method: str) -> None:
    """With a gradient of the wrong sign."""
    search = minimise(lambda logs: (smooth(logs)[0], -smooth(logs)[1]), START, SearchOptions(method=method, **OPTIONS))
    assert torch.equal(search.best, START)
    assert search.best_value == smooth(START)[0]


def fenced_at(bad: float) -> Evaluate:
    """The bowl with values that are bad a little behind its minimum."""

    def fenced(logs: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = smooth(logs)
        return (value * bad, gradient * math.nan) if logs[1] < -2.05 else (value, gradient)

    return fenced


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("raises", [False, True])
def test_values_that_are_read_together_give_the_same_course(
    bad: float, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what follows a value that is not finite is an error."""

    def evaluate(logs: Tensor) -> tuple[Tensor, Tensor]:
        if raises and not logs.isfinite().all():
            raise ValueError("logarithms that are not finite")
        return fenced_at(bad)(logs)

    together = minimise(evaluate, START, SearchOptions(method="adam", n_steps=120, lr=0.3))
    monkeypatch.setattr(search_module, "_AT_ONCE", 1)
    one_by_one = minimise(evaluate, START, SearchOptions(method="adam", n_steps=120, lr=0.3))
    assert together.bad == one_by_one.bad > 0
    assert len(together.values) == 121
    assert torch.allclose(torch.tensor(together.values), torch.tensor(one_by_one.values), 0.0, 0.0, equal_nan=True)
    assert torch.equal(together.best, one_by_one.best)


def test_an_error_at_finite_values_is_raised() -> None:
    def evaluate(logs: Tensor) -> tuple[Tensor, Tensor]:
        if logs[0] > 0.5:
            raise ValueError("of the objective")
        return smooth(logs)

    with pytest.raises(ValueError, match="of the objective"):
        minimise(evaluate, START, SearchOptions(method="adam", n_steps=50))


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_stepped_back_from(method: str, bad: float) -> None:
    """The bowl ends a little behind its minimum."""

    fenced = fenced_at(bad)
    search = minimise(fenced, START, SearchOptions(method=method, n_steps=400, lr=0.3, tolerance=1e-4))
    assert search.best_value == pytest.approx(3, abs=1e-2)
    assert search.bad == sum(not math.isfinite(value) for value in search.values)


@both
def test_nothing_finite(method: str) -> None:
    calls: list[int] = []

    def nowhere(logs: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return logs.new_tensor(math.nan), logs

    with pytest.raises(InvalidArgument, match="not finite"):
        minimise(nowhere, START, SearchOptions(method=method, **OPTIONS))
    assert len(calls) == 1


@both
def test_a_function_without_a_minimum_ends_at_the_bound(method: str) -> None:
    def falling(logs: Tensor) -> tuple[Tensor, Tensor]:
        return -logs.sum(), -torch.ones_like(logs)

    search = minimise(falling, START, SearchOptions(method=method, n_steps=400, lr=0.5, tolerance=0.0))
    assert search.at_bound()
    assert search.best_value == pytest.approx(-2 * BOUND)


def test_a_start_beyond_the_bound_is_no_error() -> None:
    search = minimise(smooth, START + 30, SearchOptions(method="lbfgs", **OPTIONS))
    assert search.best_value < smooth(START + 30)[0]


@both
def test_flat(method: str) -> None:
    level: Evaluate = lambda logs: (logs.new_tensor(2.0), torch.zeros_like(logs))  # noqa: E731
    search = minimise(level, START, SearchOptions(method=method, n_steps=5, lr=0.1, tolerance=0.0))
    assert search.slope == 0
    assert not search.at_bound()


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_steps": 0},
        {"n_steps": 2.5},
        {"lr": 0.0},
        {"lr": math.inf},
        {"tolerance": -1.0},
        {"tolerance": math.nan},
        {"method": "sgd"},
    ],
)
def test_arguments(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        SearchOptions(**({"method": "adam", **OPTIONS} | wrong))  # pyright: ignore


def test_adam_takes_the_steps_of_pytorch() -> None:
    torch.manual_seed(0)
    root, optimum = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)

    def evaluate(logs: Tensor) -> tuple[Tensor, Tensor]:
        gradient = root @ root.T @ (logs - optimum)
        return (logs - optimum) @ gradient / 2, gradient

    start = torch.zeros(6, dtype=torch.float64)
    search = minimise(evaluate, start, SearchOptions(method="adam", n_steps=50, lr=0.1, tolerance=0.0))
    logs = start.clone().requires_grad_()
    optimizer, values = torch.optim.Adam([logs], lr=0.1), []
    for _ in range(51):
        value, logs.grad = evaluate(logs.detach())
        values.append(value)
        optimizer.step()
    assert_close(torch.tensor(search.values, dtype=torch.float64), torch.stack(values), "algebra")


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_of_one_operation_is_the_same_step(sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(logs: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = smooth(logs)
        return sign * value, sign * gradient

    options = SearchOptions(method="adam", n_steps=50, lr=0.3)
    many = minimise(evaluate, START, options, sign)
    monkeypatch.setattr(pieces, "_CHEAP", frozenset())
    one = minimise(evaluate, START, options, sign)
    assert_close(torch.tensor(one.values), torch.tensor(many.values), "algebra")
    assert_close(one.best, many.best, "algebra")
    assert one.values == minimise(smooth, START, options).values
