"""Weights that a Kronecker-factored fit could not factor."""

from __future__ import annotations

from laplace.errors import ApproximationWarning, warn
from laplace.fitting.fit import Fit
from laplace.weights.problem import Problem

_FACTORED = ("kron", "ekfac")
_ACCEPTED = 0.01
"""Share of the weights that may be held by a diagonal without a word."""

_NAMED = 3


def warn_of_diagonals(fit: Fit, problem: Problem) -> None:
    """Warns where more than 1 % of the weights have neither factors nor an exact block.

    Vectors that a rule explains (scales, shifts) do not count: a diagonal is their usual form.
    """
    if fit.curvature.name not in _FACTORED:
        return
    sizes: dict[str, int] = {}
    for slot, form in zip(problem.slots, fit.curvature.forms(), strict=True):
        is_vector = len(slot.shape) < 2 and "fallback" not in fit.coverage.get(slot.name, "fallback")
        if form == "exact diagonal" and not is_vector:
            sizes[slot.name] = slot.size
    share = sum(sizes.values()) / problem.layout.n_params
    if share <= _ACCEPTED:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])
    more = f" and {len(sizes) - _NAMED} more" if len(sizes) > _NAMED else ""
    warn(
        f"hessian_structure={fit.curvature.name!r}: {share:.1%} of the random weights have no Kronecker factors and "
        f"are held by their exact diagonal, without correlations: {', '.join(map(repr, largest[:_NAMED]))}{more}. "
        "la.coverage() names what explains every tensor; a layer of your own that works as a known one does gets its "
        "factors by laplace.curvature.rules.like(known, own); hessian_structure='lowrank' needs no factors.",
        ApproximationWarning,
    )
