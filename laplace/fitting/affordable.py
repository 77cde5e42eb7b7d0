"""Refusal of a fit that memory does not hold, by the shapes of its first batch, before its curvature is summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from laplace.engines.profile import BatchProfile
from laplace.enums import SubsetOfWeights
from laplace.errors import OutOfMemory, UnsupportedError
from laplace.fitting.available import Available, available
from laplace.fitting.planning import Estimate, FitPlan, in_units, make_plan
from laplace.structures import Curvature
from laplace.weights.problem import Problem

LEAST = 2**30
"""Bytes below which nobody looks how much there is."""

_NAMED = 4
"""Other choices that a refusal names."""


@dataclass(frozen=True)
class MemoryCheck:
    """Refuses a fit that would take more memory than there is.

    Attributes:
        problem: The network and its random parameters.
        structure: The structure.
        options: Its options.
    """

    problem: Problem
    structure: type[Curvature]
    options: Any

    def __call__(self, profile: BatchProfile) -> None:
        """Looks at what a batch shows, whose forward pass is held by now.

        Raises:
            OutOfMemory: The fit takes more than there is.
        """
        lacking = self.lacking(profile)
        if lacking is not None:
            raise self.refusal(profile, lacking)

    def lacking(self, profile: BatchProfile) -> Available | None:
        """Available memory if the fit takes more; None if it is enough, or nobody can say."""
        try:
            cost = self.structure.cost(profile, self.options)
        except UnsupportedError:  # a structure that does not say what it takes
            return None
        needed = cost.fit_bytes(profile)
        if cost.assumed or needed <= LEAST:
            return None
        there = available(self.problem.device)
        return there if there is not None and there.size < needed else None

    def _bytes(self, profile: BatchProfile) -> int:
        return self.structure.cost(profile, self.options).fit_bytes(profile)

    def refusal(self, profile: BatchProfile, there: Available) -> OutOfMemory:
        """The error, with other choices that memory holds."""
        plan = make_plan(profile, self.problem, self.structure, self.options, None)
        return OutOfMemory(
            f"a fit of subset_of_weights={plan.chosen.weights!r}, hessian_structure={plan.chosen.structure!r} would "
            f"take {in_units(plan.peak_bytes)} more than is held now, but only {in_units(there.size)} are available "
            f"({there.source}). {self._advice(profile, plan, there)} fit(..., check_memory=False) begins all the same."
        )

    def _advice(self, profile: BatchProfile, plan: FitPlan, there: Available) -> str:
        """Ways to take less: other choices, smaller batches, fewer weights."""
        chosen = plan.chosen
        others = [o for o in plan.cheaper if (o.weights, o.structure) != (chosen.weights, chosen.structure)]
        small = [other for other in others if other.peak_bytes <= there.size]
        ways = [f"Choose what takes less: {_listed(small, chosen.weights)}."] if small else []
        if self._bytes(profile.of_one_datum()) <= there.size:
            ways.append("Give the loader smaller batches (batch_size).")
        if not ways:
            fewer = "" if chosen.weights == SubsetOfWeights.SUBNETWORK else ", of a subnetwork"
            ways.append(f"Choose fewer weights{fewer}, or free memory.")
        return " ".join(ways)


def _listed(choices: list[Estimate], weights: str) -> str:
    """Choices in words: the largest ones, which say most, and the smallest."""
    named = choices if len(choices) <= _NAMED else [*choices[: _NAMED - 1], choices[-1]]
    return ", ".join(
        ("" if other.weights == weights else f"subset_of_weights={other.weights!r} with ")
        + f"hessian_structure={other.structure!r} ({in_units(other.peak_bytes)})"
        for other in named
    )
