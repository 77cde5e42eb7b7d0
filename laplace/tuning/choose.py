"""Choosing hyper-parameters: by the evidence, by the gradient of a validation loss, or by that loss on a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace.core.arguments import check_counts, positive
from laplace.core.precision_policy import wide_dtype, widened
from laplace.enums import PredType
from laplace.errors import InvalidArgument, TuningWarning, UnsupportedError, warn
from laplace.network.model_guard import autograd_mode
from laplace.posterior.posterior import Posterior
from laplace.posterior.sharding import refuse_sharded
from laplace.structures.base import Curvature
from laplace.tuning.gradient_loss import SmoothLoss
from laplace.tuning.grid import Grid, search_grid
from laplace.tuning.group import PosteriorGroup, log_mean_exp, negative_evidence, require_same_data
from laplace.tuning.search import (
    BOUND,
    NAMES,
    Climb,
    Coordinates,
    Evaluate,
    Search,
    checked_names,
    restructured,
    spread,
)
from laplace.tuning.validation import ValidationLoss

EVIDENCE = "evidence"

EVIDENCES: dict[str, Callable[[Tensor], Tensor]] = {EVIDENCE: log_mean_exp, "joint_evidence": torch.sum}
"""Evidence of a mixture from the logarithms of its components' `[K]`, by the name of the objective."""


@dataclass(frozen=True, eq=False)
class TuningResult:
    """Result of `optimize_hyperparameters`: the values that were assigned, and the course of the search.

    Attributes:
        prior_precision: Prior precision δ, `[1]`, `[n_tensors]` or `[P]`.
        sigma_noise: Observation noise σ, 0-dim or `[C]`.
        temperature: Temperature T, 0-dim.
        value: The objective at these values: the log evidence (higher is better) or the loss (lower is better).
        values: The objective at every step, `[n]`, or at every point of the grid, in its shape; float64.
        grid: Values of each tuned hyper-parameter, `[n]` each, in the order of the dimensions of `values`; empty
            without a grid.
        converged: Whether the search converged; True for a grid.
        notes: Remarks, e.g. that the objective is flat, or that the best value is on an edge of the grid.
    """

    prior_precision: Tensor
    sigma_noise: Tensor
    temperature: Tensor
    value: float
    values: Tensor = field(repr=False)
    grid: dict[str, Tensor] = field(repr=False)
    converged: bool
    notes: tuple[str, ...]

    def noting(self, note: str) -> TuningResult:
        """A copy with one more note, before the others."""
        return replace(self, notes=(note, *self.notes))

    def values_of(self, names: Sequence[str] = NAMES) -> dict[str, Tensor]:
        """The hyper-parameters as a dictionary, by name."""
        return {name: getattr(self, name) for name in names}


def check_predictive(pred_type: Any) -> None:
    """Checks the first argument of `optimize_prior_precision`, in whose place others are given.

    Raises:
        InvalidArgument: It is no predictive.
    """
    if str(pred_type) in tuple(PredType):
        return
    given = repr(str(pred_type)) if isinstance(pred_type, str) else f"a {type(pred_type).__name__}"
    raise InvalidArgument(
        f"pred_type is {given}; accepted are 'glm' and 'nn' ('gp' for hessian_structure='gp'). It is the first "
        "argument of optimize_prior_precision: give others by name, method='gridsearch', val_loader=..."
    )


def prior_by_evidence(group: PosteriorGroup, init: float | Tensor, structure: str, climb: Climb) -> TuningResult:
    """The prior precision of the largest evidence, by a search from `init`; the posteriors are not changed.

    Raises:
        InvalidArgument: Unknown structure, or a start that is no prior precision.
    """
    now = group.hypers(("prior_precision",))
    start = replace(now, prior_precision=spread(init, structure, group.layout, now.prior_precision))
    return by_evidence(group, Coordinates(("prior_precision",), start), climb)


def prior_on_grid(group: PosteriorGroup, values: Tensor, structure: str, loss: ValidationLoss) -> TuningResult:
    """The prior precision `[n]` of the smallest validation loss; the posteriors are not changed.

    One value is searched, whatever the structure it is then written in: the posterior is the same.

    Raises:
        InvalidArgument: Unknown structure, or no candidate with a finite loss.
    """
    written = spread(1.0, structure, group.layout, values)
    return on_grid(group, {"prior_precision": values}, written, loss)


