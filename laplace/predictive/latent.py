"""Outputs under a posterior over weights: of the linearised network, or of the network at sampled weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import checks
from laplace.core.batch import Inputs
from laplace.core.checks import require
from laplace.core.gaussian import Gaussian, sample_moments
from laplace.core.memory import DATUM, in_slices
from laplace.core.positions import OutputRows, unrolled
from laplace.engines.engine import CurvatureEngine, detached
from laplace.engines.outputs import outputs
from laplace.errors import InvalidData, UnsupportedError
from laplace.jacobian.jacobian import Jacobian
from laplace.predictive.sampled_weights import outputs_at
from laplace.structures.base import Precision
from laplace.weights.problem import Problem


class GaussianSource(ABC):
    """Latent outputs at some inputs that are Gaussian under the posterior.

    Attributes:
        create_graph: Whether results can be differentiated, with respect to hyper-parameters or the inputs.
    """

    create_graph: bool

    @abstractmethod
    def mean(self) -> OutputRows:
        """Mean of the latents, `[B, C]`, without their covariance."""

    @abstractmethod
    def latent(self, form: str, *, wide: bool = False) -> Gaussian:
        """Gaussian of the latents.

        Args:
            form: `"full"`, `"diagonal"` or `"joint"`.
            wide: Whether covariances are summed in float64, since samples are to be drawn.
        """


class SampleSource(ABC):
    """Latent outputs at some inputs that are known by samples alone, so that their moments are those of the samples.

    Attributes:
        create_graph: Whether results can be differentiated, with respect to hyper-parameters or the inputs.
    """

    create_graph: bool

    @abstractmethod
    def samples(self, n: int, generator: torch.Generator | None) -> OutputRows:
        """Samples of the latents, `[n, B, C]`."""


def moments_of(drawn: OutputRows, form: str) -> Gaussian:
    """The Gaussian with the moments of samples `[S, B, C]`; covariances are unbiased.

    Raises:
        InvalidArgument: One sample, which has no variance.
    """
    samples, positions = drawn.values, drawn.positions
    mean, variance = sample_moments(samples)
    if form == "diagonal":
        return Gaussian(mean, variance, positions)
    centred = samples - mean
    if form == "joint":
        rows = centred.flatten(1)
        return Gaussian(mean, rows.T @ rows / (len(samples) - 1), positions)
    return Gaussian(mean, torch.einsum("sbc,sbd->bcd", centred, centred) / (len(samples) - 1), positions)


@dataclass(frozen=True, eq=False)
class LinearisedOutputs(GaussianSource):
    """f(x, θ*) + J (θ − θ*), θ ~ N(θ̂, P⁻¹): the GLM predictive (Immer et al., 2021, equation 10).

    Attributes:
        engine: Gives Jacobians at θ*.
        precision: P.
        x: Inputs of B data.
        step: θ̂ − θ*, `[P]`; None where it is zero, as before a refinement.
        create_graph: Whether results can be differentiated, with respect to hyper-parameters or x.
        check: Raises where the network is not that of the posterior any more.
        through_x: Whether they can be with respect to x.
    """

    engine: CurvatureEngine
    precision: Precision
    x: Inputs
    step: Tensor | None
    create_graph: bool
    check: Callable[[], None]
    through_x: bool

    def mean(self) -> OutputRows:
        with checks.together():
            self.check()
            if self.step is not None:
                return linearised_mean(self.engine, self.x, self.step, create_graph=self.through_x)
            return outputs(self.engine, self.x, create_graph=self.through_x)

    def latent(self, form: str, *, wide: bool = False) -> Gaussian:
        def of(precision: Precision) -> Gaussian:
            with checks.together():
                self.check()
                return linearised(
                    self.engine, precision, self.x, form, step=self.step, create_graph=self.through_x, wide=wide
                )

        return self.precision.summed(self.x, of)


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
    """

    engine: CurvatureEngine
    thetas: Callable[[int, torch.Generator | None], Tensor]
    centre: Tensor
    x: Inputs
    model_kwargs: dict[str, Any]
    create_graph: bool
    check: Callable[[], None]
    through_x: bool

    def samples(self, n: int, generator: torch.Generator | None) -> OutputRows:
        with checks.together():
            thetas = self.thetas(n, generator)
            self.check()
            run = sampler(self.engine, self.centre, self.x, self.model_kwargs, create_graph=self.through_x)
            return OutputRows.of(finite(run(thetas)), 1)


