"""One package at work: `python -m benchmarks.peer.worker FD DEVICE SHARED`, commanded over a pipe.

The process imports its package once, and forks for every workload: each begins with fresh memory and a limit, and may
be killed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # else the first vectorised gradient of a process imports it

import laplace
from benchmarks import timing
from benchmarks.peer import script, work
from benchmarks.peer.protocol import Begin, Ended, Failed
from benchmarks.peer.workloads import Workload

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""What PyTorch says then, as a `RuntimeError`."""


def failure(error: BaseException) -> Failed:
    """Name of an error, or that memory ran out."""
    said = str(error).lower()
    out_of_memory = isinstance(error, MemoryError) or any(text in said for text in OUT_OF_MEMORY)
    return Failed("out of memory" if out_of_memory else type(error).__name__)


def limit_memory(n_bytes: int) -> None:
    """Lets this process take so many more bytes of data; on Linux alone."""
    held = timing.status("VmData:")
    if held is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (held + n_bytes, held + n_bytes))


class Task:
    """A workload in a process of its own.

    Args:
        workload: What to do.
        state: File of weights and data.
        device: Where.
        backend: Class of the curvature; empty for the default.
        shared: Whether processor time counts.
    """

    def __init__(self, workload: Workload, state: Path, device: torch.device, backend: str, *, shared: bool) -> None:
        timing.free_a_large_block()
        self.work = work.read(workload, state, device, backend)
        self.job = self.work.job()
        self.device = device
        self.clock = script.processor_time if shared else time.perf_counter

    def first(self) -> tuple[float, float]:
        """Peak memory in MiB that the first run adds, NaN of a script in another process, and its seconds."""
        if self.work.workload.action == "script":
            return math.nan, self.run()
        seconds: list[float] = []
        timed = timing.Job(lambda made: seconds.append(self._seconds(made)), prepare=self.job.prepare)
        return timing.measure_memory(timed, self.device).extra_mib, seconds[0]

    def run(self) -> float:
        """Seconds of one run."""
        return self._seconds(self.job.prepare())

    def _seconds(self, made: Any) -> float:
        return timing.seconds(lambda: self.job.run(made), self.device, self.clock)


def answered(compute: Callable[[], Any]) -> Any:
    """What was computed, or the failure."""
    try:
        return compute()
    except BaseException as error:  # laplace-torch leaves the interpreter where an eigenvalue solver fails
        return failure(error)


def serve(pipe: Connection, begin: Begin, device: torch.device, *, shared: bool) -> None:
    """Answers `first`, and then `run` again and again, with what they measured or the failure, until told to end.

    Asked for the result it answers with a number that fits of other backends have too.
    """
    os.setpgid(0, 0)
    pipe.send(os.getpid())
    task: Task | None = None

    def first() -> tuple[float, float]:
        nonlocal task
        limit_memory(begin.n_bytes)
        task = Task(begin.workload, begin.state, device, begin.backend, shared=shared)
        return task.first()

    while (asked := pipe.recv()) != "end":
        pipe.send(answered(first if task is None else task.work.result if asked == "result" else task.run))


def versions() -> str:
    """The package and its version."""
    try:
        return f"laplace-torch {importlib.metadata.version('laplace-torch')}"
    except importlib.metadata.PackageNotFoundError:
        return str(Path(laplace.__file__).parent)


def main() -> None:
    """Forks for every workload, and says so when that process has ended; until this one is ended."""
    pipe, device, shared = Connection(int(sys.argv[1])), torch.device(sys.argv[2]), sys.argv[3] == "True"
    torch.set_num_threads(1)
    pipe.send(versions())
    while True:
        begin = pipe.recv()
        if not isinstance(begin, Begin):
            continue  # a question to a process that was ended before it heard it
        child = os.fork()
        if child == 0:
            serve(pipe, begin, device, shared=shared)
            os._exit(0)
        pipe.send(Ended(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError):  # the comparing end is gone
        main()
