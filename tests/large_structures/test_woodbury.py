"""What few columns add to a diagonal, against the dense matrix P = B + V Vᵀ in float64."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from laplace.large_structures import woodbury
from laplace.structures.precision import Form
from tests.reference.compare import assert_close

P, R, B, C = 7, 3, 4, 2
FORMS = get_args(Form)


@pytest.fixture
def numbers() -> tuple[Tensor, Tensor, Tensor]:
    """Diagonal B, columns V, and rows of a Jacobian `[B, C, P]`."""
    source = torch.Generator().manual_seed(0)
    diagonal, columns, rows = (torch.randn(size, generator=source).double() for size in ((P,), (P, R), (B, C, P)))
    return diagonal.exp(), columns, rows


def in_form(covariance: Tensor, form: str) -> Tensor:
    """Covariances `[B·C, B·C]` of all rows in one of the forms."""
    if form == "joint":
        return covariance
    blocks = covariance.view(B, C, B, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return blocks if form == "full" else blocks.diagonal(dim1=1, dim2=2)


def coordinates(diagonal: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """Z = J B⁻¹ V R⁻ᵀ with K = I + Vᵀ B⁻¹ V = R Rᵀ."""
    inside = torch.eye(R).double() + columns.T @ (columns / diagonal.unsqueeze(1))
    inner = rows / diagonal @ columns
    return torch.linalg.solve_triangular(torch.linalg.cholesky(inside).mT, inner, upper=True, left=False)


@pytest.mark.parametrize("form", FORMS)
def test_variances_are_those_of_the_dense_inverse(numbers: tuple[Tensor, Tensor, Tensor], form: Form) -> None:
    diagonal, columns, rows = numbers
    flat = rows.flatten(0, 1)
    dense = flat @ torch.linalg.inv(torch.diag(diagonal) + columns @ columns.T) @ flat.T
    prior = in_form(flat / diagonal @ flat.T, form)
    left = woodbury.covariance_left(prior, coordinates(*numbers), form)
    assert_close(left, in_form(dense, form), "algebra")
    assert not woodbury.cancels(prior, left, form)


@pytest.mark.parametrize("form", FORMS)
def test_variances_that_cancel_are_told_and_left_positive(form: Form) -> None:
    """Columns that say everything: all that is left of a variance is rounding."""
    z = torch.randn(B, C, B * C, generator=torch.Generator().manual_seed(1))
    prior = woodbury.products(z, form)
    left = woodbury.covariance_left(prior, z, form)
    assert woodbury.cancels(prior, left, form)
    assert (left if form == "diagonal" else left.diagonal(dim1=-2, dim2=-1)).min() > 0


@pytest.mark.parametrize("exponent", [-1.0, -0.5])
def test_powers_are_those_of_the_dense_matrix(numbers: tuple[Tensor, Tensor, Tensor], exponent: float) -> None:
    diagonal, columns, _ = numbers
    deviations = diagonal.rsqrt()
    white = deviations.unsqueeze(1) * columns
    values, vectors = torch.linalg.eigh(torch.eye(R).double() + white.T @ white)
    shrinking = (vectors * woodbury.shrinkage(values, exponent)) @ vectors.T
    made = woodbury.whitened_power(
        torch.eye(P).double(), exponent, deviations, lambda rows: rows @ white @ shrinking @ white.T
    )
    inverse = torch.linalg.inv(torch.diag(diagonal) + columns @ columns.T)
    assert_close(made if exponent == -1 else made.T @ made, inverse, "algebra")


@pytest.mark.parametrize("exponent", [-1.0, -0.5])
def test_the_slope_of_shrinkage_is_its_derivative(exponent: float) -> None:
    source = torch.Generator().manual_seed(2)
    root, step = (torch.randn(R, R, generator=source).double() for _ in range(2))
    matrix, step = torch.eye(R).double() + root @ root.T, step + step.T

    def shrinking(matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return (vectors * woodbury.shrinkage(values, exponent)) @ vectors.T

    eigen = torch.linalg.eigh(matrix)
    moving = matrix.clone().requires_grad_()
    slope = woodbury.shrinkage_slope(moving, (eigen[0], eigen[1]), exponent)
    assert not slope.any()
    (gradient,) = torch.autograd.grad((slope * root).sum(), moving)
    size = 1e-6
    expected = (root * (shrinking(matrix + size * step) - shrinking(matrix - size * step))).sum() / (2 * size)
    assert_close((gradient * step).sum(), expected, "finite_difference")
