"""Hyper-parameters, objective and method of a tuning: from its arguments to its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core.hyperparameters import check_counts, positive
from laplace.core.precision_policy import wide_dtype
from laplace.enums import PredType, TuningMethod
from laplace.errors import InvalidArgument, TuningWarning, warn
from laplace.tuning.candidates import Predictive
from laplace.tuning.gradient_loss import SmoothLoss
from laplace.tuning.grid import Grid, make_axes, search_grid
from laplace.tuning.group import PosteriorGroup, negative_evidence
from laplace.tuning.objectives import make_objective
from laplace.tuning.optimise import Evaluate, Search, minimise
from laplace.tuning.settings import NAMES, Coordinates, checked_names, restructured, spread
from laplace.tuning.validation import Validation

EVIDENCE = "evidence"


@dataclass(frozen=True)
class TuningOptions:
    """The arguments of `optimize_prior_precision`, documented there."""

    method: str
    n_steps: int
    lr: float
    init_prior_prec: float | Tensor
    prior_structure: str
    val_loader: Iterable[Any] | None
    loss: Any
    log_prior_prec_min: float
    log_prior_prec_max: float
    grid_size: int
    log_prior_prec_base: float
    predictive: Predictive
    progress_bar: bool


@dataclass(frozen=True)
class SearchOptions:
    """The arguments of `optimize_hyperparameters`, documented there."""

    tune: str | Sequence[str]
    objective: Any
    method: str | None
    prior_structure: str | None
    val_loader: Iterable[Any] | None
    ood_loader: Iterable[Any] | None
    ood_weight: float
    grid: Mapping[str, Tensor | Sequence[float]] | None
    n_steps: int
    lr: float
    tolerance: float
    predictive: Predictive
    progress_bar: bool


@dataclass(frozen=True)
class TuningResult:
    """Result of a tuning, and the way to it.

    Attributes:
        prior_precision: δ, `[1]`, `[n_tensors]` or `[P]`.
        sigma_noise: σ, 0-dim or `[C]`.
        temperature: T, 0-dim.
        value: The objective there: the log evidence (large is good), or the loss (small is good).
        values: The objective at every step, `[n]`, or at every candidate, in the shape of the grid; float64, not
            finite where it does not exist.
        grid: Values of every tuned hyper-parameter, `[n]` each, in the order of the dimensions of `values`; empty
            without a grid.
        converged: Whether the search ended by itself; True for a grid.
        notes: What is worth knowing, in words: flat objectives, edges, values that are not finite.
    """

    prior_precision: Tensor
    sigma_noise: Tensor
    temperature: Tensor
    value: float
    values: Tensor = field(repr=False)
    grid: dict[str, Tensor] = field(repr=False)
    converged: bool
    notes: tuple[str, ...]

    def values_of(self, names: Sequence[str] = NAMES) -> dict[str, Tensor]:
        """The hyper-parameters of some names."""
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


def choose_prior_precision(group: PosteriorGroup, options: TuningOptions) -> TuningResult:
    """The best prior precision by the chosen method; the posteriors are not changed.

    Raises:
        InvalidArgument: Unknown method or structure, or missing validation data.
    """
    group.check_structure(options.prior_structure)
    layout, like = group.layout, group.first.hypers.prior_precision
    now = group.hypers(("prior_precision",))
    if options.method == TuningMethod.MARGLIK:
        start = replace(now, prior_precision=spread(options.init_prior_prec, options.prior_structure, layout, like))
        coordinates = Coordinates(("prior_precision",), start)
        search = minimise(
            negative_evidence(group, coordinates), coordinates.vector(), method="adam", n_steps=options.n_steps,
            lr=options.lr, tolerance=0.0, label=EVIDENCE, progress_bar=options.progress_bar,
        )  # fmt: skip
        unused = "val_loader is not used by method='marglik'; use method='gridsearch' to tune on validation data"
        result = _by_evidence(group, _moved(coordinates, search, sign=-1))
        return result if options.val_loader is None else replace(result, notes=(unused, *result.notes))
    if options.method in (TuningMethod.GRIDSEARCH, TuningMethod.CV):
        if options.val_loader is None:
            raise InvalidArgument(f"method={options.method!r} needs val_loader=, the validation data.")
        # One value is searched, whatever the structure it is then written in: the posterior is the same.
        structured = spread(1.0, options.prior_structure, layout, like)
        return _on_grid(
            group, {"prior_precision": _powers(options, like)}, options.loss, Validation(options.val_loader),
            options.predictive, structured, progress_bar=options.progress_bar,
        )  # fmt: skip
    raise InvalidArgument(f"method={options.method!r}; accepted are 'marglik', 'gridsearch' and 'CV'.")


def _powers(options: TuningOptions, like: Tensor) -> Tensor:
    """The candidates base^min … base^max, `[n]`.

    Raises:
        InvalidArgument: None, or some that are no precisions.
    """
    low, high, base, n = (
        options.log_prior_prec_min, options.log_prior_prec_max, options.log_prior_prec_base, options.grid_size,
    )  # fmt: skip
    check_counts(grid_size=n)
    name = f"log_prior_prec_base={base} to the powers from log_prior_prec_min={low} to log_prior_prec_max={high}"
    return positive(name, torch.logspace(low, high, n, base, dtype=like.dtype, device=like.device))


def choose_hyperparameters(group: PosteriorGroup, options: SearchOptions) -> TuningResult:
    """The best hyper-parameters by the chosen objective; the posteriors are not changed.

    Raises:
        InvalidArgument: Arguments that do not belong together, or no finite objective.
    """
    group.check_structure(options.prior_structure)
    by_evidence = isinstance(options.objective, str) and options.objective == EVIDENCE
    has_noise = group.likelihood.has_noise
    names = checked_names(options.tune, has_noise=has_noise, by_evidence=by_evidence)
    now = group.hypers(names)
    prior = restructured(now.prior_precision, options.prior_structure, group.layout)
    start = replace(now, prior_precision=prior) if "prior_precision" in names else now
    method = options.method or ("lbfgs" if by_evidence else "grid")
    if method != "grid" and options.grid is not None:
        raise InvalidArgument(f"grid= is not used by method={method!r}; use method='grid', or leave it out.")
    coordinates = Coordinates(names, start)
    if by_evidence:
        _refuse_data(options, method)
        result = _climbed(negative_evidence(group, coordinates), coordinates, options, method, sign=-1)
        return _by_evidence(group, result)
    if options.val_loader is None:
        raise InvalidArgument(f"objective={options.objective!r} needs val_loader=, the validation data.")
    validation = Validation(options.val_loader, options.ood_loader, options.ood_weight)
    if method == "grid":
        axes = make_axes(names, options.grid, now.prior_precision)
        return _on_grid(
            group, axes, options.objective, validation, options.predictive, prior, progress_bar=options.progress_bar
        )
    objective = make_objective(options.objective, group.likelihood)
    loss = SmoothLoss(group, coordinates, objective, validation, options.predictive, progress_bar=options.progress_bar)
    return _climbed(loss, coordinates, options, method, sign=1)


def report(result: TuningResult) -> None:
    """Warns whoever called the library, once, of all that there is to note."""
    if result.notes:
        what = "grid search" if result.grid else "tuning"
        warn(f"{what}: {'; '.join(result.notes)}.", TuningWarning)


def _refuse_data(options: SearchOptions, method: str) -> None:
    """Raises where the evidence is given what it does not use."""
    if options.val_loader is not None or options.ood_loader is not None:
        raise InvalidArgument(
            "the evidence uses no validation data; leave val_loader and ood_loader out, or give another objective, "
            "such as 'nll'."
        )
    if method == "grid":
        raise InvalidArgument(
            "method='grid' is for validation data; the evidence has gradients: use 'lbfgs' or 'adam'."
        )


def _climbed(
    evaluate: Evaluate, coordinates: Coordinates, options: SearchOptions, method: str, *, sign: int
) -> TuningResult:
    """The result of a search by gradients, with all that is worth a warning."""
    search = minimise(
        evaluate, coordinates.vector(), method=method, n_steps=options.n_steps, lr=options.lr,
        tolerance=options.tolerance, progress_bar=options.progress_bar,
    )  # fmt: skip
    result = _moved(coordinates, search, sign=sign)
    if search.converged or search.is_flat():
        return result
    slope = f"the search did not converge in {options.n_steps} steps (largest slope {search.slope:.2g} per log unit)"
    return replace(result, notes=(*result.notes, f"{slope}; raise n_steps"))


def _moved(coordinates: Coordinates, search: Search, *, sign: int) -> TuningResult:
    """Result of a search by gradients; `sign` is −1 where the negative of the objective was made small."""
    notes: list[str] = []
    names = " and the ".join(name.replace("_", " ") for name in coordinates.names)
    if search.bad:
        notes.append(f"the objective was NaN or infinite in {search.bad} of {len(search.values)} steps")
    if search.is_flat() and search.slope == 0:
        notes.append(f"the objective does not depend on the {names}; choose one that reads the predictive variance")
    if search.at_bound():
        notes.append(f"the best value has a hyper-parameter at the bound of the search, 1e-10 or 1e10: the {names} may "
                     "have no finite optimum")  # fmt: skip
    with torch.no_grad():
        best = coordinates.hypers(search.best)
    values = torch.tensor([sign * value for value in search.values], dtype=wide_dtype())
    value = sign * search.best_value
    return TuningResult(
        best.prior_precision, best.sigma_noise, best.temperature, value, values, {}, search.converged, tuple(notes)
    )


def _by_evidence(group: PosteriorGroup, result: TuningResult) -> TuningResult:
    """The result, with a note where a truncated curvature leaves out more than the prior adds.

    Directions that were cut count as if the data said nothing of them, so that their log det P / P₀ is missing, and
    with it what keeps the prior precision from falling.
    """
    scale = 1 / (result.sigma_noise.square().min() * result.temperature)
    cut = max(posterior.fit.curvature.tail for posterior in group.posteriors) * scale.item()
    smallest = result.prior_precision.min().item()
    if cut <= smallest:
        return result
    note = (
        f"the curvature leaves out eigenvalues up to {cut:.2g}, more than the prior precision {smallest:.2g}: the "
        "evidence then favours priors that are too weak; raise structure_kwargs={'rank': …}, or tune on validation data"
    )
    return replace(result, notes=(*result.notes, note))


def _on_grid(
    group: PosteriorGroup,
    axes: dict[str, Tensor],
    loss: Any,
    validation: Validation,
    predictive: Predictive,
    prior: Tensor,
    *,
    progress_bar: bool,
) -> TuningResult:
    """The best candidate of a grid; a tuned prior precision is written in the structure of `prior`."""
    objective = make_objective(loss, group.likelihood)
    if objective.thresholds:
        if tuple(axes) != ("prior_precision",):
            raise InvalidArgument("Thresholds choose a prior precision; give tune='prior_precision'.")
        if validation.ood_loader is not None:
            raise InvalidArgument(
                "Thresholds are met or not, whatever the entropy on ood_loader is; leave it out, or give another "
                "objective, such as 'nll'."
            )
        axes = {"prior_precision": axes["prior_precision"].sort().values}
    now = group.hypers(tuple(axes))
    if "prior_precision" not in axes and now.prior_precision.numel() > 1:
        raise InvalidArgument(
            "a grid of noises or temperatures needs one prior precision for all parameters, or one that is tuned too; "
            "tune='prior_precision' as well, or use method='lbfgs'."
        )
    grid = Grid.over(axes, now)
    search = search_grid(group, grid, objective, validation, predictive, progress_bar=progress_bar)
    best = grid.settings[search.place]
    chosen = best.prior_precision
    chosen = chosen.expand_as(prior).clone() if "prior_precision" in axes else chosen
    value, notes = search.values.flatten()[search.place].item(), tuple(search.notes)
    return TuningResult(
        chosen, best.sigma_noise.clone(), best.temperature.clone(), value, search.values, axes, True, notes
    )
