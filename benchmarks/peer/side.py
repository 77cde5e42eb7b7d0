"""The comparing end of a worker: starts it, asks it, and ends what takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import cached_property
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Literal

from benchmarks.peer.protocol import Begin, Ended, Failed

ROOT = Path(__file__).parents[2]
START_SECONDS = 300.0
"""How long a worker may take to import its package."""
_PATIENCE = 10.0
"""Seconds per second of the limit on processor time after which a process is ended that only waits."""


def processor_seconds(process: int) -> float:
    """Processor time of a process and of those that it has started, from Linux's /proc; 0 where it has ended."""
    folder = Path(f"/proc/{process}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()  # from the third: the second may have spaces
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # also of children that have ended
    try:
        children = (folder / f"task/{process}/children").read_text().split()
    except OSError:  # it has just ended, or this kernel does not list them
        return own
    return own + sum(processor_seconds(int(child)) for child in children)


class Side:
    """One package in a process of its own.

    Args:
        python: Interpreter.
        home: Empty folder, from which it imports.
        package: Folder that holds `laplace`; None for what the interpreter has.
        device: Where it works.
        shared: Whether processor time counts, or else time.
        limit_s: Seconds that an answer may take, by the same clock.
    """

    def __init__(
        self, python: Path, home: Path, package: Path | None, *, device: str, shared: bool, limit_s: float
    ) -> None:
        self.limit_s = limit_s
        self.shared = shared
        home.mkdir()
        (home / "benchmarks").symlink_to(ROOT / "benchmarks", target_is_directory=True)
        if package is not None:
            (home / "laplace").symlink_to(package / "laplace", target_is_directory=True)
        self._pipe, theirs = Pipe()
        settings = {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
        command = [str(python), "-m", "benchmarks.peer.worker", str(theirs.fileno()), device, str(shared)]
        self._process = subprocess.Popen(
            command, cwd=home, env=settings, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL
        )
        theirs.close()
        self._child: int | None = None

    @cached_property
    def package(self) -> str:
        """The package and its version, once it is imported."""
        return str(self._answer(START_SECONDS))

    def begin(self, begin: Begin) -> None:
        """Begins a workload, once the package is imported; the one before has ended."""
        _ = self.package
        self._pipe.send(begin)
        self._child = int(self._answer(START_SECONDS))

    def ask(self, what: Literal["run", "result"] = "run") -> Any:
        """What the first run, or another, measured: see `worker.Task`; or a `Failed`, after which the workload ends.

        Args:
            what: A run, or after the first one the result, by which backends are compared.
        """
        if self._child is None:
            raise RuntimeError("no workload has begun, or it has ended: begin one before asking")
        self._pipe.send(what)
        if not self._in_time(self._child):
            os.killpg(self._child, signal.SIGKILL)  # with a script that it has started
            self._reap()
            return Failed(f"over {self.limit_s:.0f} s")
        answer = self._pipe.recv()
        if isinstance(answer, Ended):
            self._child = None
            return Failed(f"exit status {answer.status}")
        if isinstance(answer, Failed):
            self.end()
        return answer

    def _in_time(self, child: int) -> bool:
        """Waits for an answer, for as long as the limit allows; longer where a process uses no processor time."""
        start, latest = self._clock(child), time.perf_counter() + _PATIENCE * self.limit_s
        while not (answered := self._pipe.poll(min(1.0, self.limit_s))) and time.perf_counter() < latest:
            if self._clock(child) - start >= self.limit_s:
                break
        return answered

    def _clock(self, child: int) -> float:
        """Seconds, or those of the processor that a process has used (Linux)."""
        return processor_seconds(child) if self.shared else time.perf_counter()

    def end(self) -> None:
        """Ends the workload, if it has not."""
        if self._child is not None:
            self._pipe.send("end")
            self._reap()

    def close(self) -> None:
        """Ends the worker."""
        self.end()
        self._process.kill()
        self._process.wait()

    def _reap(self) -> None:
        """Reads on until the worker says that the workload's process has ended."""
        while not isinstance(self._answer(START_SECONDS), Ended):
            pass
        self._child = None

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            self._process.kill()
            raise TimeoutError(f"the worker {self._process.args!r} did not answer within {seconds:.0f} s")
        return self._pipe.recv()
