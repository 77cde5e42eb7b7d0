"""Bytes of a fit and a prediction before they are run: cheaper choices, refusal of what is too large."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.memory import LEAST, Available, available, in_units
from laplace.core.progress import known_length
from laplace.engines.cost import Cost
from laplace.engines.engine import CurvatureEngine
from laplace.engines.profile import BatchProfile
from laplace.enums import SubsetOfWeights
from laplace.errors import InvalidArgument, InvalidData, OutOfMemory, UnsupportedError
from laplace.fitting.fit import FitOptions, engine_for, infer_from_first_batch
from laplace.likelihoods.base import Likelihood
from laplace.network import next_token
from laplace.network.fsdp import require_unsharded
from laplace.network.model_guard import autograd_mode, same_random_state
from laplace.posterior.posterior import Posterior
from laplace.structures import STRUCTURES, Curvature
from laplace.weights.problem import Problem

_SHARE = 6
"""A batch holds its output gradients several times, and what is made of them."""

_NAMED = 4
"""Other choices that a refusal names."""


@dataclass(frozen=True)
class Estimate:
    """Estimated memory of one structure for one choice of weights.

    Attributes:
        weights: `"all"`, `"last_layer"` or `"subnetwork"`.
        structure: Name of the structure.
        peak_bytes: Peak memory of the fit, on top of what is allocated before it.
        kept_bytes: Memory of the fitted curvature.
        predict_bytes: Peak memory of the first prediction, on top of what is allocated after the fit.
        note: Words about the form that the structure takes for so many data; empty if there is only one.
    """

    weights: str
    structure: str
    peak_bytes: int
    kept_bytes: int
    predict_bytes: int
    note: str = ""

    def __str__(self) -> str:
        choice = f"{self.weights} / {self.structure}"
        sizes = (in_units(value) for value in (self.peak_bytes, self.kept_bytes, self.predict_bytes))
        return " ".join([f"{choice:<26}", *(f"{size:>13}" for size in sizes)])


@dataclass(frozen=True)
class FitPlan:
    """Estimated memory of a fit, which `la.plan(loader)` returns; nothing has been fitted. `print` shows a table.

    It is computed from shapes, and is right to within a factor of two above some tens of MiB.

    Attributes:
        chosen: The estimate for this posterior.
        cheaper: Estimates for other choices that need less memory, in descending order.
        n_batches: Number of batches; None if the loader has no length.
        bearable: The `memory_budget` that a card would bear by what is free there, in bytes; None of a CPU.
    """

    chosen: Estimate
    cheaper: tuple[Estimate, ...]
    n_batches: int | None
    bearable: int | None = None

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the fit, on top of what is allocated before it."""
        return self.chosen.peak_bytes

    @property
    def kept_bytes(self) -> int:
        """Memory of the fitted curvature."""
        return self.chosen.kept_bytes

    @property
    def predict_bytes(self) -> int:
        """Peak memory of the first prediction, on top of what is allocated after the fit."""
        return self.chosen.predict_bytes

    def __str__(self) -> str:
        what = "one batch" if self.n_batches is None else f"{self.n_batches} batches"
        head = f"{'weights / structure':<26} {'fit: peak':>13} {'kept':>13} {'predict: peak':>13}"
        lines = [f"fit to {what}, first prediction of one", head, str(self.chosen)]
        note = [f"  {self.chosen.note}"] if self.chosen.note else []
        if self.bearable is not None:
            budget = f"backend_kwargs={{'memory_budget': {self.bearable}}}"
            note.append(f"  the card would bear {budget}, {in_units(self.bearable)}: fewer, larger operations")
        return "\n".join(
            [*lines, *note, *(["cheaper:"] if self.cheaper else []), *(str(other) for other in self.cheaper)]
        )


