"""Gaussian processes of linearised networks, conditioned on further observations by dense algebra in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def conditioned(
    f: Tensor, jacobian: Tensor, covariance: Tensor, n_points: int, y: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of some points given observations at others, (Rasmussen & Williams, 2006, equation 2.23).

    Args:
        f: Outputs at the points and then at the observed inputs, `[q + n, m]`.
        jacobian: J there, `[q + n, m, P]`.
        covariance: P⁻¹, `[P, P]`.
        n_points: q.
        y: Observations, `[n, m]`.
        noise: Their variances, `[n, m]`.

    Returns:
        `[q·m]` and `[q·m, q·m]`, points major.
    """
    rows, size = jacobian.flatten(0, 1), n_points * f.shape[1]
    kernel = rows @ covariance @ rows.T
    inverse = torch.linalg.inv(kernel[size:, size:] + torch.diag(noise.flatten()))
    gain = kernel[:size, size:] @ inverse
    mean = f[:n_points].flatten() + gain @ (y - f[n_points:]).flatten()
    return mean, kernel[:size, :size] - gain @ kernel[size:, :size]
