"""What a search improves: the evidence; a loss on validation data by its gradient; the same loss on a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import eigen
from laplace.core.batch import Inputs
from laplace.core.cached import Kept
from laplace.core.checks import named
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.overrides import POSTERIOR, PREDICTIONS
from laplace.core.pieces import operations_are_dear
from laplace.core.precision_policy import widened
from laplace.enums import PredType
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.jacobian.jacobian import Jacobian
from laplace.network.model_guard import autograd_mode
from laplace.posterior.noise import noise_like
from laplace.posterior.posterior import Posterior
from laplace.predictive import latent
from laplace.predictive.prediction import mixed
from laplace.structures.precision import Precision
from laplace.tuning.candidates import Losses, Predictive
from laplace.tuning.group import PosteriorGroup, require_same_data
from laplace.tuning.losses import Loss, LossRule, Targets, Validation, entropy_of, make_loss
from laplace.tuning.search import Coordinates, GridSearch, Objective, TuningResult

# ----------------------------------------------------------------------------------------------------------------------
# The evidence
# ----------------------------------------------------------------------------------------------------------------------

_SMALLEST_FACTOR = 0.1
"""Factor of δ in one step at least: an estimate of γ may be negative, its expectation is not."""

_LARGEST_NOISE = 1.5
"""Ratio of the noise and the residuals: at 1.5 five ninths of the observed values count as explained."""


@cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The slope of a value in itself, which autograd would make anew for every step."""
    return torch.ones((), dtype=dtype, device=device)


@dataclass(frozen=True)
class EvidenceObjective(Objective):
    """The log evidence log p(D), which is made large (MacKay, 1992)."""

    group: PosteriorGroup
    sign: ClassVar[int] = -1

    def __post_init__(self) -> None:
        require_same_data([posterior.fit.n_data for posterior in self.group.posteriors])
        for posterior in self.group.posteriors:
            if operations_are_dear(posterior.hypers.device):
                posterior.cache.kept = Kept()  # of this search: nobody writes to hyper-parameters while it runs

    def gradient(self, coordinates: Coordinates, logs: Tensor) -> tuple[Tensor, Tensor]:
        with autograd_mode(), torch.enable_grad():
            exponentials = logs.exp()
            numbers = exponentials.to(coordinates.start.dtype).detach().requires_grad_()
            value = self.group.at_hyperparameters(coordinates.from_numbers(numbers)).log_evidence()
            # Elsewhere none is given: with one autograd imports SymPy at first, a third of a second.
            slope = _one(value.dtype, value.device) if operations_are_dear(value.device) else None
            (gradient,) = torch.autograd.grad(value, numbers, slope)
            known = value.detach() if self.group.weigh else value.detach().to(numbers.dtype)
            return known, gradient * exponentials

    def fixed_point(self, delta: Tensor) -> tuple[float, Tensor]:
        """The log evidence at δ, and the factor γ / (δ ‖θ* − μ₀‖²) of the next δ: MacKay's fixed point.

        Where ∂ log p(D) / ∂δ is zero, δ_t ‖θ* − μ₀‖²_t is γ_t, the number of the entries of tensor t that the data
        determine:

            δ_t ← γ_t / ‖θ* − μ₀‖²_t,    γ_t = n_t − δ_t tr_t P⁻¹ = δ_t (2 ∂ log p(D) / ∂δ_t + ‖θ* − μ₀‖²_t).

        (MacKay, 1992, Bayesian Interpolation; Antorán et al., 2023, section 3.3). A step takes the gradient of the
        evidence alone and no step size, and tends to be within a few percent after a few of them: what suits an
        evidence that costs solutions of linear systems, and is known with a standard error.
        """
        posterior, leaf = self.group.first, delta.detach().clone().requires_grad_()
        at = posterior.at_hyperparameters(replace(posterior.hypers, prior_precision=leaf))
        value = at.log_evidence().to(delta.dtype)
        (slope,) = torch.autograd.grad(value, leaf)
        (square,) = torch.autograd.grad(at.evidence.scatter, leaf)
        slope, square = widened(slope), widened(square)
        # Of a tensor that is zero and that nothing is known of there is no fixed point: its precision stays.
        known = 2 * widened(leaf.detach()) * slope > torch.finfo(leaf.dtype).eps * len(at.mean)
        factor = torch.where((square > 0) | known, 1 + 2 * slope / square, 1.0)
        return value.item(), factor.clamp(min=_SMALLEST_FACTOR)

    def remarks(self, result: TuningResult, names: Sequence[str]) -> Iterable[str | None]:
        """Where the curvature misleads the evidence."""
        yield from super().remarks(result, names)
        curvatures = [posterior.fit.curvature for posterior in self.group.posteriors]
        # Directions that were cut count as if the data said nothing of them, so that their log det P / P₀ is missing,
        # and with it what keeps the prior precision from falling.
        tail = max(curvature.tail for curvature in curvatures)
        cut = tail and tail / (result.sigma_noise.square().min() * result.temperature).item()
        if cut and cut > (smallest := result.prior_precision.min().item()):
            yield (
                f"the curvature leaves out eigenvalues up to {cut:.2g}, more than the prior precision {smallest:.2g}: "
                "the evidence then favours priors that are too weak; raise structure_kwargs={'rank': …}, or tune on "
                "validation data"
            )
        factor = max(curvature.prior_factor for curvature in curvatures)
        if factor != 1 and "prior_precision" in names:
            yield (
                f"the subset's evidence sees the product of the prior precision and the factor {factor:.3g} alone, so "
                "that a search cancels the factor: the variances are those of a posterior of the subset alone; tune "
                "on validation data (method='gridsearch')"
            )
        if result.converged and "sigma_noise" in names:
            for posterior in self.group.posteriors:
                yield noise_warning(posterior, result.sigma_noise, result.temperature)


