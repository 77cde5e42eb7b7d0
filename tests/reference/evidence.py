"""Log evidence and posterior covariance from a dense curvature, and the exact ones of a linear-Gaussian model."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_likelihood(
    loss: Tensor,
    n_data: int,
    n_outputs: int,
    sigma: Tensor | float = 1.0,
    temperature: float = 1.0,
    likelihood: str = "regression",
) -> Tensor:
    """Log likelihood of the data from the unit loss.

    Regression: −Σ_c loss_c/(σ_c²T) − N Σ_c log(σ_c √2π); else −loss/T.

    Args:
        loss: Unit negative log likelihood, 0-dim, or `[C]` (one half sum of squares per output).
        n_data: N, the data that were seen.
        n_outputs: C.
        sigma: Noise, 0-dim or `[C]`; with `[C]` the loss must be `[C]` as well.
        temperature: T.
        likelihood: Name of the likelihood.
    """
    if likelihood != "regression":
        return -loss.sum() / temperature
    noise = torch.as_tensor(sigma, dtype=loss.dtype)
    if noise.numel() > 1 and loss.dim() == 0:
        raise ValueError("a vector of noises needs the loss of each output, [C]")
    per_output = noise.expand(n_outputs)
    normaliser = n_data * torch.log(per_output * math.sqrt(2 * math.pi)).sum()
    return -(loss / (noise.square() * temperature)).sum() - normaliser


def posterior_precision(hessian: Tensor, prior_diag: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """scale·H + diag(δ), `[P, P]`."""
    return scale * hessian + torch.diag(prior_diag)


def posterior_covariance(hessian: Tensor, prior_diag: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """(scale·H + diag(δ))⁻¹, `[P, P]`."""
    return torch.linalg.inv(posterior_precision(hessian, prior_diag, scale))


def log_marginal_likelihood(
    hessian: Tensor,
    mean: Tensor,
    prior_diag: Tensor,
    prior_mean: Tensor | float,
    scale: Tensor | float,
    loglik: Tensor,
) -> Tensor:
    """Laplace's log evidence, 0-dim (MacKay 1992; Immer et al. 2021, eq. 5).

    log p(D) ≈ loglik − ½ (logdet(scale·H + diag δ) − Σ log δ + (θ − μ)ᵀ diag δ (θ − μ))

    Args:
        hessian: Unit curvature, `[P, P]`.
        mean: θ, `[P]`.
        prior_diag: δ, `[P]`.
        prior_mean: μ, 0-dim or `[P]`.
        scale: 1/(σ²T).
        loglik: Log likelihood at θ, 0-dim.
    """
    logdet = torch.linalg.slogdet(posterior_precision(hessian, prior_diag, scale)).logabsdet
    offset = mean - prior_mean
    scatter = (prior_diag * offset.square()).sum()
    return loglik - 0.5 * (logdet - prior_diag.log().sum() + scatter)


def bayesian_linear_regression(
    design: Tensor, targets: Tensor, noise: Tensor, prior_diag: Tensor, prior_mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact posterior and evidence of y = Φθ + ε (Bishop 2006, eqs. 3.49–3.51; Rasmussen & Williams 2006, eq. 2.30).

    The evidence is the density of y under N(Φμ, Φ diag(1/δ) Φᵀ + diag σ²), a form without any Hessian over θ.

    Args:
        design: Φ, `[M, P]`.
        targets: y, `[M]`.
        noise: Standard deviations σ, `[M]`.
        prior_diag: δ, `[P]`.
        prior_mean: μ, `[P]`.

    Returns:
        Posterior mean `[P]`, covariance `[P, P]` and log evidence, 0-dim.
    """
    weights = noise.square().reciprocal()
    covariance = torch.linalg.inv(design.T @ (weights[:, None] * design) + torch.diag(prior_diag))
    mean = covariance @ (design.T @ (weights * targets) + prior_diag * prior_mean)
    marginal = (design / prior_diag) @ design.T + torch.diag(noise.square())
    normal = torch.distributions.MultivariateNormal(design @ prior_mean, covariance_matrix=marginal)
    return mean, covariance, normal.log_prob(targets)
