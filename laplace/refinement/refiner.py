"""Common ground of all refinements: a linear model at the present hyper-parameters, Gaussians over its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.core.random_numbers import check_generator
from laplace.engines.engine import same_count
from laplace.engines.native.kinds import GGNEngine
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.fitting import Fit
from laplace.posterior.posterior import Posterior, Refinement
from laplace.refinement.linear_model import LinearModel
from laplace.refinement.newton import Minimum, minimise

S = TypeVar("S", bound="Covariance")


@dataclass(frozen=True)
class RefineOptions:
    """Options of a refinement.

    Attributes:
        max_steps: Newton steps, or updates of a variational covariance.
        tolerance: None for what the precision of the numbers allows.
        n_samples: Points of the expectations of softmax likelihoods.
        generator: Their source.
        progress_bar: Show a progress bar.

    Raises:
        InvalidArgument: Options that are not accepted.
        InvalidType: The generator is no `torch.Generator`.
    """

    max_steps: int = 100
    tolerance: float | None = None
    n_samples: int = 200
    generator: torch.Generator | None = None
    progress_bar: bool = False

    def __post_init__(self) -> None:
        if self.max_steps < 1 or self.n_samples < 2:
            raise InvalidArgument(
                f"max_steps={self.max_steps} and n_samples={self.n_samples}; at least 1 and 2 are accepted."
            )
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise InvalidArgument(f"tolerance={self.tolerance}; it must lie in (0, 1).")
        check_generator(self.generator)


class Covariance(ABC):
    """Covariance S of a Gaussian over the n parameters of a linear model: S⁻¹ is a curvature plus the prior P₀."""

    @abstractmethod
    def solve(self, vector: Tensor) -> Tensor:
        """S v of a vector `[n]`, float64."""

    @abstractmethod
    def of_outputs(self, *, diagonal: bool) -> list[Tensor]:
        """Covariances J S Jᵀ of the outputs of every datum, a tensor `[B, C, C]` per batch, or variances `[B, C]`."""

    @abstractmethod
    def divergence(self) -> float:
        """tr(P₀ S) − n + log det S⁻¹ − log det P₀: twice KL(q ‖ p), less the distance of the means."""


class Refiner(ABC, Generic[S]):
    """A linear model of the data of a fit at the present hyper-parameters, and how a posterior is made of its end.

    Args:
        posterior: A fitted posterior.
        options: How it is refined.

    Attributes:
        engine: Knows the network at θ*.
        model: The linear model.
        start: Parameters that a search begins with, `[n]`, float64: those of a former refinement, or of the network.

    Raises:
        UnsupportedError: The curvature is not the library's GGN, or data have weights.
    """

    model: LinearModel
    start: Tensor

    def __init__(self, posterior: Posterior, options: RefineOptions) -> None:
        choices, engine = posterior.choices, posterior.engine
        split = posterior.map_fit.curvature.n_terms > 1
        if engine.split_outputs != split:  # a loaded or copied posterior has one that was made for predictions
            engine = choices.engine(posterior.weights, posterior.problem, split_outputs=split)
        if not isinstance(engine, GGNEngine):
            raise UnsupportedError(
                f"backend={choices.backend_cls.__name__} cannot refine: the curvature of the linearised network is a "
                "GGN at its own outputs; use backend=NativeGGN, the default."
            )
        if posterior.map_fit.is_weighed:
            raise UnsupportedError(
                "the fit has data with weights of their own (weight_fn=, dict_key_weight=), which a refinement does "
                "not support; for class weights use Categorical(class_weight=...), which it supports."
            )
        self.posterior = posterior
        self.engine: GGNEngine = engine
        self.options = options
        self.evidence = posterior.evidence
        scale = posterior.likelihood.curvature_scale(engine.kind, self.evidence.sigma_noise, self.evidence.temperature)
        self.scale = widened(scale.detach())

    def require_all(self, n_data: float) -> None:
        """Compares the number of data that were read with that of the fit.

        Raises:
            InvalidData: It is another one.
        """
        seen = self.posterior.map_fit.n_data
        if not same_count(n_data, seen):
            raise InvalidData(
                f"the loader gave {n_data:g} data, the fit has seen {seen:g}; a refinement replaces the fit "
                "and needs all of its data."
            )

    @property
    @abstractmethod
    def network_loss(self) -> Tensor:
        """Loss of the data at the network's own outputs, as `Likelihood.loss_terms`, `[1]` or `[C]`."""

    def require_same_loss(self) -> None:
        """Compares the loss of the data that were read with that of the fit.

        Raises:
            InvalidData: It is another one.
        """
        found, fitted = (
            float(widened(terms).sum()) for terms in (self.network_loss, self.posterior.map_fit.loss_terms)
        )
        if abs(found - fitted) > _SAME * max(abs(fitted), 1.0):
            raise InvalidData(
                f"the loss of these data is {found:.6g}, that of the fit was {fitted:.6g}: give the data of the fit, "
                "without random augmentation."
            )

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype in which outputs of the linear model are known."""

    @abstractmethod
    def covariance(self) -> S:
        """Covariance of the posterior as it is."""

    @abstractmethod
    def expected(self, model: LinearModel, at: Tensor) -> S:
        """Covariance with the (expected) curvature of a model at parameters `[n]`."""

    @abstractmethod
    def between(self, first: S, second: S, rate: float) -> S:
        """Covariance with the curvature (1 − ρ) H + ρ H′ of two, 0 < ρ < 1."""

    @abstractmethod
    def fit(self, covariance: S, at: Tensor) -> Fit:
        """The curvature of a covariance, in the posterior's structure, and the loss at parameters `[n]`."""

    @abstractmethod
    def mean(self, at: Tensor) -> Tensor:
        """θ̂ of parameters `[n]`, as `Refinement` holds it."""

    def minimum(self, model: LinearModel, start: Tensor, covariance: S, *, show: bool) -> Minimum:
        """The minimum of a model, searched from parameters `[n]`."""
        tolerance = self.options.tolerance or _TOLERANCE[self.dtype]
        return minimise(
            model, start, covariance.solve, tolerance=tolerance, max_steps=self.options.max_steps, progress_bar=show
        )

    @property
    def bound_tolerance(self) -> float:
        """Change of a bound, relative to its size, that counts as none."""
        return self.options.tolerance or _BOUND_TOLERANCE[self.dtype]

    def result(self, method: str, covariance: S, end: Minimum, standard_error: float = 0.0) -> Refinement:
        """The refinement at the end of a search."""
        return Refinement(
            method, self.mean(end.at), self.fit(covariance, end.at), len(end.values) - 1, end.converged, end.distance,
            end.values, standard_error,
        )  # fmt: skip


_SAME = 1e-3
"""Difference of two sums of losses, relative to them, that may be rounding of single precision."""

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""In posterior standard deviations: what products with a Jacobian of this precision can resolve."""

_BOUND_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}
"""Of a bound that cannot grow any more, relative to its size."""