def powers(base: float, low: float, high: float, n: int, like: Tensor) -> Tensor:
    """The candidates base^low … base^high, `[n]`.

    Raises:
        InvalidArgument: None, or some that are no precisions.
    """
    check_counts(grid_size=n)
    name = f"log_prior_prec_base={base} to the powers from log_prior_prec_min={low} to log_prior_prec_max={high}"
    return positive(name, torch.logspace(low, high, n, base, dtype=like.dtype, device=like.device))


def coordinates_of(
    group: PosteriorGroup, tune: str | Sequence[str], structure: str | None, *, by_evidence: bool
) -> Coordinates:
    """Coordinates of what is tuned, from where it is now; a prior that is tuned in the structure that is asked for.

    Raises:
        InvalidArgument: Names or a structure that are not accepted.
    """
    names = checked_names(tune, has_noise=group.likelihood.has_noise, by_evidence=by_evidence)
    now = group.hypers(names)
    prior = restructured(now.prior_precision, structure, group.layout)
    return Coordinates(names, replace(now, prior_precision=prior) if "prior_precision" in names else now)


def by_evidence(group: PosteriorGroup, coordinates: Coordinates, climb: Climb) -> TuningResult:
    """The hyper-parameters of the largest evidence, with notes where the curvature misleads it.

    Raises:
        InvalidArgument: The mean of evidences of different numbers of data; their product may be maximised.
    """
    if group.combined is log_mean_exp:
        require_same_data([posterior.fit.n_data for posterior in group.posteriors])
    result = _climbed(negative_evidence(group, coordinates), coordinates, climb, sign=-1)
    curvatures = [posterior.fit.curvature for posterior in group.posteriors]
    notes = [_cut(result, max(curvature.tail for curvature in curvatures)), _cancelled(coordinates, curvatures)]
    if result.converged and "sigma_noise" in coordinates.names:
        notes += [inflated_noise(one, result.sigma_noise, result.temperature) for one in group.posteriors]
    return replace(result, notes=(*result.notes, *dict.fromkeys(note for note in notes if note)))


def _cut(result: TuningResult, tail: float) -> str | None:
    """A note where a truncated curvature misleads the evidence.

    Directions that were cut count as if the data said nothing of them, so that their log det P / P₀ is missing, and
    with it what keeps the prior precision from falling.
    """
    scale = 1 / (result.sigma_noise.square().min() * result.temperature)
    cut, smallest = tail * scale.item(), result.prior_precision.min().item()
    if cut <= smallest:
        return None
    return (
        f"the curvature leaves out eigenvalues up to {cut:.2g}, more than the prior precision {smallest:.2g}: the "
        "evidence then favours priors that are too weak; raise structure_kwargs={'rank': …}, or tune on validation data"
    )


def _cancelled(coordinates: Coordinates, curvatures: Sequence[Curvature]) -> str | None:
    """A note where a search cancels the factor of the prior that a subset of the data has."""
    factor = max(curvature.prior_factor for curvature in curvatures)
    if factor == 1 or "prior_precision" not in coordinates.names:
        return None
    return (
        f"the subset's evidence sees the product of the prior precision and the factor {factor:.3g} alone, so that a "
        "search cancels the factor: the variances are those of a posterior of the subset alone; tune "
        "on validation data (method='gridsearch')"
    )


def by_gradient(group: PosteriorGroup, coordinates: Coordinates, loss: ValidationLoss, climb: Climb) -> TuningResult:
    """The hyper-parameters of the smallest validation loss, by its gradient.

    Raises:
        UnsupportedError: Several processes have the validation data, or the curvature.
    """
    for posterior in group.posteriors:
        refuse_sharded(posterior, "tuning on validation data")
    if loss.data.processes is not None:
        raise UnsupportedError(
            f"group= with method={climb.method!r} on validation data, where gradients would be those of one process's "
            "data only; use method='grid', or objective='evidence', which needs no data, or leave group at None in a "
            "process that has all of them."
        )
    return _climbed(SmoothLoss(group, coordinates, loss), coordinates, climb, sign=1)


