"""What few columns add to a diagonal, by matrices between the columns (Woodbury, 1950).

P = B + V Vᵀ for a diagonal B and V of r columns: those of a low rank, or √w Aᵀ of r rows A of data. With W = B^(−½) V,
K = I + Wᵀ W = R Rᵀ and coordinates Z = J B⁻¹ V R⁻ᵀ of the rows of a Jacobian

    log det P = log det B + log det K,    P⁻¹ = B⁻¹ − B⁻¹ V K⁻¹ Vᵀ B⁻¹,    J P⁻¹ Jᵀ = J B⁻¹ Jᵀ − Z Zᵀ,
    (I + W Wᵀ)ᵉ = I − W g(K) Wᵀ  with  g(λ) = (1 − λᵉ) / (λ − 1).

Where the columns take away nearly all of a variance the difference is rounding: `cancels` says so to who can compute it
another way, `left_of` and `covariance_left` leave at least the rounding to who cannot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laplace.structures.precision import Form

# Variances.

CANCELLING = 1e-3
"""Share of a variance that rounding may take before it is computed in float64, and there without a difference."""


def products(z: Tensor, form: Form) -> Tensor:
    """Z Zᵀ of coordinates `[B, C, r]` in one of the forms."""
    if form == "diagonal":
        return z.square().sum(2)
    rows = z.flatten(0, 1) if form == "joint" else z
    return rows @ rows.mT


def cancels(before: Tensor, after: Tensor, form: Form, units: float = 10) -> Tensor:
    """True, 0-dim, if of variances that are left of others rounding may be too large a share, in their dtype.

    It is some units of rounding of the others: by default those of a difference of sums over many weights.
    """
    pair = (before.detach(), after.detach())
    whole, left = (t if form == "diagonal" else t.diagonal(dim1=-2, dim2=-1) for t in pair)
    return (left * CANCELLING < units * torch.finfo(left.dtype).eps * whole).any()


def left_of(variance: Tensor, removed: Tensor) -> Tensor:
    """What is left of variances of B⁻¹: at least the rounding of these."""
    return torch.maximum(variance - removed, torch.finfo(variance.dtype).eps * variance.detach())


def covariance_left(covariance: Tensor, z: Tensor, form: Form) -> Tensor:
    """J B⁻¹ Jᵀ − Z Zᵀ of coordinates `[B, C, r]` in one of the forms, of variances at least the rounding."""
    if form == "diagonal":
        return left_of(covariance, products(z, form))
    left = covariance - products(z, form)
    left = 0.5 * (left + left.mT)
    least = torch.finfo(left.dtype).eps * covariance.detach().diagonal(dim1=-2, dim2=-1)
    left.diagonal(dim1=-2, dim2=-1).clamp_(min=least)
    return left


# Powers.


def shrinkage(values: Tensor, exponent: float) -> Tensor:
    """`g(λ)` of eigenvalues of K, `[n]`, at least 1: 1/λ for the inverse, 1/(√λ (1 + √λ)) for its root."""
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
