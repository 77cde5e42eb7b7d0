"""A whole script in a process of its own: the import of a package, a fit and a prediction."""

from __future__ import annotations

import pickle
import resource
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.peer.workloads import Workload


def processor_time() -> float:
    """Seconds of the processor that this process has used, and those that it has started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def run(workload: Workload, state: Path, device: torch.device, backend: str) -> None:
    """Runs the script with the interpreter and the package of this process.

    Raises:
        CalledProcessError: It failed.
    """
    given = pickle.dumps((workload, state, device, backend))
    subprocess.run([sys.executable, "-m", "benchmarks.peer.script"], input=given, check=True)


def main() -> None:
    """Fits what standard input says, and predicts all data."""
    torch.set_num_threads(1)
    workload, state, device, backend = pickle.loads(sys.stdin.buffer.read())
    from benchmarks.peer import work  # which imports the package

    its = work.read(workload, state, device, backend)
    its.predict(its.fitted(), **its.kind())


if __name__ == "__main__":
    main()