def on_grid(group: PosteriorGroup, axes: dict[str, Tensor], prior: Tensor, loss: ValidationLoss) -> TuningResult:
    """The best candidate of a grid; a tuned prior precision is written in the structure of `prior`."""
    axes = _accepted(axes, loss)
    now = group.hypers(tuple(axes))
    if "prior_precision" not in axes and now.prior_precision.numel() > 1:
        raise InvalidArgument(
            "a grid of noises or temperatures needs one prior precision for all parameters, or one that is tuned too; "
            "tune='prior_precision' as well, or use method='lbfgs'."
        )
    grid = Grid.over(axes, now)
    search = search_grid(group, grid, loss)
    best = grid.settings[search.place]
    chosen = best.prior_precision
    chosen = chosen.expand_as(prior).clone() if "prior_precision" in axes else chosen
    value, notes = search.values.flatten()[search.place].item(), tuple(search.notes)
    return TuningResult(
        chosen, best.sigma_noise.clone(), best.temperature.clone(), value, search.values, axes, True, notes
    )


def _accepted(axes: dict[str, Tensor], loss: ValidationLoss) -> dict[str, Tensor]:
    """The axes as a loss can be searched on them: thresholds are met by the smallest of ascending prior precisions.

    Raises:
        InvalidArgument: Thresholds with what they do not go with.
    """
    if not loss.objective.thresholds:
        return axes
    if tuple(axes) != ("prior_precision",):
        raise InvalidArgument("Thresholds choose a prior precision; give tune='prior_precision'.")
    if loss.data.ood_loader is not None:
        raise InvalidArgument(
            "Thresholds are met or not, whatever the entropy on ood_loader is; leave it out, or give another "
            "objective, such as 'nll'."
        )
    return {"prior_precision": axes["prior_precision"].sort().values}


def report(result: TuningResult) -> None:
    """Issues the notes of a result as one `TuningWarning`."""
    if result.notes:
        what = "grid search" if result.grid else "tuning"
        warn(f"{what}: {'; '.join(result.notes)}.", TuningWarning)


def _climbed(evaluate: Evaluate, coordinates: Coordinates, climb: Climb, *, sign: int) -> TuningResult:
    """Result of a search by gradients; `sign` is −1 where the negative of the objective is made small."""
    search = climb(evaluate, coordinates.vector())
    with torch.no_grad():
        best = coordinates.hypers(search.best)
    values = torch.tensor([sign * value for value in search.values], dtype=wide_dtype())
    value, notes = sign * search.best_value, (*_notes(coordinates, search), *climb.shortfall(search))
    return TuningResult(
        best.prior_precision, best.sigma_noise, best.temperature, value, values, {}, search.converged, notes
    )


def _notes(coordinates: Coordinates, search: Search) -> list[str]:
    """Notes on objectives that are not finite or flat, and on optima at the bound."""
    notes: list[str] = []
    names = " and the ".join(name.replace("_", " ") for name in coordinates.names)
    if search.bad:
        notes.append(f"the objective was NaN or infinite in {search.bad} of {len(search.values)} steps")
    if search.is_flat() and search.slope == 0:
        notes.append(f"the objective does not depend on the {names}; choose one that reads the predictive variance")
    if search.at_bound():
        notes.append(f"the best value has a hyper-parameter at the bound of the search, 1e-10 or 1e10: the {names} may "
                     "have no finite optimum")  # fmt: skip
    return notes


# Says when the evidence chose a noise far larger than the residuals.
#
# In σ the evidence is stationary where σ² = Σ r² / (n − γ) for n observed values with residuals r, of which γ, the
# effective number of parameters, count as explained by the weights (MacKay, 1992, "Bayesian interpolation"). Curvature
# that leaves out how weights depend on each other has a larger γ than the GGN; with fewer data than weights it may come
# close to n, and σ is then too large by √(n / (n − γ)).


_LARGEST_RATIO = 1.5
"""Of the noise and the residuals: at 1.5 five ninths of the observed values count as explained."""


def inflated_noise(posterior: Posterior, sigma_noise: Tensor, temperature: Tensor) -> str | None:
    """A note where the noise that the evidence chose is far larger than the residuals, or None.

    Args:
        posterior: What was tuned.
        sigma_noise: The noise σ, 0-dim or `[C]`.
        temperature: The temperature T, by which σ² is multiplied in the likelihood.
    """
    fit = posterior.fit
    squares = posterior.likelihood.mean_squares(widened(fit.loss_terms), fit.n_data, fit.n_outputs)
    if squares is None:
        return None
    noise = (widened(sigma_noise.detach()).square() * widened(temperature.detach())).sqrt()
    residual = (squares if noise.ndim else squares.mean()).sqrt()
    worst = (noise / residual).argmax()
    sigma, spread = noise.reshape(-1)[worst].item(), residual.reshape(-1)[worst].item()
    if not sigma > _LARGEST_RATIO * spread:
        return None
    explained = 100 * (1 - (spread / sigma) ** 2)
    ratio = f"{sigma / spread:.3g} times " if spread else "with "
    return (
        f"the evidence chose a noise of {sigma:.3g}, {ratio}the root mean square {spread:.2g} of the "
        f"residuals, since it counts {explained:.0f} % of the observed values as explained by the weights; a curvature "
        "that leaves out how weights depend on each other overstates that where data are few: compare "
        "hessian_structure='full', use the last layer, or tune on validation data"
    )


