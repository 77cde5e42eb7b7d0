"""Scores of predictive distributions, one per datum: written once for metrics, tuning and predictions.

Probabilities and moments of one posterior are `[B, C]`, of n candidates `[n, B, C]`; scores `[B]` and `[n, B]`. Every
score can be differentiated in the prediction. Nothing is checked here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.special import entr

from laplace.core.precision_policy import widened


def class_brier(probs: Tensor, y: Tensor, ignore_index: int | None = None) -> Tensor:
    """Σ_c (p_c − 1[y = c])² of labels `[B]` (Brier, 1950), Σ_c (p_c − q_c)² of soft ones q, `[B, C]`.

    Of an ignored label it means nothing.
    """
    if not y.is_floating_point():
        labels = y if ignore_index is None else y.where(y != ignore_index, 0)
        y = one_hot(labels, probs.shape[-1])
    return (probs - y).square().sum(-1)


def class_log_probability(probs: Tensor, y: Tensor) -> Tensor:
    """Log p_y of labels `[B]`, Σ_c q_c log p_c of soft ones q, `[B, C]`, where classes of q_c = 0 count nothing."""
    if not y.is_floating_point():
        return probs.gather(-1, y.unsqueeze(-1)).squeeze(-1).log()
    return torch.xlogy(y, probs).sum(-1)


def class_agreement(predicted: Tensor, y: Tensor) -> Tensor:
    """1[k = y] of predicted classes k, `[..., B]`, and labels `[B]`; q_k, its expectation, of soft ones q, `[B, C]`."""
    if not y.is_floating_point():
        return predicted == y
    return y.expand(*predicted.shape, -1).gather(-1, predicted.unsqueeze(-1)).squeeze(-1)


def binary_brier(probs: Tensor, y: Tensor) -> Tensor:
    """Σ_c (p_c − y_c)² of labels `[B, C]`."""
    return (probs - y).square().sum(-1)


def class_confidence(probs: Tensor) -> Tensor:
    """max_c p_c."""
    return probs.amax(-1)


def binary_confidence(probs: Tensor) -> Tensor:
    """Mean over labels of max(p, 1 − p)."""
    return torch.maximum(probs, 1 - probs).mean(-1)


def class_entropy(probs: Tensor) -> Tensor:
    """−Σ_c p_c log p_c, of one label."""
    return _entropy_terms(probs).sum(-1)


def binary_entropy(probs: Tensor) -> Tensor:
    """Σ_c of the entropies of labels that are independent."""
    return (_entropy_terms(probs) + _entropy_terms(1 - probs)).sum(-1)


def gaussian_entropy(variance: Tensor) -> Tensor:
    """½ Σ_c log(2πe v_c), the differential entropy of independent Gaussians."""
    return 0.5 * (2 * math.pi * math.e * variance).log().sum(-1)


def gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """−Σ_c log N(y_c; m_c, v_c)."""
    return 0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi)).sum(-1)


def gaussian_crps(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """Σ_c of the continuous ranked probability scores of N(m_c, v_c); see `laplace.metrics.gaussian_crps`."""
    scale = variance.sqrt()
    z = (y - mean) / scale
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    # 2Φ(z) − 1 = erf(z/√2), which keeps its digits around 0.
    return (scale * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))).sum(-1)


def confidence_bins(confidence: Tensor, n_bins: int) -> Tensor:
    """Bins of equal width, from 0: bin m − 1 of M holds what lies in ((m−1)/M, m/M]."""
    return (confidence.detach() * n_bins).ceil().long().sub(1).clamp(0, n_bins - 1)


def binned_gaps(probs: Tensor, y: Tensor, n_bins: int) -> Tensor:
    """1[the most probable class is y] − max_c p_c in the bin of the latter, 0 in the others, `[..., B, M]`, float64.

    The expected calibration error is (1/N) Σ_m |Σ_n gap_nm| (Guo et al., 2017, eq. 3). Of soft labels `[B, C]` the
    indicator is its expectation, the label's probability of that class.
    """
    confidence, predicted = probs.max(-1)
    gap = widened(class_agreement(predicted, y)) - widened(confidence)
    return one_hot(confidence_bins(confidence, n_bins), n_bins) * gap.unsqueeze(-1)


def _entropy_terms(probs: Tensor) -> Tensor:
    """−p log p of probabilities at least the smallest normal number away from 0, where its slope is infinite."""
    return entr(probs.clamp(min=torch.finfo(probs.dtype).tiny))


def quantile_shares(mean: Tensor, var: Tensor, y: Tensor, n_levels: int) -> tuple[Tensor, Tensor]:
    """Levels p_j = j / (m + 1), j = 1 … m, and the share of targets below the Gaussian p_j-quantiles, `[m]` each."""
    reached = torch.special.ndtr((y - mean) / var.sqrt()).flatten()
    levels = torch.arange(1, n_levels + 1, dtype=reached.dtype, device=reached.device) / (n_levels + 1)
    return levels, (reached <= levels.unsqueeze(1)).to(reached.dtype).mean(1)
