"""Fits by several processes, each of a shard of the data.

All processes describe what they are about to fit, and begin the same fit or raise; data that a sampler repeats count
once; and sums are exchanged at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from laplace.core import batch as batches
from laplace.core.checks import as_count
from laplace.core.nested import digest, has_room
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.processes import Processes
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.engines.kron_parts import UNUSED
from laplace.errors import ApproximationWarning, InvalidData, ProcessError, warn
from laplace.fitting.checks import NO_DATA
from laplace.fitting.fit import Begun, Reading
from laplace.network.watch import checksums, same_sums
from laplace.posterior.posterior import Posterior
from laplace.structures.base import DataPass


@dataclass(frozen=True, eq=False)
class FitDescription:
    """A fit that is about to be made, without its data, in values that other processes can compare."""

    settings: Mapping[str, str]  # Settings by name, as words
    names: tuple[str, ...]  # Names of the network's parameters and buffers
    kinds: tuple[str, ...]  # Their shapes and dtypes
    sums: Tensor  # Checksums of them, `[n, 3]`
    # Name, shape and a digest of the random entries of every random tensor; none where they are unknown
    random: tuple[str, ...]
    layer: str | None  # Name of the last layer, where one is random
    channel_dim: int | None  # Dimension of the channels, if it is known

    @classmethod
    def from_posterior(cls, posterior: Posterior, settings: Mapping[str, Any]) -> FitDescription:
        """That of a fit, with what the first batch tells; `settings` are what else is compared."""
        choices, hypers = posterior.choices, posterior.hypers
        problem, model = posterior.weights.problem, posterior.weights.model
        said = {
            "likelihood": choices.likelihood_object.name,
            "attributes of the likelihood": _plain(vars(choices.likelihood_object)),
            "hessian_structure": choices.structure.name,
            "structure_kwargs": choices.structure_options,
            "backend": choices.backend_cls.__name__,
            "backend_kwargs": _plain(choices.backend_kwargs),
            "lengths of prior_precision and sigma_noise": (hypers.prior_precision.numel(), hypers.sigma_noise.numel()),
            **settings,
        }
        tensors = (*model.named_parameters(), *model.named_buffers())
        slots = () if problem is None else problem.slots
        entries = [None if slot.entries is None else digest([slot.entries]) for slot in slots]
        return cls(
            settings={name: repr(value) for name, value in said.items()},
            names=tuple(name for name, _ in tensors),
            kinds=tuple(f"{tuple(tensor.shape)} {tensor.dtype}" for _, tensor in tensors),
            sums=checksums(model, together=False),
            random=tuple(f"{s.name} {tuple(s.shape)} {own}" for s, own in zip(slots, entries, strict=True)),
            layer=None if problem is None else problem.head,
            channel_dim=choices.channel_dim,
        )

    def difference(self, other: FitDescription, whose: str) -> tuple[str, str | None]:
        """Words for the first difference from another one, and the tensor that has other numbers; empty if equal.

        What only data tell is left out.
        """
        for name, value in self.settings.items():
            if value != other.settings.get(name):
                return f"has {name} = {value}, {whose} {other.settings.get(name)}", None
        if (self.names, self.kinds) != (other.names, other.kinds):
            return f"has a network of other tensors than {whose} (names, shapes or dtypes)", None
        for i, name in enumerate(self.names):
            if not same_sums(self.sums[i : i + 1], other.sums[i : i + 1]):
                return f"has other numbers in {name!r} than {whose}", name
        return "", None


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and words by name, and digests of tensors; what cannot be compared is left out."""
    by_name = {name: digest([value]) if isinstance(value, Tensor) else value for name, value in sorted(values.items())}
    plain = (str, int, float, tuple, type(None))
    return {name: value for name, value in by_name.items() if isinstance(value, plain)}


# The start of a fit: all processes describe it, and compare what they say.


@dataclass(frozen=True)
class _Announcement:
    """What a process is about to fit, and a digest of its first batch; None without data."""

    description: FitDescription
    batch: str | None


def _compare(messages: Sequence[_Announcement]) -> None:
    """Requires that all processes say the same as the first; every process finds the same difference."""
    for rank, message in enumerate(messages[1:], 1):
        difference, tensor = message.description.difference(messages[0].description, "rank 0")
        if difference:
            raise _differing(rank, f"{difference}{'' if tensor is None else _BROADCAST}")
    descriptions = {rank: message.description for rank, message in enumerate(messages)}
    _compare_known({rank: (fit.random, fit.layer) for rank, fit in descriptions.items() if fit.random},
                   "makes other parameters random than rank {}")  # fmt: skip
    _compare_known({rank: fit.channel_dim for rank, fit in descriptions.items() if messages[rank].batch is not None},
                   "reads the outputs' channels in another dimension than rank {}")  # fmt: skip


_BROADCAST = (
    "; put the same in all processes, by torch.distributed.broadcast(tensor, 0) (the running statistics of BatchNorm "
    "differ after training with DistributedDataParallel)"
)


def _compare_known(said: Mapping[int, Any], difference: str) -> None:
    """The same of what some processes do not know, having no data."""
    for rank, value in said.items():
        other = min(said)
        if value != said[other]:
            raise _differing(rank, difference.format(other))


def _differing(rank: int, what: str) -> ProcessError:
    return ProcessError(f"rank {rank} of the group {what}. Nothing was fitted.")


