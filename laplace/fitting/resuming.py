"""Fits that go on where a killed process left them, from a file of the sums so far."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from laplace.core import batch as batches
from laplace.core import nested
from laplace.core.batch import Inputs
from laplace.core.memory import ran_out
from laplace.core.nested import digest
from laplace.core.processes import Processes
from laplace.engines.engine import BatchSummary
from laplace.errors import InvalidArgument, InvalidData, InvalidType, StateError
from laplace.fitting.processes import FitDescription

# Checkpoints: a fit between two batches, in a file that is replaced at once or not at all.


_VERSION = 1
"""Version of the format of the file."""

_KEYS = {"version", "account", "checkpoint"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A fit after some batches of one of its readings: all that another process needs to go on."""

    reading: int  # Number of the reading, from 1
    batches: int  # Number of its batches that were read, those of ignored data alone among them
    digest: str  # Of these batches
    order: tuple[Tensor, ...]  # States of the generators of the loader's order at the beginning of the reading
    data_pass: dict[str, Any]  # State of the pass over the data
    total: BatchSummary | None  # Sums of what the batches contribute besides curvature; None where no data counted
    first: BatchSummary | None  # The same of the whole first reading, after it
    coverage: dict[str, str]  # Rules that have explained a tensor
    draws: tuple[Tensor, ...] | None  # States of the engine's generator, before a reading and now; None without one


