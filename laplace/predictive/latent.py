"""Outputs under a posterior over weights, by their moments or by samples; those of the linearised network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import checks
from laplace.core.batch import Inputs
from laplace.core.checks import require
from laplace.core.gaussian import GaussianAlongAxes, GaussianOutputs, centred, sample_moments
from laplace.core.memory import DATUM, LEAST, available, in_slices, in_units
from laplace.core.pieces import operations_are_dear
from laplace.core.positions import OutputChoice, OutputRows
from laplace.core.precision_policy import at_least_single
from laplace.engines.engine import CurvatureEngine, outputs
from laplace.errors import InvalidData, OutOfMemory
from laplace.jacobian.jacobian import Jacobian, group_left_over, joined, moved_by, whole_groups
from laplace.structures.precision import Form, Precision

if TYPE_CHECKING:
    from laplace.posterior.posterior import Posterior

LatentForm = Form | Literal["centred"]
"""Forms of the covariance; `"centred"` are variances of the outputs less their mean."""

Pieces = Generator[tuple[Jacobian, Tensor]]
"""Jacobians and outputs f, `[b, C]`, of consecutive parts of the inputs."""

_NO_DATA = "the inputs hold no data to predict."

_COPIES = 3
"""Of covariances: a sum, what is taken away from it, and what is left."""


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
    def gaussian(self, form: LatentForm, *, wide: bool = False) -> GaussianOutputs:
        """Gaussian of the latents; `form` is as of `linearised`, with `wide` to draw samples from."""

    def along_axes(self) -> GaussianAlongAxes | None:
        """The Gaussian of form `"full"` where it can be drawn from without its covariances; None where it cannot."""
        return None


class SampleSource(ABC):
    """Latent outputs at some inputs that are known by samples alone, so that their moments are those of the samples.

    Attributes:
        create_graph: Whether results can be differentiated, with respect to hyper-parameters or the inputs.
    """

    create_graph: bool

    @abstractmethod
    def samples(self, n: int, generator: torch.Generator | None) -> OutputRows:
        """Samples of the latents, `[n, B, C]`."""


def moments_of(drawn: OutputRows, form: LatentForm, group_size: int | None = None) -> GaussianOutputs:
    """The Gaussian with the moments of samples `[S, B, C]`, by unbiased covariances; `form` is as of `linearised`."""
    samples = drawn.values
    mean, covariance = sample_moments(samples)
    if form == "centred":
        covariance = sample_moments(centred(samples))[1]
    elif form != "diagonal":
        steps = samples - mean
        if form == "joint" and group_size is None:
            rows = steps.flatten(1)
            covariance = rows.T @ rows / (len(samples) - 1)
        else:
            n_rows = 1 if form == "full" or group_size is None else group_size * prod(drawn.positions)
            if samples.shape[1] % n_rows:
                raise group_left_over(group_size, samples.shape[1] % n_rows)
            rows = steps.unflatten(1, (-1, n_rows)).flatten(2)
            covariance = torch.einsum("sbc,sbd->bcd", rows, rows) / (len(samples) - 1)
    return _checked(GaussianOutputs(mean, covariance, drawn.positions, drawn.outputs))


@dataclass(frozen=True, eq=False)
class LinearisedOutputs(GaussianSource):
    """f(x, θ*) + J (θ − θ*), θ ~ N(θ̂, P⁻¹): the GLM predictive [Linearization, eq. 10].

    Attributes:
        posterior: Has the engine, which gives Jacobians at θ*, and the step θ̂ − θ* of a refinement.
        precision: P.
        x: Inputs of B data.
        create_graph: Whether results can be differentiated, with respect to hyper-parameters or x.
        through_x: Whether they can be with respect to x.
        choice: Which outputs; None for all.
        group_size: Inputs of a group, within which joint covariances are; None for all.
    """

    posterior: Posterior
    precision: Precision
    x: Inputs
    create_graph: bool
    through_x: bool
    choice: OutputChoice | None = None
    group_size: int | None = None

    def mean(self) -> OutputRows:
        with checks.together():
            self.posterior.check_unchanged()
            engine, step = self.posterior.engine, self.posterior.refined_step
            if step is not None:
                pieces = shifted(jacobians(engine, self.x, self.choice, create_graph=self.through_x), step)
                return _together((mean, jacobian.positions, jacobian.outputs) for jacobian, mean in pieces)
            rows = outputs(engine, self.x, create_graph=self.through_x)
            return rows if self.choice is None else self.choice.picked(rows)

    def gaussian(
        self, form: LatentForm, *, wide: bool = False, engine: CurvatureEngine | None = None
    ) -> GaussianOutputs:
        """As of `GaussianSource`; by another engine of the same network, if one is given."""
        with checks.together():
            self.posterior.check_unchanged()
            return linearised(
                engine or self.posterior.engine, self.precision, self.x, form, step=self.posterior.refined_step,
                create_graph=self.through_x, wide=wide, choice=self.choice, group_size=self.group_size,
            )  # fmt: skip

    def along_axes(self) -> GaussianAlongAxes | None:
        posterior, axes = self.posterior, self.precision.axes
        if axes is None or len(axes) == 1 or posterior.problem.head is None or self.choice is not None:
            return None
        with checks.together():
            posterior.check_unchanged()
            pieces = _pieces(posterior.engine, self.x, None, create_graph=self.through_x)
            return _along_axes(shifted(pieces, posterior.refined_step), self.precision, axes)


def jacobians(engine: CurvatureEngine, x: Inputs, choice: OutputChoice | None, *, create_graph: bool) -> Pieces:
    """Jacobians and outputs of inputs on any device: of all outputs, or the chosen."""
    return engine.jacobian(batches.to_device(x, engine.problem.device), create_graph=create_graph, choice=choice)


def linearised(
    engine: CurvatureEngine,
    precision: Precision,
    x: Inputs,
    form: LatentForm,
    *,
    step: Tensor | None = None,
    create_graph: bool = False,
    wide: bool = False,
    choice: OutputChoice | None = None,
    group_size: int | None = None,
) -> GaussianOutputs:
    """N(f(x, θ*) + J (θ̂ − θ*), J P⁻¹ Jᵀ), the GLM predictive's latent [Redux, appendix B, linearised outputs].

    The form of covariances is `"full"`, `[B, C, C]`, `"diagonal"`, `[B, C]`, or `"joint"`, `[B·C, B·C]`, of groups of n
    inputs `[B/n, n·C, n·C]`; B are rows, data × positions. `"centred"` are variances of the outputs less their mean,
    `[B, C]`, beside the mean of the outputs themselves. With `wide` they are summed in float64.
    """
    if form == "diagonal" and step is None and choice is None and not create_graph:
        pieces = engine.jacobian_by_outputs(batches.to_device(x, engine.problem.device))
        pieces = _without_graph(pieces) if torch.is_grad_enabled() else pieces
    else:
        pieces = _pieces(engine, x, choice, create_graph=create_graph)
    return gaussian_of(shifted(pieces, step), precision, form, wide=wide, group_size=group_size)


def gaussian_of(
    pieces: Pieces, precision: Precision, form: LatentForm, *, wide: bool = False, group_size: int | None = None
) -> GaussianOutputs:
    """The Gaussian of `linearised`, from Jacobians with the means of the outputs."""
    if form == "joint" and group_size is None:
        parts = list(pieces)
        rows = _together((f, part.positions, part.outputs) for part, f in parts)
        require_room((rows.values.numel(),) * 2, rows.values)
        covariance = precision.variance(replace(joined(parts)[0], wide=wide), "joint")
        return _checked(GaussianOutputs(rows.values, covariance, rows.positions, rows.outputs))
    if form == "joint" and group_size is not None:
        pieces = whole_groups(pieces, group_size)
    kind: Form = "diagonal" if form == "diagonal" else "full"
    contract = precision.centred_variance if form == "centred" else partial(precision.variance, form=kind)
    variances: list[Tensor] = []
    of_some: list[Tensor] = []  # variances of some outputs, of the same data
    means: list[tuple[Tensor, tuple[int, ...], Tensor | None]] = []
    with closing(pieces):
        for jacobian, f in pieces:
            if form not in ("diagonal", "centred"):
                require_room((jacobian.n_data, jacobian.n_cotangents, jacobian.n_cotangents), f)
            variance = contracted(contract, replace(jacobian, wide=True) if wide else jacobian)
            if form == "diagonal" and jacobian.group_size == 1:
                of_some.append(variance)
                if sum(part.shape[1] for part in of_some) < f.shape[1]:
                    continue
                variance, of_some = of_some[0] if len(of_some) == 1 else torch.cat(of_some, 1), []
            variances.append(variance)
            outputs_of_rows = jacobian.outputs if jacobian.outputs is None else jacobian.outputs.view(f.shape)
            means.append((f, jacobian.positions, outputs_of_rows))
    if not means:
        raise InvalidData(_NO_DATA)
    rows = _together(means)
    return _checked(GaussianOutputs(rows.values, _joined(variances), rows.positions, rows.outputs))


def _along_axes(pieces: Pieces, precision: Precision, axes: Tensor) -> GaussianAlongAxes | None:
    """The Gaussian by variances along axes that all covariances share; None for other outputs than a linear layer's."""
    variances: list[Tensor] = []
    means: list[tuple[Tensor, tuple[int, ...], Tensor | None]] = []
    with closing(pieces):
        for jacobian, f in pieces:
            if not jacobian.is_head:
                return None
            variances.append(precision.variance_along_axes(jacobian))
            means.append((f, jacobian.positions, None))
    if not means:
        raise InvalidData(_NO_DATA)
    rows, variance = _together(means), _joined(variances)
    _require_finite(rows.values, variance)
    return GaussianAlongAxes(rows.values, variance, axes, rows.positions)


