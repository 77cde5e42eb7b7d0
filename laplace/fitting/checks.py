"""Checks of a fit: arguments that are refused, and warnings of what it leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

from torch import distributed

from laplace.core import batch as batches
from laplace.core.content import Content
from laplace.errors import ApproximationWarning, DataWarning, warn
from laplace.network.model_guard import reading
from laplace.structures.fit import Fit
from laplace.weights.problem import Problem

NO_DATA = "the loader gave no data, or all are ignored; a Laplace approximation needs at least one datum."

# Warnings of what a fit leaves out.

_ACCEPTED = 0.01
"""Share of the weights that may be held by a diagonal without a word."""

_NAMED = 3


def warn_of_diagonals(fit: Fit, problem: Problem) -> None:
    """Warns where more than 1 % of the weights have neither factors nor an exact block.

    Vectors that a rule explains (scales, shifts) do not count: a diagonal is their usual form.
    """
    sizes: dict[str, int] = {}
    for slot in (problem.slots[i] for i in fit.curvature.without_factors()):
        if len(slot.shape) >= 2 or "fallback" in fit.coverage.get(slot.name, "fallback"):
            sizes[slot.name] = slot.size
    share = sum(sizes.values()) / problem.layout.n_params
    if share <= _ACCEPTED:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])
    more = f" and {len(sizes) - _NAMED} more" if len(sizes) > _NAMED else ""
    warn(
        f"hessian_structure={fit.curvature.name!r}: {share:.1%} of the random weights have no Kronecker factors and "
        f"are stored as their exact diagonal, without correlations: {', '.join(map(repr, largest[:_NAMED]))}{more}. "
        "la.coverage() lists how each tensor was handled; laplace.curvature.rules.like(known, own) gives factors to a "
        "layer of your own that computes the same as a known one; hessian_structure='lowrank' needs no factors.",
        ApproximationWarning,
    )


def warn_of_dropped(loader: Iterable[Any]) -> None:
    """Warns of a loader that leaves out the last data of a pass."""
    sampler = getattr(loader, "batch_sampler", None)
    if not getattr(sampler, "drop_last", False):
        return
    try:
        left_out = len(sampler.sampler) % sampler.batch_size  # pyright: ignore[reportOptionalMemberAccess]
    except (AttributeError, TypeError):  # a sampler of a user's, or of a stream
        return
    if left_out:
        warn(
            f"the loader has drop_last=True, which leaves {left_out} of the data out of the fit, and of the evidence. "
            "Fit with DataLoader(dataset, batch_size=...) without it.",
            DataWarning,
        )


def warn_of_repeated(former: Content, new: Content) -> None:
    """Warns of data that are added to a fit which holds them already."""
    if former.holds(new):
        warn(
            "the data that are added by override=False were fitted before, and count twice now: the posterior is too "
            "narrow. fit(train_loader) without it begins anew; after la.forget(loader) data can be added again.",
            DataWarning,
        )


def warn_of_shards() -> None:
    """Warns in a process group of several ranks, over which fits are not summed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ranks = distributed.get_world_size()
    if ranks > 1:
        warn(
            f"this process is one of {ranks} in a group, and every process fits the data that its own loader gives: "
            "nothing is summed over processes. If its loader has a shard of them (DistributedSampler), posterior and "
            "evidence are those of the shard alone. To sum over processes pass group=torch.distributed.group.WORLD; "
            "otherwise give the loader all the data, or fit in one process.",
            ApproximationWarning,
        )


def number_of_data(loader: Iterable[Any], dict_key_y: str) -> int:
    """N of a loader, by its data set, or by reading it once (`InvalidArgument` if that is not possible)."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, Sized):
        return len(dataset)
    batches.require_rereadable(loader, "a fit by _curv_closure, which takes the number of all data, counts them first")
    return sum(len(batches.split(batch, dict_key_y)[1]) for batch in reading(loader))
