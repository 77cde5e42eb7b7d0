"""Outputs under a posterior over weights, by their moments or by samples; those of the linearised network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import checks
from laplace.core.batch import Inputs
from laplace.core.checks import require
from laplace.core.gaussian import Gaussian, sample_moments
from laplace.core.memory import DATUM, LEAST, available, in_slices, in_units
from laplace.core.positions import OutputChoice, OutputRows
from laplace.engines.engine import CurvatureEngine, outputs
from laplace.errors import InvalidData, OutOfMemory
from laplace.jacobian.jacobian import Jacobian, group_left_over, joined, whole_groups
from laplace.structures.precision import Form, Precision

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
    def gaussian(self, form: str, *, wide: bool = False) -> Gaussian:
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


def moments_of(drawn: OutputRows, form: str, group_size: int | None = None) -> Gaussian:
    """The Gaussian with the moments of samples `[S, B, C]`; covariances are unbiased.

    Args:
        drawn: The samples.
        form: `"full"`, `"diagonal"` or `"joint"`.
        group_size: Inputs of a group, within which a joint covariance is; None for all.

    Raises:
        InvalidArgument: One sample, which has no variance; or groups that are not whole.
    """
    samples = drawn.values
    mean, covariance = sample_moments(samples)
    if form != "diagonal":
        centred = samples - mean
        if form == "joint" and group_size is None:
            rows = centred.flatten(1)
            covariance = rows.T @ rows / (len(samples) - 1)
        else:
            n_rows = 1 if form == "full" or group_size is None else group_size * prod(drawn.positions)
            if samples.shape[1] % n_rows:
                raise group_left_over(group_size, samples.shape[1] % n_rows)
            rows = centred.unflatten(1, (-1, n_rows)).flatten(2)
            covariance = torch.einsum("sbc,sbd->bcd", rows, rows) / (len(samples) - 1)
    return Gaussian(mean, covariance, drawn.positions, drawn.outputs)


@dataclass(frozen=True, eq=False)
class LinearisedOutputs(GaussianSource):
    """f(x, θ*) + J (θ − θ*), θ ~ N(θ̂, P⁻¹): the GLM predictive (Immer et al., 2021, equation 10).

    Attributes:
        engine: Gives Jacobians at θ*.
        precision: P.
        x: Inputs of B data.
        step: θ̂ − θ*, `[P]`, or one per output `[C, P]`; None where it is zero, as before a refinement.
        create_graph: Whether results can be differentiated, with respect to hyper-parameters or x.
        check: Raises where the network is not that of the posterior any more.
        through_x: Whether they can be with respect to x.
        choice: Which outputs; None for all.
        group_size: Inputs of a group, within which joint covariances are; None for all.
    """

    engine: CurvatureEngine
    precision: Precision
    x: Inputs
    step: Tensor | None
    create_graph: bool
    check: Callable[[], None]
    through_x: bool
    choice: OutputChoice | None = None
    group_size: int | None = None

    def mean(self) -> OutputRows:
        with checks.together():
            self.check()
            if self.step is not None:
                pieces = jacobians(self.engine, self.x, self.choice, create_graph=self.through_x)
                return linearised_mean(pieces, self.step)
            rows = outputs(self.engine, self.x, create_graph=self.through_x)
            return rows if self.choice is None else self.choice.picked(rows)

    def gaussian(self, form: str, *, wide: bool = False) -> Gaussian:
        def of(precision: Precision) -> Gaussian:
            with checks.together():
                self.check()
                return linearised(
                    self.engine, precision, self.x, form, step=self.step, create_graph=self.through_x, wide=wide,
                    choice=self.choice, group_size=self.group_size,
                )  # fmt: skip

        return self.precision.summed(self.x, of)


def jacobians(
    engine: CurvatureEngine, x: Inputs, choice: OutputChoice | None, *, create_graph: bool
) -> Generator[tuple[Jacobian, Tensor]]:
    """Jacobians and outputs of consecutive parts of the inputs, wherever these are: of all outputs, or the chosen."""
    return engine.jacobian(batches.to_device(x, engine.problem.device), create_graph=create_graph, choice=choice)


def linearised(
    engine: CurvatureEngine,
    precision: Precision,
    x: Inputs,
    form: str,
    *,
    step: Tensor | None = None,
    create_graph: bool = False,
    wide: bool = False,
    choice: OutputChoice | None = None,
    group_size: int | None = None,
) -> Gaussian:
    """N(f(x, θ*) + J (θ̂ − θ*), J P⁻¹ Jᵀ), the GLM predictive's latent (Immer et al., 2021).

    Args:
        engine: Gives Jacobians.
        precision: P.
        x: Inputs of B data.
        form: `"full"` (covariance `[B, C, C]`), `"diagonal"` (`[B, C]`) or `"joint"` (`[B·C, B·C]`); of outputs with
            positions, B are rows, data × positions.
        step: θ̂ − θ*, `[P]`, or one per output `[C, P]`; None where it is zero.
        create_graph: Whether mean and covariance can be differentiated with respect to x.
        wide: Whether covariances are summed in float64, since samples are to be drawn.
        choice: Which outputs; None for all.
        group_size: n, inputs of a group, within which a joint covariance is, `[B/n, n·C, n·C]`; None for all.

    Raises:
        InvalidArgument: The last group is not whole.
        InvalidData: No data, or outputs that are not finite.
        OutOfMemory: Covariances between all outputs are more than there is room for.
    """
    pieces = jacobians(engine, x, choice, create_graph=create_graph)
    pieces = shifted(without_graph(pieces, unless=create_graph), step)
    if form == "joint" and group_size is None:
        parts = list(pieces)
        rows = _together((f, part.positions, part.outputs) for part, f in parts)
        require_room((rows.values.numel(),) * 2, rows.values)
        covariance = precision.variance(replace(joined(parts)[0], wide=wide), "joint")
        return _checked(Gaussian(rows.values, covariance, rows.positions, rows.outputs))
    if form == "joint" and group_size is not None:
        pieces = whole_groups(pieces, group_size)
    kind: Form = "diagonal" if form == "diagonal" else "full"
    variances: list[Tensor] = []
    means: list[tuple[Tensor, tuple[int, ...], Tensor | None]] = []
    with closing(pieces):
        for jacobian, f in pieces:
            if form != "diagonal":
                require_room((jacobian.n_data, jacobian.n_cotangents, jacobian.n_cotangents), f)
            variances.append(
                contracted(
                    lambda part: precision.variance(part, kind), replace(jacobian, wide=True) if wide else jacobian
                )
            )
            outputs_of_rows = jacobian.outputs if jacobian.outputs is None else jacobian.outputs.view(f.shape)
            means.append((f, jacobian.positions, outputs_of_rows))
    if not means:
        raise InvalidData("the inputs hold no data to predict.")
    rows = _together(means)
    return _checked(Gaussian(rows.values, torch.cat(variances), rows.positions, rows.outputs))


def _together(parts: Iterable[tuple[Tensor, tuple[int, ...], Tensor | None]]) -> OutputRows:
    """Rows of all parts, of means, positions and chosen outputs of each."""
    means, positions, outputs = zip(*parts, strict=True)
    return OutputRows(torch.cat(means), positions[0], None if outputs[0] is None else torch.cat(outputs))


def require_room(shape: tuple[int, ...], like: Tensor) -> None:
    """Refuses covariances of a shape that the device has no room for, before any of them is computed.

    Raises:
        OutOfMemory: They are more than that.
    """
    needed = _COPIES * prod(shape) * like.element_size()
    there = available(like.device) if needed > LEAST else None
    if there is not None and there.size < needed:
        raise OutOfMemory(
            f"covariances {list(shape)} between the outputs take {in_units(needed)}, but only {in_units(there.size)} "
            f"are available ({there.source}). Variances alone take no matrix: use link_approx='probit', or "
            "diagonal_output=True; or say by outputs= which outputs are asked for."
        )


def without_graph(
    pieces: Generator[tuple[Jacobian, Tensor]], *, unless: bool = False
) -> Generator[tuple[Jacobian, Tensor]]:
    """Jacobians and outputs made without a graph: a graph leads to hyper-parameters, not to x.

    Args:
        pieces: Jacobians and outputs, to be read in the present gradient mode.
        unless: Leave them as they are.
    """
    return pieces if unless or not torch.is_grad_enabled() else _made_without_graph(pieces)


def _made_without_graph(pieces: Generator[tuple[Jacobian, Tensor]]) -> Generator[tuple[Jacobian, Tensor]]:
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


def shifted(pieces: Generator[tuple[Jacobian, Tensor]], step: Tensor | None) -> Generator[tuple[Jacobian, Tensor]]:
    """Jacobians with f + J step, `[b, C]`, in at least float32, in place of f.

    Args:
        pieces: Jacobians and outputs f at θ*.
        step: `[P]`, or one per output `[C, P]`, or None for zero.
    """
    with closing(pieces):
        for jacobian, f in pieces:
            mean = f.to(widest(f))
            yield jacobian, mean if step is None else mean + _moved_by(jacobian, step)


def _moved_by(jacobian: Jacobian, step: Tensor) -> Tensor:
    from laplace.structures.gp.dual import moved_by  # after a refinement

    return moved_by(jacobian, step)


def linearised_mean(pieces: Generator[tuple[Jacobian, Tensor]], step: Tensor) -> OutputRows:
    """f(x, θ*) + J step, `[B, C]`, of Jacobians and outputs f, and a step as of `shifted`; without a covariance."""
    return _together((mean, jacobian.positions, jacobian.outputs) for jacobian, mean in shifted(pieces, step))


def _checked(gaussian: Gaussian) -> Gaussian:
    require(
        checks.are_finite(gaussian.mean) & checks.are_numbers(gaussian.variance),
        lambda: InvalidData(
            f"the network's outputs or their variances are NaN or infinite{checks.where_not_finite(gaussian.mean)}; "
            "look at the inputs and at the network's weights."
        ),
    )
    return gaussian


def widest(f: Tensor) -> torch.dtype:
    """At least float32, for outputs of a lower precision."""
    return torch.promote_types(f.dtype, torch.float32)
