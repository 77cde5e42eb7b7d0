"""Processes that work together, each on its own data: outcomes that all of them learn, and sums over all of them."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from laplace.errors import InvalidArgument, InvalidType, ProcessError, UnsupportedError

T = TypeVar("T")

_BUCKET_BYTES = 25 * 2**20
"""Bytes that are summed over the processes at once, and copied for it."""


_FAILED_ALONE: ContextVar[list[str] | None] = ContextVar("failed_alone", default=None)
"""Errors of this process's work within collective calls that are not made here."""


class OutOfStep(ProcessError):
    """Error that every process of the group raises by itself, since they do not take the same step."""


@dataclass(frozen=True)
class _Report:
    """What a process sends to the others."""

    value: bytes  # the result of its work, or what it takes a step with, pickled
    error: str | None = None  # words for what it failed with, or None
    step: str = ""  # the step that it is about to take; empty at the end of its work


@dataclass(frozen=True)
class Processes:
    """The processes of a group, of which this one is a member.

    Every method is collective: all of them call it, in the same order.
    """

    group: distributed.ProcessGroup

    @classmethod
    def from_argument(cls, group: Any) -> Processes | None:
        """Those of a group that a user gives; None for this process alone."""
        if group is None:
            return None
        if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
            raise InvalidType(
                f"group is a {type(group).__name__}; it must be None, or a group of torch.distributed that this "
                "process is in, such as torch.distributed.group.WORLD after init_process_group."
            )
        return cls(group)

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Number of this process among them."""
        return self.group.rank()

    def joined(self, given: Processes | None) -> Processes:
        """These processes, if they are those that a user gives for work with a network that is spread over them."""
        own = distributed.get_process_group_ranks(self.group)
        if given is None or distributed.get_process_group_ranks(given.group) != own:
            raise InvalidArgument(
                f"the network is spread over the ranks {own} by FSDP2: they fit together, each its shard of the data. "
                "Give their group, group=torch.distributed.group.WORLD if these are all."
            )
        return self

    def gather(self, value: T) -> list[T]:
        """A value of every process, which can be pickled."""
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def gather_results(self, attempt: Callable[[], T]) -> list[T]:
        """The outcome of every process; where one fails, all of them do.

        Args:
            attempt: Work of this process whose result can be pickled, without collective calls but for those that
                `barrier` goes before, in `collective_region`.
        """
        own: Exception | None = None
        alone: list[str] = []
        token = _FAILED_ALONE.set(alone)
        try:
            outcome = _Report(pickle.dumps(attempt()))  # what cannot be is an error of this process, as others are
        except OutOfStep:
            raise  # the others know
        except Exception as error:
            if alone:
                raise
            own, outcome = error, _Report(b"", f"{type(error).__name__}: {error}")
        finally:
            _FAILED_ALONE.reset(token)
        outcomes = self.gather(outcome)
        if own is not None:
            raise own
        return _values(outcomes)

    def barrier(self, step: str, value: Any = None) -> list[Any]:
        """A value of every process, all of which are about to take the same step of work that needs all of them."""
        return _values(self.gather(_Report(pickle.dumps(value), step=step)))

    @contextmanager
    def collective_region(self) -> Iterator[None]:
        """A block of collective calls of others, such as FSDP's within a pass.

        Where one process fails in it the others are left within such a call, and would take any message for a part of
        it. `gather_results` then raises the error in that process at once, and sends nothing; the others end as its
        connections do.
        """
        try:
            yield
        except Exception as error:
            failed = _FAILED_ALONE.get()
            if failed is not None:
                failed.append(type(error).__name__)
            raise

    def __deepcopy__(self, memo: object) -> Processes:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UnsupportedError("a group of processes cannot be pickled; they are given to each call by group=.")

    def add_(self, sums: Mapping[str, Tensor], symmetric: Callable[[Tensor], bool]) -> None:
        """Puts the sums over all processes in the place of this one's, in place.

        Tensors travel side by side in buckets, symmetric matrices `[..., n, n]` by their upper triangles.

        Args:
            sums: Tensors by name; equal names, shapes and dtypes in every process.
            symmetric: Whether a tensor holds symmetric matrices.
        """
        ordered = [sums[name] for name in sorted(sums)]
        views = itertools.chain.from_iterable(
            _rows(tensor) if symmetric(tensor) else _chunks(tensor) for tensor in ordered
        )
        for bucket in _buckets(views):
            flat = torch.cat([view.reshape(-1) for view in bucket])
            distributed.all_reduce(flat, group=self.group)
            for view, part in zip(bucket, flat.split([view.numel() for view in bucket]), strict=True):
                view.copy_(part.view_as(view))
        for tensor in filter(symmetric, ordered):
            _mirror_entries(tensor)


def _values(messages: Sequence[_Report]) -> list[Any]:
    """Values of all processes, if all are well and take the same step."""
    failed = {rank: each.error for rank, each in enumerate(messages) if each.error is not None}
    if failed:
        first, message = next(iter(failed.items()))
        more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise OutOfStep(f"rank {first} of the group failed{more}, so that nothing was summed. {message}")
    for rank, each in enumerate(messages):
        if each.step != messages[0].step:
            raise OutOfStep(
                f"rank {rank} of the group is at {each.step or 'the end of its data'!r}, rank 0 at "
                f"{messages[0].step or 'the end of its data'!r}: a network that is spread over processes runs in all "
                "of them at once. Give each of them as many batches as the others, as DistributedSampler does."
            )
    return [pickle.loads(each.value) for each in messages]


def _rows(matrix: Tensor) -> Iterator[Tensor]:
    """Views of the rows of an upper triangle."""
    for i in range(matrix.shape[-1]):
        yield matrix[..., i, i:]


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Views of all of a tensor, none larger than a bucket unless it is one slice."""
    if tensor.ndim == 0:
        yield tensor
        return
    slice_bytes = tensor[:1].numel() * tensor.element_size()
    yield from tensor.split(max(1, _BUCKET_BYTES // max(1, slice_bytes)))


def _buckets(views: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Views of one dtype each, that follow each other, up to the bytes of a bucket."""
    bucket: list[Tensor] = []
    n_bytes = 0
    for view in views:
        size = view.numel() * view.element_size()
        if bucket and (view.dtype != bucket[0].dtype or n_bytes + size > _BUCKET_BYTES):
            yield bucket
            bucket, n_bytes = [], 0
        bucket.append(view)
        n_bytes += size
    if bucket:
        yield bucket


def _mirror_entries(matrix: Tensor) -> None:
    """Copies the upper triangle of `[..., n, n]` to the lower one, in place."""
    step = 256
    for start in range(0, matrix.shape[-1], step):
        stop = start + step
        block = matrix[..., start:stop, start:stop]
        block.copy_(block.triu() + block.triu(1).mT)
        matrix[..., stop:, start:stop] = matrix[..., start:stop, stop:].mT
