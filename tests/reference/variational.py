"""Variational posteriors of inducing outputs, dense and in float64, by textbook definitions alone."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence


def posterior_covariance(rows: Tensor, root: Tensor, delta: float) -> Tensor:
    """(δ + J_Zᵀ L Lᵀ J_Z)⁻¹, `[P, P]`.

    Args:
        rows: J_Z, `[M, P]`.
        root: L, `[M, M]`.
        delta: δ.
    """
    eye = torch.eye(rows.shape[1], dtype=rows.dtype)
    return torch.linalg.inv(delta * eye + rows.T @ root @ root.T @ rows)


def divergence(mean: Tensor, covariance: Tensor, prior_mean: float, delta: float) -> Tensor:
    """KL of N(mean, covariance) from N(μ₀, 1/δ), by PyTorch."""
    eye = torch.eye(len(mean), dtype=mean.dtype)
    posterior = MultivariateNormal(mean, covariance_matrix=0.5 * (covariance + covariance.T))
    return kl_divergence(
        posterior, MultivariateNormal(torch.full_like(mean, prior_mean), covariance_matrix=eye / delta)
    )


def expected_log_likelihood(
    loglik: Tensor, jacobian: Tensor, inner: Tensor, covariance: Tensor, scale: Tensor
) -> Tensor:
    """Log p(D | θ*) − ½ Σ_n tr(Λ_n J_n Σ J_nᵀ), with Λ scaled: to second order, and for a regression exact.

    Args:
        loglik: Log p(D | θ*), 0-dim.
        jacobian: `[N, C, P]`.
        inner: Λ, `[N, C, C]`.
        covariance: Σ, `[P, P]`.
        scale: 1/(σ²T), 0-dim or `[C]`.
    """
    outputs = jacobian @ covariance @ jacobian.mT
    weighted = inner * scale.sqrt().unsqueeze(-1) * scale.sqrt().unsqueeze(-2) if scale.ndim else scale * inner
    return loglik - 0.5 * (weighted * outputs.mT).sum()


def best_curvature(rows: Tensor, jacobian: Tensor, inner: Tensor, scale: float) -> Tensor:
    """The L Lᵀ of the largest lower bound: the curvature of all data in the span of J_Z, `[M, M]`."""
    hessian = scale * torch.einsum("ncp,ncd,ndq->pq", jacobian, inner, jacobian)
    inverse = torch.linalg.pinv(rows)  # [P, M]
    return inverse.T @ hessian @ inverse


def energy(log_likelihood, mean: float, variance: float, alpha: float, nodes: int = 200) -> float:
    """(1/α) log E[p(y | f)^α], or E[log p(y | f)] at α = 0, over f ~ N(mean, variance), by Gauss–Hermite quadrature.

    Args:
        log_likelihood: Log p(y | f) of points f `[n]`.
        mean: Of f.
        variance: Of f.
        alpha: α.
        nodes: Of the quadrature.
    """
    points, weights = (torch.from_numpy(values) for values in np.polynomial.hermite.hermgauss(nodes))
    logs = log_likelihood(mean + math.sqrt(2 * variance) * points)
    weights = weights / math.sqrt(math.pi)
    if alpha == 0:
        return float((weights * logs).sum())
    return float(((alpha * logs) + weights.log()).logsumexp(0) / alpha)
