"""One workload by both packages, as a line of the table."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from benchmarks.peer.workloads import Workload


@dataclass(frozen=True)
class Half:
    """One package at one workload.

    Attributes:
        seconds: Of the runs that count.
        first: Seconds of the first run, which does not count.
        extra_mib: Peak memory of the first run, beyond model and data; for predictions also beyond the posterior. NaN
            of a script, which has a process of its own.
        failure: What kept it from an answer; else empty.
    """

    seconds: tuple[float, ...] = ()
    first: float = float("nan")
    extra_mib: float = float("nan")
    failure: str = ""

    @property
    def median(self) -> float:
        """Median seconds; NaN without a run."""
        return statistics.median(self.seconds) if self.seconds else float("nan")


@dataclass(frozen=True)
class Line:
    """A workload by both packages.

    Attributes:
        workload: What was done.
        theirs: By laplace-torch, with the backend that took least time.
        ours: By this library.
        backend: The name of that backend; empty where it has no part, or all fail.
    """

    workload: Workload
    theirs: Half
    ours: Half
    backend: str = ""

    @property
    def ratios(self) -> list[float]:
        """Theirs / ours, of each pair."""
        return [a / b for a, b in zip(self.theirs.seconds, self.ours.seconds, strict=False)]

    def __str__(self) -> str:
        ratios = self.ratios
        spread = f"{min(ratios):.3g} – {max(ratios):.3g}" if ratios else ""
        median = f"{statistics.median(ratios):.3g}" if ratios else ""
        first = f"{self.theirs.first / self.ours.first:.3g}" if ratios else ""
        return (
            f"{self.workload.name:<58} {median:>7} {spread:<15} {first:>6} {_ms(self.theirs):>22} {_ms(self.ours):>22} "
            f"{_mib(self.theirs):>8} {_mib(self.ours):>8}  {self.backend.removesuffix('GGN'):<10}".rstrip()
        )


HEADER = (
    f"{'workload':<58} {'median':>7} {'range':<15} {'first':>6} {'laplace-torch, ms':>22} {'laplace, ms':>22} "
    f"{'MiB':>8} {'MiB':>8}  backend"
)


def _ms(half: Half) -> str:
    return half.failure or f"{1e3 * half.median:.1f}"


def _mib(half: Half) -> str:
    return "" if half.failure or math.isnan(half.extra_mib) else f"{half.extra_mib:.0f}"
