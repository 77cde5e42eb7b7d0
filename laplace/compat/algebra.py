"""Linear algebra of the legacy interface."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace.compat.kronecker import factors
from laplace.core.gaussian import Gaussian
from laplace.errors import CurvatureError


def invsqrt_precision(M: Tensor) -> Tensor:
    """Lower-triangular L with L Lᵀ = M⁻¹, the Cholesky factor of a covariance from its precision.

    With J the flip of both axes and C the Cholesky factor of J M J, the factor U = J C J is upper-triangular and
    M = U Uᵀ; so L = U⁻ᵀ. Nothing is inverted twice.

    Args:
        M: Positive definite, `[..., P, P]`.

    Raises:
        CurvatureError: M is not positive definite, or not finite.
    """
    flipped, info = torch.linalg.cholesky_ex(M.flip(-2, -1))
    if bool((info != 0).any()) or not bool(torch.isfinite(flipped).all()):
        raise CurvatureError(
            f"the precision of shape {list(M.shape)} is not positive definite; "
            "raise the prior precision, or use float64."
        )
    upper = flipped.flip(-2, -1)
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(M)
    return torch.linalg.solve_triangular(upper, eye, upper=True).mT


def kron(t1: Tensor, t2: Tensor) -> Tensor:
    """Dense Kronecker product of `[a, b]` and `[c, d]`, `[a·c, b·d]`."""
    return torch.kron(t1.contiguous(), t2.contiguous())


def diagonal_add_scalar(X: Tensor, value: float | Tensor) -> Tensor:
    """X + value · I for square matrices `[..., P, P]`; a new tensor."""
    return X + value * torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


def symeig(M: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[P]`, at least 0, and eigenvectors `[P, P]` of a positive semi-definite matrix, by float64.

    Raises:
        CurvatureError: M is not finite.
    """
    return factors.eigh(M)


def block_diag(blocks: Sequence[Tensor]) -> Tensor:
    """Dense block-diagonal matrix of square blocks, `[P, P]`."""
    return torch.block_diag(*blocks)


def normal_samples(mean: Tensor, var: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws from one Gaussian per row, with noise of its own in every row.

    Args:
        mean: `[B, C]`.
        var: Variances `[B, C]` or covariances `[B, C, C]`.
        n_samples: Number of draws S.
        generator: Source of randomness; the global one if None.

    Returns:
        `[S, B, C]`.

    Raises:
        InvalidArgument: The shapes do not fit, or S is not positive.
        CurvatureError: The covariance is not finite.
    """
    return Gaussian(mean, var).sample(n_samples, generator)
