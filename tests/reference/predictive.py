"""Gaussian predictives of the linearised network and their links, dense and in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def functional_variance(jacobian: Tensor, covariance: Tensor) -> Tensor:
    """J_b Σ J_bᵀ for every datum, `[B, C, C]`, from `[B, C, P]` and `[P, P]`."""
    return torch.einsum("bcp,pq,bdq->bcd", jacobian, covariance, jacobian)


def functional_covariance(jacobian: Tensor, covariance: Tensor) -> Tensor:
    """Joint covariance of all outputs of all data, `[B·C, B·C]`, the outputs of one datum next to each other."""
    rows = jacobian.flatten(0, 1)
    return rows @ covariance @ rows.T


def probit(mean: Tensor, variance: Tensor) -> Tensor:
    """softmax(μ / √(1 + π/8 diag Σ)), `[B, C]` (MacKay 1992; Gibbs 1997), from `[B, C]` and `[B, C, C]`."""
    return torch.softmax(_moderated(mean, variance), dim=-1)


def probit_centred(mean: Tensor, variance: Tensor) -> Tensor:
    """The same of Π μ and Π Σ Π, with Π = I − 11ᵀ/C: logits less their mean, `[B, C]`."""
    centring = torch.eye(mean.shape[1], dtype=mean.dtype) - 1 / mean.shape[1]
    against = mean.shape[1] / (mean.shape[1] - 1)  # an output less the mean of the others
    return probit(mean @ centring, against**2 * centring @ variance @ centring)


def bernoulli_probit(mean: Tensor, variance: Tensor) -> Tensor:
    """sigmoid(μ / √(1 + π/8 diag Σ)), `[B, C]` (MacKay 1992)."""
    return torch.sigmoid(_moderated(mean, variance))


def bridge(mean: Tensor, variance: Tensor) -> Tensor:
    """Laplace bridge: mean of the Dirichlet that matches the logit Gaussian, `[B, C]` (Hobbhahn et al. 2022, eq. 6).

    After the correction to zero-sum logits, with d the diagonal of Σ,
    α_k = (1 − 2/C + e^{μ_k}/C² Σ_l e^{−μ_l}) / d_k and p = α/Σα, evaluated in log space.
    """
    mean, diagonal = _zero_sum(mean, variance)
    return torch.softmax(_log_alpha(mean, diagonal), dim=-1)


def bridge_norm(mean: Tensor, variance: Tensor) -> Tensor:
    """Laplace bridge after a normalisation of the variance to √(C/2): μ/√c, d/c, c = mean(d)/√(C/2)."""
    mean, diagonal = _zero_sum(mean, variance)
    c = diagonal.mean(-1, keepdim=True) / math.sqrt(mean.shape[-1] / 2)
    return torch.softmax(_log_alpha(mean / c.sqrt(), diagonal / c), dim=-1)


def monte_carlo(
    mean: Tensor, variance: Tensor, n_samples: int, generator: torch.Generator, link: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """Mean of the link under N(μ, Σ) by brute force.

    Returns:
        The sample mean `[B, C]` and its standard error `[B, C]`.
    """
    values, vectors = torch.linalg.eigh(variance)
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)  # Σ may be singular: no Cholesky
    noise = torch.randn(n_samples, *mean.shape, dtype=mean.dtype, generator=generator)
    f = mean + torch.einsum("bcd,sbd->sbc", root, noise)
    draws = torch.softmax(f, dim=-1) if link == "softmax" else torch.sigmoid(f)
    return draws.mean(0), draws.std(0) / math.sqrt(n_samples)


def _moderated(mean: Tensor, variance: Tensor) -> Tensor:
    return mean / (1 + math.pi / 8 * variance.diagonal(dim1=-2, dim2=-1)).sqrt()


def _zero_sum(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Conditions the logits on a sum of zero: mean `[B, C]` and diagonal of the covariance `[B, C]`."""
    rows = variance.sum(-1)
    total = rows.sum(-1, keepdim=True)
    corrected = variance - rows.unsqueeze(-1) * variance.sum(-2).unsqueeze(-2) / total.unsqueeze(-1)
    return mean - rows * mean.sum(-1, keepdim=True) / total, corrected.diagonal(dim1=-2, dim2=-1)


def _log_alpha(mean: Tensor, diagonal: Tensor) -> Tensor:
    """log α_k, where exp(μ_k) Σ_l exp(−μ_l) may overflow but its logarithm does not."""
    classes = mean.shape[-1]
    constant = torch.full_like(mean, 1 - 2 / classes).log()  # −inf for two classes: the term vanishes
    growing = mean + torch.logsumexp(-mean, dim=-1, keepdim=True) - 2 * math.log(classes)
    return torch.logaddexp(constant, growing) - diagonal.log()