def noise_warning(posterior: Posterior, sigma_noise: Tensor, temperature: Tensor) -> str | None:
    """A note where the noise σ that the evidence chose, 0-dim or `[C]`, is far larger than the residuals, or None.

    In σ the evidence is stationary where σ² = Σ r² / (n − γ) for n observed values with residuals r, of which γ, the
    effective number of parameters, count as explained by the weights (MacKay, 1992, "Bayesian interpolation").
    Curvature that leaves out how weights depend on each other has a larger γ than the GGN; with fewer data than weights
    it may come close to n, and σ is then too large by √(n / (n − γ)).
    """
    fit = posterior.fit
    squares = posterior.likelihood.mean_squares(widened(fit.loss_terms), fit.n_observed, fit.n_outputs)
    if squares is None:
        return None
    noise = (widened(sigma_noise.detach()).square() * widened(temperature.detach())).sqrt()
    residual = (squares if noise.ndim else squares.mean()).sqrt()
    worst = (noise / residual).argmax()
    sigma, size = noise.reshape(-1)[worst].item(), residual.reshape(-1)[worst].item()
    if not sigma > _LARGEST_NOISE * size:
        return None
    explained = 100 * (1 - (size / sigma) ** 2)
    ratio = f"{sigma / size:.3g} times " if size else "with "
    whole = posterior.choices.structure.is_exact
    others = [] if whole else ["compare hessian_structure='full'"]
    others += [] if posterior.problem.head is not None else ["use the last layer"]
    why = "many weights fit noise, too," if whole else "a curvature that leaves out how weights depend overstates that"
    return (
        f"the evidence chose a noise of {sigma:.3g}, {ratio}the root mean square {size:.2g} of the "
        f"residuals, since it counts {explained:.0f} % of the observed values as explained by the weights; {why} where "
        f"data are few: {', '.join([*others, 'or tune' if others else 'tune'])} on validation data"
    )


