"""Refinement over weights: the linearised network, all data of the fit, and the posterior's own structure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace import fitting
from laplace.core.precision_policy import widened
from laplace.engines.native.kinds import GGNEngine
from laplace.fitting import Fit, ReadOptions
from laplace.jacobian.jacobian import Jacobian
from laplace.posterior.posterior import Posterior
from laplace.refinement.glm import LinearModel
from laplace.refinement.likelihood_at_mode import Shifted
from laplace.refinement.linear import LinearData
from laplace.refinement.refiner import Covariance, RefineOptions, Refiner
from laplace.refinement.smoothing import Smoothing
from laplace.structures.base import Precision


@dataclass(frozen=True, eq=False)
class WeightCovariance(Covariance):
    """Covariance of weights, as a structure has it.

    Attributes:
        source: Where it belongs.
        curve: Curvature, with what else a fit says.
        precision: S⁻¹.
    """

    source: WeightRefiner
    curve: Fit
    precision: Precision

    def solve(self, vector: Tensor) -> Tensor:
        dtype = self.source.posterior.expansion_point.dtype
        return widened(self.precision.solve(vector.to(dtype).unsqueeze(0))[0])

    def of_outputs(self, *, diagonal: bool) -> list[Tensor]:
        contract = self.precision.functional_diagonal if diagonal else self.precision.functional_variance
        parts: list[Tensor] = []
        for batch in self.source.data.batches:
            with torch.no_grad():
                pieces: Iterable[tuple[Jacobian, Tensor]] = self.source.engine.jacobian(batch.x)
                parts.append(torch.cat([contract(replace(jacobian, wide=True)) for jacobian, _ in pieces]))
        return parts

    def divergence(self) -> float:
        delta = self.source.model.prior_precision
        trace = delta @ widened(self.precision.diagonal_of_inverse())
        return float(trace - len(delta) + widened(self.precision.logdet_ratio().detach()))


class WeightRefiner(Refiner[WeightCovariance]):
    """The linearised network as a model of θ − θ*.

    Args:
        posterior: A fitted posterior.
        loader: The data of the fit, read once.
        options: How.

    Raises:
        UnsupportedError: The curvature is not the library's GGN, or outputs have positions.
        InvalidData: Other data than those of the fit.
    """

    def __init__(self, posterior: Posterior, loader: Iterable[Any], options: RefineOptions) -> None:
        super().__init__(posterior, options)
        self.data = LinearData(self.engine, loader, posterior.choices.dict_key_y, progress_bar=options.progress_bar)
        self.require_all(self.data.n_data)
        prior = self.evidence.prior
        self.model = LinearModel(
            data=self.data,
            likelihood=posterior.likelihood,
            scale=self.scale,
            prior_precision=widened(prior.diagonal().detach()),
            offset=widened(posterior.expansion_point) - widened(prior.mean.detach()),
        )
        step = posterior.refined_step
        self.start = torch.zeros_like(self.model.offset) if step is None else widened(step)

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.dtype

    def covariance(self) -> WeightCovariance:
        return WeightCovariance(self, self.posterior.fit, self.posterior.precision())

    def covariance_of(self, fit: Fit) -> WeightCovariance:
        """Covariance of another fit at the present hyper-parameters."""
        return WeightCovariance(self, fit, replace(self.evidence, fit=fit).precision)

    def expected(self, model: LinearModel, at: Tensor) -> WeightCovariance:
        return self.covariance_of(self._read(at, model.smoothing, model.roots))

    def between(self, first: WeightCovariance, second: WeightCovariance, rate: float) -> WeightCovariance:
        curvature = first.curve.curvature.scaled(1 - rate) + second.curve.curvature.scaled(rate)
        return self.covariance_of(replace(first.curve, curvature=curvature))

    def fit(self, covariance: WeightCovariance, at: Tensor) -> Fit:
        losses = self.model.loss_terms(at).to(covariance.curve.loss_terms)
        return replace(covariance.curve, loss_terms=losses)

    def mean(self, at: Tensor) -> Tensor:
        centre = self.posterior.expansion_point
        return centre + at.to(centre.dtype)

    def _read(self, step: Tensor, smoothing: Smoothing, roots: Sequence[Tensor] | None) -> Fit:
        """Curvature, in the posterior's structure, at (and around) f_lin(x, θ* + step)."""
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
