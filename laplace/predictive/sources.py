"""Latent outputs under a posterior over weights, as predictions read them: linearised, or by sampled weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace.core import checks
from laplace.core.batch import Inputs
from laplace.core.gaussian import Gaussian
from laplace.core.positions import OutputRows
from laplace.engines.engine import CurvatureEngine
from laplace.engines.outputs import outputs
from laplace.predictive import latent
from laplace.structures.base import Precision


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
                return latent.linearised_mean(self.engine, self.x, self.step, create_graph=self.through_x)
            return outputs(self.engine, self.x, create_graph=self.through_x)

    def latent(self, form: str, *, wide: bool = False) -> Gaussian:
        with checks.together():
            self.check()
            return latent.linearised(
                self.engine, self.precision, self.x, form, step=self.step, create_graph=self.through_x, wide=wide
            )


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
            run = latent.sampler(self.engine, self.centre, self.x, self.model_kwargs, create_graph=self.through_x)
            return OutputRows.of(latent.finite(run(thetas)), 1)
