"""One reading of the data of a fit: batches of a loader that are fed to a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import Conditions, named
from laplace.core.memory import COTANGENT, ran_out
from laplace.core.processes import Processes
from laplace.core.progress import DataBar
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.engines.kron_parts import UNUSED
from laplace.errors import InvalidData, OutOfMemory
from laplace.fitting.content import ContentReader
from laplace.fitting.resuming import Resumable
from laplace.network import next_token
from laplace.network.misfits import noticing_swap
from laplace.network.watch import FirstBatch
from laplace.structures.base import DataPass, require_finite

FirstPass = Callable[[CurvatureEngine], DataPass]
"""Makes the first pass over the data of a fit, for the engine that computes their curvature."""


@dataclass(frozen=True)
class ReadOptions:
    """Options of reading the data of a fit.

    Attributes:
        dict_key_y: Key of the targets, for mappings.
        progress_bar: Whether to show one.
        first_batch: What looks at the first batch that counts, or None.
        check_memory: Whether to ask first if memory holds the fit.
        first_pass: Makes the first pass over the data; None for that of the structure.
        processes: Those that read the other shards of the data at the same time; None where all data are read here.
        resume: The file from which the fit goes on, and to which it is written; None without one.
        content: What notes the content of the data in their first reading, or None.
    """

    dict_key_y: str
    progress_bar: bool = False
    first_batch: FirstBatch | None = None
    check_memory: bool = False
    first_pass: FirstPass | None = None
    processes: Processes | None = None
    resume: Resumable | None = None
    content: ContentReader | None = None


@dataclass(frozen=True, eq=False)
class Reading:
    """One of the readings of a fit.

    Attributes:
        loader: Batches.
        engine: Computes the numbers of a batch.
        data_pass: What batches are fed to.
        options: How they are read.
        label: Words for the progress bar.
        number: Number of the reading, from 1.
        first: Sums of the first reading, after it.
        draws: State of the engine's generator before a reading; None without one.
    """

    loader: Iterable[Any]
    engine: CurvatureEngine
    data_pass: DataPass
    options: ReadOptions
    label: str
    number: int = 1
    first: BatchSummary | None = None
    draws: Tensor | None = None

    def run(self) -> BatchSummary | None:
        """Feeds every batch to the pass; returns sums of what they contribute besides curvature, or None."""
        total, look, resume = self._begin(), self.options.first_batch, self.options.resume
        bar = DataBar(self.label, self.loader, shown=self.options.progress_bar)
        conditions = Conditions()  # read once a batch: some are those of the batch before
        content = self.options.content if self.number == 1 else None
        self.engine.on_outputs, self.engine.keeps = None if look is None else look.see, look is not None
        for number, batch in enumerate(self.loader):
            with _within_memory(number), conditions.collected(), named(f"batch {number}"):
                data = self._counted(batch)
                is_summed = resume is not None and resume.passes_over(data)
                if data is None:
                    continue
                if content is not None:
                    content.see(*data[:2])
                if not is_summed:
                    total = self._extended(total, *data)
                if look is not None:
                    conditions.read()
                    look.look(*data[:2])
                    look = None
            bar.add(len(data[1]), done=is_summed)
            if resume is not None and not is_summed and resume.is_due():
                conditions.read()
                self._save(resume, total)
        conditions.read()
        bar.close()
        self.engine.keeps = False
        if resume is not None:
            resume.require_passed()
        return None if total is None else BatchSummary(total.loss_terms, total.count, total.n_outputs)

    def coverage(self) -> dict[str, str]:
        """Rule that explained every tensor, also before the fit was interrupted."""
        resume = self.options.resume
        former = {} if resume is None else resume.coverage
        return {**former, **{n: rule for n, rule in self.engine.coverage().items() if former.get(n, UNUSED) == UNUSED}}

    def _begin(self) -> BatchSummary | None:
        """Sums of the batches that were read before the fit was interrupted, of which the random numbers go on."""
        resume, source = self.options.resume, self.engine.generator
        if resume is None or resume.at is None:
            if resume is not None and self.number > 1:
                self._save(resume, None)  # what the readings before have found
            return None
        if source is not None and resume.at.draws is not None:
            source.set_state(resume.at.draws[1].cpu())
        return resume.at.total

    def _save(self, resume: Resumable, total: BatchSummary | None) -> None:
        source = self.engine.generator
        draws = None if source is None or self.draws is None else (self.draws, source.get_state())
        resume.save(
            reading=self.number, data_pass=self.data_pass.state(), total=total, first=self.first,
            coverage=self.coverage(), draws=draws,
        )  # fmt: skip

    def _counted(self, batch: Any) -> tuple[Inputs, Tensor, Tensor | None] | None:
        """Inputs and targets that are not ignored, with their weights, or None."""
        problem = self.engine.problem
        return next_token.weighed(
            batch, self.options.dict_key_y, problem.device, self.engine.target_rules, problem.module
        )

    def _extended(self, total: BatchSummary | None, x: Inputs, y: Tensor, weights: Tensor | None) -> BatchSummary:
        """The sums with those of one more batch, whose curvature the pass takes in."""
        problem = self.engine.problem
        with self.engine.weighing(weights), noticing_swap(problem.module, problem.forward_fn, y):
            new = self.data_pass.add(x, y)
        require_finite(new.loss_terms.isfinite())
        losses = new.loss_terms.detach()
        if total is None:
            return BatchSummary(losses, new.n_data, new.n_outputs)
        if total.n_outputs != new.n_outputs:
            raise InvalidData(f"the batch has {new.n_outputs} outputs, the former ones {total.n_outputs}.")
        return BatchSummary(total.loss_terms + losses, total.n_data + new.n_data, total.n_outputs)


@contextmanager
def _within_memory(number: int) -> Iterator[None]:
    """Names the batch at which memory ran out.

    Raises:
        OutOfMemory: It did.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        said = str(error) if isinstance(error, OutOfMemory) else f"memory ran out. {COTANGENT.remedy} {error}"
        raise OutOfMemory(f"batch {number}: {said}") from error


def begin_reading(
    loader: Iterable[Any], dict_key_y: str, device: torch.device
) -> tuple[Inputs, Tensor, Iterable[Any]] | None:
    """Inputs and targets of the first batch, and an iterable that still gives every batch; the loader is read once.

    None if there is no batch.
    """
    iterator = iter(loader)
    try:
        head = next(iterator)
    except StopIteration:
        return None
    with named("batch 0"):
        x, y = batches.split(head, dict_key_y)
        return batches.to_device(x, device), y.to(device), _Begun(loader, head, iterator)


class _Begun:
    """A loader of which one batch has been read: the first reading goes on, later ones start anew.

    The first one must not start anew, for a stream behind a fresh iterator would begin at the second batch, and a
    loader that shuffles would draw another order.
    """

    def __init__(self, loader: Iterable[Any], head: Any, rest: Iterator[Any]) -> None:
        self.loader = loader
        self.head = head
        self.rest: Iterator[Any] | None = rest

    def __len__(self) -> int:
        return len(self.loader)  # pyright: ignore[reportArgumentType]  (a TypeError tells a progress bar of none)

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that an iterator of which no more than one batch is read takes nothing away.
        if self.rest is not None:
            yield self.head
        rest, self.rest = self.rest, None
        yield from self.loader if rest is None else rest
