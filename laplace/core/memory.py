"""Memory: work in slices, and in smaller ones where memory runs out; and how much is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

import torch

from laplace.errors import MemoryWarning, OutOfMemory, warn

_T = TypeVar("_T")


@dataclass(frozen=True)
class Unit:
    """The smallest piece of some work."""

    name: str  # what it is, for messages
    plural: str  # of several
    remedy: str  # what to do where memory does not hold one


_LESS = "choose what takes less: la.plan(loader).cheaper lists structures and weights that do."
DATUM = Unit("datum", "data", f"Free memory, or {_LESS}")
POSITION = Unit("position of a datum", "positions", f"Free memory, or {_LESS}")
OUTPUT = Unit("output of a datum", "outputs", f"Give fewer data at once, or {_LESS}")
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


# Free memory: on the host, within the control groups of the process, or on the device.
#
# Nothing else reads the machine, and nothing is computed from it: it decides whether a fit begins, and whether
# covariances between outputs are computed.


Read = Callable[[str], "str | None"]
"""The text of a file, or None where there is none."""

LEAST = 2**30
"""Bytes below which nobody looks how much there is."""

_KIB = 1024

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class Available:
    """Memory that can be taken."""

    size: int  # bytes
    source: str  # who says so


def available(device: torch.device) -> Available | None:
    """Memory that is free on a device; None if nobody says."""
    if device.type == "cpu":
        return free_on_host(_file_text)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Available(free + unused, "CUDA")
    return None


def in_units(value: int) -> str:
    """A number of bytes for people."""
    number, unit = float(value), 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.3g} {_UNITS[unit]}"


def free_on_host(read: Read) -> Available | None:
    """The least of what Linux, and every control group that the process is in, leave; None on other systems."""
    limits: list[Available] = []
    meminfo = meminfo_available(read("/proc/meminfo") or "")
    if meminfo is not None:
        limits.append(Available(meminfo, "/proc/meminfo"))
    for maximum, current, stat, prefix in _group_files(read("/proc/self/cgroup") or ""):
        limit = left_by_group(read(maximum), read(current), read(stat), prefix)
        if limit is not None:
            limits.append(Available(limit, maximum))
    return min(limits, key=lambda one: one.size, default=None)


def meminfo_available(text: str) -> int | None:
    """Bytes of the line `MemAvailable` of /proc/meminfo."""
    value = _entry(text, "MemAvailable:")
    return None if value is None else _KIB * value


def left_by_group(maximum: str | None, current: str | None, stat: str | None, prefix: str) -> int | None:
    """Bytes that the limit of a control group leaves; None without a limit.

    Args:
        maximum: The limit, a number or `max`.
        current: What is used, with cached files.
        stat: Lines of a name and a number, two of which are those of cached files, which are given up when memory runs
            short: data and weights that were read lately are no reason to refuse a fit.
        prefix: What their names begin with.
    """
    if maximum is None or current is None or not maximum.strip().isdigit():
        return None
    cached = sum(_entry(stat or "", f"{prefix}{name}") or 0 for name in ("active_file", "inactive_file"))
    return max(0, int(maximum) - int(current) + cached)


def _group_files(groups: str) -> Iterator[tuple[str, str, str, str]]:
    """Files of every group that holds the process, from its own to the root: limit, use, statistics.

    With them comes what the names in the statistics begin with.
    """
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        own = PurePosixPath(path)
        for group in (own, *own.parents):
            if not controllers:
                folder = f"/sys/fs/cgroup{group}".rstrip("/")
                yield f"{folder}/memory.max", f"{folder}/memory.current", f"{folder}/memory.stat", ""
            elif "memory" in controllers.split(","):
                folder = f"/sys/fs/cgroup/memory{group}".rstrip("/")
                limit, use = f"{folder}/memory.limit_in_bytes", f"{folder}/memory.usage_in_bytes"
                yield limit, use, f"{folder}/memory.stat", "total_"


def _entry(text: str, name: str) -> int | None:
    """The number behind a name at the beginning of a line."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _file_text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except (OSError, ValueError):
        return None
