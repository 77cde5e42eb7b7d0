"""Checks of a fit: arguments that are refused, and warnings of what it leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

from torch import distributed

from laplace.core import batch as batches
from laplace.core.arguments import check_flag
from laplace.errors import ApproximationWarning, DataWarning, InvalidArgument, warn
from laplace.fitting.content import Content
from laplace.fitting.fit import Fit
from laplace.structures.base import Curvature
from laplace.weights.problem import Problem

_FACTORED = ("kron", "ekfac")
_ACCEPTED = 0.01
"""Share of the weights that may be held by a diagonal without a word."""

_NAMED = 3


def check_override(override: Any) -> None:
    """Checks the second argument of `fit`, in whose place targets are often given.

    Raises:
        InvalidType: It is neither True nor False.
    """
    remedy = (
        "fit takes one loader of batches (x, y): la.fit([(X, Y)]) for tensors X and Y, or a DataLoader of "
        "TensorDataset(X, Y); validation data are given to optimize_prior_precision(val_loader=...)."
    )
    check_flag("override", override, remedy)


def check_decay(decay: float, *, override: bool) -> None:
    """Checks the weight of former data.

    Raises:
        InvalidArgument: It is not in (0, 1], or there are no former data that could fade.
    """
    if not isinstance(decay, Real) or not 0 < decay <= 1:
        raise InvalidArgument(f"decay={decay}; it must be in (0, 1], where 1 keeps the former data as they are.")
    if override and decay != 1:
        raise InvalidArgument(
            f"decay={decay} with override=True, which forgets the former data at once; pass override=False."
        )


def check_weight(weight: float) -> None:
    """Checks the weight of data that are to be removed.

    Raises:
        InvalidArgument: It is not in (0, 1].
    """
    if not 0 < weight <= 1:
        raise InvalidArgument(f"weight={weight}; it must be in (0, 1]: 1, or decay**k after k fits with that decay.")


def require_rereadable(loader: Iterable[Any], structure: type[Curvature]) -> None:
    """Refuses an iterator where the data are read several times; before a first batch is taken from it.

    Raises:
        InvalidArgument: The loader can be read only once.
    """
    if structure.n_passes > 1:
        reader = f"hessian_structure={structure.name!r} reads the data {structure.n_passes} times or more"
        batches.require_rereadable(loader, reader)


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
        f"are stored as their exact diagonal, without correlations: {', '.join(map(repr, largest[:_NAMED]))}{more}. "
        "la.coverage() lists how each tensor was handled; laplace.curvature.rules.like(known, own) gives factors to a "
        "layer of your own that computes the same as a known one; hessian_structure='lowrank' needs no factors.",
        ApproximationWarning,
    )


def warn_of_dropped(loader: Iterable[Any]) -> None:
    """Warns of a loader that leaves out the last data of a pass.

    Warns:
        DataWarning: It does.
    """
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
    """Warns of data that are added to a fit which holds them already.

    Warns:
        DataWarning: They are.
    """
    if former.holds(new):
        warn(
            "the data that are added by override=False were fitted before, and count twice now: the posterior is too "
            "narrow. fit(train_loader) without it begins anew; after la.forget(loader) data can be added again.",
            DataWarning,
        )


def warn_of_shards() -> None:
    """Warns in a process group of several ranks, over which fits are not summed.

    Warns:
        ApproximationWarning: There is such a group.
    """
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
