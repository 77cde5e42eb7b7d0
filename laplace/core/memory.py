"""Work that is done in slices, and in smaller ones where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from laplace.errors import MemoryWarning, OutOfMemory, warn

_T = TypeVar("_T")


@dataclass(frozen=True)
class Unit:
    """The smallest piece of some work.

    Attributes:
        name: What it is, for messages.
        plural: Of several.
        remedy: What to do where memory does not hold one.
    """

    name: str
    plural: str
    remedy: str


_LESS = "choose what takes less: la.plan(loader).cheaper lists structures and weights that do."
DATUM = Unit("datum", "data", f"Free memory, or {_LESS}")
POSITION = Unit("position of a datum", "positions", f"Free memory, or {_LESS}")
COTANGENT = Unit("backward pass", "backward passes", f"Give the loader smaller batches (batch_size), or {_LESS}")
VECTOR = Unit("product with a vector", "products with vectors", f"Give the loader smaller batches, or {_LESS}")

_WORDS = ("out of memory", "not enough memory", "allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What PyTorch says in a plain `RuntimeError` where it has no type for it: on a CPU, on MPS, in cuBLAS."""


def ran_out(error: BaseException) -> bool:
    """True if an error says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def in_slices(count: int, at_once: int, compute: Callable[[slice], _T], unit: Unit) -> Iterator[tuple[slice, _T]]:
    """Computes consecutive slices of some work; halves them where memory runs out, and goes on so.

    Args:
        count: Pieces of work in all.
        at_once: How many a slice has at first.
        compute: The work; it must leave nothing behind if it fails, for it is called again.
        unit: What one piece is, and what to do where memory does not hold it.

    Yields:
        A slice, and what was computed for it.

    Raises:
        OutOfMemory: Memory does not hold a single piece.
    """
    start, warned = 0, False
    while start < count:
        part = slice(start, min(start + at_once, count))
        size = part.stop - part.start
        try:
            result = compute(part)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            if size == 1:
                raise OutOfMemory(f"memory ran out at a single {unit.name}. {unit.remedy}") from error
        else:
            start = part.stop
            yield part, result
            del result  # or it would be held beside the next one
            continue
        # Out of the handler, for the traceback keeps the tensors of the failed attempt alive.
        at_once = size // 2
        if not warned:
            warned = True
            warn(
                f"memory ran out at {size} {unit.plural} at once; the work goes on with {at_once}, with the same "
                "numbers. Smaller batches, or a smaller backend_kwargs={'memory_budget': bytes}, save the attempts.",
                MemoryWarning,
            )
