"""The start of a fit over several processes: all of them say what they are about to fit, and compare it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.processes import Processes, digest
from laplace.errors import ApproximationWarning, InvalidData, ProcessError, warn
from laplace.fitting import NO_DATA
from laplace.network.fingerprint import checksums, same_sums
from laplace.posterior.posterior import Posterior


@dataclass(frozen=True)
class Started:
    """A reading of data that has begun.

    Attributes:
        posterior: The former posterior, with what the first batch tells.
        loader: Gives every batch, also the one that was read.
        first: Inputs and targets of the first batch; None if there is none.
    """

    posterior: Posterior
    loader: Iterable[Any]
    first: tuple[Inputs, Tensor] | None


@dataclass(frozen=True)
class _Word:
    """A process's account of the fit that it is about to make.

    Attributes:
        settings: Settings by name, which all processes have in common.
        names: Names of the network's parameters and buffers.
        kinds: Their shapes and dtypes.
        sums: Checksums of them, `[n, 2]`.
        random: Name, shape and a digest of the random entries of every random tensor.
        layer: Name of the last layer, where one is random.
        channel_dim: Dimension of the channels, if it is known.
        batch: Digest of the first batch; None without data.
    """

    settings: Mapping[str, str]
    names: Sequence[str]
    kinds: Sequence[tuple[tuple[int, ...], str]]
    sums: Tensor
    random: Sequence[tuple[Any, ...]]
    layer: str | None
    channel_dim: int | None
    batch: str | None


def started_together(
    processes: Processes,
    start: Callable[[], Started],
    settings: Mapping[str, Any],
    informed: Callable[[Posterior, int | None, str | None], Posterior],
) -> Started:
    """Begins the reading of this process's shard, once all processes are about to fit the same network alike.

    One collective call. A process without data learns from the others what their first batches tell.

    Args:
        processes: All of them.
        start: Begins the reading.
        settings: What else all processes must have in common, by name.
        informed: The posterior of a process without data, with the dimension of the channels and the name of the last
            layer as another process found them.

    Raises:
        InvalidData: There are no data in any process.
        ProcessError: Another process failed, or its network or settings differ from this one's.

    Warns:
        ApproximationWarning: The first batch is the same in all of them.
    """
    begun: list[Started] = []

    def attempt() -> _Word:
        begun.append(start())
        return _word(begun[0], settings)

    words = processes.agreed(attempt)
    _compare(words)
    known = [word for word in words if word.batch is not None]
    if not known:
        raise InvalidData(NO_DATA)
    if len(known) > 1 and len({word.batch for word in known}) == 1:
        warn(
            f"all of the {len(known)} processes with data read the same first batch; with all data in every process "
            f"they count {len(known)} times. Give every process a shard: DataLoader(data, sampler="
            "DistributedSampler(data)).",
            ApproximationWarning,
        )
    (started,) = begun
    if started.first is not None:
        return started
    return replace(started, posterior=informed(started.posterior, known[0].channel_dim, known[0].layer))


def _word(started: Started, settings: Mapping[str, Any]) -> _Word:
    posterior, choices = started.posterior, started.posterior.choices
    problem, model = posterior.weights.problem, posterior.weights.model
    said = {
        "likelihood": choices.likelihood_object.name,
        "hessian_structure": choices.structure.name,
        "structure_kwargs": choices.structure_options,
        "backend": choices.backend_cls.__name__,
        "backend_kwargs": {name: value for name, value in sorted(choices.backend_kwargs.items()) if _is_plain(value)},
        "lengths of prior_precision and sigma_noise": (
            posterior.hypers.prior_precision.numel(), posterior.hypers.sigma_noise.numel(),
        ),
        **settings,
    }  # fmt: skip
    tensors = (*model.named_parameters(), *model.named_buffers())
    slots = () if problem is None else problem.slots
    return _Word(
        settings={name: repr(value) for name, value in said.items()},
        names=[name for name, _ in tensors],
        kinds=[(tuple(tensor.shape), str(tensor.dtype)) for _, tensor in tensors],
        sums=checksums(model),
        random=[
            (slot.name, tuple(slot.shape), None if slot.entries is None else digest([slot.entries])) for slot in slots
        ],
        layer=None if problem is None else problem.head,
        channel_dim=choices.channel_dim,
        batch=None if started.first is None else digest([*batches.tensors(started.first[0]), started.first[1]]),
    )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _compare(words: Sequence[_Word]) -> None:
    """Requires that all processes say the same; every process finds the same difference.

    Raises:
        ProcessError: One says something else than the first.
    """
    first = words[0]
    for rank, word in enumerate(words[1:], 1):
        for name, value in word.settings.items():
            if value != first.settings.get(name):
                raise _differing(rank, f"has {name} = {value}, rank 0 {first.settings.get(name)}")
        if (word.names, word.kinds) != (first.names, first.kinds):
            raise _differing(rank, "has a network of other tensors than rank 0 (names, shapes or dtypes)")
        for name, mine, theirs in zip(word.names, word.sums, first.sums, strict=True):
            if not same_sums(mine, theirs):
                raise _differing(
                    rank,
                    f"has other numbers in {name!r} than rank 0; put the same in all processes, by "
                    "torch.distributed.broadcast(tensor, 0) (the running statistics of BatchNorm differ after training "
                    "with DistributedDataParallel)",
                )
    _compare_known({rank: (word.random, word.layer) for rank, word in enumerate(words) if word.random},
                   "makes other parameters random than rank {}")  # fmt: skip
    _compare_known({rank: word.channel_dim for rank, word in enumerate(words) if word.batch is not None},
                   "reads the outputs' channels in another dimension than rank {}")  # fmt: skip


def _compare_known(said: Mapping[int, Any], difference: str) -> None:
    """Requires that processes say the same of what some of them do not know, having no data.

    Args:
        said: By rank.
        difference: Words for another one than that of a rank.

    Raises:
        ProcessError: One says something else.
    """
    for rank, value in said.items():
        other = min(said)
        if value != said[other]:
            raise _differing(rank, difference.format(other))


def _differing(rank: int, what: str) -> ProcessError:
    return ProcessError(f"rank {rank} of the group {what}. Nothing was fitted.")
