"""Gaussian processes of a linearised network, dense and in float64 (Rasmussen and Williams, 2006, chapter 3)."""

from __future__ import annotations

import torch
from torch import Tensor


def posterior_covariance(star: Tensor, train: Tensor, inner: Tensor, prior_diag: Tensor, scale: float = 1.0) -> Tensor:
    """K** − K*M Λ^½ (I + Λ^½ K_MM Λ^½)⁻¹ Λ^½ K_M*, `[B·C, B·C]` (Immer et al. 2021, eq. A.7, for any Λ ≥ 0).

    Args:
        star: Jacobian of the test data, `[B, C, P]`.
        train: Jacobian of the M data, `[M, C, P]`.
        inner: Λ of the M data, `[M, C, C]`.
        prior_diag: δ, `[P]`.
        scale: 1/(σ²T).
    """
    star, train = star.flatten(0, 1), train.flatten(0, 1)
    root = torch.block_diag(*symmetric_root(scale * inner))
    cross = star / prior_diag @ train.T @ root
    within = torch.eye(len(root), dtype=root.dtype) + root @ (train / prior_diag @ train.T) @ root
    return star / prior_diag @ star.T - cross @ torch.linalg.solve(within, cross.T)


def log_det_ratio(train: Tensor, inner: Tensor, prior_diag: Tensor, scale: float = 1.0) -> Tensor:
    """Log det(I + Λ^½ K_MM Λ^½), 0-dim."""
    rows = train.flatten(0, 1)
    root = torch.block_diag(*symmetric_root(scale * inner))
    within = torch.eye(len(root), dtype=root.dtype) + root @ (rows / prior_diag @ rows.T) @ root
    return torch.linalg.slogdet(within).logabsdet


def symmetric_root(matrices: Tensor) -> Tensor:
    """Λ^½ of positive semi-definite `[M, C, C]`."""
    values, vectors = torch.linalg.eigh(matrices)
    return (vectors * values.clamp(min=0).sqrt().unsqueeze(1)) @ vectors.mT
