"""Functions of positive definite matrices with their first derivative (Daleckii and Krein, 1965).

With M = U diag(λ) Uᵀ,  df(M) = U (Γ ∘ Uᵀ dM U) Uᵀ,  Γ_ij = (f(λ_i) − f(λ_j)) / (λ_i − λ_j), f′(λ) of equal ones.
Eigenvectors themselves have no derivative where eigenvalues meet, as those of a curvature often do; f(M) has one.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def power(matrix: Tensor, eigen: tuple[Tensor, Tensor], exponent: float) -> Tensor:
    """Mᵉ `[n, n]`, with its first derivative in M; `eigen` are M's eigenvalues and eigenvectors, constants."""
    values, vectors = eigen
    constant = (vectors * values**exponent) @ vectors.T
    return constant + vectors @ _slope(matrix, eigen, exponent) @ vectors.T if matrix.requires_grad else constant


def power_slope(matrix: Tensor, eigen: tuple[Tensor, Tensor], exponent: float) -> Tensor | None:
    """Uᵀ (Mᵉ − M*ᵉ) U to first order at M* = M: zero, with its gradient in M; None where M has none."""
    return _slope(matrix, eigen, exponent) if matrix.requires_grad else None


def _slope(matrix: Tensor, eigen: tuple[Tensor, Tensor], exponent: float) -> Tensor:
    values, vectors = eigen
    return divided_differences(values, exponent) * (vectors.T @ (matrix - matrix.detach()) @ vectors)


def divided_differences(values: Tensor, exponent: float) -> Tensor:
    """Γ of λᵉ, `[n, n]`: with b = max(λ_i, λ_j) and r = log(min/max) ≤ 0 it is bᵉ⁻¹ (1 − exp(e r)) / (1 − exp(r))."""
    rows, columns = values.unsqueeze(1), values.unsqueeze(0)
    larger, smaller = rows.maximum(columns), rows.minimum(columns)
    logs = ((smaller - larger) / larger).log1p()
    apart = logs < 0
    safe = logs.where(apart, -1.0)
    return larger ** (exponent - 1) * ((exponent * safe).expm1() / safe.expm1()).where(apart, exponent)


# (I + W Wᵀ)ᵉ = I − W g(K) Wᵀ with K = I + Wᵀ W and g(λ) = (1 − λᵉ) / (λ − 1), by which a low rank enters a power.


def shrinkage(values: Tensor, exponent: float) -> Tensor:
    """G of eigenvalues of K, `[n]`, at least 1: 1/λ for the inverse, 1/(√λ (1 + √λ)) for its root."""
    if exponent == -1:
        return 1 / values
    roots = values.sqrt()
    return 1 / (roots * (1 + roots))


def shrinkage_slope(matrix: Tensor, eigen: tuple[Tensor, Tensor], exponent: float) -> Tensor:
    """U (Γ ∘ Uᵀ (K − K*) U) Uᵀ of g: zero, with its gradient in K.

    1/(√λ (1 + √λ)) = 1/√λ − 1/(1 + √λ); with a, b the roots of two eigenvalues the divided differences of the first are
    −1 / (a b (a + b)), those of the second −1 / ((1 + a) (1 + b) (a + b)).
    """
    values, vectors = eigen
    if exponent == -1:
        divided = -1 / (values.unsqueeze(1) * values)
    else:
        a, b = values.sqrt().unsqueeze(1), values.sqrt()
        divided = (1 / ((1 + a) * (1 + b)) - 1 / (a * b)) / (a + b)
    return vectors @ (divided * (vectors.T @ (matrix - matrix.detach()) @ vectors)) @ vectors.T


def whitened_power(vectors: Tensor, exponent: float, deviations: Tensor, removed: Callable[[Tensor], Tensor]) -> Tensor:
    """P⁻¹ v (exponent −1) or D^(−½) (I + W Wᵀ)^(−½) v (−½) of P = D^½ (I + W Wᵀ) D^½, for v `[..., P]`."""
    white = vectors if exponent == -0.5 else vectors * deviations
    return (white - removed(white)) * deviations


def bilinear(rows: Tensor, matrix: Tensor, *, diagonal: bool) -> Tensor:
    """Z M Zᵀ of rows `[..., n, r]`, `[..., n, n]`, or its diagonals `[..., n]`."""
    half = rows @ matrix.to(rows)
    return (half * rows).sum(-1) if diagonal else half @ rows.mT
