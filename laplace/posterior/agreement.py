"""Processes that fit together: each describes its fit, and all begin the same one, or raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.files import digest
from laplace.core.processes import Processes
from laplace.errors import ApproximationWarning, InvalidData, ProcessError, warn
from laplace.fitting import NO_DATA
from laplace.network.watch import checksums, same_sums
from laplace.posterior.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Account:
    """A fit that is about to be made, without its data.

    Attributes:
        settings: Settings by name, as words.
        names: Names of the network's parameters and buffers.
        kinds: Their shapes and dtypes.
        sums: Checksums of them, `[n, 3]`.
        random: Name, shape and a digest of the random entries of every random tensor; none where they are unknown.
        layer: Name of the last layer, where one is random.
        channel_dim: Dimension of the channels, if it is known.
    """

    settings: Mapping[str, str]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    sums: Tensor
    random: tuple[str, ...]
    layer: str | None
    channel_dim: int | None

    @classmethod
    def of(cls, posterior: Posterior, settings: Mapping[str, Any]) -> Account:
        """The account of a fit of data to a network.

        Args:
            posterior: The former posterior, with what the first batch tells.
            settings: What else all fits must have in common that are compared, by name.
        """
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

    def difference(self, other: Account, whose: str) -> tuple[str, str | None]:
        """Words for the first difference from another account, and the tensor that has other numbers; none if equal.

        Args:
            other: To compare with; what only data tell is left out.
            whose: Words for its owner.
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
    told = {name: digest([value]) if isinstance(value, Tensor) else value for name, value in sorted(values.items())}
    plain = (str, int, float, tuple, type(None))
    return {name: value for name, value in told.items() if isinstance(value, plain)}


# The start of a fit over several processes: all of them say what they are about to fit, and compare it.


@dataclass(frozen=True)
class Started:
    """A reading of data that has begun.

    Attributes:
        posterior: The former posterior, with what the first batch tells.
        loader: Gives every batch, also the one that was read.
        first: Inputs and targets of the first batch; None if there is none.
        reading: Number of the reading; more than 1 in a fit that goes on where it was interrupted.
    """

    posterior: Posterior
    loader: Iterable[Any]
    first: tuple[Inputs, Tensor] | None
    reading: int = 1


@dataclass(frozen=True)
class _Word:
    """A process's account of the fit that it is about to make.

    Attributes:
        account: What is fitted how.
        batch: Digest of the first batch; None without data.
    """

    account: Account
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
            f"they are counted {len(known)} times. Give every process a shard: DataLoader(data, sampler="
            "DistributedSampler(data)).",
            ApproximationWarning,
        )
    (started,) = begun
    if started.first is not None:
        return started
    told = known[0].account
    return replace(started, posterior=informed(started.posterior, told.channel_dim, told.layer))


def _word(started: Started, settings: Mapping[str, Any]) -> _Word:
    account = Account.of(started.posterior, {**settings, _READING: started.reading})
    return _Word(
        account, None if started.first is None else digest([*batches.tensors(started.first[0]), started.first[1]])
    )


_READING = "number of the reading (of files of resume= that differ in it all are to be removed)"


def _compare(words: Sequence[_Word]) -> None:
    """Requires that all processes say the same; every process finds the same difference.

    Raises:
        ProcessError: One says something else than the first.
    """
    accounts = [word.account for word in words]
    for rank, account in enumerate(accounts[1:], 1):
        difference, tensor = account.difference(accounts[0], "rank 0")
        remedy = "" if tensor is None else _BROADCAST
        if difference:
            raise _differing(rank, f"{difference}{remedy}")
    _compare_known({rank: (account.random, account.layer) for rank, account in enumerate(accounts) if account.random},
                   "makes other parameters random than rank {}")  # fmt: skip
    _compare_known({rank: word.account.channel_dim for rank, word in enumerate(words) if word.batch is not None},
                   "reads the outputs' channels in another dimension than rank {}")  # fmt: skip


_BROADCAST = (
    "; put the same in all processes, by torch.distributed.broadcast(tensor, 0) (the running statistics of BatchNorm "
    "differ after training with DistributedDataParallel)"
)


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
