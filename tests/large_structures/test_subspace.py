"""Dominant eigenpairs of an operator that is known by its products."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laplace.curvature import NativeGGN, NativeHessian
from laplace.large_structures import subspace
from tests.large_structures.test_low_rank import exact, fitted
from tests.pairs import nightly
from tests.reference.compare import assert_close


@pytest.mark.parametrize("kind", ["ggn", *nightly("hessian")])
def test_dominant_eigenpairs(kind: str) -> None:
    """With enough iterations: the eigenvalues of largest size, of both signs for the Hessian."""
    dense = exact(kind)
    la = fitted(backend=NativeGGN if kind == "ggn" else NativeHessian, rank=8, oversampling=25, power_iterations=25)
    truth = torch.linalg.eigvalsh(dense)
    truth = truth[truth.abs().argsort(descending=True)][:8]
    vectors, values = la.H
    assert_close(values, truth, "backend", label="eigenvalues")
    assert_close(vectors.T @ vectors, torch.eye(8), "algebra", label="orthonormal")
    assert_close(dense @ vectors, vectors * values, "backend", label="eigenvectors")
    assert (kind == "hessian") == bool((values < 0).any())


@pytest.mark.parametrize("backend", [NativeGGN, NativeHessian])
@pytest.mark.parametrize("power_iterations", [0, 1, 4])
@pytest.mark.turns
def test_residual_is_measured(backend: Any, power_iterations: int) -> None:
    la = fitted(backend=backend, rank=8, oversampling=2, power_iterations=power_iterations)
    dense = exact("ggn" if backend is NativeGGN else "hessian")
    vectors, values = la.H
    expected = (dense @ vectors - vectors * values).norm() / values.norm()
    assert_close(la.residual, expected, "backend")
    assert f"{la.residual:.2g}" in repr(la)


def test_more_iterations_have_smaller_residuals() -> None:
    residuals = [fitted(rank=8, power_iterations=q).residual for q in (0, 1, 2, 4)]
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[2] < 0.02 < residuals[0] * 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthonormal_rows_of_graded_and_dependent_ones(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 500, dtype=torch.float64, generator=generator) * torch.logspace(0, -5, 6).double()[:, None]
    rows[2] = rows[0] + rows[1]
    basis = subspace.orthonormalise_(rows.to(dtype, copy=True)).double()
    found = basis[basis.norm(dim=1) > 0.5]
    assert len(found) == 5
    eps = torch.finfo(dtype).eps
    assert (found @ found.T - torch.eye(5)).abs().max() < 20 * eps
    residual = rows - rows @ found.T @ found
    assert (residual.norm(dim=1) < 100 * eps * rows.norm()).all()
