"""Factorisations of sizes that the other tests, with their small networks, do not reach."""

from __future__ import annotations

import torch
from torch import nn

from laplace import Laplace
from laplace.core import linalg


def test_covariance_factor_by_halves() -> None:
    """Several levels of halves, of odd sizes: L is lower-triangular and L Lᵀ = P⁻¹."""
    n = 1031
    root = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    precision = root @ root.T / n + 0.5 * torch.eye(n, dtype=torch.float64)
    turned = linalg.cholesky(precision.flip(0, 1))
    assert turned is not None
    kept = turned.clone()
    factor = linalg.covariance_factor(turned)
    assert torch.equal(factor, factor.tril())
    assert torch.equal(turned, kept)
    torch.testing.assert_close(factor @ factor.T, torch.linalg.inv(precision), rtol=1e-10, atol=1e-12)


def test_curvature_without_digits_is_no_indefinite_one() -> None:
    """Weights that a strong prior took to zero: the sums in float32 are denormal, eigenvalues of either sign."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    for p in model.parameters():
        p.data *= 1e-21
    x, y = torch.randn(30, 3), torch.randint(3, (30,))
    la = Laplace(model, "classification", "all", "kron", prior_precision=100.0)
    la.fit([(x, y)])
    torch.testing.assert_close(la(x), torch.full((30, 3), 1 / 3), atol=1e-3, rtol=0)
