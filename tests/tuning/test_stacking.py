"""Weights by stacking: what a constrained optimiser finds, and hedging where data are few."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize

from laplace.tuning.stacking import stacking_weights


def _by_scipy(log_densities: np.ndarray, counts: np.ndarray, pseudo: float) -> np.ndarray:
    """The same weights, by a general optimiser over the logarithms of unnormalised weights."""
    n_candidates = log_densities.shape[1]

    def loss(z: np.ndarray) -> float:
        log_w = z - np.logaddexp.reduce(z)
        return -(counts @ np.logaddexp.reduce(log_densities + log_w, axis=1) + pseudo / n_candidates * log_w.sum())

    z = minimize(loss, np.zeros(n_candidates), method="BFGS", options={"gtol": 1e-10}).x
    return np.exp(z - np.logaddexp.reduce(z))


def test_weights_maximise_the_log_density_of_the_mixture() -> None:
    source = np.random.default_rng(0)
    values, counts = source.normal(size=(12, 4)), source.integers(1, 4, size=12).astype(float)
    found = stacking_weights(torch.as_tensor(values), torch.as_tensor(counts))
    np.testing.assert_allclose(found.numpy(), _by_scipy(values, counts, 2.0), atol=1e-6)


def test_candidates_that_are_equal_share_equally() -> None:
    assert torch.equal(stacking_weights(torch.zeros(5, 4)), torch.full((4,), 0.25, dtype=torch.float64))


def test_one_datum_does_not_decide() -> None:
    weights = stacking_weights(torch.tensor([[0.0, -50.0]]))
    assert abs(weights[0].item() - 2 / 3) < 1e-6
    assert abs(float(weights.sum()) - 1) < 1e-12


def test_densities_beyond_range_count_as_none() -> None:
    weights = stacking_weights(torch.tensor([[-torch.inf, -1e4], [-1.0, -1e4]]), pseudo_counts=1.0)
    assert weights.isfinite().all()
    assert weights[1] > 0.3