def linearised(
    engine: CurvatureEngine,
    precision: Precision,
    x: Inputs,
    form: str,
    *,
    step: Tensor | None = None,
    create_graph: bool = False,
    wide: bool = False,
) -> Gaussian:
    """N(f(x, θ*) + J (θ̂ − θ*), J P⁻¹ Jᵀ), the GLM predictive's latent (Immer et al., 2021).

    Args:
        engine: Gives Jacobians.
        precision: P.
        x: Inputs of B data.
        form: `"full"` (covariance `[B, C, C]`), `"diagonal"` (`[B, C]`) or `"joint"` (`[B·C, B·C]`); of outputs with
            positions, B are rows, data × positions.
        step: θ̂ − θ*, `[P]`; None where it is zero.
        create_graph: Whether mean and covariance can be differentiated with respect to x.
        wide: Whether covariances are summed in float64, since samples are to be drawn.

    Raises:
        InvalidData: No data, or outputs that are not finite.
    """
    x = batches.to_device(x, engine.problem.device)
    pieces = shifted(without_graph(engine.jacobian(x, create_graph=create_graph), unless=create_graph), step)
    if form == "joint":
        parts = list(pieces)
        jacobian = parts[0][0] if len(parts) == 1 else _joined(parts)
        mean = torch.cat([f for _, f in parts])
        covariance = precision.functional_covariance(replace(jacobian, wide=wide))
        return _checked(Gaussian(mean, covariance, parts[0][0].positions))
    contract: Callable[[Jacobian], Tensor] = (
        precision.functional_diagonal if form == "diagonal" else precision.functional_variance
    )
    with closing(pieces):
        parts = [(f, contracted(contract, replace(jacobian, wide=wide)), jacobian.positions) for jacobian, f in pieces]
    if not parts:
        raise InvalidData("the inputs hold no data to predict.")
    means, variances, positions = zip(*parts, strict=True)
    return _checked(Gaussian(torch.cat(means), torch.cat(variances), positions[0]))


def without_graph(
    pieces: Generator[tuple[Jacobian, Tensor]], *, unless: bool = False
) -> Generator[tuple[Jacobian, Tensor]]:
    """Jacobians and outputs made without a graph, whoever reads them: a graph leads to hyper-parameters, not to x.

    Args:
        pieces: Jacobians and outputs.
        unless: Leave them as they are.
    """
    with closing(pieces):
        while True:
            with torch.set_grad_enabled(torch.is_grad_enabled() and unless):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece


def contracted(contract: Callable[[Jacobian], Tensor], jacobian: Jacobian) -> Tensor:
    """A contraction of the Jacobian of every datum, `[B, …]`; of fewer data at once where memory runs out."""
    n_data = jacobian.n_data

    def computed(part: slice) -> Tensor:
        return contract(jacobian if part == slice(0, n_data) else jacobian.at(part))

    parts = [values for _, values in in_slices(n_data, n_data, computed, DATUM)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def shifted(pieces: Generator[tuple[Jacobian, Tensor]], step: Tensor | None) -> Generator[tuple[Jacobian, Tensor]]:
    """Jacobians with f + J step, `[b, C]`, in at least float32, in place of f.

    Args:
        pieces: Jacobians and outputs f at θ*.
        step: `[P]`, or None for zero.
    """
    with closing(pieces):
        for jacobian, f in pieces:
            mean = f.to(_dtype(f))
            yield jacobian, mean if step is None else mean + moved_by(jacobian, step.unsqueeze(0))[0]


def moved_by(jacobian: Jacobian, steps: Tensor) -> Tensor:
    """J v of steps v `[S, P]`, `[S, B, C]`."""
    parts = steps.split([block.size for block in jacobian.blocks], 1)
    return jacobian.sum_over_blocks(lambda i, block: block.apply(parts[i]))


def linearised_mean(engine: CurvatureEngine, x: Inputs, step: Tensor, *, create_graph: bool = False) -> OutputRows:
    """f(x, θ*) + J step, `[B, C]`, without a covariance."""
    x = batches.to_device(x, engine.problem.device)
    parts = [
        (mean, jacobian.positions) for jacobian, mean in shifted(engine.jacobian(x, create_graph=create_graph), step)
    ]
    return OutputRows(torch.cat([mean for mean, _ in parts]), parts[0][1])


def _checked(gaussian: Gaussian) -> Gaussian:
    require(
        gaussian.mean.isfinite().all() & ~gaussian.variance.isnan().any(),
        lambda: InvalidData(
            "the network's outputs or their variances are NaN or infinite; look at the inputs and at the network's "
            "weights."
        ),
    )
    return gaussian


def _dtype(f: Tensor) -> torch.dtype:
    return torch.promote_types(f.dtype, torch.float32)


def _joined(parts: list[tuple[Jacobian, Tensor]]) -> Jacobian:
    sizes = tuple(block.size for block in parts[0][0].blocks)
    return Jacobian.from_dense(torch.cat([jacobian.dense() for jacobian, _ in parts]), sizes)


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
        return samples.to(_dtype(samples))

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
    return f.to(_dtype(f)) + moved_by(jacobian, steps)


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
