"""Orthogonal bases of few given vectors."""

from __future__ import annotations

import pytest
import torch

from laplace.core.orthogonal_basis import ThinBasis
from tests.reference.compare import assert_close


@pytest.mark.parametrize("kind", ["any", "unit vectors", "zero rows"])
@pytest.mark.parametrize(("n", "r"), [(10, 3), (50, 1), (60, 29)])
def test_the_basis_is_orthogonal_and_ends_with_the_vectors(n: int, r: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n, r, dtype=torch.float64, generator=generator)
    if kind == "unit vectors":
        rows = torch.eye(n, dtype=torch.float64)[:, -r:]
    if kind == "zero rows":
        rows[-r:] = 0
    vectors = torch.linalg.qr(rows)[0]
    basis = ThinBasis.from_last_columns(vectors)
    matrix = basis.matrix()[0]
    assert_close(matrix.T @ matrix, torch.eye(n, dtype=torch.float64), "algebra")
    assert_close(matrix[:, -r:].abs(), vectors.abs(), "algebra")
    x = torch.randn(2, 1, n, dtype=torch.float64, generator=generator)
    assert_close(basis.rotate(x), x @ matrix, "algebra")
    assert_close(basis.rotate(basis.rotate(x), back=True), x, "algebra")
    assert_close(basis.squares()[0, :, -r:], vectors.square(), "algebra")
    assert_close(basis.squares()[0].sum(0), torch.ones(n, dtype=torch.float64), "algebra")
    assert_close(basis.squares()[0].sum(1), torch.ones(n, dtype=torch.float64), "algebra")
