"""The interface that predictions are asked through, of a posterior or a mixture, and the options of a prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.argument_checks import check_counts
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.output_choice import Given, OutputChoice
from laplace.core.progress import DataBar
from laplace.enums import LinkApprox, PredType
from laplace.errors import InvalidArgument
from laplace.predictive.options import PredictiveNames, check_options
from laplace.predictive.posterior_outputs import PredictionOptions
from laplace.predictive.prediction import Prediction


@dataclass(frozen=True, eq=False)
class Request:
    """Options of a prediction as users give them.

    Attributes:
        pred_type: Name of the predictive.
        n_samples: Monte-Carlo samples.
        diagonal_output: Only variances of the outputs.
        generator: Source of randomness; None for the global one.
        joint: Covariance over all inputs.
        link_approx: Name of the link; None for samples, which need none.
        outputs: Which outputs; None for all.
        group_size: Inputs of a group, within which a joint covariance is; None for all.
    """

    pred_type: PredType | str
    n_samples: int
    diagonal_output: bool
    generator: torch.Generator | None
    joint: bool
    link_approx: LinkApprox | str | None = None
    outputs: Given = None
    group_size: int | None = None

    def kind(self, names: PredictiveNames) -> PredType:
        """The predictive, linearised or sampled, by the names that a posterior has.

        Raises:
            InvalidArgument: Unknown predictive or link, or no samples.
            InvalidType: The generator is no `torch.Generator`.
        """
        return check_options(self.pred_type, self.link_approx, self.n_samples, self.generator, names)

    def options(self, channel_dim: int) -> PredictionOptions:
        """Link, samples, form, and which outputs of a network that has its channels in `channel_dim`.

        Raises:
            InvalidType: Outputs that are no integers.
            InvalidArgument: No outputs; or groups without `joint`, or of no inputs.
        """
        check_group(self.group_size, joint=self.joint)
        form = form_of(joint=self.joint, diagonal_output=self.diagonal_output)
        choice = OutputChoice.of(self.outputs, channel_dim)
        link = str(self.link_approx or LinkApprox.PROBIT)
        return PredictionOptions(link, self.n_samples, form, choice, self.group_size)


def form_of(*, joint: bool, diagonal_output: bool) -> str:
    """The covariance of the latents that was asked for: `"joint"`, `"diagonal"` or `"full"`."""
    return "joint" if joint else "diagonal" if diagonal_output else "full"


def check_group(group_size: int | None, *, joint: bool) -> None:
    """Refuses groups of inputs where no joint covariance was asked for, and of no inputs.

    Raises:
        InvalidArgument: They are.
    """
    if group_size is None:
        return
    check_counts(group_size=group_size)
    if not joint:
        raise InvalidArgument(f"group_size={group_size} says which inputs are joint; give joint=True with it.")


def is_loader(x: Any) -> bool:
    """True of an iterable of batches: any but a tensor, tuple or mapping, which are inputs, and arrays and numbers."""
    if isinstance(x, Tensor | tuple | str | bytes) or not isinstance(x, Iterable) or batches.keys(x) is not None:
        return False
    if batches.are_graphs(x):
        return False
    return getattr(x, "__array__", None) is None and not (isinstance(x, list) and x and isinstance(x[0], Real))


class Predictor(ABC):
    """A posterior, or a mixture of several, as it is asked for predictions.

    What the methods return is documented where users call them, at the methods of the same names of
    `laplace.predicting.Predicting`; `more` are arguments that the methods of a posterior alone have names for.
    """

    @abstractmethod
    def call(self, x: Inputs, request: Request, /, **more: Any) -> Any:
        """Value of `la(x, ...)`."""

    @abstractmethod
    def predict(self, x: Inputs, request: Request, /, **more: Any) -> Prediction:
        """Value of `la.predict(x, ...)`."""

    def stream(
        self, loader: Iterable[Any], request: Request, /, *, progress_bar: bool = False, **more: Any
    ) -> Iterator[Prediction]:
        """`predict` of the inputs of every batch of a loader, when it is asked for; nothing is kept of former ones.

        Raises:
            InvalidArgument: Results over all inputs together, or outputs for every row, which only one batch can have.
        """
        if request.joint:
            raise InvalidArgument("joint=True is over all inputs, which a loader gives a few at a time; give a tensor.")
        if isinstance(request.outputs, Tensor) and request.outputs.ndim > 1:
            raise InvalidArgument(
                "outputs= with indices per row fits one batch only; for a loader give indices [K], or a number."
            )
        return self._streamed(loader, request, DataBar("predict", loader, shown=progress_bar), more)

    def _streamed(
        self, loader: Iterable[Any], request: Request, bar: DataBar, more: dict[str, Any]
    ) -> Iterator[Prediction]:
        for number, batch in enumerate(loader):
            with named(f"batch {number}"):
                x = batches.inputs(batch)
                prediction = self.predict(x, request, **more)
            yield prediction
            bar.add(batches.size(x, ""))
        bar.close()

    @abstractmethod
    def functional_samples(self, x: Inputs, request: Request, /, **model_kwargs: Any) -> Tensor:
        """Value of `la.functional_samples(x, ...)`."""

    @abstractmethod
    def predictive_samples(self, x: Inputs, request: Request, /, **model_kwargs: Any) -> Tensor:
        """Value of `la.predictive_samples(x, ...)`."""

    @abstractmethod
    def check_whole(self, what: str) -> None:
        """Refuses what takes a whole posterior, if every process holds a part of it.

        Args:
            what: What is asked for.

        Raises:
            NotFittedError: Before a fit.
            UnsupportedError: It is spread over processes.
        """
