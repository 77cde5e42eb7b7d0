"""Scores of predictions, per datum and for many candidates at once; every one is differentiable.

Predictions of one candidate are `[B, C]`, of n candidates `[n, B, C]`; scores `[B]` and `[n, B]`. What a score means
is decided by `Likelihood.target_kind`: probabilities of classes, a probability per output, or a Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from laplace.errors import UnsupportedError
from laplace.likelihoods.base import Likelihood
from laplace.metrics import crps_terms

Prediction = Tensor | tuple[Tensor, Tensor]
"""Means of the target, or mean and latent variance of a regression."""

Score = Callable[[Likelihood, Prediction, Tensor, Tensor], Tensor]
"""`(likelihood, prediction, y, sigma) -> [..., B]`."""

N_BINS = 15
"""Bins of the calibration error, as in `laplace.metrics.expected_calibration_error`."""


def moments(prediction: Prediction) -> tuple[Tensor, Tensor | None]:
    """Mean and latent variances, `[..., B, C]` each, of a prediction; None where it has no variance."""
    if not isinstance(prediction, tuple):
        return prediction, None
    mean, variance = prediction
    return mean, variance.diagonal(dim1=-2, dim2=-1) if variance.ndim > mean.ndim else variance


def negative_log_density(likelihood: Likelihood, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
    """−log p(y | x, D), in nats: of every likelihood that defines `predictive_nll`."""
    mean, variance = moments(prediction)
    if mean.ndim == 2:
        return likelihood.predictive_nll(mean, variance, y, sigma)
    n, n_data = mean.shape[:2]
    repeated = y.repeat(n, *(1,) * (y.ndim - 1))  # candidates are rows like any other
    variance = None if variance is None else variance.flatten(0, 1)
    return likelihood.predictive_nll(mean.flatten(0, 1), variance, repeated, sigma).view(n, n_data)


def _class_brier(likelihood: Likelihood, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
    """Σ_c (p_c − 1[y = c])² (Brier, 1950)."""
    probs, _ = moments(prediction)
    kept = y if likelihood.ignore_index is None else y.where(y != likelihood.ignore_index, 0)
    return (probs - torch.nn.functional.one_hot(kept, probs.shape[-1])).square().sum(-1)


def _binary_brier(likelihood: Likelihood, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
    """Σ_c (p_c − y_c)²."""
    return (moments(prediction)[0] - y).square().sum(-1)


def _crps(likelihood: Likelihood, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
    """Σ_c CRPS(N(m_c, v_c + σ_c²), y_c) (Gneiting and Raftery, 2007)."""
    mean, variance = moments(prediction)
    return crps_terms(mean, _noisy(mean, variance, sigma), y).sum(-1)


def _class_confidence(likelihood: Likelihood, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
    """max_c p_c."""
    return moments(prediction)[0].amax(-1)


def _binary_confidence(likelihood: Likelihood, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
    """Mean over outputs of max(p, 1 − p)."""
    probs, _ = moments(prediction)
    return torch.maximum(probs, 1 - probs).mean(-1)


def _class_entropy(likelihood: Likelihood, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
    """−Σ_c p_c log p_c."""
    return torch.special.entr(_inside(moments(prediction)[0])).sum(-1)


def _binary_entropy(likelihood: Likelihood, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
    """Σ_c of the entropies of independent binary targets."""
    probs, _ = moments(prediction)
    return (torch.special.entr(_inside(probs)) + torch.special.entr(_inside(1 - probs))).sum(-1)


def _real_entropy(likelihood: Likelihood, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
    """½ Σ_c log(2πe (v_c + σ_c²)), the differential entropy."""
    mean, variance = moments(prediction)
    return 0.5 * (2 * math.pi * math.e * _noisy(mean, variance, sigma)).log().sum(-1)


def _inside(probs: Tensor) -> Tensor:
    """Probabilities at least the smallest normal number away from 0, where the entropy has an infinite slope."""
    return probs.clamp(min=torch.finfo(probs.dtype).tiny)


def _noisy(mean: Tensor, variance: Tensor | None, sigma: Tensor) -> Tensor:
    """Variance of the target, `[..., B, C]`."""
    noise = sigma.square()
    return noise.expand_as(mean) if variance is None else variance + noise


SCORES: dict[str, dict[str, Score]] = {
    "brier": {"class": _class_brier, "binary": _binary_brier},
    "crps": {"real": _crps},
    "confidence": {"class": _class_confidence, "binary": _binary_confidence},
    "entropy": {"class": _class_entropy, "binary": _binary_entropy, "real": _real_entropy},
}
"""Scores by name and kind of target; `"nll"` is `negative_log_density` for every kind."""


def find_score(name: str, likelihood: Likelihood) -> Score:
    """A score for a likelihood's predictions.

    Raises:
        UnsupportedError: It has no meaning for this kind of target.
    """
    if name == "nll":
        return negative_log_density
    by_kind = SCORES[name]
    if likelihood.target_kind not in by_kind:
        raise UnsupportedError(
            f"{name!r} has no meaning for likelihood={likelihood.name!r}, whose target_kind is "
            f"{likelihood.target_kind!r}; it is defined for {list(by_kind)}. Use 'nll', or a loss of your own."
        )
    return by_kind[likelihood.target_kind]
