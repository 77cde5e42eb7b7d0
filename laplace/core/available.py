"""Memory that is free: on the host, within the control groups of the process, or on the device.

Nothing else reads the machine, and nothing is computed from it: it decides whether a fit begins, and whether
covariances between outputs are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

Read = Callable[[str], "str | None"]
"""The text of a file, or None where there is none."""

LEAST = 2**30
"""Bytes below which nobody looks how much there is."""

_KIB = 1024

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class Available:
    """Memory that can be taken.

    Attributes:
        size: Bytes.
        source: Who says so.
    """

    size: int
    source: str


def available(device: torch.device) -> Available | None:
    """Memory that is free on a device; None if nobody says."""
    if device.type == "cpu":
        return of_host(_read)
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


def of_host(read: Read) -> Available | None:
    """The least of what Linux, and every control group that the process is in, leave; None on other systems."""
    limits: list[Available] = []
    meminfo = of_meminfo(read("/proc/meminfo") or "")
    if meminfo is not None:
        limits.append(Available(meminfo, "/proc/meminfo"))
    for maximum, current, stat, prefix in _group_files(read("/proc/self/cgroup") or ""):
        limit = of_group(read(maximum), read(current), read(stat), prefix)
        if limit is not None:
            limits.append(Available(limit, maximum))
    return min(limits, key=lambda one: one.size, default=None)


def of_meminfo(text: str) -> int | None:
    """Bytes of the line `MemAvailable` of /proc/meminfo."""
    value = _entry(text, "MemAvailable:")
    return None if value is None else _KIB * value


def of_group(maximum: str | None, current: str | None, stat: str | None, prefix: str) -> int | None:
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

    Args:
        groups: /proc/self/cgroup: lines `number:controllers:path`, of version 2 `0::path`.
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


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except (OSError, ValueError):
        return None
