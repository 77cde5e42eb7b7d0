"""Outputs of the network at weights that are drawn from a posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core import checks
from laplace.core.batch import Inputs
from laplace.core.checks import require
from laplace.core.positions import OutputChoice, OutputRows
from laplace.engines.at_weights import outputs_of_weights
from laplace.errors import InvalidData, UnsupportedError
from laplace.predictive.latent import SampleSource
from laplace.weights.problem import Problem

if TYPE_CHECKING:
    from laplace.posterior.posterior import Posterior


@dataclass(frozen=True, eq=False)
class SampledOutputs(SampleSource):
    """Outputs of the network at weights drawn from the posterior [Mixtures, eq. 4].

    Attributes:
        posterior: Of the weights.
        thetas: Draws weights, `[S, P]`.
        x: Inputs of B data.
        model_kwargs: Further arguments of the model.
        create_graph: Whether results can be differentiated, with respect to hyper-parameters or x.
        through_x: Whether they can be with respect to x.
        choice: Which outputs; None for all.
    """

    posterior: Posterior
    thetas: Callable[[int, torch.Generator | None], Tensor]
    x: Inputs
    model_kwargs: dict[str, Any]
    create_graph: bool
    through_x: bool
    choice: OutputChoice | None = None

    def samples(self, n: int, generator: torch.Generator | None) -> OutputRows:
        with checks.together():
            thetas = self.thetas(n, generator)
            self.posterior.check_unchanged()
            engine, centre = self.posterior.engine, self.posterior.expansion_point
            run = outputs_of_weights(engine, centre, self.x, self.model_kwargs, create_graph=self.through_x)
            rows = OutputRows.from_outputs(finite(run(thetas)), 1)
            return rows if self.choice is None else self.choice.picked(rows)


def finite(samples: Tensor) -> Tensor:
    """Outputs `[S, B, …]` at sampled weights, if they are finite.

    Raises:
        InvalidData: They are not.
    """
    require(
        samples.isfinite(),
        lambda: InvalidData(
            "outputs of the network at sampled weights are NaN or infinite: look at the inputs and at the network's "
            "weights. Where those are right the posterior is too wide for sampled weights; raise prior_precision, or "
            "use pred_type='glm'."
        ),
    )
    return samples


def refuse_refined(step: Tensor | None, problem: Problem) -> None:
    """Raises where weights of a refined posterior would be put into a network that is not linear in them."""
    if step is not None and problem.head is None:
        raise UnsupportedError(
            "pred_type='nn' after refine(): the refined posterior is that of the linearised network, not of the "
            "network itself; use pred_type='glm', or fit anew."
        )
