"""Passes over data of which every process of a group reads a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.processes import Processes
from laplace.engines.engine import BatchSummary, CurvatureEngine, as_count
from laplace.engines.kron_parts import UNUSED
from laplace.errors import ProcessError
from laplace.structures.base import DataPass
from laplace.structures.fields import has_room


@dataclass(frozen=True)
class _Share:
    """A process's part of the sums over all data, without the sums themselves.

    Attributes:
        form: Form of the sums, see `DataPass.form`.
        loss_terms: Summed unit negative log likelihood of its data.
        n_data: Number of them that count.
        n_outputs: C.
        coverage: Which rule explained every tensor.
    """

    form: Any
    loss_terms: list[float]
    n_data: float
    n_outputs: int
    coverage: Mapping[str, str]


def sum_over(
    processes: Processes,
    read: Callable[[], BatchSummary | None],
    data_pass: DataPass,
    engine: CurvatureEngine,
    coverage_of_own: Callable[[], dict[str, str]],
) -> tuple[BatchSummary | None, dict[str, str]]:
    """Reads this process's shard, and puts the sums over all shards in the place of its own.

    Two collective calls: one exchange of outcomes and forms, then one bucketed sum.

    Args:
        processes: All of them.
        read: Feeds this process's data to the pass; returns None if there are none.
        data_pass: The pass.
        engine: Computes the numbers of a batch.
        coverage_of_own: Rules that explained the tensors in this process, once its data were read.

    Returns:
        Sums of what the data of all processes contribute besides curvature, None if there are none; and the rule that
        explained every tensor.

    Raises:
        ProcessError: Another process failed, or its data have other outputs or are explained by another rule.
    """

    def attempt() -> _Share | None:
        totals = read()
        if totals is None:
            return None
        losses = widened(totals.loss_terms).tolist()
        return _Share(data_pass.form(), losses, totals.count, totals.n_outputs, coverage_of_own())

    shares = processes.agreed(attempt)
    known = {rank: share for rank, share in enumerate(shares) if share is not None}
    if not known:
        return None, {}
    coverage = _coverage(known)
    own = shares[processes.rank]
    for share in known.values():
        if own is None or not has_room(own.form, share.form):
            data_pass.make_room(share.form)
    processes.add_(data_pass.sums(), data_pass.is_symmetric)
    first = next(iter(known.values()))
    losses = torch.tensor([share.loss_terms for share in known.values()], dtype=wide_dtype()).sum(0)
    problem = engine.problem
    losses = losses.to(problem.device, torch.promote_types(problem.dtype, torch.float32))
    n_data = as_count(sum(share.n_data for share in known.values()))
    return BatchSummary(losses, n_data, first.n_outputs), coverage


def _coverage(shares: Mapping[int, _Share]) -> dict[str, str]:
    """The rule that explained every tensor in all processes whose data use it.

    Raises:
        ProcessError: They are not one, or processes have other outputs.
    """
    coverage: dict[str, str] = {}
    first, n_outputs = next((rank, share.n_outputs) for rank, share in shares.items())
    for rank, share in shares.items():
        if share.n_outputs != n_outputs:
            raise ProcessError(
                f"rank {rank} of the group has data with {share.n_outputs} outputs, rank {first} with {n_outputs}."
            )
        for name, rule in share.coverage.items():
            known = coverage.get(name, UNUSED)
            if UNUSED not in (known, rule) and known != rule:
                raise ProcessError(
                    f"rank {rank} of the group explains {name!r} by {rule!r}, another one by {known!r}: their batches "
                    "have other forms. Give every process batches of the same form."
                )
            coverage[name] = known if rule == UNUSED else rule
    return coverage
