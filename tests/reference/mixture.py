"""Mixtures of Gaussians and of predictions, dense and in float64; the bound on the confidence far from the data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def weights_by_evidence(log_evidences: Sequence[float]) -> list[float]:
    """p(D | M_k) / Σ_l p(D | M_l) (Eschenhagen et al., 2021, equation 10), with the largest taken out."""
    largest = max(log_evidences)
    shares = [math.exp(value - largest) for value in log_evidences]
    return [share / math.fsum(shares) for share in shares]


def log_evidence(log_evidences: Sequence[float]) -> float:
    """log((1/K) Σ_k exp v_k), with the largest taken out."""
    largest = max(log_evidences)
    return largest + math.log(math.fsum(math.exp(v - largest) for v in log_evidences) / len(log_evidences))


def moments(weights: Tensor, means: Tensor, covariances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a mixture by raw second moments: E[ff'] − E[f]E[f]', from `[K]`, `[K, n]`, `[K, n, n]`."""
    mean = torch.zeros_like(means[0])
    second = torch.zeros_like(covariances[0])
    for weight, m, c in zip(weights, means, covariances, strict=True):
        mean += weight * m
        second += weight * (c + torch.outer(m, m))
    return mean, second - torch.outer(mean, mean)


def confidence_bound(weights: Tensor, rows: Sequence[Tensor], covariances: Sequence[Tensor]) -> float:
    """The largest over c of Σ_k π_k / (1 + Σ_{i≠c} exp(−(b_i + b_c))), b_i = ‖μ_i‖ / √(π/8 λ_min(Σ_i)).

    For a class c it is theorem 2 of Eschenhagen et al. (2021), with one component lemma 1.

    Args:
        weights: π, `[K]`.
        rows: Of each component, the means μ_i of the rows of the last layer, `[C, D]`.
        covariances: Of each component, the covariance of the flattened rows, `[C·D, C·D]`, row after row.
    """
    totals = [0.0] * len(rows[0])
    for weight, mu, covariance in zip(weights.tolist(), rows, covariances, strict=True):
        width = mu.shape[1]
        b = []
        for i, row in enumerate(mu):
            block = covariance[i * width : (i + 1) * width, i * width : (i + 1) * width]
            smallest = torch.linalg.eigvalsh(block)[0].item()
            b.append(row.norm().item() / math.sqrt(math.pi / 8 * smallest))
        for c in range(len(totals)):
            totals[c] += weight / (1 + sum(math.exp(-(b[i] + b[c])) for i in range(len(b)) if i != c))
    return max(totals)
