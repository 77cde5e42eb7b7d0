"""A validation loss and its gradient in every hyper-parameter, without any further pass of the network.

The variance of an output is v = jᵀ P⁻¹ j. With z = P⁻¹ j its derivative is dv = −zᵀ (dP) z, so that for a loss L(v)

    dL = −Σ (∂L/∂v) d(zᵀ P z)    at a constant z,

and zᵀ P z is `Precision.quad`, which every structure can differentiate. z is L (Lᵀ j) for the root L of P⁻¹ that
samples are drawn with; Lᵀ is the transpose of a linear map, which autograd applies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace import batch as batches
from laplace.batch import Inputs
from laplace.curvature.jacobian import Jacobian
from laplace.enums import PredType
from laplace.errors import InvalidArgument
from laplace.predictive import latent
from laplace.structures.base import Precision
from laplace.tuning.candidates import Predictive, shared_seed
from laplace.tuning.objectives import Objective
from laplace.tuning.settings import Coordinates
from laplace.tuning.validation import Validation, at_rows, checked_rows, entropy_of, rows_that_count

if TYPE_CHECKING:
    from laplace.parametric import ParametricLaplace


@dataclass(frozen=True)
class Batch:
    """What the network says of a batch.

    Attributes:
        jacobians: Of consecutive parts.
        mean: Outputs, `[B, C]`.
        y: Checked targets; zeros `[B]` of foreign inputs.
        kept: Rows that count, of outputs with positions; None for all.
    """

    jacobians: list[Jacobian]
    mean: Tensor
    y: Tensor
    kept: Tensor | None = None

    @property
    def n_data(self) -> int:
        """Data that count."""
        return len(self.y) if self.kept is None else len(self.kept)


class SmoothLoss:
    """A validation loss of linearised predictions; the network runs once, when it is made.

    Args:
        la: A fitted posterior; not changed.
        coordinates: What is tuned.
        objective: The loss.
        validation: The data.
        predictive: Link, samples and generator.
        progress_bar: Show one for the pass over the data.

    Raises:
        InvalidArgument: `pred_type="nn"`, or thresholds.
        InvalidData: No validation data.
    """

    def __init__(
        self,
        la: ParametricLaplace,
        coordinates: Coordinates,
        objective: Objective,
        validation: Validation,
        predictive: Predictive,
        *,
        progress_bar: bool = False,
    ) -> None:
        kind = latent.check_options(predictive.pred_type, predictive.link_approx, predictive.n_samples, None)
        if kind == PredType.NN or objective.thresholds:
            what = "pred_type='nn'" if kind == PredType.NN else "Thresholds"
            raise InvalidArgument(f"{what} has no gradient in the hyper-parameters; use method='grid'.")
        la.check_unchanged()
        self.la = la
        self.coordinates = coordinates
        self.objective = objective
        self.validation = validation
        self.predictive = predictive
        likelihood = la.likelihood_object
        self.as_latent = likelihood.latent_prediction and likelihood.has_noise
        self.diagonal = (
            not objective.whole_covariance if self.as_latent else latent.needs_variances_only(predictive.link_approx)
        )
        with torch.inference_mode(False), torch.no_grad():
            data = validation.batches(la, progress_bar=progress_bar)
            self.data = [self._run(x, y) for x, y in data]
            self.foreign: list[Batch] = []
            if validation.ood_loader is not None:
                self.entropy = entropy_of(likelihood)
                self.foreign = [self._run(x, None) for x in validation.foreign(la, progress_bar=progress_bar)]
        self.seed = shared_seed(predictive.generator, la.prior_precision.device)

    def __call__(self, logs: Tensor) -> tuple[float, Tensor]:
        """The loss and its gradient at logarithms `[n]`."""
        with torch.inference_mode(False), torch.enable_grad():
            leaf = logs.clone().requires_grad_()
            setting = self.coordinates.setting(leaf)
            precision = setting.evidence(self.la).precision
            # What a precision keeps must not depend on who asks first: with a graph, or without.
            constant = self.coordinates.setting(logs.detach()).evidence(self.la).precision
            every = [*self.data, *self.foreign]
            variances = [self._variance(constant, batch).requires_grad_() for batch in every]
            loss = self._loss(variances, setting.sigma_noise)
            if not loss.requires_grad:
                raise InvalidArgument(
                    f"{self.objective.name} cannot be differentiated; use method='grid', or compute it with torch."
                )
            direct, *slopes = torch.autograd.grad(loss, [leaf, *variances], allow_unused=True, retain_graph=True)
            gradient = torch.zeros_like(leaf) if direct is None else direct
            for batch, slope in zip(every, slopes, strict=True):
                if slope is not None:
                    gradient = gradient + self._through(precision, constant, batch, slope, leaf)
            return loss.item(), gradient

    def _run(self, x: Inputs, y: Tensor | None) -> Batch:
        """One pass of the network over a batch."""
        x = batches.to_device(x, self.la.problem.device)
        with closing(self.la.engine.jacobian(x)) as pieces:
            parts = list(pieces)
        mean = torch.cat([f for _, f in parts]).to(self.la.prior_precision.dtype)
        positions = parts[0][0].positions
        y = checked_rows(self.la, mean, y, positions)
        kept = rows_that_count(self.la.likelihood_object, y, positions)
        return Batch([jacobian for jacobian, _ in parts], mean, y, kept)

    def _variance(self, precision: Precision, batch: Batch) -> Tensor:
        """`[B, C]` or `[B, C, C]`, without gradient."""
        contract = precision.functional_diagonal if self.diagonal else precision.functional_variance
        with torch.no_grad():
            return torch.cat([contract(jacobian) for jacobian in batch.jacobians])

    def _loss(self, variances: list[Tensor], sigma: Tensor) -> Tensor:
        loss = self._mean_of(self.objective, self.data, variances[: len(self.data)], sigma)
        if not self.foreign:
            return loss
        entropy = self._mean_of(self.entropy, self.foreign, variances[len(self.data) :], sigma)
        ratio = sum(batch.n_data for batch in self.foreign) / sum(batch.n_data for batch in self.data)
        return loss - self.validation.ood_weight * ratio * entropy

    def _mean_of(self, objective: Objective, data: list[Batch], variances: list[Tensor], sigma: Tensor) -> Tensor:
        running = objective.fresh()
        options, likelihood = self.predictive, self.la.likelihood_object
        for batch, variance in zip(data, variances, strict=True):
            y = batch.y if batch.kept is None else batch.y[batch.kept]
            if self.as_latent:
                running.update(at_rows((batch.mean, variance), batch.kept), y, sigma)
                continue
            draws = torch.Generator(device=variance.device).manual_seed(self.seed)
            predicted = likelihood.predict(batch.mean, variance, options.link_approx, options.n_samples, draws)
            running.update(at_rows(predicted, batch.kept), y, sigma)
        return running.result()

    def _through(self, precision: Precision, constant: Precision, batch: Batch, slope: Tensor, leaf: Tensor) -> Tensor:
        """Σ (∂L/∂v) dv/d(log h), `[n]`, of one batch."""
        total, start = torch.zeros_like(leaf), 0
        for piece in _pieces(batch.jacobians):
            rows, slopes = _directions(piece, slope[start : start + len(piece)])
            start += len(piece)
            quadratic = precision.quad(solved(constant, rows))
            (gradient,) = torch.autograd.grad(-(slopes * quadratic).sum(), leaf, retain_graph=True)
            total = total + gradient
        return total


def _pieces(jacobians: list[Jacobian]) -> Iterator[Tensor]:
    """Dense pieces `[b, C, P]` over consecutive data."""
    for jacobian in jacobians:
        yield from jacobian.pieces()


def _directions(piece: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Rows j `[m, P]` and slopes γ `[m]` with Σ_kl slope_kl d(J_k P⁻¹ J_lᵀ) = Σ_m γ_m d(jᵀ P⁻¹ j).

    For variances the rows are those of J. For covariances they are J rotated into the eigenbasis of the slope.
    """
    if slope.ndim == 2:
        return piece.flatten(0, 1), slope.flatten()
    values, vectors = torch.linalg.eigh(0.5 * (slope + slope.transpose(1, 2)))
    return (vectors.transpose(1, 2) @ piece).flatten(0, 1), values.flatten()


def solved(precision: Precision, rows: Tensor) -> Tensor:
    """P⁻¹ j of rows j `[m, P]`, by the root that samples are drawn with; a constant."""
    with torch.enable_grad():
        noise = torch.zeros_like(rows).requires_grad_()
        (coloured,) = torch.autograd.grad(precision.sample(noise), noise, rows)
    with torch.no_grad():
        return precision.sample(coloured)
