"""Processes that work together, each on its own data: outcomes that all of them learn, and sums over all of them."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from laplace.errors import InvalidType, ProcessError, UnsupportedError

T = TypeVar("T")

_BUCKET_BYTES = 25 * 2**20
"""Bytes that are summed over the processes at once, and copied for it."""


@dataclass(frozen=True)
class Processes:
    """The processes of a group, of which this one is a member.

    Every method is collective: all of them call it, in the same order.

    Attributes:
        group: The group.
    """

    group: distributed.ProcessGroup

    @classmethod
    def of(cls, group: Any) -> Processes | None:
        """Those of a group that a user gives; None for this process alone.

        Raises:
            InvalidType: It is no process group, or this process is not in it.
        """
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

    def gathered(self, value: T) -> list[T]:
        """A value of every process, which can be pickled."""
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def agreed(self, attempt: Callable[[], T]) -> list[T]:
        """The outcome of every process; where one fails, all of them do.

        Args:
            attempt: Work of this process without collective calls, whose result can be pickled.

        Raises:
            ProcessError: Others failed; the message says which, and why. A process that fails raises its own error.
        """
        own: Exception | None = None
        outcome: tuple[bytes, str | None]
        try:
            outcome = pickle.dumps(attempt()), None  # what cannot be is an error of this process, as others are
        except Exception as error:
            own, outcome = error, (b"", f"{type(error).__name__}: {error}")
        outcomes = self.gathered(outcome)
        if own is not None:
            raise own
        failed = {rank: message for rank, (_, message) in enumerate(outcomes) if message is not None}
        if failed:
            first, message = next(iter(failed.items()))
            more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise ProcessError(f"rank {first} of the group failed{more}, so that nothing was summed. {message}")
        return [pickle.loads(value) for value, _ in outcomes]

    def __deepcopy__(self, memo: object) -> Processes:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UnsupportedError(
            "a group of processes cannot be pickled; what they hold together is saved by laplace.checkpoint.save."
        )

    def sum_(self, tensor: Tensor) -> Tensor:
        """Puts the sum over all processes in the place of a contiguous tensor, and returns it."""
        distributed.all_reduce(tensor, group=self.group)
        return tensor

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