# ----------------------------------------------------------------------------------------------------------------------
# A loss on validation data, on a grid: batches outside, settings inside, so that the network runs once
# ----------------------------------------------------------------------------------------------------------------------


class ValidationLoss(Objective):
    """A loss of predictions of validation data, for a search on a grid."""

    def __init__(
        self, group: PosteriorGroup, loss: str | Loss | None, data: Validation, predictive: Predictive
    ) -> None:
        self.group, self.data, self.predictive = group, data, predictive
        self.loss = make_loss(loss, group.likelihood)

    def grid(self, axes: dict[str, Tensor], prior: Tensor) -> GridSearch:
        """The grid of some axes; a tuned prior precision is written in the structure of `prior`."""
        now = self.group.hypers(tuple(axes))
        if "prior_precision" not in axes and now.prior_precision.numel() > 1:
            raise InvalidArgument(
                "a grid of noises or temperatures needs one prior precision for all parameters, or one that is tuned "
                "too; tune='prior_precision' as well, or use method='lbfgs'."
            )
        if "sigma_noise" in axes and now.sigma_noise.ndim:
            now = replace(now, sigma_noise=self._noise_of_residuals(now))
        return GridSearch(axes, now, prior)

    def _noise_of_residuals(self, now: Hyperparameters) -> Tensor:
        """Noises in the ratios of the outputs' residuals, `[C]`, by a forward pass over the validation data."""
        if isinstance(self.data.loader, Iterator):
            self.data = replace(self.data, loader=list(self.data.loader))

        def sums() -> tuple[Tensor, int]:
            candidates = self.group.candidates([now], Predictive(), whole_covariance=False)
            total, count = torch.zeros_like(widened(now.sigma_noise)), 0
            for mean, _, y in candidates.at_networks(self.data, 0):
                total, count = total + widened(y - mean).square().sum(0), count + len(y)
            return total.cpu(), count

        processes = self.data.processes
        with autograd_mode(), torch.no_grad():
            every = [sums()] if processes is None else processes.gather_results(sums)
        total, count = sum((total for total, _ in every), start=torch.zeros(())), sum(count for _, count in every)
        return noise_like(total.to(now.device) / count, now.sigma_noise) if count else now.sigma_noise

    def losses(self, grid: GridSearch) -> tuple[Tensor, Callable[[], Tensor]]:
        first, data, loss = self.group.first, self.data, self.loss
        with autograd_mode(), torch.no_grad():
            candidates = self.group.candidates(grid.settings, self.predictive, whole_covariance=loss.whole_covariance)
            of_network = grid.last_per_noise() if "prior_precision" in grid.axes else []
            inside = Losses(candidates, loss, data.processes, of_network)
            inside.read(data.batches(first, label="grid search"))
            if data.ood_loader is None:
                return inside.results(), inside.results_of_network
            outside = Losses(candidates, entropy_of(self.group.likelihood), data.processes, of_network)
            outside.read((name, x, None) for name, x in data.ood_inputs(first))

            def less_entropy(losses: Tensor, entropies: Tensor) -> Tensor:
                return data.less_entropy(losses, entropies, outside.n_data, inside.n_data)

            values = less_entropy(inside.results(), outside.results())
            return values, lambda: less_entropy(inside.results_of_network(), outside.results_of_network())


# ----------------------------------------------------------------------------------------------------------------------
# The same loss and its gradient in every hyper-parameter, without any further pass of the network
# ----------------------------------------------------------------------------------------------------------------------
#
# The variance of an output is v = jᵀ P⁻¹ j. With z = P⁻¹ j its derivative is dv = −zᵀ (dP) z, so that for a loss L(v)
#
#     dL = −Σ (∂L/∂v) d(zᵀ P z)    at a constant z,
#
# and zᵀ P z is `Precision.quad`, which every structure can differentiate. z is L (Lᵀ j) for the root L of P⁻¹ that
# samples are drawn with; Lᵀ is the transpose of a linear map, which autograd applies.


