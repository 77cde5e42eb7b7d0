"""Predictions of several posteriors as one: the mixture of their predictive distributions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Prediction = Tensor | tuple[Tensor, Tensor]


def mixed(predictions: Sequence[Prediction], weights: Tensor, channel_dim: int = -1) -> Prediction:
    """The mixture Σ_k π_k p_k (Eschenhagen et al., 2021, equation 9), or its first two moments.

    Probabilities are averaged. Of Gaussians N(m_k, C_k) the mixture has, by the law of total variance,

        m = Σ_k π_k m_k,    C = Σ_k π_k (C_k + (m_k − m)(m_k − m)ᵀ).

    Args:
        predictions: Of each component: probabilities `[..., B, C]`; or means and (co)variances: `[..., B, C]` with
            `[..., B, C]` or `[..., B, C, C]`, or those of all data together, `[B·C]` with `[B·C, B·C]`.
        weights: π, `[K]`; or of each of n candidates whose predictions are `[n, B, C]`, `[K, n]`.
        channel_dim: Where means with positions have their outputs; covariances have them last.

    Returns:
        What each prediction is: a tensor, or means and (co)variances. One prediction is returned as it is.
    """
    if len(predictions) == 1:
        return predictions[0]
    moments = [prediction for prediction in predictions if isinstance(prediction, tuple)]
    if not moments:
        return _average([p for p in predictions if isinstance(p, Tensor)], weights)
    mean = _average([m for m, _ in moments], weights)
    within = _average([c for _, c in moments], weights)
    steps = [m - mean for m, _ in moments]
    if within.ndim == mean.ndim:
        return mean, within + _average([step.square() for step in steps], weights)
    last = [step if step.ndim < 3 else step.movedim(channel_dim, -1) for step in steps]
    return mean, within + _average([step.unsqueeze(-1) * step.unsqueeze(-2) for step in last], weights)


def _average(values: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Σ_k π_k v_k; components may live on several devices, the first one's has the result."""
    like = values[0]
    shape = weights.shape[1:] + (1,) * (like.ndim - len(weights.shape[1:]))
    parts = [
        weight.to(like.device, torch.promote_types(value.dtype, like.dtype)).reshape(shape) * value.to(like.device)
        for weight, value in zip(weights, values, strict=True)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
