"""Data that hyper-parameters are tuned on: validation data, and foreign inputs on which to be uncertain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from tqdm.auto import tqdm

from laplace import batch as batches
from laplace.batch import Inputs
from laplace.errors import InvalidArgument, InvalidData
from laplace.fitting import without_ignored
from laplace.likelihoods.base import Likelihood
from laplace.tuning.objectives import MeanScore, Objective
from laplace.tuning.scores import find_score

if TYPE_CHECKING:
    from laplace.parametric import ParametricLaplace


@dataclass(frozen=True)
class Validation:
    """Loaders, and how much the foreign inputs weigh.

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
        self, la: ParametricLaplace, *, label: str = "validation", progress_bar: bool = False
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and targets of the validation data that count, on the posterior's device.

        Args:
            la: The posterior.
            label: Name of the progress bar.
            progress_bar: Show one.

        Raises:
            InvalidData: There are none.
        """
        device, empty = la.prior_precision.device, True
        for batch in tqdm(self.loader, desc=label, disable=not progress_bar):
            x, y = batches.split(batch, la.dict_key_y)
            kept = without_ignored(batches.to_device(x, device), y.to(device), la.likelihood_object)
            if kept is not None:
                empty = False
                yield kept
        if empty:
            raise InvalidData("the validation loader gave no data that count; the hyper-parameters are as they were.")

    def foreign(self, la: ParametricLaplace, *, progress_bar: bool = False) -> Iterator[Inputs]:
        """Inputs from elsewhere, on the posterior's device.

        Raises:
            InvalidData: There are none.
        """
        empty = True
        for batch in tqdm(self.ood_loader or (), desc="foreign inputs", disable=not progress_bar):
            empty = False
            yield batches.to_device(batches.inputs(batch), la.prior_precision.device)
        if empty:
            raise InvalidData("ood_loader gave no inputs; the hyper-parameters are as they were.")


def entropy_of(likelihood: Likelihood) -> Objective:
    """Mean entropy of the predictive distributions, in nats.

    Raises:
        UnsupportedError: The likelihood does not say what its predictions are distributions of.
    """
    return Objective("entropy", partial(MeanScore, find_score("entropy", likelihood), likelihood))
