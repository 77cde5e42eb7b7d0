"""Factorisations of sizes that the other tests, with their small networks, do not reach."""

from __future__ import annotations

import torch

from laplace.structures import algebra


def test_covariance_factor_by_halves() -> None:
    """Several levels of halves, of odd sizes: L is lower-triangular and L Lᵀ = P⁻¹."""
    n = 1031
    root = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    precision = root @ root.T / n + 0.5 * torch.eye(n, dtype=torch.float64)
    factor = algebra.covariance_factor(precision)
    assert factor is not None
    assert torch.equal(factor, factor.tril())
    torch.testing.assert_close(factor @ factor.T, torch.linalg.inv(precision), rtol=1e-10, atol=1e-12)
