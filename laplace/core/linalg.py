"""Factorisations: they always exist, are announced where they take long, and are kept while they are asked for.

Matrices are symmetrised and factorised in float64, with rounding below zero clamped. Eigendecompositions of minutes are
announced by a warning. How long they take is said by their sizes and an assumed speed, never by a clock: whether there
is a warning is the same on every machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.core import eigen
from laplace.core.checks import all_finite, require
from laplace.core.inference import kept_for_later
from laplace.core.pieces import operations_are_dear
from laplace.core.precision_policy import widened
from laplace.errors import CurvatureError, SlowWarning, warn

_ROUNDING_UNITS = 10
"""Eigenvalues up to so many units of rounding of the largest one are zero."""


def without_rounding(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Eigenvalues `[..., n]` of a matrix that was summed in `dtype`: those that are zero but for rounding are zero."""
    floor = _ROUNDING_UNITS * torch.finfo(dtype).eps * values.abs().amax(-1, keepdim=True) if values.shape[-1] else 0.0
    return torch.where(values.abs() > floor, values, 0.0)


_NEGATIVE = 1e-3
"""Relative size from which a negative eigenvalue is no rounding error of float32 sums."""

_TINY = torch.finfo(torch.float32).tiny
"""Below it numbers of float32 lose their digits: eigenvalues of this size are rounding, whatever the largest is."""

_ROUNDING = 1e4
"""Multiple of the machine precision within which a difference of two sums over data counts as zero."""

_PANEL = 256
"""Columns of a symmetric matrix that are computed at once."""

_SMALL_TRIANGLE = 256
"""Rows of a triangle that is inverted in one piece."""

RATE = 5e9
"""n³ of eigendecompositions `[n, n]` in float64 per second, of a few cores: 4,000 × 4,000 in 13 s."""

LONG = 10.0
"""Seconds above which work is announced."""


def eigh(matrix: Tensor, *, signed: bool = False) -> tuple[Tensor, Tensor]:
    """Eigenvalues, clamped at zero, and eigenvectors of positive semi-definite `[..., n, n]`, in float64.

    In float32 a rank-deficient curvature has eigenvalues that are negative by rounding; they would turn
    the evidence into NaN for every small prior precision.
    """
    _warn_if_long(matrix[..., 0, 0].numel(), matrix.shape[-1], matrix.device)
    with kept_for_later():
        values, vectors = eigen.eigh(_checked(matrix))
        return without_rounding(values, matrix.dtype) if signed else _clamped(values), vectors


def eigvalsh(matrix: Tensor, *, signed: bool = False) -> Tensor:
    """Eigenvalues only, at a fraction of the cost of `eigh`."""
    _warn_if_long(matrix[..., 0, 0].numel(), matrix.shape[-1], matrix.device)
    with kept_for_later():
        values = eigen.eigvalsh(_checked(matrix))
        return without_rounding(values, matrix.dtype) if signed else _clamped(values)


