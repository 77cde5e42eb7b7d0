"""Scores of predictions, per datum and for many candidates at once; every one is differentiable.

Predictions of one candidate are `[B, C]`, of n candidates `[n, B, C]`; scores `[B]` and `[n, B]`. What a score means is
known to the likelihood's target.
"""

from __future__ import annotations

from torch import Tensor

from laplace.errors import UnsupportedError
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.outputs import Density
from laplace.likelihoods.target import Score, Summary, mean_of, variance_of

Prediction = Summary


def negative_log_density(likelihood: Density, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
    """−log p(y | x, D), in nats: of every likelihood that defines `predictive_nll`."""
    mean, variance = mean_of(prediction), variance_of(prediction)
    if mean.ndim == 2:
        return likelihood.predictive_nll(mean, variance, y, sigma)
    n, n_data = mean.shape[:2]
    repeated = y.repeat(n, *(1,) * (y.ndim - 1))  # candidates are rows like any other
    variance = None if variance is None else variance.flatten(0, 1)
    return likelihood.predictive_nll(mean.flatten(0, 1), variance, repeated, sigma).view(n, n_data)


def find_score(name: str, likelihood: Likelihood) -> Score:
    """A score of a likelihood's predictions.

    Raises:
        UnsupportedError: It has no meaning for this target.
    """
    scores = {"nll": negative_log_density, **likelihood.target.scores}
    if name not in scores:
        raise UnsupportedError(
            f"{name!r} has no meaning for likelihood={likelihood.name!r}, whose target_kind is "
            f"{likelihood.target_kind!r}; its scores are {[*scores]}. Use one of them, or a loss of your own."
        )
    return scores[name]
