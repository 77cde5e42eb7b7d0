"""Losses on validation data, fed batch by batch: small is good."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.targets import Score, Summary, mean_of, variance_of
from laplace.metrics import RunningMetric, accepted_by

# Scores of predictions, per datum and for many candidates at once; every one is differentiable.
#
# Predictions of one candidate are `[B, C]`, of n candidates `[n, B, C]`; scores `[B]` and `[n, B]`. What a score means
# is known to the likelihood's target.


Prediction = Summary


def negative_log_density(likelihood: Likelihood, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
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


_REGRESSION = 3
"""Arguments of a user's loss in regression: mean, variance and targets."""


class Running(ABC):
    """A loss of one candidate, or of n candidates whose predictions are `[n, B, C]`; a graph is kept."""

    @abstractmethod
    def update(self, prediction: Prediction, y: Tensor, sigma: Tensor) -> None:
        """Takes in one batch: predictions, checked targets and the noise, 0-dim or `[C]`."""

    @abstractmethod
    def result(self) -> Tensor:
        """The loss over all batches, 0-dim or `[n]`."""

    @abstractmethod
    def scores(self) -> list[MeanScore]:
        """The means of scores that the loss is made of, to which those of other processes' data can be added.

        Raises:
            UnsupportedError: It is made of nothing that adds up.
        """


@dataclass(frozen=True)
class Objective:
    """Computation of a loss.

    Attributes:
        name: For messages.
        fresh: Makes a running loss that has seen nothing.
        many: Whether it takes the predictions of many candidates at once.
        whole_covariance: Whether regressions hand it `[B, C, C]`, the variance that users' predictions have.
        thresholds: Whether 0 is what is looked for, and the smallest candidate with it.
    """

    name: str
    fresh: Callable[[], Running]
    many: bool = True
    whole_covariance: bool = False
    thresholds: bool = False


@dataclass(frozen=True)
class Thresholds:
    """Objective of tuning: the smallest prior precision at which predictions are confident and accurate enough.

    From Eschenhagen et al., 2021, "Mixtures of Laplace approximations", appendices B.2 and F.4. They set `confidence`
    slightly below the accuracy of the network on the validation data.

    Attributes:
        confidence: Smallest acceptable mean confidence on the validation data, in (0, 1), or None.
        brier: Largest acceptable Brier score, or None.

    Raises:
        InvalidArgument: Neither is given, or one is out of range.
    """

    confidence: float | None = None
    brier: float | None = None

    def __post_init__(self) -> None:
        if self.confidence is None and self.brier is None:
            raise InvalidArgument("Thresholds() has none; give confidence=, brier= or both.")
        if self.confidence is not None and not 0 < self.confidence < 1:
            raise InvalidArgument(f"confidence={self.confidence}; a mean confidence lies between 0 and 1.")
        if self.brier is not None and not self.brier > 0:
            raise InvalidArgument(f"brier={self.brier}; a Brier score is positive.")


class MeanScore(Running):
    """Mean of a score over the data whose label is not ignored.

    Args:
        score: The score.
        likelihood: What it is a score of.
        dim: Dimension of the data in it.
    """

    def __init__(self, score: Score, likelihood: Likelihood, dim: int = -1) -> None:
        self.score = score
        self.likelihood = likelihood
        self.dim = dim
        self.total: Tensor | float = 0.0
        self.count = 0

    def update(self, prediction: Prediction, y: Tensor, sigma: Tensor) -> None:
        values = self.score(self.likelihood, prediction, y, sigma)
        counted = _counted(self.likelihood, y, values.shape[self.dim])
        if counted is not None:
            values = values.index_select(self.dim, counted)
        self.total = self.total + widened(values).sum(self.dim)
        self.count += values.shape[self.dim]

    def result(self) -> Tensor:
        return torch.as_tensor(self.total) / self.count if self.count else torch.tensor(torch.nan)

    def scores(self) -> list[MeanScore]:
        return [self]


class CalibrationError(Running):
    """Expected calibration error in bins of equal width (Guo et al., 2017, eq. 3).

    Args:
        binned_gaps: Gaps between accuracy and confidence, each in its bin, `[..., B, M]`.
        likelihood: Of class labels.
    """

    def __init__(self, binned_gaps: Score, likelihood: Likelihood) -> None:
        self.gaps = MeanScore(binned_gaps, likelihood, dim=-2)

    def update(self, prediction: Prediction, y: Tensor, sigma: Tensor) -> None:
        self.gaps.update(prediction, y, sigma)

    def result(self) -> Tensor:
        return self.gaps.result().abs().sum(-1)

    def scores(self) -> list[MeanScore]:
        return [self.gaps]


class Shortfall(Running):
    """The amount by which thresholds are missed: 0 where they are met.

    Args:
        thresholds: The thresholds.
        likelihood: Of class or binary labels.
    """

    def __init__(self, thresholds: Thresholds, likelihood: Likelihood) -> None:
        wanted = {"confidence": thresholds.confidence, "brier": thresholds.brier}
        self.parts = [
            (MeanScore(find_score(name, likelihood), likelihood), limit, -1 if name == "confidence" else 1)
            for name, limit in wanted.items()
            if limit is not None
        ]

    def update(self, prediction: Prediction, y: Tensor, sigma: Tensor) -> None:
        for score, _, _ in self.parts:
            score.update(prediction, y, sigma)

    def result(self) -> Tensor:
        missed = [sign * (score.result() - limit) for score, limit, sign in self.parts]
        return torch.stack(missed).amax(0).clamp(min=0)

    def scores(self) -> list[MeanScore]:
        return [score for score, _, _ in self.parts]


