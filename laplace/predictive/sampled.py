"""Outputs of the network at weights that are drawn from a posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import checks
from laplace.core.batch import Inputs
from laplace.core.checks import require
from laplace.core.output_choice import OutputChoice
from laplace.core.positions import OutputRows, unrolled
from laplace.engines.engine import CurvatureEngine, detached
from laplace.errors import InvalidData, UnsupportedError
from laplace.jacobian.jacobian import Jacobian
from laplace.predictive.latent import SampleSource, widest
from laplace.predictive.sampled_weights import outputs_at
from laplace.weights.problem import Problem


@dataclass(frozen=True, eq=False)
class SampledOutputs(SampleSource):
    """Outputs of the network at weights drawn from the posterior.

    Attributes:
        engine: Knows the problem.
        thetas: Draws weights, `[S, P]`.
        centre: θ*, the network's weights, `[P]`.
        x: Inputs of B data.
        model_kwargs: Further arguments of the model.
        create_graph: Whether results can be differentiated, with respect to hyper-parameters or x.
        check: Raises where the network is not that of the posterior any more.
        through_x: Whether they can be with respect to x.
        choice: Which outputs; None for all.
    """

    engine: CurvatureEngine
    thetas: Callable[[int, torch.Generator | None], Tensor]
    centre: Tensor
    x: Inputs
    model_kwargs: dict[str, Any]
    create_graph: bool
    check: Callable[[], None]
    through_x: bool
    choice: OutputChoice | None = None

    def samples(self, n: int, generator: torch.Generator | None) -> OutputRows:
        with checks.together():
            thetas = self.thetas(n, generator)
            self.check()
            run = sampler(self.engine, self.centre, self.x, self.model_kwargs, create_graph=self.through_x)
            rows = OutputRows.of(finite(run(thetas)), 1)
            return rows if self.choice is None else self.choice.picked(rows)


Sampler = Callable[[Tensor], Tensor]
"""Maps weights `[S, P]` to outputs `[S, B, C]`, or `[S, B, *positions, C]`."""


def sampler(
    engine: CurvatureEngine, mean: Tensor, x: Inputs, model_kwargs: dict[str, Any], *, create_graph: bool = False
) -> Sampler:
    """Outputs of the network on x at sampled weights, none of which is ever written into the model.

    A head on frozen features is linear in its weights, so that one pass of the trunk serves all samples.

    Args:
        engine: Knows the problem.
        mean: θ*, `[P]`.
        x: Inputs of B data.
        model_kwargs: Further arguments of the model.
        create_graph: Whether outputs can be differentiated with respect to x.
    """
    problem = engine.problem
    x = batches.to_device(x, problem.device)
    if problem.head is not None and not model_kwargs:
        parts = engine.head_jacobian(x, create_graph=create_graph)
        if parts is not None:
            positions = parts[0][0].positions
            return lambda thetas: unrolled(
                torch.cat([_at_samples(jacobian, f, thetas - mean) for jacobian, f in parts], 1), positions, 1
            )
    problem = with_arguments(problem, model_kwargs)
    x = x if create_graph else detached(x)

    def run(thetas: Tensor) -> Tensor:
        samples = outputs_at(problem, x, thetas, engine.options.memory_budget)
        return samples.to(widest(samples))

    return run


def finite(samples: Tensor) -> Tensor:
    """Outputs `[S, B, …]` at sampled weights.

    Raises:
        InvalidData: NaN or infinite ones.
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


def _at_samples(jacobian: Jacobian, f: Tensor, steps: Tensor) -> Tensor:
    """F + J (θ_s − θ*), `[S, B, C]`."""
    return f.to(widest(f)) + jacobian.apply(steps)


def with_arguments(problem: Problem, model_kwargs: dict[str, Any]) -> Problem:
    """The problem whose network is called with further arguments."""
    if not model_kwargs:
        return problem
    call = problem.forward_fn or batches.call

    def forward(model: torch.nn.Module, x: Inputs) -> Any:
        return call(_Partial(model, model_kwargs), x)

    return replace(problem, forward_fn=forward)


class _Partial(torch.nn.Module):
    """A model with some arguments of its forward filled in."""

    def __init__(self, model: torch.nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs, **self.arguments)


def refuse_refined(step: Tensor | None, problem: Problem) -> None:
    """Raises where weights of a refined posterior would be put into the network.

    Args:
        step: θ̂ − θ*, or None without a refinement.
        problem: The network; one that is linear in its random weights, a last layer, is its own linearisation.

    Raises:
        UnsupportedError: The network is not linear in them.
    """
    if step is not None and problem.head is None:
        raise UnsupportedError(
            "pred_type='nn' after refine(): the refined posterior is that of the linearised network, not of the "
            "network itself; use pred_type='glm', or fit anew."
        )