@dataclass(frozen=True, eq=False)
class _LinearisedBatch:
    """Linearised outputs of a batch: Jacobians of consecutive parts, the mean `[B, C]`, and targets."""

    jacobians: list[Jacobian]
    mean: Tensor
    targets: Targets


class SmoothLoss(ValidationLoss):
    """A validation loss of linearised predictions, for a search by gradients; the network runs in the constructor."""

    def __init__(
        self, group: PosteriorGroup, loss: str | Loss | None, data: Validation, predictive: Predictive
    ) -> None:
        super().__init__(group, loss, data, predictive)
        if data.processes is not None:
            raise UnsupportedError(
                "group= with a search by gradients on validation data, where gradients would be those of one "
                "process's data only; use method='grid', or objective='evidence', which needs no data, or leave group "
                "at None in a process that has all of them."
            )
        kinds = [predictive.kind(posterior) for posterior in group.posteriors]
        if PredType.NN in kinds:
            raise InvalidArgument("pred_type='nn' has no gradient in the hyper-parameters; use method='grid'.")
        for posterior in group.posteriors:
            posterior.check_unchanged()
            if posterior.overrides(*PREDICTIONS):
                with posterior.as_user_object() as la:
                    name = type(la).__name__
                raise InvalidArgument(
                    f"class {name} predicts by a method of its own (one of {', '.join(PREDICTIONS)}), whose gradient "
                    "in the hyper-parameters is not known; use method='grid'."
                )
        first = group.first
        with autograd_mode(), torch.no_grad():
            self.inside = [self._run(*batch) for batch in data.batches(first)]
            self.outside: list[list[_LinearisedBatch]] = []
            if data.ood_loader is not None:
                self.entropy = entropy_of(group.likelihood)
                self.outside = [self._run(*batch) for batch in data.ood_inputs(first)]
        self.summaries = predictive.summaries(group.likelihood, for_scores=not self.loss.whole_covariance)

    def _run(self, name: str, x: Inputs, y: Tensor | None = None) -> list[_LinearisedBatch]:
        """One pass of every network over a batch."""
        rows: list[_LinearisedBatch] = []
        with named(name):
            for posterior in self.group.posteriors:
                x = batches.to_device(x, posterior.problem.device)
                with closing(latent.shifted(posterior.engine.jacobian(x), posterior.refined_step)) as pieces:
                    parts = list(pieces)
                mean = torch.cat([f for _, f in parts]).to(posterior.hypers.dtype)
                targets = Targets.from_outputs(posterior, mean, y, parts[0][0].positions)
                rows.append(_LinearisedBatch([jacobian for jacobian, _ in parts], mean, targets))
        return rows

    def gradient(self, coordinates: Coordinates, logs: Tensor) -> tuple[Tensor, Tensor]:
        every = [*self.inside, *self.outside]
        with autograd_mode(), torch.enable_grad():
            leaf = logs.clone().requires_grad_()
            group = self.group.at_hyperparameters(coordinates.hypers(leaf))
            if any(posterior.overrides(*POSTERIOR) for posterior in self.group.posteriors):
                # Of posteriors that users compute only autograd knows the derivative.
                variances = [
                    [self._users_variance(one, part) for one, part in zip(group.posteriors, batch, strict=True)]
                    for batch in every
                ]
                loss = self._loss(variances, group)
                if not loss.requires_grad:
                    raise InvalidArgument(
                        f"{self.loss.name} does not depend on the hyper-parameters in a way that autograd knows; use "
                        "method='grid', or compute the posterior with torch."
                    )
                (gradient,) = torch.autograd.grad(loss, leaf)
                return loss.detach(), gradient
            precisions = [posterior.evidence.precision for posterior in group.posteriors]
            # What a precision keeps must not depend on who asks first: with a graph, or without.
            still = self.group.at_hyperparameters(coordinates.hypers(logs.detach()))
            constants = [posterior.evidence.precision for posterior in still.posteriors]
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
                    f"{self.loss.name} cannot be differentiated; use method='grid', or compute it with torch."
                )
            leaves = [variance for batch in variances for variance in batch]
            direct, *slopes = torch.autograd.grad(loss, [leaf, *leaves], allow_unused=True, retain_graph=True)
            gradient = torch.zeros_like(leaf) if direct is None else direct
            left = iter(slopes)
            for batch in every:
                for precision, constant, part in zip(precisions, constants, batch, strict=True):
                    slope = next(left)
                    if slope is not None:
                        jacobians = [self.summaries.varied(jacobian) for jacobian in part.jacobians]
                        gradient = gradient + _through(precision, constant, jacobians, slope, leaf)
            return loss.detach(), gradient

    def _users_variance(self, posterior: Posterior, batch: _LinearisedBatch) -> Tensor:
        """`[B, C]` or `[B, C, C]`, with its graph."""
        contract = self.summaries.contraction(posterior.predictive_precision())
        return torch.cat([contract(jacobian) for jacobian in batch.jacobians])

    def _variance(self, precision: Precision, batch: _LinearisedBatch) -> Tensor:
        """`[B, C]` or `[B, C, C]`, without gradient."""
        contract, read = self.summaries.contraction(precision), self.summaries.read
        with torch.no_grad():
            return torch.cat([contract(read(jacobian)) for jacobian in batch.jacobians])

    def _loss(self, variances: list[list[Tensor]], group: PosteriorGroup) -> Tensor:
        weights, sigma = group.weights(), group.first.hypers.sigma_noise

        def mean_of(rule: LossRule, data: list[list[_LinearisedBatch]], variances: list[list[Tensor]]) -> Tensor:
            running = rule.fresh()
            for batch, variance_of_each in zip(data, variances, strict=True):
                parts = zip(batch, variance_of_each, strict=True)
                predictions = [self.summaries.of_gaussian(part.mean, variance) for part, variance in parts]
                batch[0].targets.update(running, mixed(predictions, weights), sigma)
            return running.result()

        loss = mean_of(self.loss, self.inside, variances[: len(self.inside)])
        if not self.outside:
            return loss
        entropy = mean_of(self.entropy, self.outside, variances[len(self.inside) :])
        n_ood, n_data = (sum(batch[0].targets.n_data for batch in data) for data in (self.outside, self.inside))
        return self.data.less_entropy(loss, entropy, n_ood, n_data)


