"""Runs every workload by both packages in turn, and prints their ratios."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer import growth
from benchmarks.peer.line import HEADER, Half, Line
from benchmarks.peer.protocol import Begin, Failed
from benchmarks.peer.side import ROOT, Side
from benchmarks.peer.workloads import Workload, workloads

GIB = 2**30

_SAME = 1e-2
"""Relative difference of results up to which two backends compute the same."""


@dataclass(frozen=True)
class Limits:
    """What a run may take.

    Attributes:
        pairs: Runs of each package that count, at most but for brief ones.
        seconds: No further pair is begun after runs that took these together; there is one at least.
        brief_seconds: Pairs go on until they took these together: few milliseconds say little.
        answer_seconds: Set-up and first run, or one more run, may take these; by the clock of the measurement.
        n_bytes: Memory of a worker beyond the imported package.
    """

    pairs: int
    seconds: float
    brief_seconds: float = 0.5
    answer_seconds: float = 60.0
    n_bytes: int = 4 * GIB

    def go_on(self, pairs: int, seconds: float) -> bool:
        """True if another pair is to be run after so many, which took so many seconds."""
        return not pairs or seconds < self.brief_seconds or (pairs < self.pairs and seconds <= self.seconds)


QUICK, LONG = Limits(3, 3.0, answer_seconds=30.0), Limits(9, 30.0)


def fastest(side: Side, begin: Begin) -> tuple[str, Failed | None]:
    """The backend of laplace-torch that takes least time in a second run, or what stopped the default one.

    A backend with another result than the default, by more than a hundredth, does another thing, and is passed over.
    """
    times: dict[str, float] = {}
    result, failure = math.nan, None
    for backend in begin.workload.backends:
        side.begin(replace(begin, backend=backend))
        answers = [side.ask()]
        for what in ("result", "run"):
            if not isinstance(answers[-1], Failed):
                answers.append(side.ask(what))
        side.end()
        if isinstance(answers[-1], Failed):
            failure = failure or answers[-1]
            continue
        if math.isnan(result):
            result = answers[1]
        if abs(answers[1] - result) <= _SAME * abs(result):
            times[backend] = answers[2]
        else:
            print(
                f"{begin.workload.name}: {backend} has the result {answers[1]:.6g}, others {result:.6g}",
                file=sys.stderr,
            )
    return (min(times, key=lambda name: times[name]), None) if times else ("", failure)


def compare(sides: tuple[Side, Side], workload: Workload, state: Path, limits: Limits) -> Line:
    """Theirs and ours in turn, after a first run of each that shows the memory and does not count."""
    begin = Begin(workload, state, limits.n_bytes)
    backend, failed = fastest(sides[0], begin) if workload.backends else ("", None)
    firsts: list[Any] = []
    for side, its_backend in zip(sides, (backend, ""), strict=True):
        if side is sides[0] and failed is not None:
            firsts.append(failed)
            continue
        side.begin(replace(begin, backend=its_backend))
        firsts.append(side.ask())
    times: list[list[float]] = [[], []]
    failures = [answer.name if isinstance(answer, Failed) else "" for answer in firsts]
    while not all(failures) and limits.go_on(len(max(times, key=len)), sum(map(sum, times))):
        for i, side in enumerate(sides):
            answer = Failed(failures[i]) if failures[i] else side.ask()
            if isinstance(answer, Failed):
                failures[i] = answer.name
            else:
                times[i].append(answer)
    for side in sides:
        side.end()
    theirs, ours = (
        Half(failure=failure) if failure else Half(tuple(seconds), first[1], first[0])
        for failure, seconds, first in zip(failures, times, firsts, strict=True)
    )
    return Line(workload, theirs, ours, backend)


@contextmanager
def started(python: Path, folder: Path, limits: Limits, *, device: str, shared: bool) -> Iterator[tuple[Side, Side]]:
    """Both packages: laplace-torch of an interpreter, and this library of this one."""
    settings = {"device": device, "shared": shared, "limit_s": limits.answer_seconds}
    theirs = Side(python, folder / "theirs", None, **settings)
    ours = Side(Path(sys.executable), folder / "ours", ROOT, **settings)
    try:
        yield theirs, ours
    finally:
        theirs.close()
        ours.close()


def main(python: Path, *, quick: bool, only: str, device: str, shared: bool, results: Path | None) -> None:
    """Compares the chosen workloads and prints the table and the slopes of what grows."""
    limits, lines = QUICK if quick else LONG, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(python, folder, limits, device=device, shared=shared) as sides:
            clock = "processor time" if shared else "time"
            print(f"{sides[0].package} / laplace, torch {torch.__version__}, {device}, one thread, {clock}, float32\n")
            print(HEADER, flush=True)
            for workload in workloads():
                if only in workload.name:
                    workload.setting.save(folder / "state.pt")
                    lines.append(compare(sides, workload, folder / "state.pt", limits))
                    print(lines[-1], flush=True)
    series = growth.series(lines)
    print("", *series, sep="\n")
    if results is not None:
        results.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
        growth.plot(series, results.with_suffix(".png"))
