"""Times a candidate against its reference in one run, and measures peak memory in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_MIB = 2**20


@dataclass(frozen=True)
class Job:
    """What is measured.

    Attributes:
        run: The candidate; it is given what `prepare` made.
        reference: What it is compared with, or None if the target is in seconds or bytes.
        prepare: Untimed, before every run.
        note: Something to print beside the result.
        planned: Predicts, before the run, the bytes that it will add; or None.
        held: Bytes that count instead of a time, of what a run returned; or None.
    """

    run: Callable[[Any], object]
    reference: Callable[[], object] | None = None
    prepare: Callable[[], Any] = lambda: None
    note: str = ""
    planned: Callable[[], int] | None = None
    held: Callable[[Any], int] | None = None


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        name: Workload.
        target: The largest value that meets the target.
        unit: `"× …"` (ratio), `"s"` (seconds), or peak memory: `"GiB"` of the whole process, `"GiB added"` beyond what
            held interpreter, model and data; `"MiB"` of what is kept.
        build: Makes the job on a device.
        in_other_processes: Whether other processes do the work, so that this one's processor time says nothing of it.
    """

    name: str
    target: float
    unit: str
    build: Callable[[torch.device], Job]
    in_other_processes: bool = False


@dataclass(frozen=True)
class Timing:
    """Times over alternating repeats.

    Attributes:
        median: Median ratio, or median seconds without a reference.
        low: Smallest.
        high: Largest.
        best: Fastest run over fastest reference, which other work on the machine disturbs least.
        seconds: Median of the candidate.
        reference_seconds: Median of the reference, or None.
    """

    median: float
    low: float
    high: float
    best: float
    seconds: float
    reference_seconds: float | None


@dataclass(frozen=True)
class Memory:
    """Peak memory of one run in a fresh process.

    Attributes:
        extra_mib: What the run added to the memory held before it (model and data).
        total_mib: The whole: the process on the CPU, all tensors on CUDA.
        planned_mib: What was predicted of the former, or None.
    """

    extra_mib: float
    total_mib: float
    planned_mib: float | None = None


Clock = Callable[[], float]


def seconds(function: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Seconds that a call takes, by a clock; on CUDA until its work is done."""
    _synchronise(device)
    start = clock()
    function()
    _synchronise(device)
    return clock() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_a_large_block() -> None:
    """Frees 31 MiB once, as every process does that has trained a network.

    Until then the C library gives the memory of many activations back after every batch and fetches the pages anew.
    Some work frees such a block itself, other work does not: the state of the allocator would be compared, and lines
    would depend on those before them.
    """
    torch.empty(31 * _MIB, dtype=torch.uint8)


def time_job(
    job: Job, device: torch.device, *, repeats: int, max_seconds: float, clock: Clock = time.perf_counter
) -> Timing:
    """Alternates candidate and reference; one run of each comes first and is not counted, nor is the allocator's start.

    Args:
        job: What to time.
        device: Where it runs.
        repeats: Largest number of pairs.
        max_seconds: No further pair is begun after this time, but there are at least three.
        clock: Gives the time in seconds.
    """
    free_a_large_block()
    pairs: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(pairs) <= 3 or (len(pairs) <= repeats and time.perf_counter() - start < max_seconds):
        reference = seconds(job.reference, device, clock) if job.reference is not None else 1.0
        prepared = job.prepare()
        pairs.append((seconds(lambda made=prepared: job.run(made), device, clock), reference))
    candidates, references = zip(*pairs[1:], strict=True)
    ratios = [candidate / reference for candidate, reference in pairs[1:]]
    return Timing(
        median=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        best=min(candidates) / min(references),
        seconds=statistics.median(candidates),
        reference_seconds=statistics.median(references) if job.reference is not None else None,
    )


def measure_memory(job: Job, device: torch.device) -> Memory:
    """Peak memory of the first run in this process; what came before does not count."""
    prepared = job.prepare()
    planned = None if job.planned is None else job.planned() / _MIB
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        job.run(prepared)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        before = _forget_peak()
        job.run(prepared)
        peak = _peak_resident()
    return Memory((peak - before) / _MIB, peak / _MIB, planned)


def memory_in_subprocess(name: str, device: torch.device) -> Memory:
    """`measure_memory` of the named case in a fresh process, whose peak no earlier work has raised."""
    # Freed memory goes back at once (glibc), so that the run cannot hide in what the set-up left behind.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "benchmarks", "--memory-of", name, "--device", str(device)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return Memory(**json.loads(done.stdout.splitlines()[-1]))


def status(field: str) -> int | None:
    """A field of Linux's /proc/self/status in bytes; None elsewhere."""
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    return next((int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith(field)), None)


def _peak_resident() -> int:
    """Peak resident bytes of this process, without the parent's before exec, which `getrusage` counts on Linux."""
    peak = status("VmHWM:")
    if peak is not None:
        return peak
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


def _forget_peak() -> int:
    """Resident bytes now; on Linux the peak starts anew from here, and what was freed is given back (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS:") or _peak_resident()