def make_plan(
    profile: BatchProfile, problem: Problem, structure: type[Curvature], options: Any, n_batches: int | None
) -> FitPlan:
    """The plan of one choice, with the cheaper ones of all registered structures."""
    weights, profile = _choice(problem), replace(profile, n_batches=n_batches)
    chosen = _estimate(profile, weights, structure, structure.cost(profile, options))
    others = [(weights, profile)]
    head = profile.head() if weights == SubsetOfWeights.ALL else None
    if head is not None:
        others.append((str(SubsetOfWeights.LAST_LAYER), head))
    estimates = [_default(seen, name, STRUCTURES[key]) for name, seen in others for key in STRUCTURES]
    cheaper = [estimate for estimate in estimates if estimate is not None and estimate.peak_bytes < chosen.peak_bytes]
    free = available(profile.device) if profile.device.type != "cpu" else None
    bearable = None if free is None else free.size // _SHARE
    return FitPlan(chosen, tuple(sorted(cheaper, key=lambda estimate: -estimate.peak_bytes)), n_batches, bearable)


def _choice(problem: Problem) -> str:
    if problem.head is not None:
        return str(SubsetOfWeights.LAST_LAYER)
    whole = all(slot.entries is None for slot in problem.slots)
    return str(SubsetOfWeights.ALL if whole else SubsetOfWeights.SUBNETWORK)


def _default(profile: BatchProfile, weights: str, structure: type[Curvature]) -> Estimate | None:
    """A structure with its default options, or None where it does not fit the problem, cannot say, or is refused."""
    options = structure.options()
    try:
        structure.check(profile.layout, options)
        cost = structure.cost(profile, options)
    except (InvalidArgument, UnsupportedError):
        return None
    if cost.assumed or (cost.columns and not profile.n_columns):
        return None
    if profile.refused and not (profile.is_head or cost.vectors):  # products with vectors take no columns
        return None
    return _estimate(profile, weights, structure, cost)


def _estimate(profile: BatchProfile, weights: str, structure: type[Curvature], cost: Cost) -> Estimate:
    return Estimate(
        weights=weights,
        structure=structure.name,
        peak_bytes=cost.fit_bytes(profile),
        kept_bytes=cost.fitted,
        predict_bytes=cost.predict_bytes(profile),
        note=cost.note,
    )


def plan(posterior: Posterior, loader: Iterable[Any]) -> tuple[Posterior, FitPlan]:
    """The posterior with what the first batch tells, and what a fit would take; errors: see `la.plan`."""
    choices, model = posterior.choices, posterior.model
    require_unsharded(model, "timing takes passes that other processes do not make")
    with autograd_mode(), torch.no_grad(), same_random_state(model):
        batches.require_rereadable(loader, "plan reads the first batch, which would be missing in a fit")
        x, y = _first_counted(loader, choices.dict_key_y, posterior.hypers.device, posterior.likelihood, model)
        posterior = infer_from_first_batch(posterior, x, y)
        profile = engine_for(posterior, FitOptions()).profile(x, y)
    how = (posterior.problem, choices.structure, choices.structure_options, known_length(loader))
    return posterior, make_plan(profile, *how)


def _first_counted(
    loader: Iterable[Any], dict_key_y: str, device: torch.device, likelihood: Likelihood, model: nn.Module
) -> tuple[Inputs, Tensor]:
    """The data of the first batch that has any, without ignored ones."""
    for _, x, y in next_token.read(loader, dict_key_y, device, likelihood, model):
        return x, y
    raise InvalidData("the loader gave no data, or all are ignored; a plan needs at least one datum.")