def _through(
    precision: Precision, constant: Precision, jacobians: list[Jacobian], slope: Tensor, leaf: Tensor
) -> Tensor:
    """Σ (∂L/∂v) dv/d(log h), `[n]`, of one batch."""
    total, start = torch.zeros_like(leaf), 0
    for piece in (piece for jacobian in jacobians for piece in jacobian.pieces()):  # dense, `[b, C, P]`
        rows, slopes = _directions(piece, slope[start : start + len(piece)])
        start += len(piece)
        quadratic = precision.quad(constant.solve(rows))
        (gradient,) = torch.autograd.grad(-(slopes * quadratic).sum(), leaf, retain_graph=True)
        total = total + gradient
    return total


def _directions(piece: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Rows j `[m, P]` and slopes γ `[m]` with Σ_kl slope_kl d(J_k P⁻¹ J_lᵀ) = Σ_m γ_m d(jᵀ P⁻¹ j).

    For variances the rows are those of J. For covariances they are J rotated into the eigenbasis of the slope.
    """
    if slope.ndim == 2:
        return piece.flatten(0, 1), slope.flatten()
    values, vectors = eigen.eigh(0.5 * (slope + slope.transpose(1, 2)).to(piece.dtype))
    return (vectors.transpose(1, 2) @ piece).flatten(0, 1), values.flatten()
