"""What every refinement works with: the linearised network, its data and the present hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace import fitting
from laplace.core.random_numbers import check_generator
from laplace.engines.native.ggn import GGNEngine
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.fitting import Fit, ReadOptions
from laplace.refinement.glm import LinearModel
from laplace.refinement.likelihood_at_mode import Shifted
from laplace.refinement.linear import LinearData
from laplace.refinement.newton import Minimum, minimise
from laplace.refinement.result import Refinement
from laplace.refinement.smoothing import NOWHERE, Smoothing
from laplace.structures.base import Precision

if TYPE_CHECKING:
    from laplace.posterior.weight_posterior import WeightPosterior

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""In posterior standard deviations: what products with a Jacobian of this precision can resolve."""

BOUND_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}
"""Of a bound that cannot grow any more, relative to its size."""


@dataclass(frozen=True)
class RefineOptions:
    """How to refine.

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
        la: A fitted posterior; not changed.
        loader: The data of the fit, read once.
        options: How.

    Raises:
        UnsupportedError: The curvature is not the library's GGN.
        InvalidData: Other data than those of the fit.
        InvalidArgument: Options that are not accepted.
        InvalidType: The generator is no `torch.Generator`.
    """

    def __init__(self, la: WeightPosterior, loader: Iterable[Any], options: RefineOptions) -> None:
        engine = la.engine
        if not isinstance(engine, GGNEngine):
            raise UnsupportedError(
                f"backend={la.backend_cls.__name__} cannot refine: the curvature of the linearised network is a GGN at "
                "its own outputs; use backend=NativeGGN, the default."
            )
        if options.max_steps < 1 or options.n_samples < 2:
            raise InvalidArgument(
                f"max_steps={options.max_steps} and n_samples={options.n_samples}; at least 1 and 2 are accepted."
            )
        if options.tolerance is not None and not 0 < options.tolerance < 1:
            raise InvalidArgument(f"tolerance={options.tolerance}; it must lie in (0, 1).")
        check_generator(options.generator)
        self.la = la
        self.engine = engine
        self.options = options
        self.data = LinearData(engine, loader, la.dict_key_y)
        if self.data.n_data != la.unrefined().n_data:
            raise InvalidData(
                f"the loader gave {self.data.n_data} data that count, the fit has seen {la.n_data:g}; a refinement "
                "replaces the fit and needs all of its data."
            )
        centre = la.expansion_point.double()
        self.model = LinearModel(
            data=self.data,
            likelihood=la.likelihood_object,
            scale=la.likelihood_object.curvature_scale(engine.kind, la.sigma_noise, la.temperature).detach().double(),
            prior_precision=la.prior.diagonal().detach().double(),
            offset=centre - la.prior.mean.detach().double(),
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that the network computes."""
        return torch.float64 if self.engine.dtype == torch.float64 else torch.float32

    def minimum(self, model: LinearModel, start: Tensor, precision: Precision, *, show: bool) -> Minimum:
        """The minimum of a model, searched from a step `[P]`."""
        dtype = self.la.expansion_point.dtype

        def precondition(vector: Tensor) -> Tensor:
            return precision.solve(vector.to(dtype).unsqueeze(0))[0].double()

        tolerance = self.options.tolerance or _TOLERANCE[self.dtype]
        max_steps = max(self.options.max_steps, 1)
        return minimise(model, start, precondition, tolerance=tolerance, max_steps=max_steps, progress_bar=show)

    def fit_at(self, step: Tensor, smoothing: Smoothing = NOWHERE, roots: Sequence[Tensor] | None = None) -> Fit:
        """Curvature, in the posterior's structure, and loss at f_lin(x, θ* + step)."""
        la, engine, first = self.la, self.engine, self.data.batches[0]
        shifted = Shifted(la.likelihood_object, smoothing, first.y[0], first.f.shape[1], rooted=roots is not None)
        exact = replace(engine.options, stochastic=False, generator=None)
        own = GGNEngine(engine.problem, shifted, exact)
        known = [None] * len(self.data.batches) if roots is None else roots
        pushed = self.data.push(step)
        loader = [
            (batch.x, shifted.pack(shift, root, batch.y))
            for batch, shift, root in zip(self.data.batches, pushed, known, strict=True)
        ]
        return fitting.accumulate(loader, own, la.structure, la.structure_options, ReadOptions(la.dict_key_y))

    def precision(self, fit: Fit) -> Precision:
        """P of another fit at the present hyper-parameters."""
        return replace(self.la.evidence(), fit=fit).precision

    def result(self, method: str, step: Tensor, fit: Fit, end: Minimum) -> Refinement:
        """A refinement with the mean θ* + step."""
        mean = self.la.expansion_point + step.to(self.la.expansion_point.dtype)
        steps = len(end.values) - 1
        return Refinement(method, mean, fit, steps, end.converged, end.distance, end.values)