def thin_eigh(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[..., r]`, ascending, and eigenvectors `[..., n, r]` of Σ x xᵀ over few rows `[..., r, n]`.

    They are the squares of the singular values: what is zero is zero to the square of the rounding, which no sum of
    products leaves. All other eigenvalues are 0.
    """
    require(all_finite([rows.detach()]), _not_finite)
    _warn_if_long(rows[..., 0, 0].numel(), rows.shape[-2], rows.device)
    with kept_for_later():
        basis, triangle = torch.linalg.qr(widened(rows.detach()).mT)
        left, roots, _ = torch.linalg.svd(triangle)
        return roots.square().flip(-1), basis @ left.flip(-1)


def _warn_if_long(n_matrices: int, width: int, device: torch.device) -> None:
    seconds = n_matrices * float(width) ** 3 / RATE
    if seconds > LONG:
        duration = f"about {seconds:.0f} s" if seconds < 120 else f"about {seconds / 60:.0f} minutes"
        if operations_are_dear(device):  # whose speed nobody knows
            duration = f"a few times n³ = {n_matrices * float(width) ** 3:.1g} operations"
        warn(
            f"the eigendecomposition of {n_matrices} matrices {width:,} × {width:,} will take {duration}. It is done "
            "once per fit; hessian_structure='lowrank_kron' needs none of this size.",
            SlowWarning,
        )


def _checked(matrix: Tensor) -> Tensor:
    require(all_finite([matrix.detach()]), _not_finite)
    return widened(matrix.detach())


def _not_finite() -> CurvatureError:
    return CurvatureError("the curvature is not finite; the data or the network's outputs hold NaN or infinity.")


def _clamped(values: Tensor) -> Tensor:
    """Eigenvalues in ascending order without rounding."""
    smallest, largest = values[..., :1], values[..., -1:]
    require(
        torch.add(smallest, largest, alpha=_NEGATIVE) >= -_TINY,
        lambda: CurvatureError(
            f"the curvature has {int((values < -_NEGATIVE * largest.abs() - _TINY).sum())} negative directions "
            f"(smallest eigenvalue "
            f"{values.min():.3g}, largest {values.max():.3g}); use the GGN or the empirical Fisher, which are positive "
            "semi-definite, or structure_kwargs={'indefinite': 'clamp'} or 'abs'."
        ),
    )
    # The most negative eigenvalue shows the size of the rounding, which makes as many zeros positive as negative.
    floor = -smallest.clamp(max=0)
    return values.masked_fill(values <= floor, 0.0)


def remaining_matrix(
    total: Tensor, removed: Tensor, *, signed: bool = False, terms: torch.dtype | None = None
) -> Tensor:
    """A sum of positive semi-definite `[..., n, n]` without some of its terms: total − removed, in the wider dtype.

    Negative eigenvalues within the rounding of the terms, which were computed in the dtype `terms` or in that of the
    sums, are set to zero: a difference of nearly equal sums has them.
    """
    left = total - removed
    if signed:
        return left
    with kept_for_later():
        values, vectors = eigen.eigh(_checked(total) - _checked(removed))
        relative = _rounding_of(total, removed, terms)
        zero = relative * eigen.eigvalsh(_checked(total)).abs().amax(-1, keepdim=True)
        if (values < -zero).any():
            raise _removed_too_much(float(values.min()))
        if (values >= 0).all():
            return left
        return ((vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.transpose(-1, -2)).to(left)


def remaining_entries(
    total: Tensor, removed: Tensor, *, signed: bool = False, terms: torch.dtype | None = None
) -> Tensor:
    """The same of non-negative entries of any shape: each is a sum of its own.

    Entries are squares of derivatives. Of one that is zero for a reason, as that of attention in the bias of its keys,
    the square of rounding is left, which no other pass over the data repeats.
    """
    left = total - removed
    if signed or not total.numel():
        return left
    relative = _rounding_of(total, removed, terms)
    if (left < -(relative * total.abs() + relative**2 * total.abs().amax())).any():
        raise _removed_too_much(float(left.min()))
    return left.clamp(min=0)


def rounding(dtype: torch.dtype) -> float:
    """Relative error that a sum over many data may have in this dtype."""
    return _ROUNDING * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _rounding_of(total: Tensor, removed: Tensor, terms: torch.dtype | None) -> float:
    """The same of two sums, by the narrowest dtype that they, or their terms, were computed in."""
    return max(rounding(dtype) for dtype in (total.dtype, removed.dtype, terms) if dtype is not None)


def _removed_too_much(smallest: float) -> CurvatureError:
    return CurvatureError(
        f"without the removed data the curvature would be indefinite (smallest eigenvalue {smallest:.3g}): they are "
        "not among the data of the fit, or were weighted otherwise, or the weights have changed since. Remove only "
        "data that were fitted, at the weights of the fit, or fit the data that are left with override=True."
    )


def positive_part(matrix: Tensor) -> Tensor:
    """A curvature `[n, n]` with its directions of rounding below zero set to zero; differentiable, in float64."""
    values, vectors = eigh(matrix)
    return _projected(matrix, vectors * (values > 0))


def significant_part(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The same of an indefinite curvature that was summed in `dtype`, without eigenvalues that are zero but for it."""
    values, vectors = eigen.eigh(_checked(matrix))
    return _projected(matrix, vectors * (without_rounding(values, dtype) != 0))


def _projected(matrix: Tensor, keep: Tensor) -> Tensor:
    # The projection is a constant, so that the gradient is that of the projected curvature.
    projector = keep @ keep.T
    return projector @ widened(matrix) @ projector


def cholesky(matrix: Tensor) -> Tensor | None:
    """Lower Cholesky factor of `[..., n, n]` in float64, or None if a matrix is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return None if bool(info.any()) else factor


def covariance_factor(factor: Tensor) -> Tensor:
    """Lower-triangular L with L Lᵀ = P⁻¹, of the lower Cholesky factor R of P in reversed order, `[n, n]`.

    With J the reversal, J P J = R Rᵀ, it is the inverse of (J R J)ᵀ.
    """
    return inverse_of_lower(factor.flip(0, 1).T)


def times_transpose(lower: Tensor) -> Tensor:
    """L Lᵀ of a lower-triangular `[n, n]`, at a sixth of the multiplications of a product; differentiable by one."""
    if lower.requires_grad and torch.is_grad_enabled():
        return lower @ lower.T
    result = torch.empty_like(lower)
    for start in range(0, len(lower), _PANEL):
        stop = start + _PANEL
        columns = lower[start:, :stop] @ lower[start:stop, :stop].T
        result[start:, start:stop] = columns
        result[start:stop, start:] = columns.T
    return result


def inverse_of_lower(lower: Tensor) -> Tensor:
    """Inverse of a lower triangular `[n, n]`, in its place unless autograd keeps it.

    By halves, a third of the work of solving for the identity: [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [−C⁻¹ B A⁻¹, C⁻¹]].
    """
    inverse = torch.zeros_like(lower) if lower.requires_grad and torch.is_grad_enabled() else lower
    _write_inverse(lower, inverse)
    return inverse


def _write_inverse(lower: Tensor, inverse: Tensor) -> None:
    """Writes the inverse of a triangle into another one, or into itself: its corner before what that is made of."""
    n = len(lower)
    if n <= _SMALL_TRIANGLE:
        identity = torch.eye(n, dtype=lower.dtype, device=lower.device)
        inverse.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    a, b, c = lower[: n // 2, : n // 2], lower[n // 2 :, : n // 2], lower[n // 2 :, n // 2 :]
    corner = torch.linalg.solve_triangular(c, b, upper=False)
    corner = torch.linalg.solve_triangular(a, corner, upper=False, left=False)
    inverse[n // 2 :, : n // 2] = -corner
    _write_inverse(a, inverse[: n // 2, : n // 2])
    _write_inverse(c, inverse[n // 2 :, n // 2 :])


# Functions of positive definite matrices with their first derivative (Daleckii and Krein, 1965).
#
# With M = U diag(λ) Uᵀ,  df(M) = U (Γ ∘ Uᵀ dM U) Uᵀ,  Γ_ij = (f(λ_i) − f(λ_j)) / (λ_i − λ_j), f′(λ) of equal ones.
# Eigenvectors themselves have no derivative where eigenvalues meet, as those of a curvature often do; f(M) has one.


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


def bilinear(rows: Tensor, matrix: Tensor, *, diagonal: bool) -> Tensor:
    """Z M Zᵀ of rows `[..., n, r]`, `[..., n, n]`, or its diagonals `[..., n]`."""
    half = rows @ matrix.to(rows)
    return (half * rows).sum(-1) if diagonal else half @ rows.mT