# The prior precision of the largest evidence by a fixed point (MacKay, 1992; Antorán et al., 2023, section 3.3).
#
# Where ∂ log p(D) / ∂δ is zero, δ_t ‖θ* − μ₀‖²_t is γ_t, the number of the entries of tensor t that the data determine:
#
#     δ_t ← γ_t / ‖θ* − μ₀‖²_t,    γ_t = n_t − δ_t tr_t P⁻¹ = δ_t (2 ∂ log p(D) / ∂δ_t + ‖θ* − μ₀‖²_t).
#
# A step takes the gradient of the evidence alone and no step size, and tends to be within a few percent after a few of
# them: what suits an evidence that costs solutions of linear systems, and is known with a standard error.


_TOLERANCE = 1e-3
"""Change of log δ at which it has converged."""

_NEAR_BOUND = BOUND - 1e-3
"""Largest |log δ| that is within the bound of a search, and not at it."""

_SMALLEST_FACTOR = 0.1
"""Factor of δ in one step at least: an estimate of γ may be negative, its expectation is not."""


def prior_by_fixed_point(
    group: PosteriorGroup, init: float | Tensor, structure: str, n_steps: int, *, progress_bar: bool = False
) -> TuningResult:
    """The prior precision at which the gradient of the log evidence vanishes; the posterior is not changed.

    Args:
        group: One posterior.
        init: Where it begins; a vector keeps its structure.
        structure: `"scalar"`, `"layerwise"` or `"diag"`.
        n_steps: Steps at most.
        progress_bar: Show a progress bar.

    Raises:
        UnsupportedError: Several posteriors, whose mixture has no such equation.
        InvalidArgument: Unknown structure, or a start that is no prior precision.
    """
    check_counts(n_steps=n_steps)
    if len(group.posteriors) > 1:
        raise UnsupportedError("method='em' is for one posterior; tune a mixture by method='marglik'.")
    now = group.hypers(("prior_precision",))
    delta = spread(init, structure, group.layout, now.prior_precision)
    values: list[float] = []
    converged = False
    with autograd_mode(), torch.enable_grad(), tqdm(total=n_steps, desc="em", disable=not progress_bar) as bar:
        for _ in range(n_steps):
            bar.update()
            value, factor = _step(group.first, delta)
            values.append(value)
            former = delta
            delta = (widened(delta) * factor).log().clamp(-BOUND, BOUND).exp().to(delta.dtype)
            converged = bool(((widened(delta) / widened(former)).log().abs() <= _TOLERANCE).all())
            if converged:
                break
    notes = () if converged else (f"the prior precision still moved after {n_steps} steps; raise n_steps",)
    if bool((widened(delta).log().abs() >= _NEAR_BOUND).any()):
        notes = (
            *notes,
            "a prior precision is at the bound of the search, 1e-10 or 1e10: it may have no finite optimum",
        )
    seen = torch.tensor(values, dtype=wide_dtype())
    return TuningResult(delta, now.sigma_noise, now.temperature, values[-1], seen, {}, converged, notes)


def _step(posterior: Posterior, delta: Tensor) -> tuple[float, Tensor]:
    """The log evidence at δ, and the factor γ / (δ ‖θ* − μ₀‖²) of the next one, float64."""
    leaf = delta.detach().clone().requires_grad_()
    at = posterior.at(replace(posterior.hypers, prior_precision=leaf))
    value = at.log_evidence()
    (slope,) = torch.autograd.grad(value, leaf)
    (square,) = torch.autograd.grad(at.prior.quad(at.mean), leaf)
    slope, square = widened(slope), widened(square)
    # Of a tensor that is zero and that nothing is known of there is no fixed point: its precision stays.
    known = 2 * widened(leaf.detach()) * slope > torch.finfo(leaf.dtype).eps * len(at.mean)
    factor = torch.where((square > 0) | known, 1 + 2 * slope / square, 1.0)
    return value.item(), factor.clamp(min=_SMALLEST_FACTOR)
