"""The comparison with laplace-torch, run small: this library stands on both sides."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peer import growth, run
from benchmarks.peer.protocol import Begin, Failed
from benchmarks.peer.side import ROOT, Side
from benchmarks.peer.workloads import GROWTH, Setting, Workload, workloads

TINY = Workload("tiny", Setting("MLP", 8, 4, (3, 4, 2)), "all", "kron", "fit")
LIMITS = run.Limits(pairs=2, seconds=60.0)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """Two workers, both with this library."""
    folder = tmp_path_factory.mktemp("sides")
    made = [
        Side(Path(sys.executable), folder / name, ROOT, device="cpu", shared=True, limit_s=60.0)
        for name in ("theirs", "ours")
    ]
    yield made[0], made[1]
    for side in made:
        side.close()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and data of the tiny network."""
    path = tmp_path_factory.mktemp("state") / "state.pt"
    TINY.setting.save(path)
    return path


def test_both_run_in_turn(sides: tuple[Side, Side], state: Path) -> None:
    line = run.compare(sides, TINY, state, LIMITS)
    for half in (line.theirs, line.ours):
        assert not half.failure
        assert len(half.seconds) == LIMITS.pairs
        assert half.first > 0 and half.extra_mib >= 0
    assert len(line.ratios) == LIMITS.pairs
    assert line.ratios[0] == line.theirs.seconds[0] / line.ours.seconds[0]


def test_failures_are_named(sides: tuple[Side, Side], state: Path) -> None:
    wrong = replace(TINY, structure="no such")
    line = run.compare(sides, wrong, state, LIMITS)
    assert line.theirs.failure == line.ours.failure != ""
    assert line.ratios == [] and line.ours.failure in str(line)


def test_memory_is_limited(sides: tuple[Side, Side], state: Path, tmp_path: Path) -> None:
    wide = replace(TINY, setting=Setting("MLP", 8, 4, (3, 3000, 3000, 2)))  # 36 MB
    wide.setting.save(tmp_path / "wide.pt")
    line = run.compare(sides, wide, tmp_path / "wide.pt", replace(LIMITS, n_bytes=2**20))
    assert line.theirs.failure == line.ours.failure == "out of memory"
    assert not run.compare(sides, TINY, state, LIMITS).ours.failure


def test_what_takes_too_long_is_ended(sides: tuple[Side, Side], state: Path) -> None:
    side = sides[0]
    side.begin(Begin(TINY, state, 2**32))
    side.limit_s = 0.0
    assert side.ask() == Failed("over 0 s")
    side.limit_s = 60.0
    assert not run.compare(sides, TINY, state, LIMITS).theirs.failure


def test_slope() -> None:
    assert growth.slope(((1.0, 50.0), (10.0, 300.0), (20.0, 1200.0), (40.0, 4800.0))) == pytest.approx(2.0)
    assert math.isnan(growth.slope(((1.0, 1.0),)))


def test_series() -> None:
    def line(size: int, theirs: run.Half) -> run.Line:
        point = replace(TINY, axis="N: tiny", size=size)
        return run.Line(point, theirs, run.Half((1.0, 3.0, 2.0), 1.0, 4.0))

    lines = [line(size, run.Half((size / 4,), 1.0, 8.0)) for size in (10, 20, 40)]
    (found,) = growth.series([*lines, line(80, run.Half(failure="out of memory"))])
    assert found.seconds == (((10, 2.5), (20, 5.0), (40, 10.0)), tuple((size, 2.0) for size in (10, 20, 40, 80)))
    assert "time  1.00 and  0.00, memory  0.00 and  0.00  laplace-torch: out of memory at 80" in str(found)


def test_names_are_unique() -> None:
    names = [workload.name for workload in workloads()]
    assert len(set(names)) == len(names)
    assert {workload.axis for workload in workloads()} == {*GROWTH, ""}
