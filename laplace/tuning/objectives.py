"""Losses on validation data, one running sum per candidate."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.metrics import RunningMetric

Prediction = Tensor | tuple[Tensor, Tensor]
"""Probabilities `[B, C]`, or mean and variance of a regression."""


class Objective(ABC):
    """A loss that is fed batch by batch."""

    @abstractmethod
    def update(self, prediction: Prediction, y: Tensor) -> None:
        """Takes in one batch."""

    @abstractmethod
    def result(self) -> float:
        """The loss over all batches."""


class NegativeLogPredictive(Objective):
    """Mean negative log predictive density: with the noise for regression, so that it depends on the variance."""

    def __init__(self, likelihood: Likelihood, sigma_noise: Tensor) -> None:
        self.likelihood = likelihood
        self.sigma_noise = sigma_noise.detach()
        self.total = 0.0
        self.count = 0

    def update(self, prediction: Prediction, y: Tensor) -> None:
        """Takes in one batch."""
        mean, covariance = prediction if isinstance(prediction, tuple) else (prediction, None)
        if covariance is not None and covariance.ndim == 3:
            covariance = covariance.diagonal(dim1=1, dim2=2)
        values = self.likelihood.predictive_nll(mean, covariance, y, self.sigma_noise)
        counted = y != self.likelihood.ignore_index if self.likelihood.ignore_index is not None else None
        values = values if counted is None or counted.shape != values.shape else values[counted]
        self.total += float(values.sum())
        self.count += values.numel()

    def result(self) -> float:
        """Mean over the data that count."""
        return self.total / self.count if self.count else float("nan")


class RunningLoss(Objective):
    """A user's running metric, copied and reset so that no candidate sees another's sums."""

    def __init__(self, metric: RunningMetric) -> None:
        self.metric = copy.deepcopy(metric)
        self.metric.reset()

    def update(self, prediction: Prediction, y: Tensor) -> None:
        """Takes in one batch; a metric whose update requires (mean, variance, y) gets all three, others the mean."""
        if isinstance(prediction, tuple) and _requires_three(self.metric.update):
            self.metric.update(*prediction, y)
        else:
            self.metric.update(prediction[0] if isinstance(prediction, tuple) else prediction, y)

    def result(self) -> float:
        """What the metric computes."""
        return float(torch.as_tensor(self.metric.compute()).sum())


def _requires_three(update: Callable[..., Any]) -> bool:
    """Whether a metric's update cannot do with two arguments (`weight=None` would be another's third)."""
    parameters = inspect.signature(update).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return len(required) >= 3 or any(p.kind is p.VAR_POSITIONAL for p in required)


class WholeLoss(Objective):
    """A user's function of all predictions at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.predictions: list[Prediction] = []
        self.targets: list[Tensor] = []

    def update(self, prediction: Prediction, y: Tensor) -> None:
        """Keeps one batch."""
        self.predictions.append(prediction)
        self.targets.append(y)

    def result(self) -> float:
        """The function of everything."""
        y = torch.cat(self.targets)
        pairs = [p for p in self.predictions if isinstance(p, tuple)]
        if pairs:
            means, variances = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            return float(self.function(means, variances, y))
        return float(self.function(torch.cat([p for p in self.predictions if isinstance(p, Tensor)]), y))


def make_objective(loss: Any, likelihood: Likelihood, sigma_noise: Tensor) -> Callable[[], Objective]:
    """A factory of fresh objectives.

    Raises:
        InvalidArgument: `loss` is neither None, a running metric nor callable.
    """
    if loss is None:
        return lambda: NegativeLogPredictive(likelihood, sigma_noise)
    if isinstance(loss, RunningMetric):
        return lambda: RunningLoss(loss)
    if callable(loss):
        return lambda: WholeLoss(loss)
    raise InvalidArgument(f"loss must be None, a running metric or a callable; {type(loss).__name__} was given.")
