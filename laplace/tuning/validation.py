"""Validation data of a tuning, inputs from elsewhere on which to be uncertain, and losses of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.positions import rows_that_count, target_rows
from laplace.core.processes import Processes
from laplace.core.progress import DataBar
from laplace.errors import InvalidArgument, InvalidData
from laplace.fitting import without_padding
from laplace.fitting.content import ContentReader, warn_of_training_data
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.checks import check_outputs
from laplace.network import next_token
from laplace.posterior.posterior import Posterior
from laplace.tuning.candidates import Predictive
from laplace.tuning.objectives import MeanScore, Objective, Prediction, Running, find_score


@dataclass(frozen=True)
class Validation:
    """Loaders, and the weight of the out-of-distribution inputs.

    Attributes:
        loader: Validation data, batches as `fit` takes them.
        ood_loader: Inputs from elsewhere, with or without targets, which are not read; or None.
        ood_weight: λ of equation 12 of Daxberger et al. (2021).
        progress_bar: Show a progress bar for each pass over the data.
        processes: Those whose loaders have the other shards of the data; None where all data are here.
        refuse_training_data: Whether data of the fit are an error, and not a warning.

    Raises:
        InvalidArgument: A weight that is negative or not finite.
    """

    loader: Iterable[Any]
    ood_loader: Iterable[Any] | None = None
    ood_weight: float = 1.0
    progress_bar: bool = False
    processes: Processes | None = None
    refuse_training_data: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ood_weight < math.inf:
            raise InvalidArgument(
                f"ood_weight={self.ood_weight}; it must be at least 0 and finite, between 0 and 1 as a rule."
            )

    def batches(self, posterior: Posterior, label: str = "validation") -> Iterator[tuple[str, Inputs, Tensor]]:
        """Name of a batch, inputs and targets of the validation data, without ignored ones, on the posterior's device.

        Args:
            posterior: The posterior.
            label: Name of the progress bar.

        Raises:
            InvalidData: There are none, and no other processes that may have some; or they are refused data of the fit.

        Warns:
            DataWarning: They are data of the fit.
        """
        loader = self.loader if self.processes is None else without_padding(self.loader, posterior.choices.dict_key_y)
        device, likelihood, empty = posterior.hypers.device, posterior.likelihood, True
        bar, content = DataBar(label, loader, shown=self.progress_bar), ContentReader()
        for number, batch in enumerate(loader):
            name = f"validation batch {number}"
            with named(name):
                data = next_token.counted(batch, posterior.choices.dict_key_y, device, likelihood, posterior.model)
            if data is not None:
                empty = False
                content.see(*data)
                yield name, *data
                bar.add(len(data[1]))
        bar.close()
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
        """Name of a batch and out-of-distribution inputs, on the posterior's device.

        Raises:
            InvalidData: There are none.
        """
        empty, loader = True, self.ood_loader or ()
        bar = DataBar("out-of-distribution inputs", loader, shown=self.progress_bar)
        for number, batch in enumerate(loader):
            empty = False
            x = batches.to_device(batches.inputs(batch), posterior.hypers.device)
            yield f"batch {number} of ood_loader", x
            bar.add(batches.size(x, posterior.choices.dict_key_x))
        bar.close()
        if empty and self.processes is None:
            raise InvalidData("ood_loader gave no inputs; the hyper-parameters are as they were.")

    def less_entropy(self, loss: Tensor, entropy: Tensor, n_ood: int, n_data: int) -> Tensor:
        """The loss minus λ times the entropy outside: sums over data in equation 12, here divided by their number.

        Args:
            loss: Mean over the validation data.
            entropy: Mean over the out-of-distribution inputs.
            n_ood: Their number.
            n_data: Number of validation data, without ignored ones.
        """
        return loss - self.ood_weight * n_ood / n_data * entropy


@dataclass(frozen=True)
class ValidationLoss:
    """A loss of predictions of validation data.

    Attributes:
        objective: The loss.
        data: The data, and inputs from elsewhere.
        predictive: Kind of prediction.
    """

    objective: Objective
    data: Validation
    predictive: Predictive


@dataclass(frozen=True, eq=False)
class Targets:
    """Checked targets of a batch.

    Attributes:
        y: One for every row of the outputs; zeros `[B]` of out-of-distribution inputs, which have none.
        rows: Rows that are not ignored, of outputs with positions; None for all.
    """

    y: Tensor
    rows: Tensor | None

    @classmethod
    def of(cls, posterior: Posterior, f: Tensor, y: Tensor | None, positions: tuple[int, ...]) -> Targets:
        """Targets of outputs f.

        Args:
            posterior: The posterior.
            f: Outputs `[B, C]`; with positions, B are rows, data × positions.
            y: Targets as the loader gives them, or None.
            positions: Their dimensions.
        """
        checked = _checked_rows(posterior, f, y, positions)
        return cls(checked, rows_that_count(checked, positions, posterior.likelihood.ignore_index))

    @property
    def n_data(self) -> int:
        """Rows that are not ignored."""
        return len(self.y) if self.rows is None else len(self.rows)

    def counted(self, prediction: Prediction) -> tuple[Prediction, Tensor]:
        """Predictions of this batch, of one setting or of several, and targets, without ignored rows."""
        return (prediction, self.y) if self.rows is None else (_at_rows(prediction, self.rows), self.y[self.rows])

    def update(self, running: Running, prediction: Prediction, sigma: Tensor) -> None:
        """Adds predictions of this batch to a running loss."""
        running.update(*self.counted(prediction), sigma)


def _checked_rows(posterior: Posterior, f: Tensor, y: Tensor | None, positions: tuple[int, ...]) -> Tensor:
    """Targets `[B, …]`, one for every row of f."""
    if y is None:
        check_outputs(f)
        return torch.zeros(len(f), dtype=torch.long, device=f.device)
    return posterior.likelihood.check_targets(f, target_rows(y, f, positions, posterior.channel_dim))


def _at_rows(prediction: Prediction, rows: Tensor) -> Prediction:
    """Some rows of the predictions of one setting or of several."""
    if isinstance(prediction, tuple):
        mean, variance = prediction
        dim = mean.ndim - 2
        return mean.index_select(dim, rows), variance.index_select(dim, rows)
    return prediction.index_select(prediction.ndim - 2, rows)


def entropy_of(likelihood: Likelihood) -> Objective:
    """Mean entropy of the predictive distributions, in nats.

    Raises:
        UnsupportedError: The likelihood does not say what its predictions are distributions of.
    """
    return Objective("entropy", partial(MeanScore, find_score("entropy", likelihood), likelihood))
