"""Factorisations that always exist: float64, symmetrised, with rounding below zero clamped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from laplace.core.checks import require
from laplace.core.precision_policy import widened
from laplace.errors import CurvatureError
from laplace.structures.announced import Decompositions
from laplace.structures.indefinite import without_rounding

_NEGATIVE = 1e-3
"""Relative size from which a negative eigenvalue is no rounding error of float32 sums."""

_ROUNDING = 1e4
"""Multiple of the machine precision within which a difference of two sums over data counts as zero."""

_PANEL = 256
"""Columns of a symmetric matrix that are computed at once."""

_SMALL_TRIANGLE = 256
"""Rows of a triangle that is inverted in one piece."""


def kept_for_later() -> AbstractContextManager[object]:
    """Leaves inference mode, if it is on, to compute what is kept: autograd could never use tensors made in it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def eigh(matrix: Tensor, *, signed: bool = False) -> tuple[Tensor, Tensor]:
    """Eigenvalues, clamped at zero, and eigenvectors of positive semi-definite `[..., n, n]`, in float64.

    In float32 a rank-deficient curvature has eigenvalues that are negative by rounding; they would turn
    the evidence into NaN for every small prior precision.

    Args:
        matrix: Symmetric, in the dtype in which it was summed.
        signed: Negative eigenvalues are meant: only those that are zero but for rounding become zero.

    Raises:
        CurvatureError: The matrix is indefinite beyond rounding and not `signed`, or not finite.
    """
    with kept_for_later(), _announced(matrix):
        values, vectors = torch.linalg.eigh(_checked(matrix))
        return without_rounding(values, matrix.dtype) if signed else _clamped(values), vectors


def eigvalsh(matrix: Tensor, *, signed: bool = False) -> Tensor:
    """Eigenvalues only, at a fraction of the cost of `eigh`."""
    with kept_for_later(), _announced(matrix):
        values = torch.linalg.eigvalsh(_checked(matrix))
        return without_rounding(values, matrix.dtype) if signed else _clamped(values)


