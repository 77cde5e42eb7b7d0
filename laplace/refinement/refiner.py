"""Common ground of all refinements: the linearised network, its data and the present hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace import fitting
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import check_generator
from laplace.engines.engine import same_count
from laplace.engines.native.ggn import GGNEngine
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.fitting import Fit, ReadOptions
from laplace.posterior.posterior import Posterior
from laplace.posterior.refined import Refinement
from laplace.refinement.glm import LinearModel
from laplace.refinement.likelihood_at_mode import Shifted
from laplace.refinement.linear import LinearData
from laplace.refinement.newton import Minimum, minimise
from laplace.refinement.smoothing import NOWHERE, Smoothing
from laplace.structures.base import Precision

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""In posterior standard deviations: what products with a Jacobian of this precision can resolve."""

BOUND_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}
"""Of a bound that cannot grow any more, relative to its size."""


@dataclass(frozen=True)
class RefineOptions:
    """Options of a refinement.

    Attributes:
        max_steps: Newton steps, or updates of a variational covariance.
        tolerance: None for what the precision of the numbers allows.
        n_samples: Points of the expectations of softmax likelihoods.
        generator: Their source.
        progress_bar: Show one.
    """

    max_steps: int = 100
    tolerance: float | None = None
    n_samples: int = 200
    generator: torch.Generator | None = None
    progress_bar: bool = False


class Refiner:
    """The linearised network with its data at the present hyper-parameters.

    Args:
        posterior: A fitted posterior.
        loader: The data of the fit, read once.
        options: How.

    Raises:
        UnsupportedError: The curvature is not the library's GGN.
        InvalidData: Other data than those of the fit.
        InvalidArgument: Options that are not accepted.
        InvalidType: The generator is no `torch.Generator`.
    """

    def __init__(self, posterior: Posterior, loader: Iterable[Any], options: RefineOptions) -> None:
        choices, engine = posterior.choices, posterior.engine
        if not isinstance(engine, GGNEngine):
            raise UnsupportedError(
                f"backend={choices.backend_cls.__name__} cannot refine: the curvature of the linearised network is a "
                "GGN at its own outputs; use backend=NativeGGN, the default."
            )
        if options.max_steps < 1 or options.n_samples < 2:
            raise InvalidArgument(
                f"max_steps={options.max_steps} and n_samples={options.n_samples}; at least 1 and 2 are accepted."
            )
        if options.tolerance is not None and not 0 < options.tolerance < 1:
            raise InvalidArgument(f"tolerance={options.tolerance}; it must lie in (0, 1).")
        check_generator(options.generator)
        if posterior.map_fit.is_weighed:
            raise UnsupportedError(
                "the fit has data with weights of their own (weight_fn=, dict_key_weight=), which a refinement does "
                "not know; weigh classes by the likelihood, Categorical(class_weight=...), which it does."
            )
        self.posterior = posterior
        self.engine = engine
        self.options = options
        self.data = LinearData(engine, loader, choices.dict_key_y, progress_bar=options.progress_bar)
        seen = posterior.map_fit.n_data
        if not same_count(self.data.n_data, seen):
            raise InvalidData(
                f"the loader gave {self.data.n_data:g} data that count, the fit has seen {seen:g}; a refinement "
                "replaces the fit and needs all of its data."
            )
        self.evidence = evidence = posterior.evidence
        scale = posterior.likelihood.curvature_scale(engine.kind, evidence.sigma_noise, evidence.temperature)
        self.model = LinearModel(
            data=self.data,
            likelihood=posterior.likelihood,
            scale=widened(scale.detach()),
            prior_precision=widened(evidence.prior.diagonal().detach()),
            offset=widened(posterior.expansion_point) - widened(evidence.prior.mean.detach()),
        )

    @property
    def start(self) -> Tensor:
        """The step from θ* that a search begins with, `[P]`, float64: that of a former refinement, or zero."""
        step = self.posterior.refined_step
        return torch.zeros_like(self.model.offset) if step is None else widened(step)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the numbers that the network computes."""
        return self.engine.dtype

    def minimum(self, model: LinearModel, start: Tensor, precision: Precision, *, show: bool) -> Minimum:
        """The minimum of a model, searched from a step `[P]`."""
        dtype = self.posterior.expansion_point.dtype

        def precondition(vector: Tensor) -> Tensor:
            return widened(precision.solve(vector.to(dtype).unsqueeze(0))[0])

        tolerance = self.options.tolerance or _TOLERANCE[self.dtype]
        max_steps = max(self.options.max_steps, 1)
        return minimise(model, start, precondition, tolerance=tolerance, max_steps=max_steps, progress_bar=show)

    def fit_at(self, step: Tensor, smoothing: Smoothing = NOWHERE, roots: Sequence[Tensor] | None = None) -> Fit:
        """Curvature, in the posterior's structure, and loss at f_lin(x, θ* + step)."""
        choices, engine, first = self.posterior.choices, self.engine, self.data.batches[0]
        shifted = Shifted(self.posterior.likelihood, smoothing, first.y[0], first.f.shape[1], rooted=roots is not None)
        own = GGNEngine(engine.problem, shifted, replace(engine.options, stochastic=False, generator=None))
        known = [None] * len(self.data.batches) if roots is None else roots
        pushed = self.data.push(step)
        loader = [
            (batch.x, shifted.pack(shift, root, batch.y))
            for batch, shift, root in zip(self.data.batches, pushed, known, strict=True)
        ]
        return fitting.accumulate(
            loader, own, choices.structure, choices.structure_options, ReadOptions(choices.dict_key_y)
        )

    def precision(self, fit: Fit) -> Precision:
        """P of another fit at the present hyper-parameters."""
        return replace(self.evidence, fit=fit).precision

    def result(self, method: str, step: Tensor, fit: Fit, end: Minimum) -> Refinement:
        """A refinement with the mean θ* + step."""
        centre = self.posterior.expansion_point
        steps = len(end.values) - 1
        return Refinement(method, centre + step.to(centre.dtype), fit, steps, end.converged, end.distance, end.values)
