"""Fits by several processes: data that a sampler repeats count once, and sums are exchanged at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from laplace.core import batch as batches
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.processes import Processes
from laplace.engines.engine import BatchSummary, CurvatureEngine, as_count
from laplace.engines.kron_parts import UNUSED
from laplace.errors import InvalidData, ProcessError
from laplace.structures.base import DataPass
from laplace.structures.fields import has_room

_REMEDY = (
    "Give the sampler drop_last=True, or data whose number the number of processes divides; to accelerate, "
    "DataLoaderConfiguration(even_batches=False)."
)


@dataclass(frozen=True)
class _Counted:
    """Batches of one process that count: some whole, a part of the next one, and none after it.

    Attributes:
        whole: Number of batches that are as they are.
        rest: Number of indices that count of the batch after them, the first ones.
        given: Number of indices of that batch.
    """

    whole: int
    rest: int
    given: int


def without_padding(loader: Iterable[Any], dict_key_y: str) -> Iterable[Any]:
    """A loader's batches without the data that its sampler repeats; the loader itself where there are none.

    Repeated are data by a `DistributedSampler`, and by the loaders that accelerate prepares.

    Args:
        loader: Batches.
        dict_key_y: Key of the targets, for mappings.

    Raises:
        InvalidData: Data are repeated, and may be anywhere: by a user's own batch sampler, or in a stream.
    """
    if not isinstance(loader, DataLoader):
        return loader
    counted = _of_sampler(loader) or _of_accelerate(loader)
    return loader if counted is None else _Shortened(loader, counted, dict_key_y)


def _of_sampler(loader: DataLoader[Any]) -> _Counted | None:
    """Without what a `DistributedSampler` repeats, which comes last, at most one index for every process."""
    groups = loader.batch_sampler
    sampler = getattr(groups, "sampler", loader.sampler)  # what batch_sampler= was made of is not loader.sampler
    if not isinstance(sampler, DistributedSampler) or not isinstance(sampler.dataset, Sized):
        return None
    places = range(sampler.rank, sampler.total_size, sampler.num_replicas)
    if not places or places[-1] < len(sampler.dataset):
        return None
    size = 1 if groups is None else _batch_size(groups, loader, "DistributedSampler repeats a datum")
    whole, rest = divmod(len(places) - 1, size)
    return _Counted(whole, rest, rest + 1)


def _of_accelerate(loader: DataLoader[Any]) -> _Counted | None:
    """Without what accelerate repeats: indices from the beginning, after all others, to fill up its last batches."""
    if "accelerate" not in sys.modules:  # which made the loader, if it is one of these
        return None
    from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard

    if isinstance(loader, DataLoaderDispatcher) or isinstance(loader.dataset, IterableDatasetShard):
        raise InvalidData(
            "accelerate repeats data of a stream, and of batches that one process reads for all (dispatch_batches), "
            "which nobody can tell from the others; give every process a loader of its own shard."
        )
    shard = loader.batch_sampler
    if not isinstance(shard, BatchSamplerShard) or shard.drop_last or not shard.even_batches:
        return None
    inner: Any = shard.batch_sampler
    size = _batch_size(inner, loader, "accelerate repeats data")
    indices = inner.sampler
    n_data = len(indices)
    if n_data % (size if shard.split_batches else size * shard.num_processes) == 0:
        return None
    full, rest = divmod(n_data, size)
    if shard.split_batches:  # of every batch a part
        part = size // shard.num_processes
        return _Counted(full, min(max(rest - part * shard.process_index, 0), part), part)
    whole, left = divmod(full - shard.process_index, shard.num_processes)  # of all batches one in `num_processes`
    return _Counted(whole + (left > 0), 0 if left else rest, size)


def _batch_size(groups: Any, loader: DataLoader[Any], repeated: str) -> int:
    """Number of indices of a batch, where batches come in the order of indices whose number is known.

    Raises:
        InvalidData: They may not.
    """
    if type(groups) is BatchSampler and isinstance(groups.sampler, Sized) and getattr(loader, "in_order", True):
        return groups.batch_size
    raise InvalidData(f"{repeated}, and the loader may give it in any batch. {_REMEDY}")


@dataclass(frozen=True)
class _Shortened:
    """The batches of a loader without repeated data.

    Attributes:
        loader: Batches.
        counted: Which of them.
        dict_key_y: Key of the targets, for mappings.
    """

    loader: DataLoader[Any]
    counted: _Counted
    dict_key_y: str

    def __len__(self) -> int:
        return self.counted.whole + (self.counted.rest > 0)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):  # to its end, where loaders put back what they have changed
            if number < self.counted.whole:
                yield batch
            elif number == self.counted.whole and self.counted.rest:
                yield self._shortened(batch)

    def _shortened(self, batch: Any) -> Any:
        """A batch without its last data.

        Raises:
            InvalidData: Its rows are not the data of the sampler one by one.
        """
        _, y = batches.split(batch, self.dict_key_y)
        if len(y) != self.counted.given:
            raise InvalidData(
                f"the sampler repeats data in the last batch, whose {len(y)} rows are not its "
                f"{self.counted.given} data one by one. {_REMEDY}"
            )
        return batches.first(batch, self.dict_key_y, self.counted.rest)


# Passes over data of which every process of a group reads a shard.


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
