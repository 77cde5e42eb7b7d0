"""Predictions of a mixture: those of its components, by their public methods, as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.output_choice import Given
from laplace.core.random_numbers import uniform
from laplace.enums import PredType
from laplace.errors import InvalidArgument
from laplace.parametric import ParametricLaplace
from laplace.posterior.sharding import refuse_sharded
from laplace.predictive.options import WEIGHT_SPACE
from laplace.predictive.posterior_outputs import MixedOutputs, mixed
from laplace.predictive.predict import Predictor, Request, replayed
from laplace.predictive.prediction import Prediction


def choose(weights: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """The component of every sample, `[S]`, drawn with probabilities π `[K]`."""
    steps = weights.cumsum(0)
    steps = steps / steps[-1]  # rounding must leave no gap below 1
    return torch.searchsorted(steps, uniform((n_samples,), weights, generator), right=True).cpu()


def in_order(draws: Sequence[Callable[[int], Tensor]], chosen: Tensor) -> Tensor:
    """Samples `[S, …]`, each of the component `[S]` that was chosen for it.

    Args:
        draws: Samples `[n, …]` of each component; called where n is positive.
        chosen: The component of every sample, `[S]`.
    """
    counts = torch.bincount(chosen, minlength=len(draws)).tolist()
    parts = [draw(count) for draw, count in zip(draws, counts, strict=True) if count]
    stacked = torch.cat([part.to(parts[0].device) for part in parts])
    place = chosen.argsort(stable=True).to(stacked.device)
    return stacked[place.argsort()]


@dataclass(frozen=True, eq=False)
class MixturePredictor(Predictor):
    """Several posteriors as they are asked for predictions together.

    Attributes:
        components: The K Laplace objects, whose methods may be users' own.
        weights: π, `[K]`.
    """

    components: tuple[ParametricLaplace, ...]
    weights: Tensor

    @property
    def _channel_dim(self) -> int:
        return self.components[0].channel_dim

    def call(self, x: Inputs, request: Request, /, **more: Any) -> Any:
        """Σ_k π_k p_k(y | x), or its first two moments."""
        _shared(more.get("outputs"))
        predictions = [la(x, *_arguments(la, request), **more) for la in self.components]
        return mixed(predictions, self.weights, self._channel_dim)

    def predict(self, x: Inputs, request: Request, /, **more: Any) -> Prediction:
        """One object over the outputs of all components."""
        _shared(more.get("outputs"))
        predictions = [la.predict(x, *_arguments(la, request), **more) for la in self.components]
        rows = tuple(outputs for prediction in predictions for outputs in prediction.rows.components)
        draws = replayed(request.generator, self.weights.device)

        def choice() -> Tensor:
            return choose(self.weights, request.n_samples, draws())

        return Prediction(MixedOutputs(rows, self.weights, choice), self._channel_dim)

    def check_whole(self, what: str) -> None:
        """Refuses what takes whole posteriors, if every process holds a part of a component."""
        for la in self.components:
            refuse_sharded(la.snapshot(), what)
            la.fitted()

    def functional_samples(self, x: Inputs, request: Request, /, **model_kwargs: Any) -> Tensor:
        """A component per sample, then a sample of its outputs."""
        chosen = _shared(request.outputs) | _groups(request)

        def draw(la: ParametricLaplace, n_samples: int) -> Tensor:
            return la.functional_samples(x, *_sampling_arguments(request, n_samples), **chosen, **model_kwargs)

        return self._drawn(draw, request)

    def predictive_samples(self, x: Inputs, request: Request, /, **model_kwargs: Any) -> Tensor:
        """A component per sample, then a sample of the mean of its target."""
        chosen = _shared(request.outputs) | _groups(request)

        def draw(la: ParametricLaplace, n_samples: int) -> Tensor:
            return la.predictive_samples(x, *_sampling_arguments(request, n_samples), **chosen, **model_kwargs)

        return self._drawn(draw, request)

    def _drawn(self, draw: Callable[[ParametricLaplace, int], Tensor], request: Request) -> Tensor:
        """Samples `[S, …]`, each of a component by its weight."""
        request.kind(WEIGHT_SPACE)
        chosen = choose(self.weights, request.n_samples, request.generator)
        return in_order([partial(draw, la) for la in self.components], chosen)


def _arguments(la: ParametricLaplace, request: Request) -> tuple[Any, ...]:
    """Arguments of `la(x, ...)`: a posterior over functions has a name of its own for the linearised predictive."""
    linearised = str(request.pred_type) == PredType.GLM
    return (
        la.pred_types.name(PredType.GLM) if linearised else request.pred_type,
        request.joint,
        request.link_approx,
        request.n_samples,
        request.diagonal_output,
        request.generator,
    )


def _groups(request: Request) -> dict[str, Any]:
    """Groups of inputs as an argument of all components, which is not passed on where there are none."""
    return {} if request.group_size is None else {"group_size": request.group_size}


def _shared(outputs: Given) -> dict[str, Given]:
    """The chosen outputs as an argument of all components.

    Raises:
        InvalidArgument: The largest ones, of which every component has its own.
    """
    if isinstance(outputs, int):
        raise InvalidArgument(
            f"outputs={outputs} of a mixture: the largest outputs of one network are not those of another. Give "
            "indices, e.g. those of la.components[0].predict(x, outputs=...).outputs."
        )
    return {} if outputs is None else {"outputs": outputs}


def _sampling_arguments(request: Request, n_samples: int) -> tuple[Any, ...]:
    return request.pred_type, n_samples, request.diagonal_output, request.generator, request.joint