def _together(parts: Iterable[tuple[Tensor, tuple[int, ...], Tensor | None]]) -> OutputRows:
    """Rows of all parts, of means, positions and chosen outputs of each."""
    means, positions, outputs = zip(*parts, strict=True)
    return OutputRows(_joined(means), positions[0], None if outputs[0] is None else torch.cat(outputs))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts; of one those themselves where a copy is dear."""
    return parts[0] if len(parts) == 1 and operations_are_dear(parts[0].device) else torch.cat(list(parts))


def require_room(shape: tuple[int, ...], like: Tensor) -> None:
    """Refuses covariances of a shape that the device has no room for, before any of them is computed."""
    needed = _COPIES * prod(shape) * like.element_size()
    there = available(like.device) if needed > LEAST else None
    if there is not None and there.size < needed:
        raise OutOfMemory(
            f"covariances {list(shape)} between the outputs take {in_units(needed)}, but only {in_units(there.size)} "
            f"are available ({there.source}). Variances alone take no matrix: use link_approx='probit', or "
            "diagonal_output=True; or say by outputs= which outputs are asked for."
        )


def _pieces(engine: CurvatureEngine, x: Inputs, choice: OutputChoice | None, *, create_graph: bool) -> Pieces:
    """Jacobians and outputs, with a graph or made without one."""
    pieces = jacobians(engine, x, choice, create_graph=create_graph)
    return _without_graph(pieces) if torch.is_grad_enabled() and not create_graph else pieces


def _without_graph(pieces: Pieces) -> Pieces:
    """Jacobians and outputs made without a graph: a graph leads to hyper-parameters, not to x."""
    with closing(pieces):
        while True:
            with torch.no_grad():
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


def shifted(pieces: Pieces, step: Tensor | None) -> Pieces:
    """Jacobians with f + J step, in at least float32, in place of f, for a step `[P]`, or one per output `[C, P]`."""
    with closing(pieces):
        for jacobian, f in pieces:
            mean = f.to(at_least_single(f))
            if step is not None:
                mean = mean + moved_by(jacobian, step)
            yield jacobian, mean


def _checked(gaussian: GaussianOutputs) -> GaussianOutputs:
    _require_finite(gaussian.mean, gaussian.variance)
    return gaussian


def _require_finite(mean: Tensor, variance: Tensor) -> None:
    require(
        checks.are_finite(mean, variance),
        lambda: InvalidData(
            f"the network's outputs or their variances are NaN or infinite{checks.where_not_finite(mean)}; look at the "
            "inputs and at the network's weights. Where those are right the variances are beyond the range of the "
            "dtype: raise prior_precision, or take a network in float64."
        ),
    )
