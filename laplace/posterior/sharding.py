"""Fits whose curvature stays spread over the processes that made it."""

from __future__ import annotations

from dataclasses import replace

from laplace.core.layout import Layout
from laplace.core.overrides import EVIDENCE, POSTERIOR
from laplace.core.processes import Processes
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.fitting import Fit
from laplace.posterior.posterior import Posterior
from laplace.structures.sharded import ShardedCurvature


def check(posterior: Posterior, *, override: bool, sharded: bool) -> None:
    """Refuses a fit whose curvature cannot be spread, or added to one that is.

    Args:
        posterior: The former one.
        override: Whether that is forgotten.
        sharded: Whether the next one is to be spread.

    Raises:
        UnsupportedError: A structure that couples all tensors, a class with moments of its own, or a former fit that
            is spread when this one is not.
    """
    structure = posterior.choices.structure
    if sharded and structure.separation is None:
        raise UnsupportedError(
            f"sharded=True with hessian_structure={structure.name!r}, whose precision couples all tensors, so that "
            "processes cannot store them separately; use 'kron', 'ekfac', 'diag', 'block' or 'lowrank_kron', or leave "
            "it out."
        )
    if sharded and posterior.overrides(*POSTERIOR, *EVIDENCE):
        raise UnsupportedError(
            "sharded=True with a class that overrides moments of the posterior or terms of the evidence, which no "
            "process could compute from its own tensors; leave it out."
        )
    if not override and not sharded and shards_of(posterior) is not None:
        raise UnsupportedError(
            "override=False adds data to a fit that is sharded, but sharded=True was not given; give it, with the same "
            "group."
        )


def check_group(processes: Processes | None, *, sharded: bool, former: Posterior | None) -> None:
    """Refuses a sharded fit in one process alone, or of another group than that of the fit that it is added to.

    Args:
        processes: The group that was given.
        sharded: Whether the next fit is to be spread.
        former: The posterior whose data count further; None for none.

    Raises:
        InvalidArgument: It is one of these.
    """
    known = None if former is None else shards_of(former)
    if processes is None and (sharded or known is not None):
        raise InvalidArgument(
            "a sharded posterior is one of several processes; give their group, group= "
            "(torch.distributed.group.WORLD after init_process_group)."
        )
    if known is not None and known.processes != processes:
        raise InvalidArgument("group= is another group than that of the former fit, over which that is sharded.")


def shards_of(posterior: Posterior) -> ShardedCurvature | None:
    """The curvature of a posterior of which every process holds a part; None of others."""
    curvature = None if posterior.data is None else posterior.data.fit.curvature
    return curvature if isinstance(curvature, ShardedCurvature) else None


def refuse_sharded(posterior: Posterior, what: str) -> None:
    """Refuses what takes the whole curvature.

    Raises:
        UnsupportedError: Every process holds a part of it.
    """
    if shards_of(posterior) is not None:
        raise UnsupportedError(
            f"{what} of a sharded posterior, of which every process stores some tensors only; fit with sharded=False, "
            "or write it by laplace.checkpoint.save and load it in one process."
        )


def spread(fit: Fit, processes: Processes, layout: Layout) -> Fit:
    """This process's part of a fit that all processes have.

    Args:
        fit: Of all tensors, the same in every process; or a part already.
        processes: The group.
        layout: All tensors.
    """
    if isinstance(fit.curvature, ShardedCurvature):
        return fit
    return replace(fit, curvature=ShardedCurvature.of(fit.curvature, processes, layout))


def total(former: Fit, new: Fit) -> Fit:
    """The fit of the data of two, of which the former may be a part.

    Args:
        former: A fit.
        new: What new data say, of all tensors.
    """
    curvature = former.curvature
    if isinstance(curvature, ShardedCurvature):
        new = replace(new, curvature=curvature.alike(new.curvature))
    return former + new


def difference(former: Fit, removed: Fit, *, signed: bool) -> Fit:
    """A fit without some of its data; of a sharded one all processes raise where one does.

    Args:
        former: The fit.
        removed: Curvature and loss of the data that are removed, of all tensors.
        signed: Whether the curvature may be indefinite.

    Raises:
        InvalidData: More data than were seen, or of other outputs.
        CurvatureError: The curvature would be indefinite.
        ProcessError: That of another process would.
    """
    curvature, dtype = former.curvature, former.loss_terms.dtype
    if not isinstance(curvature, ShardedCurvature):
        return former.minus(removed, signed=signed)
    mine = replace(former, curvature=curvature.narrowed(dtype))
    part = replace(removed, curvature=curvature.alike(removed.curvature).narrowed(dtype))
    fits: list[Fit] = []
    curvature.processes.agreed(lambda: fits.append(mine.minus(part, signed=signed)))
    return fits[0]
