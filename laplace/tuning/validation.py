"""Data of a tuning: validation data, and out-of-distribution inputs on which to be uncertain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.positions import target_rows
from laplace.errors import InvalidArgument, InvalidData
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.checks import check_outputs
from laplace.network import next_token
from laplace.posterior.posterior import Posterior
from laplace.tuning.objectives import MeanScore, Objective
from laplace.tuning.scores import Prediction, find_score


@dataclass(frozen=True)
class Validation:
    """Loaders, and the weight of the out-of-distribution inputs.

    Attributes:
        loader: Validation data, batches as `fit` takes them.
        ood_loader: Inputs from elsewhere, with or without targets, which are not read; or None.
        ood_weight: λ of equation 12 of Daxberger et al. (2021).

    Raises:
        InvalidArgument: A weight that is negative or not finite.
    """

    loader: Iterable[Any]
    ood_loader: Iterable[Any] | None = None
    ood_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.ood_weight < math.inf:
            raise InvalidArgument(
                f"ood_weight={self.ood_weight}; it must be at least 0 and finite, between 0 and 1 as a rule."
            )

    def batches(
        self, posterior: Posterior, *, label: str = "validation", progress_bar: bool = False
    ) -> Iterator[tuple[str, Inputs, Tensor]]:
        """Name of a batch, inputs and targets of the validation data that count, on the posterior's device.

        Args:
            posterior: The posterior.
            label: Name of the progress bar.
            progress_bar: Show one.

        Raises:
            InvalidData: There are none.
        """
        device, likelihood, empty = posterior.hypers.device, posterior.likelihood, True
        for number, batch in enumerate(tqdm(self.loader, desc=label, disable=not progress_bar)):
            name = f"validation batch {number}"
            with named(name):
                data = next_token.counted(batch, posterior.choices.dict_key_y, device, likelihood, posterior.model)
            if data is not None:
                empty = False
                yield name, *data
        if empty:
            raise InvalidData("the validation loader gave no data that count; the hyper-parameters are as they were.")

    def ood_inputs(self, posterior: Posterior, *, progress_bar: bool = False) -> Iterator[tuple[str, Inputs]]:
        """Name of a batch and out-of-distribution inputs, on the posterior's device.

        Raises:
            InvalidData: There are none.
        """
        empty = True
        loader = tqdm(self.ood_loader or (), desc="out-of-distribution inputs", disable=not progress_bar)
        for number, batch in enumerate(loader):
            empty = False
            yield f"batch {number} of ood_loader", batches.to_device(batches.inputs(batch), posterior.hypers.device)
        if empty:
            raise InvalidData("ood_loader gave no inputs; the hyper-parameters are as they were.")


def checked_rows(posterior: Posterior, f: Tensor, y: Tensor | None, positions: tuple[int, ...]) -> Tensor:
    """Checked targets of outputs f `[B, C]`; zeros `[B]` of out-of-distribution inputs, which have none.

    Args:
        posterior: The posterior.
        f: Outputs; with positions, B are rows, data × positions.
        y: Targets as the loader gives them, or None.
        positions: Their dimensions.
    """
    if y is None:
        check_outputs(f)
        return torch.zeros(len(f), dtype=torch.long, device=f.device)
    return posterior.likelihood.check_targets(f, target_rows(y, f, positions, posterior.channel_dim))


def at_rows(prediction: Prediction, rows: Tensor | None) -> Prediction:
    """Some rows of the predictions of one candidate or of several; None for all."""
    if rows is None:
        return prediction
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