@dataclass(frozen=True)
class MemoryCheck:
    """Refuses a fit that would take more memory than there is."""

    problem: Problem
    structure: type[Curvature]
    options: Any
    n_batches: int | None = None  # How many batches there are, or None if that is unknown

    def before(self, engine: CurvatureEngine, loader: Iterable[Any], dict_key_y: str) -> None:
        """Refuses a fit that is too large whatever its data; only then a batch is read, which says what is not."""
        least = engine.profile_by_shapes()
        lacking = None if least is None else self.lacking(least)
        if lacking is None:
            return
        x, _ = _first_counted(loader, dict_key_y, self.problem.device, engine.likelihood, self.problem.module)
        profile = engine.profile_by_shapes(x)
        if profile is not None:
            raise self.refusal(profile, lacking)

    def __call__(self, profile: BatchProfile) -> None:
        """Looks at what a batch shows, whose forward pass is held by now."""
        lacking = self.lacking(profile)
        if lacking is not None:
            raise self.refusal(profile, lacking)

    def lacking(self, profile: BatchProfile) -> Available | None:
        """Available memory if the fit takes more; None if it is enough, or nobody can say."""
        asked = self.structure.cost, profile, self.n_batches, self.options
        try:
            needed = _known_bytes(*asked, repr(self.options))
        except TypeError:  # options that cannot be kept
            needed = _bytes(*asked)
        if needed is None or needed <= LEAST:
            return None
        there = available(self.problem.device)
        return there if there is not None and there.size < needed else None

    def refusal(self, profile: BatchProfile, there: Available) -> OutOfMemory:
        """The error, with other choices that memory holds."""
        plan = make_plan(profile, self.problem, self.structure, self.options, self.n_batches)
        return OutOfMemory(
            f"a fit of subset_of_weights={plan.chosen.weights!r}, hessian_structure={plan.chosen.structure!r} would "
            f"take {in_units(plan.peak_bytes)} more than is in use now, but only {in_units(there.size)} are available "
            f"({there.source}). {self._advice(profile, plan, there)} fit(..., check_memory=False) tries it anyway."
        )

    def _advice(self, profile: BatchProfile, plan: FitPlan, there: Available) -> str:
        """Ways to take less: other choices, smaller batches, fewer weights."""
        chosen = plan.chosen
        others = [o for o in plan.cheaper if (o.weights, o.structure) != (chosen.weights, chosen.structure)]
        small = [other for other in others if other.peak_bytes <= there.size]
        ways = [f"Choose what takes less: {_listed(small, chosen.weights)}."] if small else []
        small_batch = replace(profile, n_batches=self.n_batches).of_one_datum()
        if self.structure.cost(small_batch, self.options).fit_bytes(small_batch) <= there.size:
            ways.append("Give the loader smaller batches (batch_size).")
        if not ways:
            fewer = "" if chosen.weights == SubsetOfWeights.SUBNETWORK else ", of a subnetwork"
            ways.append(f"Choose fewer weights{fewer}, or free memory.")
        return " ".join(ways)


def _bytes(
    cost: Callable[[BatchProfile, Any], Cost], profile: BatchProfile, n_batches: int | None, options: Any
) -> int | None:
    """Bytes of a fit; None of a structure that does not say what it takes, or an upper bound alone."""
    try:
        costs = cost(replace(profile, n_batches=n_batches), options)
    except UnsupportedError:
        return None
    return None if costs.assumed else costs.fit_bytes(profile)


@lru_cache(maxsize=64)
def _known_bytes(cost: Any, profile: BatchProfile, n_batches: int | None, options: Any, shown: str) -> int | None:
    """The same, asked once of fits of one form: of one network, and of batches of one size, there are many.

    `shown` are the options as text, in which 1 and 1.0 differ: a number of columns, and a share of them.
    """
    return _bytes(cost, profile, n_batches, options)


def _listed(choices: list[Estimate], weights: str) -> str:
    """Choices in words: the largest ones, which say most, and the smallest."""
    named = choices if len(choices) <= _NAMED else [*choices[: _NAMED - 1], choices[-1]]
    return ", ".join(
        ("" if other.weights == weights else f"subset_of_weights={other.weights!r} with ")
        + f"hessian_structure={other.structure!r} ({in_units(other.peak_bytes)})"
        for other in named
    )
