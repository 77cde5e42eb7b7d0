"""Losses of predictions, fed batch by batch (small is good), and the validation data that they are losses on."""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.content import Content, ContentReader, warn_of_training_data
from laplace.core.positions import rows_that_count, target_rows
from laplace.core.precision_policy import widened
from laplace.core.processes import Processes
from laplace.core.progress import DataBar
from laplace.errors import DataWarning, InvalidArgument, InvalidData, UnsupportedError, warn
from laplace.large_fits.processes import without_padding
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.checks import check_outputs
from laplace.likelihoods.targets import Score, Summary, mean_of, variance_of
from laplace.metrics import RunningMetric, accepted_by
from laplace.network import next_token
from laplace.network.model_guard import reading
from laplace.posterior.posterior import Posterior

# ----------------------------------------------------------------------------------------------------------------------
# Scores of predictions, per input and for many candidates at once; every one is differentiable
# ----------------------------------------------------------------------------------------------------------------------
#
# Predictions of one candidate are `[B, C]`, of n candidates `[n, B, C]`; scores `[B]` and `[n, B]`. What a score means
# is known to the likelihood's target.


Prediction = Summary


def negative_log_density(likelihood: Likelihood, prediction: Prediction, y: Tensor, sigma: Tensor) -> Tensor:
    """−log p(y | x, D), in nats [Redux, appendix eq. 11]: of every likelihood that defines `predictive_nll`."""
    mean, variance = mean_of(prediction), variance_of(prediction)
    if mean.ndim == 2:
        return likelihood.predictive_nll(mean, variance, y, sigma)
    n, n_data = mean.shape[:2]
    repeated = y.repeat(n, *(1,) * (y.ndim - 1))  # candidates are rows like any other
    variance = None if variance is None else variance.flatten(0, 1)
    return likelihood.predictive_nll(mean.flatten(0, 1), variance, repeated, sigma).view(n, n_data)


def find_score(name: str, likelihood: Likelihood) -> Score:
    """A score of a likelihood's predictions; an error where it has no meaning for this target."""
    scores = {"nll": negative_log_density, **likelihood.target.scores}
    if name not in scores:
        raise UnsupportedError(
            f"{name!r} has no meaning for likelihood={likelihood.name!r}, whose target_kind is "
            f"{likelihood.target_kind!r}; its scores are {[*scores]}. Use one of them, or a loss of your own."
        )
    return scores[name]


# ----------------------------------------------------------------------------------------------------------------------
# Losses over all batches
# ----------------------------------------------------------------------------------------------------------------------


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
        """The means of scores that the loss is made of, to which those of other processes' data can be added."""


@dataclass(frozen=True)
class LossRule:
    """How a loss is computed."""

    name: str  # for messages
    fresh: Callable[[], Running]  # makes a running loss that has seen nothing
    many: bool = True  # whether it takes the predictions of many candidates at once
    whole_covariance: bool = False  # whether regressions hand it `[B, C, C]`, as users' predictions have


class MeanScore(Running):
    """Mean of a score over the data, in its dimension `dim`, whose label is not ignored."""

    def __init__(self, score: Score, likelihood: Likelihood, dim: int = -1) -> None:
        self.score = score
        self.likelihood = likelihood
        self.dim = dim
        self.total: Tensor | float = 0.0
        self.count = 0

    def update(self, prediction: Prediction, y: Tensor, sigma: Tensor) -> None:
        values = self.score(self.likelihood, prediction, y, sigma)
        ignored = self.likelihood.ignore_index
        if ignored is not None and y.shape == (values.shape[self.dim],):
            values = values.index_select(self.dim, (y != ignored).nonzero().flatten())
        self.total = self.total + widened(values).sum(self.dim)
        self.count += values.shape[self.dim]

    def result(self) -> Tensor:
        return torch.as_tensor(self.total) / self.count if self.count else torch.tensor(torch.nan)

    def scores(self) -> list[MeanScore]:
        return [self]


class CalibrationError(Running):
    """Expected calibration error in bins of equal width [Guo et al., 2017, eq. 3]."""

    def __init__(self, binned_gaps: Score, likelihood: Likelihood) -> None:
        # Gaps between accuracy and confidence, each in its bin, `[..., B, M]`.
        self.gaps = MeanScore(binned_gaps, likelihood, dim=-2)

    def update(self, prediction: Prediction, y: Tensor, sigma: Tensor) -> None:
        self.gaps.update(prediction, y, sigma)

    def result(self) -> Tensor:
        return self.gaps.result().abs().sum(-1)

    def scores(self) -> list[MeanScore]:
        return [self.gaps]


