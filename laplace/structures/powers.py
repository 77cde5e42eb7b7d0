"""Powers of positive definite matrices with their first derivative (Daleckii and Krein, 1965).

With M = U diag(λ) Uᵀ,  dMᵉ = U (Γ ∘ Uᵀ dM U) Uᵀ,  Γ_ij = (λ_iᵉ − λ_jᵉ) / (λ_i − λ_j), or e λᵉ⁻¹ for equal eigenvalues.
Eigenvectors themselves have no derivative where eigenvalues meet, as those of a curvature often do; powers have one.
"""

from __future__ import annotations

from torch import Tensor


def power(matrix: Tensor, eigen: tuple[Tensor, Tensor], exponent: float) -> Tensor:
    """Mᵉ `[n, n]`, once differentiable in M.

    Args:
        matrix: M, symmetric, with the graph that leads to it.
        eigen: Its eigenvalues `[n]`, positive, and eigenvectors, constants.
        exponent: E.
    """
    values, vectors = eigen
    moved = vectors.T @ (matrix - matrix.detach()) @ vectors
    return (vectors * values**exponent) @ vectors.T + vectors @ (slopes(values, exponent) * moved) @ vectors.T


def slopes(values: Tensor, exponent: float) -> Tensor:
    """Γ, `[n, n]`: with b = max(λ_i, λ_j) and r = log(min/max) ≤ 0 it is bᵉ⁻¹ (1 − exp(e r)) / (1 − exp(r))."""
    rows, columns = values.unsqueeze(1), values.unsqueeze(0)
    larger, smaller = rows.maximum(columns), rows.minimum(columns)
    logs = ((smaller - larger) / larger).log1p()
    apart = logs < 0
    safe = logs.where(apart, -1.0)
    return larger ** (exponent - 1) * ((exponent * safe).expm1() / safe.expm1()).where(apart, exponent)


def shrinking_slopes(values: Tensor) -> Tensor:
    """Γ of 1 / (√λ (1 + √λ)) = (1 − 1/√λ) / (λ − 1) for λ `[n]` of at least 1, `[n, n]`.

    It is 1/√λ − 1/(1 + √λ); with a, b the roots of two eigenvalues the divided differences of the first are
    −1 / (a b (a + b)), those of the second −1 / ((1 + a) (1 + b) (a + b)).
    """
    a, b = values.sqrt().unsqueeze(1), values.sqrt()
    return (1 / ((1 + a) * (1 + b)) - 1 / (a * b)) / (a + b)