def write(path: Path, account: Any, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint in the place of the former one, which stays whole until the new one is."""
    state = {"version": _VERSION, "account": account, "checkpoint": nested.state_of(checkpoint)}
    with nested.replaced(path) as file:
        torch.save(state, file)


def read(path: Path, device: torch.device) -> tuple[Any, Checkpoint] | None:
    """The description of the fit and the checkpoint of a file, whose code is not run; None if there is no file."""
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if nested.entries(state).keys() != _KEYS or state["version"] != _VERSION:
            raise StateError("it holds something else, or is of another version.")
        return state["account"], nested.from_state(Checkpoint, nested.move(state["checkpoint"], device, None))
    except Exception as error:
        if ran_out(error):
            raise
        raise StateError(
            f"resume={str(path)!r}: the file is there, and no checkpoint of a fit that could be resumed: {error} "
            "Give another path, or remove the file to begin anew."
        ) from error


def remove(path: Path) -> None:
    """Removes the file of a fit that has ended, and what a process left that was killed while it wrote."""
    for file in (path, *path.parent.glob(f"{escape(path.name)}.{'[0-9a-f]' * 32}.new")):
        file.unlink(missing_ok=True)


_EVERY = timedelta(minutes=10)
"""Time between two checkpoints where nothing is said."""

_ENTRIES = 4096
"""Entries of a batch's tensors by which data are told from others."""

_ORDERED = (SequentialSampler, DistributedSampler)
"""Samplers whose order follows from their arguments."""


class Resumable:
    """A fit whose sums are written to a file after so many batches, or so much time.

    Attributes:
        former: State of the description of the fit in the file; None without a file.
        at: The checkpoint that the fit goes on from, until its reading has ended.
        account: State of the description of this fit, for the file.
        coverage: Rules that explained tensors before the fit was interrupted.
    """

    def __init__(self, path: Path, every: int | timedelta) -> None:
        self.path = path
        self.former: Any = None
        self.at: Checkpoint | None = None
        self.account: Any = None
        self.coverage: dict[str, str] = {}
        self._every = every
        self._sources: list[torch.Generator] = []
        self._order: tuple[Tensor, ...] = ()
        self._start_reading()

    @classmethod
    def of(cls, path: Any, every: Any, processes: Processes | None) -> Resumable | None:
        """A fit as the arguments of `la.fit` say it; None for one that is not written anywhere."""
        if path is None:
            if every is not None:
                raise InvalidArgument(f"save_every={every!r} without resume=; give the path of a file as resume=.")
            return None
        if not isinstance(path, str | os.PathLike):
            raise InvalidType(f"resume is a {type(path).__name__}; give the path of a file, which need not exist yet.")
        file = Path(path).absolute()
        if processes is not None:
            file = file.with_name(f"{file.name}.{processes.rank}")
        return cls(file, _checked_interval(_EVERY if every is None else every))

    @property
    def reading(self) -> int:
        """Number of the reading that the fit begins with."""
        return 1 if self.at is None else self.at.reading

    def begin(self, loader: Iterable[Any], device: torch.device) -> None:
        """Reads the file, if there is one, and puts the loader's order back to what it was; before a batch is read."""
        if self.path.is_dir() or not self.path.parent.is_dir():
            path = str(self.path)
            raise InvalidArgument(f"resume={path!r} is a folder, or in none that exists; give the path of a file.")
        self._sources = list(_sources(loader))
        stored = read(self.path, device)
        if stored is not None:
            self.former, self.at = stored
            if len(self.at.order) != len(self._sources):
                raise self.refusal("has a loader with another number of generators than the fit in the file")
            for source, state in zip(self._sources, self.at.order, strict=True):
                source.set_state(state.cpu())
            self.coverage = self.at.coverage
        self._order = tuple(source.get_state() for source in self._sources)

    def taken(self) -> dict[str, Any]:
        """The state of the pass that the fit goes on with, which is then held there alone."""
        if self.at is None:
            return {}
        state, self.at = self.at.data_pass, replace(self.at, data_pass={})
        return state

    def go_on_as(self, description: FitDescription) -> None:
        """Sets the file's description of the fit; raises if an existing file belongs to another fit."""
        if self.former is not None:
            former = nested.from_state(FitDescription, self.former)
            difference, _ = description.difference(former, "the fit in the file")
            if difference:
                raise self.refusal(difference)
            if (description.random, description.layer) != (former.random, former.layer):
                raise self.refusal("makes other parameters random than the fit in the file")
            if description.channel_dim != former.channel_dim:
                raise self.refusal("reads the outputs' channels in another dimension than the fit in the file")
        self.account = nested.state_of(description)

    def refusal(self, difference: str) -> StateError:
        """The error of a fit that is not that of the file."""
        return StateError(
            f"resume={str(self.path)!r}: this fit {difference}. Give the arguments of the fit that was interrupted, or "
            "remove the file to begin anew."
        )

    def next_reading(self) -> None:
        """Notes the beginning of a reading after the first one."""
        self.at = None
        self._order = tuple(source.get_state() for source in self._sources)
        self._start_reading()

    def _start_reading(self) -> None:
        self._batches, self._digest, self._saved = 0, "", (0, time.monotonic())

    def passes_over(self, data: tuple[Inputs, Tensor, Tensor | None] | None) -> bool:
        """True of a batch that the sums hold already: inputs, targets and weights of what is not ignored, or None."""
        self._batches += 1
        tensors = [] if data is None else [*batches.tensors(data[0]), *(part for part in data[1:] if part is not None)]
        self._digest = digest(tensors, before=self._digest, most=_ENTRIES)
        if self.at is None or self._batches > self.at.batches:
            return False
        if self._batches == self.at.batches:
            if self._digest != self.at.digest:
                raise self._other_data("other data, or another order,")
            self._saved = (self._batches, time.monotonic())
        return True

    def require_passed(self) -> None:
        """Requires that a loader which ended has given every batch of the sums."""
        if self.at is not None and self._batches < self.at.batches:
            raise self._other_data(f"{self._batches} batches, fewer")

    def _other_data(self, what: str) -> InvalidData:
        return InvalidData(
            f"resume={str(self.path)!r}: the loader gave {what} than the fit in the file had read; give the same data "
            "in the same order (without random augmentation, or with its generator in the loader), or remove the file "
            "to begin anew."
        )

    def is_due(self) -> bool:
        """True if the sums are to be written after this batch."""
        batches_then, then = self._saved
        if isinstance(self._every, timedelta):
            return time.monotonic() - then >= self._every.total_seconds()
        return self._batches - batches_then >= self._every

    def save(self, **facts: Any) -> None:
        """Writes a checkpoint after the batches so far; `facts` are the fields of `Checkpoint` besides its place."""
        place = {"batches": self._batches, "digest": self._digest, "order": self._order}
        write(self.path, self.account, Checkpoint(**place, **facts))
        self._saved = (self._batches, time.monotonic())

    def end(self) -> None:
        """Removes the file of a fit that has ended."""
        remove(self.path)


def _checked_interval(every: Any) -> int | timedelta:
    if isinstance(every, timedelta):
        if every > timedelta(0):
            return every
    elif not isinstance(every, int) or isinstance(every, bool):
        raise InvalidType(
            f"save_every is a {type(every).__name__}; give a number of batches, or datetime.timedelta(minutes=...)."
        )
    elif every >= 1:
        return every
    raise InvalidArgument(f"save_every={every!r}; it must be at least one batch, or a time above 0.")


def _sources(loader: Iterable[Any]) -> Iterator[torch.Generator]:
    """Generators that the order of a loader's data comes from; an error where that is another one every time."""
    if not isinstance(loader, DataLoader):
        return
    own = [] if loader.generator is None else [loader.generator]
    if not isinstance(loader.dataset, IterableDataset):
        groups = loader.batch_sampler
        own += [source for part in (groups, getattr(groups, "sampler", loader.sampler)) for source in _sources_of(part)]
    if not getattr(loader, "in_order", True):
        raise _irreproducible("in_order=False gives batches as workers finish them", "in_order=True")
    if own and loader.persistent_workers:
        raise _irreproducible("persistent_workers=True seeds its workers once for all readings", "False")
    yield from {id(source): source for source in own}.values()


def _sources_of(sampler: Any) -> list[torch.Generator]:
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        return [generator]
    if sampler is None or type(sampler) is BatchSampler or isinstance(sampler, (*_ORDERED, Sequence)):
        return []
    raise _irreproducible(
        f"its {type(sampler).__name__} without a generator draws another one every time, or may",
        "DataLoader(..., shuffle=True, generator=torch.Generator().manual_seed(0)), whose state is saved; or no "
        "shuffle, since the order makes no difference to a fit; of a sampler of your own, sampler=list(sampler)",
    )


def _irreproducible(reason: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(f"resume= needs a loader whose order can be repeated, but {reason}. Give {remedy}.")