class UsersMetric(Running):
    """A user's running metric, copied and reset so that no candidate sees another's sums."""

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
    """A user's function of all predictions at once: of `(prediction, y)`, or `(mean, variance, y)` in regression."""

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
        "'crps' or 'ece', or tune in one process."
    )


def _require_arguments(function: Callable[..., Any], count: int) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C say nothing
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        given = "(mean, variance, y), as for every regression" if count == 3 else "(prediction, y)"
        raise InvalidArgument(
            f"the loss has the signature {signature}, but it is called with {given}: give it these arguments."
        ) from error


def _numbers(value: Any, name: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"{name} returned {value!r}; a number is needed, or a 0-dim tensor.") from error


Loss = Literal["nll", "brier", "crps", "ece"] | RunningMetric | Callable[..., Any]
"""What users give for a loss on validation data."""


def make_loss(loss: Any, likelihood: Likelihood) -> LossRule:
    """A loss from what users give: None or a name, a running metric or a callable."""
    if loss is None or (isinstance(loss, str) and loss in ("nll", "brier", "crps")):
        name = loss or "nll"
        return LossRule(name, partial(MeanScore, find_score(name, likelihood), likelihood))
    if isinstance(loss, str) and loss == "ece":
        return LossRule(loss, partial(CalibrationError, find_score(loss, likelihood), likelihood))
    if isinstance(loss, RunningMetric) and not isinstance(loss, type):
        if getattr(loss, "higher_is_better", False):
            raise InvalidArgument(
                f"{type(loss).__name__} says that large values are good (higher_is_better), but a loss is minimised; "
                "give 1 - metric, or another loss."
            )
        return LossRule(type(loss).__name__, lambda: UsersMetric(loss), many=False, whole_covariance=True)
    if callable(loss) and not isinstance(loss, type):
        return LossRule("the loss", lambda: UsersFunction(loss), many=False, whole_covariance=True)
    raise InvalidArgument(
        f"{loss!r} is no objective; accepted are 'nll', 'brier', 'crps', 'ece', a running metric (update, compute, "
        "reset) and a callable; give an object, not a class."
    )


# ----------------------------------------------------------------------------------------------------------------------
# Validation data, and inputs from elsewhere on which to be uncertain
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Validation:
    """Loaders, and the weight of the out-of-distribution inputs."""

    loader: Iterable[Any]  # validation data, batches as `fit` takes them
    ood_loader: Iterable[Any] | None = None  # inputs from elsewhere; targets are not read
    ood_weight: float = 1.0  # λ of `less_entropy`
    progress_bar: bool = False
    processes: Processes | None = None  # whose loaders have the other shards of the data
    refuse_training_data: bool = False  # whether data of the fit are an error, and not a warning
    seen: list[Content] = field(default_factory=list)  # the digest of the data, once they were read

    def __post_init__(self) -> None:
        if not 0 <= self.ood_weight < math.inf:
            raise InvalidArgument(
                f"ood_weight={self.ood_weight}; it must be at least 0 and finite, between 0 and 1 as a rule."
            )

    def batches(self, posterior: Posterior, label: str = "validation") -> Iterator[tuple[str, Inputs, Tensor]]:
        """Name of a batch, inputs and targets of the validation data, without ignored ones, on the posterior's device.

        Data of the fit are refused, or warned of.
        """
        loader = self.loader if self.processes is None else without_padding(self.loader, posterior.choices.dict_key_y)
        device, likelihood, empty = posterior.hypers.device, posterior.likelihood, True
        content, key = ContentReader(), posterior.choices.dict_key_y
        for name, x, y in next_token.read(
            loader, key, device, likelihood, posterior.model,
            name="validation batch {}", label=label, progress_bar=self.progress_bar,
        ):  # fmt: skip
            empty = False
            content.see(x, y)
            yield name, x, y
        self.seen[:] = [content.content]
        calibration = posterior.calibration
        if calibration is not None and calibration._content is not None and calibration._content.holds(content.content):
            warn(
                "these are the data by which la.calibrate chose the posterior: their scores are better than those of "
                "others. Give data that it has not seen.",
                DataWarning,
            )
        if posterior.data is not None and posterior.data.content is not None:
            if self.refuse_training_data and posterior.data.content.holds(content.content):
                raise InvalidData(
                    "the validation data are data of the fit, at which the network is surer than elsewhere; give data "
                    "that training has not seen, or train_loader= in their place, of which a part is held out."
                )
            warn_of_training_data(posterior.data.content, content.content)
        if empty and self.processes is None:
            raise InvalidData("the validation loader gave no data, or all are ignored; nothing was changed.")

    def ood_inputs(self, posterior: Posterior) -> Iterator[tuple[str, Inputs]]:
        """Name of a batch and out-of-distribution inputs, on the posterior's device."""
        empty, loader = True, self.ood_loader or ()
        bar = DataBar("out-of-distribution inputs", loader, shown=self.progress_bar)
        for number, batch in enumerate(reading(loader)):
            empty = False
            x = batches.to_device(batches.inputs(batch), posterior.hypers.device)
            yield f"batch {number} of ood_loader", x
            bar.add(batches.size(x, posterior.choices.dict_key_x))
        bar.close()
        if empty and self.processes is None:
            raise InvalidData("ood_loader gave no inputs; the hyper-parameters are as they were.")

    def less_entropy(self, loss: Tensor, entropy: Tensor, n_ood: int, n_data: int) -> Tensor:
        """The loss minus λ times the entropy outside, means in place of sums over data [Redux, appendix eq. 12]."""
        return loss - self.ood_weight * n_ood / n_data * entropy


