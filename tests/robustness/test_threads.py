"""Several threads with one object, with several objects on one model, and with one object each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from laplace.network.model_guard import unwrap
from tests import grid

N_THREADS, N_CALLS = 4, 24


def together(call: Callable[[int], Any], n_calls: int = N_CALLS) -> list[Any]:
    """Results of calls that run at once."""
    with ThreadPoolExecutor(N_THREADS) as pool:
        return list(pool.map(call, range(n_calls)))


def inputs(i: int) -> torch.Tensor:
    """Of different lengths, so that mixed-up captures would show."""
    return grid.data(seed=i)[0][: 1 + i % 7]


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_predictions_at_once(weights: str, structure: str, pred_type: str) -> None:
    la = grid.fitted(weights, structure, "regression")

    def predict(i: int) -> Any:
        return la(inputs(i), pred_type, n_samples=3, generator=torch.Generator().manual_seed(i))

    found, expected = together(predict), [predict(i) for i in range(N_CALLS)]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert all(module.training for module in la.model.modules())
    assert not [module for module in unwrap(la.model).modules() if module._forward_hooks]


def test_fits_and_predictions_on_one_model() -> None:
    model = grid.network("regression")
    fitted = grid.make("all", "kron", "regression", model=model)
    fitted.fit(grid.batches("regression"))
    expected = [fitted(inputs(i)) for i in range(N_CALLS)]

    def work(i: int) -> Any:
        if i % 2:
            return fitted(inputs(i))
        other = grid.make(*grid.CELLS[i % len(grid.CELLS)], "regression", model=model)
        other.fit(grid.batches("regression"))
        return other.log_marginal_likelihood()

    found = together(work)
    for i in range(1, N_CALLS, 2):
        torch.testing.assert_close(found[i], expected[i])
    for i in range(0, N_CALLS, 2):
        torch.testing.assert_close(found[i], work(i))
    assert all(module.training for module in model.modules())


def test_evidence_and_predictions_at_once() -> None:
    la = grid.fitted("all", "full", "regression")

    def work(i: int) -> Any:
        return la.log_marginal_likelihood() if i % 2 else la(inputs(i))

    for mine, theirs in zip(together(work), map(work, range(N_CALLS)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_failure_in_one_thread_is_its_own() -> None:
    la = grid.fitted("all", "kron", "regression")
    expected = la(inputs(3))

    def work(i: int) -> Any:
        if i % 2:
            with pytest.raises(RuntimeError):
                la(torch.zeros(2, 7))
            return None
        return la(inputs(3))

    for found in together(work)[::2]:
        torch.testing.assert_close(found, expected)


def test_gradients_in_threads() -> None:
    """Each thread has its own grad mode."""
    la = grid.fitted("all", "kron", "regression", enable_backprop=True)

    def gradient(i: int, mode: Any = torch.enable_grad) -> torch.Tensor:
        x = inputs(i).requires_grad_()
        with mode():
            mean, variance = la(x, diagonal_output=True)
        return torch.autograd.grad(mean.sum() + variance.sum(), x)[0]

    def work(i: int) -> torch.Tensor:
        with torch.enable_grad():
            return gradient(i, torch.no_grad if i % 2 else torch.enable_grad)

    for mine, theirs in zip(together(work), map(gradient, range(N_CALLS)), strict=True):
        torch.testing.assert_close(mine, theirs)
