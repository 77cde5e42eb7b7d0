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

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.overrides import POSTERIOR, PREDICTIONS
from laplace.enums import PredType
from laplace.errors import InvalidArgument
from laplace.jacobian.jacobian import Jacobian
from laplace.network.model_guard import autograd_mode
from laplace.posterior.posterior import Posterior
from laplace.predictive import latent
from laplace.predictive.posterior_outputs import mixed
from laplace.structures.base import Precision
from laplace.tuning.group import PosteriorGroup
from laplace.tuning.objectives import Objective
from laplace.tuning.search import Coordinates
from laplace.tuning.validation import Targets, ValidationLoss, entropy_of


@dataclass(frozen=True, eq=False)
class Batch:
    """Linearised outputs of a batch.

    Attributes:
        jacobians: Of consecutive parts.
        mean: Outputs, `[B, C]`.
        targets: Of these outputs.
    """

    jacobians: list[Jacobian]
    mean: Tensor
    targets: Targets


class SmoothLoss:
    """A validation loss of linearised predictions; the network runs once, when it is made.

    Args:
        group: A fitted posterior, or several that predict as a mixture.
        coordinates: What is tuned.
        loss: The loss, the data and the kind of prediction.

    Raises:
        InvalidArgument: `pred_type="nn"`, or thresholds.
        InvalidData: No validation data.
    """

    def __init__(self, group: PosteriorGroup, coordinates: Coordinates, loss: ValidationLoss) -> None:
        kinds = [loss.predictive.kind(posterior) for posterior in group.posteriors]
        if PredType.NN in kinds or loss.objective.thresholds:
            what = "pred_type='nn'" if PredType.NN in kinds else "Thresholds"
            raise InvalidArgument(f"{what} has no gradient in the hyper-parameters; use method='grid'.")
        self.group = group
        for posterior in group.posteriors:
            posterior.check_unchanged()
            if posterior.overrides(*PREDICTIONS):
                with posterior.as_user_object() as la:
                    name = type(la).__name__
                raise InvalidArgument(
                    f"class {name} predicts by a method of its own (one of "
                    f"{', '.join(PREDICTIONS)}), whose gradient in the hyper-parameters is not known; use "
                    "method='grid'."
                )
        self.coordinates = coordinates
        self.objective = loss.objective
        self.validation = loss.data
        first = group.first
        with autograd_mode(), torch.no_grad():
            self.data = [self._run(*batch) for batch in self.validation.batches(first)]
            self.ood: list[list[Batch]] = []
            if self.validation.ood_loader is not None:
                self.entropy = entropy_of(group.likelihood)
                self.ood = [self._run(*batch) for batch in self.validation.ood_inputs(first)]
        self.summaries = loss.predictive.summaries(
            group.likelihood, first.hypers.device, for_scores=not self.objective.whole_covariance
        )

    def __call__(self, logs: Tensor) -> tuple[float, Tensor]:
        """The loss and its gradient at logarithms `[n]`."""
        if any(posterior.overrides(*POSTERIOR) for posterior in self.group.posteriors):
            return self._through_users_methods(logs)
        with autograd_mode(), torch.enable_grad():
            leaf = logs.clone().requires_grad_()
            group = self.group.at(self.coordinates.hypers(leaf))
            precisions = [posterior.evidence.precision for posterior in group.posteriors]
            # What a precision keeps must not depend on who asks first: with a graph, or without.
            still = self.group.at(self.coordinates.hypers(logs.detach()))
            constants = [posterior.evidence.precision for posterior in still.posteriors]
            pairs = list(zip(precisions, constants, strict=True))
            every = [*self.data, *self.ood]
            variances = [
                [
                    self._variance(constant, part).requires_grad_()
                    for constant, part in zip(constants, batch, strict=True)
                ]
                for batch in every
            ]
            loss = self._loss(variances, group)
            if not loss.requires_grad:
                raise InvalidArgument(
                    f"{self.objective.name} cannot be differentiated; use method='grid', or compute it with torch."
                )
            leaves = [variance for batch in variances for variance in batch]
            direct, *slopes = torch.autograd.grad(loss, [leaf, *leaves], allow_unused=True, retain_graph=True)
            gradient = torch.zeros_like(leaf) if direct is None else direct
            parts = [(part, pair) for batch in every for part, pair in zip(batch, pairs, strict=True)]
            for (part, (precision, constant)), slope in zip(parts, slopes, strict=True):
                if slope is not None:
                    gradient = gradient + self._through(precision, constant, part, slope, leaf)
            return loss.item(), gradient

    def _through_users_methods(self, logs: Tensor) -> tuple[float, Tensor]:
        """The same where users compute the posterior, of which only autograd knows the derivative."""
        with autograd_mode(), torch.enable_grad():
            leaf = logs.clone().requires_grad_()
            group = self.group.at(self.coordinates.hypers(leaf))
            variances = [
                [self._users_variance(one, part) for one, part in zip(group.posteriors, batch, strict=True)]
                for batch in (*self.data, *self.ood)
            ]
            loss = self._loss(variances, group)
            if not loss.requires_grad:
                raise InvalidArgument(
                    f"{self.objective.name} does not depend on the hyper-parameters in a way that autograd knows; use "
                    "method='grid', or compute the posterior with torch."
                )
            (gradient,) = torch.autograd.grad(loss, leaf)
            return loss.item(), gradient

    def _users_variance(self, posterior: Posterior, batch: Batch) -> Tensor:
        """`[B, C]` or `[B, C, C]`, with its graph."""
        precision = posterior.predictive_precision()
        return torch.cat([self.summaries.contraction(precision)(jacobian) for jacobian in batch.jacobians])

    def _run(self, name: str, x: Inputs, y: Tensor | None = None) -> list[Batch]:
        """One pass of every network over a batch."""
        with named(name):
            return [_passed(posterior, x, y) for posterior in self.group.posteriors]

    def _variance(self, precision: Precision, batch: Batch) -> Tensor:
        """`[B, C]` or `[B, C, C]`, without gradient."""
        contract, read = self.summaries.contraction(precision), self.summaries.read
        with torch.no_grad():
            return torch.cat([contract(read(jacobian)) for jacobian in batch.jacobians])

    def _loss(self, variances: list[list[Tensor]], group: PosteriorGroup) -> Tensor:
        weights, sigma = group.weights(), group.first.hypers.sigma_noise
        loss = self._mean_of(self.objective, self.data, variances[: len(self.data)], sigma, weights)
        if not self.ood:
            return loss
        outside = variances[len(self.data) :]
        entropy = self._mean_of(self.entropy, self.ood, outside, sigma, weights)
        n_ood, n_data = (sum(batch[0].targets.n_data for batch in data) for data in (self.ood, self.data))
        return self.validation.less_entropy(loss, entropy, n_ood, n_data)

    def _mean_of(
        self,
        objective: Objective,
        data: list[list[Batch]],
        variances: list[list[Tensor]],
        sigma: Tensor,
        weights: Tensor,
    ) -> Tensor:
        running = objective.fresh()
        for batch, spread in zip(data, variances, strict=True):
            parts = zip(batch, spread, strict=True)
            predictions = [self.summaries.of_gaussian(part.mean, variance) for part, variance in parts]
            batch[0].targets.update(running, mixed(predictions, weights), sigma)
        return running.result()

    def _through(self, precision: Precision, constant: Precision, batch: Batch, slope: Tensor, leaf: Tensor) -> Tensor:
        """Σ (∂L/∂v) dv/d(log h), `[n]`, of one batch."""
        total, start = torch.zeros_like(leaf), 0
        for piece in _pieces(batch.jacobians):
            rows, slopes = _directions(piece, slope[start : start + len(piece)])
            start += len(piece)
            quadratic = precision.quad(constant.solve(rows))
            (gradient,) = torch.autograd.grad(-(slopes * quadratic).sum(), leaf, retain_graph=True)
            total = total + gradient
        return total


def _passed(posterior: Posterior, x: Inputs, y: Tensor | None) -> Batch:
    """One pass of a network over a batch."""
    x = batches.to_device(x, posterior.problem.device)
    with closing(latent.shifted(posterior.engine.jacobian(x), posterior.refined_step)) as pieces:
        parts = list(pieces)
    mean = torch.cat([f for _, f in parts]).to(posterior.hypers.dtype)
    jacobians = [jacobian for jacobian, _ in parts]
    return Batch(jacobians, mean, Targets.of(posterior, mean, y, jacobians[0].positions))


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
    values, vectors = torch.linalg.eigh(0.5 * (slope + slope.transpose(1, 2)).to(piece.dtype))
    return (vectors.transpose(1, 2) @ piece).flatten(0, 1), values.flatten()
