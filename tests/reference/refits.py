"""A penalised head trained from nothing, dense and in float64: ridge regression, and any convex loss by L-BFGS."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def ridge_regression(features: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """(Φᵀ Φ + λ I)⁻¹ Φᵀ Y, transposed, `[C, D]` (Bishop, 2006, equation 3.28).

    Args:
        features: Φ, `[N, D]`, with a column of ones for the bias.
        targets: Y, `[N, C]`.
        penalty: λ.
    """
    normal = features.T @ features + penalty * torch.eye(features.shape[1], dtype=features.dtype)
    return torch.linalg.solve(normal, features.T @ targets).T


def minimum(loss: Callable[[Tensor], Tensor], shape: tuple[int, int], penalty: float) -> Tensor:
    """argmin loss(W) + ½ λ ‖W‖², `[C, D]`, by L-BFGS from zero."""
    weight = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight], max_iter=5000, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(weight) + 0.5 * penalty * weight.square().sum()
        value.backward()
        return value

    optimizer.step(closure)
    return weight.detach()


def least_residual(gradient: Tensor, weight: Tensor) -> float:
    """λ of the least ‖g + λ w‖, by least squares."""
    return -torch.linalg.lstsq(weight.reshape(-1, 1), gradient.reshape(-1, 1)).solution.item()
