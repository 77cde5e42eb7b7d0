"""Outputs under a posterior whose width follows the input, as a calibration chose it (`posterior/tilt.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from laplace.core import checks
from laplace.core.cached import cached_property
from laplace.core.gaussian import GaussianOutputs
from laplace.core.positions import OutputRows
from laplace.core.precision_policy import widened
from laplace.engines.layer_inputs import Noted, in_rows, layer_inputs
from laplace.errors import InvalidData
from laplace.jacobian.jacobian import group_left_over
from laplace.likelihoods.base import Likelihood
from laplace.posterior.tilt import Tilt
from laplace.predictive.latent import GaussianSource, LatentForm, LinearisedOutputs, SampleSource
from laplace.predictive.sampled import SampledOutputs, finite


@dataclass(frozen=True, eq=False)
class TiltedOutputs(GaussianSource):
    """The linearised network's outputs with their own width at every input.

    Attributes:
        source: The outputs under the posterior with its scaled covariance.
        tilt: Their width.
        alone: Whether the scale is 0: then no Jacobian is computed.
    """

    source: LinearisedOutputs
    tilt: Tilt
    alone: bool

    @property
    def create_graph(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.source.create_graph

    @cached_property
    def _read(self) -> tuple[OutputRows, Tensor]:
        """The network's outputs, and r of every row, `[B]`."""
        return distances(self.source, self.tilt)

    def network(self) -> OutputRows:
        """The outputs of the network itself; after `refine` of the linearised network at the refined mean."""
        if self.source.posterior.refined_step is not None:
            return self.source.mean()
        rows, choice = self._read[0], self.source.choice
        return rows if choice is None else choice.picked(rows)

    def mean(self) -> OutputRows:
        rows = self.network()
        values = self.tilt.mean(self._likelihood, rows.values, _checked(self._read[1]))
        return OutputRows(values, rows.positions, rows.outputs)

    def gaussian(self, form: LatentForm, *, wide: bool = False) -> GaussianOutputs:
        source, noise = self.source, self.source.posterior.hypers.sigma_noise
        noise = noise if source.choice is None else source.choice.noise(noise)
        if self.alone:
            posterior = _without_covariance(self.network(), form, source.group_size, wide=wide)
            r = self._read[1]
        elif source.posterior.problem.head is not None and "_read" not in self.__dict__:
            # Jacobians of a last layer take a forward pass: the layers' inputs are noted in it, and no other is made.
            noted = Noted(source.posterior.engine, self.tilt.layers)
            posterior = source.gaussian(form, wide=wide, engine=noted.engine)
            n_rows = prod(posterior.mean.shape[:-1])
            inputs = noted.inputs(n_rows // prod(posterior.positions))
            r = self._read[1] if inputs is None else self.tilt.distance(in_rows(inputs, n_rows), n_rows)
        else:
            posterior, r = source.gaussian(form, wide=wide), self._read[1]
        return self.tilt.gaussian(self._likelihood, noise, _checked(r), posterior)

    @property
    def _likelihood(self) -> Likelihood:
        return self.source.posterior.likelihood


@dataclass(frozen=True, eq=False)
class TiltedSamples(SampleSource):
    """Outputs at sampled weights with the same width: f̂ / T + (f_s − f̂), and in a regression noise of its own."""

    source: SampledOutputs
    tilt: Tilt
    alone: bool

    @property
    def create_graph(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.source.create_graph

    def samples(self, n: int, generator: torch.Generator | None) -> OutputRows:
        source, posterior = self.source, self.source.posterior
        rows, r = distances(source, self.tilt)
        rows = rows if source.choice is None else source.choice.picked(rows)
        sigma = posterior.hypers.sigma_noise
        sigma = sigma if source.choice is None else source.choice.noise(sigma)
        likelihood, r = posterior.likelihood, _checked(r)
        values = self.tilt.mean(likelihood, rows.values, r).expand(n, *rows.values.shape)
        if not self.alone:
            values = values + (source.samples(n, generator).values - rows.values)
        own = self.tilt.variance(likelihood, sigma, r)
        if own is not None:
            noise = torch.randn(values.shape, generator=generator, dtype=values.dtype, device=values.device)
            values = values + own.sqrt() * noise
        return OutputRows(values, rows.positions, rows.outputs)


def distances(source: LinearisedOutputs | SampledOutputs, tilt: Tilt) -> tuple[OutputRows, Tensor]:
    """The network's outputs at the inputs of a source, and r of every row, `[B]`; by one forward pass."""
    with checks.together():
        source.posterior.check_unchanged()
        problem = source.posterior.problem
        rows, inputs = layer_inputs(problem, source.x, tilt.layers, create_graph=source.through_x)
    finite(rows.values)
    return rows, tilt.distance(in_rows(inputs, len(rows.values)), len(rows.values))


def _without_covariance(rows: OutputRows, form: LatentForm, group_size: int | None, *, wide: bool) -> GaussianOutputs:
    """The outputs as a Gaussian without width, in a form of covariances."""
    n_rows, n_outputs = rows.values.shape
    like = widened(rows.values) if wide else rows.values
    if form in ("diagonal", "centred"):
        covariance = torch.zeros_like(like)
    elif form == "full":
        covariance = like.new_zeros(n_rows, n_outputs, n_outputs)
    elif group_size is None:
        covariance = like.new_zeros(n_rows * n_outputs, n_rows * n_outputs)
    else:
        each = group_size * prod(rows.positions)
        if n_rows % each:
            raise group_left_over(group_size, n_rows % each)
        covariance = like.new_zeros(n_rows // each, each * n_outputs, each * n_outputs)
    return GaussianOutputs(rows.values, covariance, rows.positions, rows.outputs)


def _checked(r: Tensor) -> Tensor:
    """Distances that are numbers: of a layer's inputs that are not, outputs may be."""
    checks.require(
        r.isfinite(),
        lambda: InvalidData(
            "inputs of the network's layers are NaN or infinite, so that a calibrated width does not exist; look at "
            "the inputs, or set la.calibration = None."
        ),
    )
    return r
