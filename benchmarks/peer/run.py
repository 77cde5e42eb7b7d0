"""Runs every workload by both packages in turn, and prints their ratios."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.peer import growth
from benchmarks.peer.line import HEADER, Half, Line
from benchmarks.peer.protocol import Begin, Failed
from benchmarks.peer.side import ROOT, Side
from benchmarks.peer.workloads import Workload, workloads

GIB = 2**30


@dataclass(frozen=True)
class Limits:
    """What a run may take.

    Attributes:
        pairs: Runs of each package that count.
        seconds: No further pair is begun after runs that took these together; there is one at least.
        answer_seconds: Set-up and first run, or one more run, may take these; by the clock of the measurement.
        n_bytes: Memory of a worker beyond the imported package.
    """

    pairs: int
    seconds: float
    answer_seconds: float = 60.0
    n_bytes: int = 4 * GIB


QUICK, LONG = Limits(3, 3.0, 30.0), Limits(9, 30.0)


def compare(sides: tuple[Side, Side], workload: Workload, state: Path, limits: Limits) -> Line:
    """Theirs and ours in turn, after a first run of each that shows the memory and does not count."""
    for side in sides:
        side.begin(Begin(workload, state, limits.n_bytes))
    firsts = [side.ask() for side in sides]
    times: list[list[float]] = [[], []]
    failures = [answer.name if isinstance(answer, Failed) else "" for answer in firsts]
    while not all(failures) and len(max(times, key=len)) < limits.pairs:
        for i, side in enumerate(sides):
            answer = Failed(failures[i]) if failures[i] else side.ask()
            if isinstance(answer, Failed):
                failures[i] = answer.name
            else:
                times[i].append(answer)
        if sum(map(sum, times)) > limits.seconds:
            break
    for side in sides:
        side.end()
    theirs, ours = (
        Half(failure=failure) if failure else Half(tuple(seconds), first[1], first[0])
        for failure, seconds, first in zip(failures, times, firsts, strict=True)
    )
    return Line(workload, theirs, ours)


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