_SURELY = 1.25
"""Ratio to the loss of a guess from which a loss is worse than chance, whatever data it is of."""

_FEWEST = 20
"""Data below which a loss says nothing of that."""

_LARGEST_RESIDUAL = 10.0
"""Ratio of residuals on other data and on those of the fit."""


def warn_if_worse_than_chance(posterior: Posterior, n_data: int, nll: float, squares: Tensor | None = None) -> None:
    """Warns of data on which a network is no better than a guess, as of a class order or units of another time.

    `nll` is the network's mean negative log likelihood, `squares` are mean squares of a regression's residuals.
    """
    likelihood, fit = posterior.likelihood, posterior.map_fit
    if n_data < _FEWEST:
        return
    chance, told = likelihood.target.chance(fit.n_outputs), ""
    if chance is not None and nll > _SURELY * chance:
        told = f"the network's negative log likelihood is {nll:.3g} on these data, worse than {chance:.3g} by chance"
    known = likelihood.mean_squares(widened(fit.loss_terms), fit.n_data, fit.n_outputs)
    if squares is not None and known is not None:
        there, here = known.mean().sqrt().item(), squares.mean().sqrt().item()
        if 0 < there < here / _LARGEST_RESIDUAL:
            told = f"the network's residuals are {here:.3g} on these data, {here / there:.3g} times those of the fit"
    if told:
        warn(f"{told}: same class order, same preprocessing?", DataWarning)


@dataclass(frozen=True, eq=False)
class Targets:
    """Checked targets of a batch."""

    y: Tensor  # one for every row of the outputs; zeros `[B]` of out-of-distribution inputs, which have none
    rows: Tensor | None  # rows that are not ignored, of outputs with positions; None for all

    @classmethod
    def from_outputs(cls, posterior: Posterior, f: Tensor, y: Tensor | None, positions: tuple[int, ...]) -> Targets:
        """Targets of outputs f `[B, C]`; with positions, B are rows, data × positions."""
        if y is None:
            check_outputs(f)
            checked = torch.zeros(len(f), dtype=torch.long, device=f.device)
        else:
            targets = target_rows(y, f, positions, posterior.channel_dim)
            checked = posterior.likelihood.check_targets(f, targets)
        return cls(checked, rows_that_count(checked, positions, posterior.likelihood.ignore_index))

    @property
    def n_data(self) -> int:
        """Rows that are not ignored."""
        return len(self.y) if self.rows is None else len(self.rows)

    @overload
    def counted(self, prediction: Tensor) -> tuple[Tensor, Tensor]: ...

    @overload
    def counted(self, prediction: Prediction) -> tuple[Prediction, Tensor]: ...

    def counted(self, prediction: Prediction) -> tuple[Prediction, Tensor]:
        """Predictions of this batch, of one setting or of several, and targets, without ignored rows."""
        if self.rows is None:
            return prediction, self.y
        parts = prediction if isinstance(prediction, tuple) else (prediction,)
        chosen = tuple(part.index_select(parts[0].ndim - 2, self.rows) for part in parts)
        return (chosen if len(chosen) == 2 else chosen[0]), self.y[self.rows]

    def update(self, running: Running, prediction: Prediction, sigma: Tensor) -> None:
        """Adds predictions of this batch to a running loss."""
        running.update(*self.counted(prediction), sigma)


def entropy_of(likelihood: Likelihood) -> LossRule:
    """Mean entropy of the predictive distributions, in nats."""
    return LossRule("entropy", partial(MeanScore, find_score("entropy", likelihood), likelihood))