@contextmanager
def _announced(matrix: Tensor) -> Iterator[None]:
    """Announces the decomposition of `[..., n, n]` where it is long, and not part of others that are announced."""
    width = matrix.shape[-1]
    with Decompositions([[(matrix.numel() // max(1, width**2), width)]]).announced() as done:
        yield
        done(0)


def _checked(matrix: Tensor) -> Tensor:
    mend = "the curvature is not finite; the data or the network's outputs hold NaN or infinity."
    require(matrix.isfinite(), lambda: CurvatureError(mend))
    return widened(matrix.detach())


def _clamped(values: Tensor) -> Tensor:
    largest = values.abs().amax(-1, keepdim=True)
    negative = values < -_NEGATIVE * largest
    require(
        ~negative,
        lambda: CurvatureError(
            f"the curvature has {int(negative.sum())} negative directions (smallest eigenvalue {values.min():.3g}, "
            f"largest {values.max():.3g}); use the GGN or the empirical Fisher, which are positive semi-definite, "
            "or structure_kwargs={'indefinite': 'clamp'} or 'abs'."
        ),
    )
    # The most negative eigenvalue shows the size of the rounding, which makes as many zeros positive as negative.
    floor = -values.amin(-1, keepdim=True).clamp(max=0)
    return torch.where(values > floor, values, 0.0)


def remaining_matrix(total: Tensor, removed: Tensor, *, signed: bool = False) -> Tensor:
    """The rest of a sum of positive semi-definite `[..., n, n]` without some terms: total − removed, in its dtype.

    Negative eigenvalues within the rounding of `total` are set to zero: a difference of nearly equal sums has them.

    Args:
        total: The sum.
        removed: Some of its terms.
        signed: The terms may be indefinite: nothing can be said of the difference then.

    Raises:
        CurvatureError: One is larger: the removed terms are not among those of the total.
    """
    if signed:
        return total - removed
    with kept_for_later():
        values, vectors = torch.linalg.eigh(_checked(total) - _checked(removed))
        rounding = _rounding(total) * torch.linalg.eigvalsh(_checked(total)).abs().amax(-1, keepdim=True)
        if (values < -rounding).any():
            raise _removed_too_much(float(values.min()))
        if (values >= 0).all():
            return total - removed
        return ((vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.transpose(-1, -2)).to(total.dtype)


def remaining_entries(total: Tensor, removed: Tensor, *, signed: bool = False) -> Tensor:
    """The same of non-negative entries of any shape: each is a sum of its own.

    Raises:
        CurvatureError: An entry would be negative beyond rounding.
    """
    left = total - removed
    if signed:
        return left
    if (left < -_rounding(total) * total.abs()).any():
        raise _removed_too_much(float(left.min()))
    return left.clamp(min=0)


def _rounding(total: Tensor) -> float:
    """Relative error that a sum over many data may have in this dtype."""
    return _ROUNDING * torch.finfo(total.dtype).eps if total.is_floating_point() else 0.0


def _removed_too_much(smallest: float) -> CurvatureError:
    return CurvatureError(
        f"without the removed data the curvature would be indefinite (smallest eigenvalue {smallest:.3g}): they are "
        "not among the data of the fit, or were weighted otherwise, or the weights have changed since. Remove only "
        "data that were fitted, at the weights of the fit, or fit the data that are left with override=True."
    )


def other_structure(mine: str, theirs: str) -> CurvatureError:
    """The error of curvatures that cannot meet."""
    return CurvatureError(f"curvature of structure {theirs!r} cannot be subtracted from one of structure {mine!r}.")


def positive_part(matrix: Tensor) -> Tensor:
    """A curvature `[n, n]` with its directions of rounding below zero set to zero; differentiable, in float64."""
    values, vectors = eigh(matrix)
    return _projected(matrix, vectors * (values > 0))


def significant_part(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The same of an indefinite curvature that was summed in `dtype`, without eigenvalues that are zero but for it."""
    values, vectors = torch.linalg.eigh(_checked(matrix))
    return _projected(matrix, vectors * (without_rounding(values, dtype) != 0))


def _projected(matrix: Tensor, keep: Tensor) -> Tensor:
    # The projection is a constant, so that the gradient is that of the projected curvature.
    projector = keep @ keep.T
    return projector @ widened(matrix) @ projector


def cholesky(matrix: Tensor) -> Tensor | None:
    """Lower Cholesky factor of `[n, n]` in float64, or None if the matrix is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return None if int(info) else factor


def covariance_factor(precision: Tensor) -> Tensor | None:
    """Lower-triangular L with L Lᵀ = P⁻¹, or None if P is not positive definite.

    The Cholesky factor of P in reversed order is upper-triangular in the right one; its inverse, transposed,
    is L.
    """
    reversed_factor = cholesky(precision.flip(0, 1))
    if reversed_factor is None:
        return None
    upper = reversed_factor.flip(0, 1)  # P = upper upperᵀ with upper triangular
    return inverse_of_upper(upper).T.contiguous()


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


def inverse_of_upper(upper: Tensor) -> Tensor:
    """Inverse of an upper triangular `[n, n]`, by halves: a third of the work of solving for the identity.

    [[A, B], [0, C]]⁻¹ = [[A⁻¹, −A⁻¹ B C⁻¹], [0, C⁻¹]].
    """
    n = len(upper)
    if n <= _SMALL_TRIANGLE:
        return torch.linalg.solve_triangular(upper, torch.eye(n, dtype=upper.dtype, device=upper.device), upper=True)
    a, b, c = upper[: n // 2, : n // 2], upper[: n // 2, n // 2 :], upper[n // 2 :, n // 2 :]
    corner = torch.linalg.solve_triangular(a, b, upper=True)
    corner = torch.linalg.solve_triangular(c, corner, upper=True, left=False)
    inverse = torch.zeros_like(upper)
    inverse[: n // 2, : n // 2], inverse[: n // 2, n // 2 :] = inverse_of_upper(a), -corner
    inverse[n // 2 :, n // 2 :] = inverse_of_upper(c)
    return inverse
