"""Predictions of several posteriors as one: the mixture of their predictive distributions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace.core.precision_policy import wide_dtype, widened

Prediction = Tensor | tuple[Tensor, Tensor]


def mixed(predictions: Sequence[Prediction], weights: Tensor, channel_dim: int = -1) -> Prediction:
    """The mixture Σ_k π_k p_k (Eschenhagen et al., 2021, equation 9), or its first two moments.

    Args:
        predictions: Of each component: probabilities `[..., B, C]`, which are averaged; or means and (co)variances, as
            of `mixed_moments`.
        weights: π, `[K]`; or of each of n candidates whose predictions are `[n, B, C]`, `[K, n]`.
        channel_dim: As of `mixed_moments`.

    Returns:
        What each prediction is: a tensor, or means and (co)variances. One prediction is returned as it is.
    """
    if len(predictions) == 1:
        return predictions[0]
    moments = [prediction for prediction in predictions if isinstance(prediction, tuple)]
    if moments:
        return mixed_moments(moments, weights, channel_dim)
    return average([p for p in predictions if isinstance(p, Tensor)], weights)


def mixed_moments(
    moments: Sequence[tuple[Tensor, Tensor]], weights: Tensor, channel_dim: int = -1
) -> tuple[Tensor, Tensor]:
    """Mean and (co)variance of a mixture of distributions with these, by the law of total variance.

        m = Σ_k π_k m_k,    C = Σ_k π_k (C_k + (m_k − m)(m_k − m)ᵀ)

    Args:
        moments: Means and (co)variances: `[..., B, C]` with `[..., B, C]` or `[..., B, C, C]`, or those of all data
            together, `[B·C]` with `[B·C, B·C]`.
        weights: π, `[K]`, or `[K, n]` of candidates.
        channel_dim: Where means have their C outputs: those of networks with positions, `[B, C, H, W]`, whose
            covariances are `[B, H, W, C, C]`.
    """
    mean = average([m for m, _ in moments], weights)
    within = average([c for _, c in moments], weights)
    steps = [m.to(mean) - mean for m, _ in moments]
    if within.ndim == mean.ndim:
        return mean, within + average([step.square() for step in steps], weights)
    if mean.ndim > 1:
        steps = [step.movedim(channel_dim, -1) for step in steps]
    return mean, within + average([step.unsqueeze(-1) * step.unsqueeze(-2) for step in steps], weights)


def average(values: Sequence[Tensor], weights: Tensor) -> Tensor:
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


_HALVINGS = 64
"""Halvings of an interval: to the last bit of float64."""

_FLAT = 1e-8
"""Density, in units of the widest component's, below which the distribution function counts as constant."""


def quantile(means: Tensor, variances: Tensor, weights: Tensor, probability: float) -> Tensor:
    """Where the mixture's distribution function Σ_k π_k Φ((q − m_k) / s_k) is `probability`, `[...]`.

    Found by bisection between the components' own quantiles. A step of Newton's method at the end changes no digit,
    and carries the derivative by means and variances.

    Args:
        means: `[K, ...]`.
        variances: `[K, ...]`.
        weights: π, `[K]`.
        probability: In (0, 1).
    """
    m, v = widened(means), widened(variances)
    s = v.clamp(min=torch.finfo(v.dtype).tiny).sqrt()
    pi = weights.to(m).reshape(-1, *(1,) * (m.ndim - 1))

    def excess(q: Tensor) -> Tensor:
        return (pi * torch.special.ndtr((q - m) / s)).sum(0) - probability

    with torch.no_grad():
        own = m + s * torch.special.ndtri(torch.tensor(probability, dtype=wide_dtype(m.device), device=m.device))
        low, high = own.amin(0), own.amax(0)
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            above = excess(middle) > 0
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        q = 0.5 * (low + high)
        spread = s.amax(0)
        density = spread * (pi * (-0.5 * ((q - m) / s).square()).exp() / (s * (2 * torch.pi) ** 0.5)).sum(0)
    steep = density > _FLAT  # between modes far apart there is nothing to divide by
    return torch.where(steep, q - excess(q) * spread / density.where(steep, 1.0), q).to(means.dtype)