class UsersMetric(Running):
    """A user's running metric, copied and reset so that no candidate sees another's sums.

    Args:
        metric: Has `update`, `compute` and `reset`.
    """

    def __init__(self, metric: RunningMetric) -> None:
        self.metric = copy.deepcopy(metric)
        self.metric.reset()

    def update(self, prediction: Prediction, y: Tensor, sigma: Tensor) -> None:
        """Takes in one batch; a metric whose update requires (mean, variance, y) gets all three, others the mean."""
        row = (*prediction, y) if isinstance(prediction, tuple) else (prediction, y)
        self.metric.update(*accepted_by(self.metric, row))

    def result(self) -> Tensor:
        return _numbers(self.metric.compute(), f"{type(self.metric).__name__}.compute()").sum()

    def scores(self) -> list[MeanScore]:
        raise _no_sum(type(self.metric).__name__)


class UsersFunction(Running):
    """A user's function of all predictions at once.

    Args:
        function: `function(prediction, y)`, or `function(mean, variance, y)` for regression.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.predictions: list[tuple[Tensor, ...]] = []
        self.targets: list[Tensor] = []

    def update(self, prediction: Prediction, y: Tensor, sigma: Tensor) -> None:
        parts = prediction if isinstance(prediction, tuple) else (prediction,)
        if not self.predictions:
            _require_arguments(self.function, len(parts) + 1)
        self.predictions.append(parts)
        self.targets.append(y)

    def result(self) -> Tensor:
        parts = [torch.cat(part) for part in zip(*self.predictions, strict=True)]
        value = _numbers(self.function(*parts, torch.cat(self.targets)), "the loss")
        if value.numel() != 1:
            raise InvalidArgument(
                f"the loss returned a tensor of shape {list(value.shape)}; one number for all data is needed: take "
                "its mean."
            )
        return value.reshape(())

    def scores(self) -> list[MeanScore]:
        raise _no_sum("a function of all predictions")


def _no_sum(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"group= with {name} as the loss, whose values for parts of the data do not add up; give 'nll', 'brier', "
        "'crps', 'ece' or laplace.tuning.Thresholds, or tune in one process."
    )


def _require_arguments(function: Callable[..., Any], count: int) -> None:
    """Raises `InvalidArgument` if a function says that it does not take so many arguments by position."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C say nothing
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        given = "(mean, variance, y), as for every regression" if count == _REGRESSION else "(prediction, y)"
        raise InvalidArgument(
            f"the loss has the signature {signature}, but it is called with {given}: give it these arguments."
        ) from error


def _numbers(value: Any, name: str) -> Tensor:
    """Result of a user's loss or metric, as a tensor.

    Raises:
        InvalidArgument: It is no number and no tensor.
    """
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"{name} returned {value!r}; a number is needed, or a 0-dim tensor.") from error


def _counted(likelihood: Likelihood, y: Tensor, n_data: int) -> Tensor | None:
    """Indices of the data that are not ignored, `[n]`; None for all."""
    if likelihood.ignore_index is None or y.shape != (n_data,):
        return None
    return (y != likelihood.ignore_index).nonzero().flatten()


Loss = Literal["nll", "brier", "crps", "ece"] | Thresholds | RunningMetric | Callable[..., Any]
"""What users give for a loss on validation data."""


def make_objective(loss: Any, likelihood: Likelihood) -> Objective:
    """An objective from what users give.

    Args:
        loss: None or `"nll"`, `"brier"`, `"crps"`, `"ece"`, `Thresholds`, a running metric or a callable.
        likelihood: Of the targets.

    Raises:
        InvalidArgument: None of these, or a metric of which large values are good.
        UnsupportedError: A score that has no meaning for this likelihood.
    """
    if loss is None or (isinstance(loss, str) and loss in ("nll", "brier", "crps")):
        name = loss or "nll"
        return Objective(name, partial(MeanScore, find_score(name, likelihood), likelihood))
    if isinstance(loss, str) and loss == "ece":
        return Objective(loss, partial(CalibrationError, find_score(loss, likelihood), likelihood))
    if isinstance(loss, Thresholds):
        Shortfall(loss, likelihood)  # refuses a likelihood without them
        return Objective("thresholds", partial(Shortfall, loss, likelihood), thresholds=True)
    if isinstance(loss, RunningMetric) and not isinstance(loss, type):
        if getattr(loss, "higher_is_better", False):
            raise InvalidArgument(
                f"{type(loss).__name__} says that large values are good (higher_is_better), but a loss is minimised; "
                "give 1 - metric, or another loss."
            )
        return Objective(type(loss).__name__, lambda: UsersMetric(loss), many=False, whole_covariance=True)
    if callable(loss) and not isinstance(loss, type):
        return Objective("the loss", lambda: UsersFunction(loss), many=False, whole_covariance=True)
    raise InvalidArgument(
        f"{loss!r} is no objective; accepted are 'nll', 'brier', 'crps', 'ece', laplace.tuning.Thresholds, a running "
        "metric (update, compute, reset) and a callable; give an object, not a class."
    )
