"""What goes over the pipe to a worker, and back, besides numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer.workloads import Workload


@dataclass(frozen=True)
class Begin:
    """Begins a workload in a process of its own.

    Attributes:
        workload: What to do.
        state: File of weights and data.
        n_bytes: Memory that it may take.
        backend: Class in `laplace.curvature` that computes the curvature; empty for the package's default.
    """

    workload: Workload
    state: Path
    n_bytes: int
    backend: str = ""


@dataclass(frozen=True)
class Failed:
    """What kept a package from an answer: the name of its error, that memory ran out, or the time."""

    name: str


@dataclass(frozen=True)
class Ended:
    """The process of a workload has ended, with this exit status; negative is a signal."""

    status: int