# Data that a sampler repeats, so that every process has equally many: they count once.

_REMEDY = (
    "Give the sampler drop_last=True, or data whose number the number of processes divides; to accelerate, "
    "DataLoaderConfiguration(even_batches=False)."
)


@dataclass(frozen=True)
class _Counted:
    """The batches of one process that count: `whole` ones, and the first `rest` of the `given` data of the next one."""

    whole: int
    rest: int
    given: int


def without_padding(loader: Iterable[Any], dict_key_y: str) -> Iterable[Any]:
    """A loader's batches without the data that its sampler repeats; the loader itself where there are none.

    Repeated are data by a `DistributedSampler`, and by the loaders that accelerate prepares. `InvalidData` where they
    may be anywhere: by a user's own batch sampler, or in a stream.
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
    """Number of indices of a batch, where batches come in the order of indices whose number is known."""
    if type(groups) is BatchSampler and isinstance(groups.sampler, Sized) and getattr(loader, "in_order", True):
        return groups.batch_size
    raise InvalidData(f"{repeated}, and the loader may give it in any batch. {_REMEDY}")


@dataclass(frozen=True)
class _Shortened:
    """The batches of a loader without repeated data."""

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
        _, y = batches.split(batch, self.dict_key_y)
        if len(y) != self.counted.given:
            raise InvalidData(
                f"the sampler repeats data in the last batch, whose {len(y)} rows are not its "
                f"{self.counted.given} data one by one. {_REMEDY}"
            )
        return batches.first(batch, self.dict_key_y, self.counted.rest)


# What every process found in its shard.


@dataclass(frozen=True)
class _Share:
    """A process's part of the sums over all data, of which the curvature is described by its form (`DataPass.form`)."""

    form: Any
    loss_terms: list[float]
    n_data: float
    n_outputs: int
    coverage: Mapping[str, str]
    observations: list[float] | None = None


def _coverage(shares: Mapping[int, _Share]) -> dict[str, str]:
    """The rule that explained every tensor in all processes whose data use it."""
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


# The fit.


@dataclass(frozen=True)
class GroupReading(Reading):
    """Every process of a group reads a shard, and all get the sums over all shards."""

    processes: Processes

    def shard(self, loader: Iterable[Any], dict_key_y: str) -> Iterable[Any]:
        return without_padding(loader, dict_key_y)

    def begin(self, begin: Callable[[], Begun], settings: Mapping[str, Any]) -> Begun:
        """Begins the reading of this process's shard, once all processes are about to fit the same network alike.

        One collective call. A process without data learns from the others what their first batches tell.
        """
        begun: list[Begun] = []

        def attempt() -> _Announcement:
            begun.append(here := begin())
            batch = None if here.first is None else digest([*batches.tensors(here.first[0]), here.first[1]])
            return _Announcement(FitDescription.from_posterior(here.posterior, settings), batch)

        messages = self.processes.gather_results(attempt)
        _compare(messages)
        known = [message for message in messages if message.batch is not None]
        if not known:
            raise InvalidData(NO_DATA)
        if len(known) > 1 and len({message.batch for message in known}) == 1:
            warn(
                f"all of the {len(known)} processes with data read the same first batch; with all data in every "
                f"process they are counted {len(known)} times. Give every process a shard: DataLoader(data, sampler="
                "DistributedSampler(data)).",
                ApproximationWarning,
            )
        (here,) = begun
        if here.first is not None:
            return here
        found = known[0].description
        return replace(here, posterior=here.posterior.apply_inferred(found.channel_dim, found.layer))

    def sum_over(
        self, read: Callable[[], BatchSummary | None], data_pass: DataPass, engine: CurvatureEngine
    ) -> tuple[BatchSummary | None, dict[str, str]]:
        """Reads this process's shard, and puts the sums over all shards in the place of its own.

        Two collective calls: one exchange of outcomes and forms, then one bucketed sum.
        """
        with suppress(InvalidData):  # there are no sums yet: this refuses a pass that does not add up over shards
            data_pass.form()

        def attempt() -> _Share | None:
            totals = read()
            if totals is None:
                return None
            losses = widened(totals.loss_terms).tolist()
            seen = None if totals.observations is None else widened(totals.observations).tolist()
            return _Share(data_pass.form(), losses, totals.count, totals.n_outputs, engine.coverage(), seen)

        shares = self.processes.gather_results(attempt)
        known = {rank: share for rank, share in enumerate(shares) if share is not None}
        if not known:
            return None, {}
        coverage = _coverage(known)
        own = shares[self.processes.rank]
        for share in known.values():
            if own is None or not has_room(own.form, share.form):
                data_pass.make_room(share.form)
        self.processes.add_(data_pass.sums(), data_pass.is_symmetric)
        first = next(iter(known.values()))
        losses = torch.tensor([share.loss_terms for share in known.values()], dtype=wide_dtype()).sum(0)
        problem = engine.problem
        losses = losses.to(problem.device, torch.promote_types(problem.dtype, torch.float32))
        n_data = as_count(sum(share.n_data for share in known.values()))
        seen = [share.observations for share in known.values()]
        observed = None if any(one is None for one in seen) else torch.tensor(seen, dtype=wide_dtype()).sum(0)
        return BatchSummary(losses, n_data, first.n_outputs, observed), coverage
