"""Refinement over weights: the linearised network, all data of the fit, and the posterior's own structure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core.batch import Inputs, require_loader
from laplace.core.checks import as_count, named
from laplace.core.positions import require_none
from laplace.core.precision_policy import widened
from laplace.engines.native.engine import NativeEngine
from laplace.engines.native.kinds import GGNEngine
from laplace.engines.native.products import GraphMap, HeadMap
from laplace.errors import InvalidData
from laplace.fitting.fit import FitOptions, sum_data
from laplace.jacobian.jacobian import Jacobian
from laplace.likelihoods.base import Likelihood, NoiseFreeLikelihood
from laplace.likelihoods.checks import check_outputs
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.network import next_token
from laplace.posterior.posterior import Posterior
from laplace.refinement.linear_model import Covariance, LinearModel, RefineOptions, Refiner, Smoothing
from laplace.structures.fit import Fit
from laplace.structures.precision import Form, Precision

# ----------------------------------------------------------------------------------------------------------------------
# The data as the linearised network sees them: outputs at θ*, products with the Jacobian, targets
# ----------------------------------------------------------------------------------------------------------------------


_WHAT = "the linear model of refine(...) and leave_one_out(...)"
_INSTEAD = "Predictions, evidence and tuning of a posterior that is not refined take them"

KEPT_BYTES = 2**28
"""Bytes of graphs or features that are kept from one product to the next: fixed, as results must not depend on it."""


class LinearBatch:
    """One batch: outputs f at θ*, `[B, C]`, float64; checked targets; products with the Jacobian."""

    def __init__(self, engine: NativeEngine, x: Inputs, y: Tensor) -> None:
        self.engine = engine
        self.x = x
        self.kept: HeadMap | GraphMap | None
        self.kept, f = self._map()
        self.f = widened(f.detach())
        self.y = engine.checked(self.f, y)

    def _map(self) -> tuple[HeadMap | GraphMap, Tensor]:
        if self.engine.problem.head is not None:
            parts = list(self.engine.jacobian(self.x))
            if parts and all(jacobian.is_head for jacobian, _ in parts):
                require_none(parts[0][0].positions, _WHAT, _INSTEAD)
                features = torch.cat([jacobian.head_features() for jacobian, _ in parts])
                return HeadMap(widened(features), parts[0][0].head_places()), torch.cat([f for _, f in parts])
        linear = self.engine.linear(self.x)
        require_none(linear.positions, _WHAT, _INSTEAD)
        return GraphMap(linear, linear.f.shape[-1]), linear.f

    @property
    def linear(self) -> HeadMap | GraphMap:
        """Products with the Jacobian: those that are kept, or from a new forward pass."""
        return self._map()[0] if self.kept is None else self.kept


class LinearData:
    """All data, read once and kept: every product reads the same batches in the same order."""

    def __init__(
        self, engine: NativeEngine, loader: Iterable[Any], dict_key_y: str, *, progress_bar: bool = False
    ) -> None:
        require_loader(loader, "loader")
        self.engine = engine
        self.batches: list[LinearBatch] = []
        n_bytes, problem = 0, engine.problem
        for name, x, y in next_token.read(
            loader, dict_key_y, problem.device, engine.target_rules, problem.module,
            label="refine, data", progress_bar=progress_bar,
        ):  # fmt: skip
            with named(name):
                batch = LinearBatch(engine, x, y)
            n_bytes += batch.linear.n_bytes
            if n_bytes > KEPT_BYTES:
                batch.kept = None
            self.batches.append(batch)
        if not self.batches:
            raise InvalidData("the loader gave no data, or all are ignored; a refinement needs those of the fit.")

    @property
    def n_data(self) -> float:
        """Data that count."""
        likelihood = self.engine.likelihood
        return as_count(sum(float(likelihood.count(batch.f, batch.y)) for batch in self.batches))

    @property
    def n_observed(self) -> float | Tensor:
        """Observed targets of every output: `n_data`, or `[C]` where the likelihood counts entries."""
        likelihood = self.engine.likelihood
        seen = [likelihood.observations(batch.f, batch.y) for batch in self.batches]
        counts = [one for one in seen if one is not None]
        total = torch.stack(counts).sum(0) if counts else None
        return self.n_data if total is None or bool((total == self.n_data).all()) else total

    def push(self, vector: Tensor) -> list[Tensor]:
        """J v of every batch, `[B, C]` each."""
        return [batch.linear.push(vector.unsqueeze(0))[0] for batch in self.batches]

    def pull(self, cotangents: Sequence[Tensor]) -> Tensor:
        """Σ Jᵀ u over batches, `[P]`."""
        total = cotangents[0].new_zeros(1, self.engine.problem.layout.n_params)
        for batch, u in zip(self.batches, cotangents, strict=True):
            batch.linear.add_pull(u.unsqueeze(0), total)
        return total[0]

    def curvature_product(self, inner: Sequence[OutputHessian], scale: Tensor, vector: Tensor) -> Tensor:
        """Σ Jᵀ (scale · Λ) J v, `[P]`, with an output Hessian per batch; one map per batch serves both directions."""
        total = torch.zeros_like(vector).unsqueeze(0)
        for batch, hessian in zip(self.batches, inner, strict=True):
            linear = batch.linear
            linear.add_pull(scale * hessian.times(linear.push(vector.unsqueeze(0))), total)
        return total[0]


# ----------------------------------------------------------------------------------------------------------------------
# A likelihood around other outputs than the network's: its targets say where
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Shifted(NoiseFreeLikelihood):
    """p(y | f + shift), in expectation over a Gaussian around f + shift, with shift and root packed into the targets.

    It makes an engine compute, in any structure, Σ Jᵀ Λ(f_lin) J with Λ at the outputs of the linearised network
    instead of at f(x, θ*). Engines ask it for losses and
    derivatives; noise and predictions are asked of `base`.
    """

    base: Likelihood  # p(y | f)
    smoothing: Smoothing
    example: Tensor  # one row of the targets, for their shape and dtype
    n_outputs: int
    rooted: bool  # whether targets carry a root
    name = "shifted"

    def pack(self, shift: Tensor, root: Tensor | None, y: Tensor) -> Tensor:
        """Targets `[B, …]` of `base` with shifts `[B, C]` and roots, as `[B, n]`, float64."""
        parts = [shift] if root is None else [shift, root.flatten(1)]
        return torch.cat([widened(part) for part in (*parts, y.reshape(len(y), -1))], 1)

    def _unpacked(self, packed: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        c = self.n_outputs
        width = 0 if not self.rooted else c if self.smoothing.independent else c * c
        shift, root, y = packed.split([c, width, packed.shape[1] - c - width], 1)
        y = y.reshape(len(y), *self.example.shape).to(self.example.dtype)
        if not self.rooted:
            return shift, None, y
        return shift, root if self.smoothing.independent else root.view(-1, c, c), y

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        check_outputs(f)
        return y

    @property
    def weighs_targets(self) -> bool:
        return self.base.weighs_targets

    def weights(self, y: Tensor) -> Tensor | None:
        return self.base.weights(self._unpacked(y)[2])

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        return self.base.count(f, self._unpacked(y)[2])

    def observations(self, f: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor | None:
        return self.base.observations(f, self._unpacked(y)[2], weights)

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Loss at the centre, f + shift."""
        shift, _, targets = self._unpacked(y)
        return self.base.loss_terms(widened(f) + shift, targets).to(f.dtype)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """Expected output Hessian around f + shift."""
        if y is None:
            return self.base.hessian(f)
        shift, root, targets = self._unpacked(y)
        return self.smoothing.hessian(self.base, widened(f) + shift, root, targets).to(f.dtype)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        shift, root, targets = self._unpacked(y)
        return self.smoothing.gradient(self.base, widened(f) + shift, root, targets).to(f.dtype)

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: torch.Generator | None = None
    ) -> Tensor:
        return self.base.sample_gradients(f, None, n_samples, generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        return self.base.inverse_link(f)

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        return self.base.predictive_nll(prediction, variance, y, sigma_noise)


@dataclass(frozen=True, eq=False)
class WeightCovariance(Covariance):
    """Covariance of weights, as a structure has it: the inverse of a precision that follows from a fit."""

    refiner: WeightRefiner
    fit: Fit
    precision: Precision

    def solve(self, vector: Tensor) -> Tensor:
        dtype = self.refiner.posterior.expansion_point.dtype
        return widened(self.precision.solve(vector.to(dtype).unsqueeze(0))[0])

    def of_outputs(self, *, diagonal: bool) -> list[Tensor]:
        form: Form = "diagonal" if diagonal else "full"
        parts: list[Tensor] = []
        for batch in self.refiner.data.batches:
            with torch.no_grad():
                pieces: Iterable[tuple[Jacobian, Tensor]] = self.refiner.engine.jacobian(batch.x)
                parts.append(torch.cat([self.precision.variance(replace(part, wide=True), form) for part, _ in pieces]))
        return parts

    def divergence(self) -> float:
        delta = self.refiner.model.prior_precision
        trace = delta @ widened(self.precision.diagonal_of_inverse())
        # By its log determinant, not by the ratio: of a full precision the factor that the trace took gives it.
        ratio = widened(self.precision.logdet().detach()) - self.precision.prior.logdet().detach()
        return float(trace - len(delta) + ratio)


class WeightRefiner(Refiner[WeightCovariance]):
    """The linearised network as a model of θ − θ*."""

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
    def network_loss(self) -> Tensor:
        return self.model.loss_terms(torch.zeros_like(self.start))

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.dtype

    def covariance(self) -> WeightCovariance:
        return WeightCovariance(self, self.posterior.fit, self.posterior.precision())

    def _covariance_of(self, fit: Fit) -> WeightCovariance:
        """Covariance of another fit at the present hyper-parameters."""
        return WeightCovariance(self, fit, replace(self.evidence, fit=fit).precision)

    def expected(self, model: LinearModel, at: Tensor) -> WeightCovariance:
        return self._covariance_of(self._read(at, model.smoothing, model.roots))

    def between(self, first: WeightCovariance, second: WeightCovariance, rate: float) -> WeightCovariance:
        curvature = first.fit.curvature.scaled(1 - rate) + second.fit.curvature.scaled(rate)
        return self._covariance_of(replace(first.fit, curvature=curvature))

    def fit(self, covariance: WeightCovariance, at: Tensor) -> Fit:
        losses = self.model.loss_terms(at).to(covariance.fit.loss_terms)
        return replace(covariance.fit, loss_terms=losses)

    def mean(self, at: Tensor) -> Tensor:
        centre = self.posterior.expansion_point
        return centre + at.to(centre.dtype)

    def _read(self, step: Tensor, smoothing: Smoothing, roots: Sequence[Tensor] | None) -> Fit:
        """Curvature, in the posterior's structure, at (and around) f_lin(x, θ* + step)."""
        choices, engine, first = self.posterior.choices, self.engine, self.data.batches[0]
        shifted = Shifted(self.posterior.likelihood, smoothing, first.y[0], first.f.shape[1], rooted=roots is not None)
        engine_around = GGNEngine(engine.problem, shifted, replace(engine.options, stochastic=False, generator=None))
        known = [None] * len(self.data.batches) if roots is None else roots
        pushed = self.data.push(step)
        loader = [
            (batch.x, shifted.pack(shift, root, batch.y))
            for batch, shift, root in zip(self.data.batches, pushed, known, strict=True)
        ]
        return sum_data(loader, engine_around, choices, FitOptions(check_memory=False))
