"""The comparison with laplace-torch, run small: this library stands on both sides."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cost_table, gpu, gpu_page, models
from benchmarks.peer import growth, run, summary
from benchmarks.peer.protocol import Begin, Failed
from benchmarks.peer.side import ROOT, Side
from benchmarks.peer.workloads import GROWTH, Setting, Workload, workloads

TINY = Workload("tiny", Setting("MLP", 8, 4, (3, 4, 2)), "all", "kron", "fit")
LIMITS = run.Limits(pairs=2, seconds=60.0, brief_seconds=0.0)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """Two workers, both with this library."""
    pytest.importorskip("curvlinops")
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


@pytest.mark.nightly
def test_both_run_in_turn(sides: tuple[Side, Side], state: Path) -> None:
    line = run.compare(sides, TINY, state, LIMITS)
    for half in (line.theirs, line.ours):
        assert not half.failure
        assert len(half.seconds) == LIMITS.pairs
        assert half.first > 0 and half.extra_mib >= 0
    assert line.backend in TINY.backends
    assert len(line.ratios) == LIMITS.pairs
    assert line.ratios[0] == line.theirs.seconds[0] / line.ours.seconds[0]


@pytest.mark.nightly
def test_brief_runs_are_repeated(sides: tuple[Side, Side], state: Path) -> None:
    limits = replace(LIMITS, brief_seconds=0.2)
    line = run.compare(sides, TINY, state, limits)
    seconds = [a + b for a, b in zip(line.theirs.seconds, line.ours.seconds, strict=True)]
    assert len(seconds) == LIMITS.pairs or sum(seconds[:-1]) < limits.brief_seconds


@pytest.mark.parametrize(
    ("pairs", "seconds", "expected"),
    [(0, 0.0, True), (1, 9.0, False), (1, 0.6, True), (2, 0.6, True), (3, 0.6, False), (3, 0.4, True), (90, 0.4, True)],
)
def test_limits_of_pairs(pairs: int, seconds: float, expected: bool) -> None:
    assert run.QUICK.go_on(pairs, seconds) is expected


@pytest.mark.nightly
def test_a_script_has_a_process_of_its_own(sides: tuple[Side, Side], state: Path) -> None:
    script = replace(TINY, action="script")
    line = run.compare(sides, script, state, LIMITS)
    for half in (line.theirs, line.ours):
        assert not half.failure
        assert min(half.seconds) > 0 and math.isnan(half.extra_mib)
    assert "nan" not in str(line)
    wrong = replace(script, structure="no such")
    assert run.compare(sides, wrong, state, LIMITS).ours.failure == "CalledProcessError"


@pytest.mark.skipif(sys.platform != "linux", reason="processor time of other processes is read from Linux's /proc")
@pytest.mark.nightly
def test_a_script_that_takes_too_long_is_ended(sides: tuple[Side, Side], state: Path) -> None:
    """Its time counts while it runs, though the worker that started it only waits."""
    side = sides[0]
    side.begin(Begin(replace(TINY, action="script"), state, 2**32))
    side.limit_s = 0.3  # less than the import of PyTorch
    assert side.ask() == Failed("over 0 s")
    side.limit_s = 60.0
    assert not run.compare(sides, TINY, state, LIMITS).theirs.failure


@pytest.mark.skipif(sys.platform != "linux", reason="processor time of other processes is read from Linux's /proc")
def test_a_process_that_only_waits_is_given_up() -> None:
    """It uses no processor time, by which the limit counts."""
    side: Any = object.__new__(Side)
    side._pipe, other = multiprocessing.Pipe()
    side.limit_s, side.shared = 0.01, True
    with subprocess.Popen(["sleep", "60"]) as waiting:
        assert not side._in_time(waiting.pid)
        other.send("an answer")
        assert side._in_time(waiting.pid)
        waiting.kill()


class Told:
    """A worker that answers with the numbers of a table: result and seconds of every backend, or a failure."""

    def __init__(self, numbers: dict[str, tuple[float, float] | Failed]) -> None:
        self.numbers = numbers
        self.backend = ""

    def begin(self, begin: Begin) -> None:
        self.backend = begin.backend

    def ask(self, what: str = "run") -> Any:
        found = self.numbers[self.backend]
        return found if isinstance(found, Failed) else found[0] if what == "result" else found[1]

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("numbers", "fastest"),
    [
        ({"CurvlinopsGGN": (-9.0, 3.0), "BackPackGGN": (-9.0, 2.0), "AsdlGGN": (-9.01, 4.0)}, ("BackPackGGN", None)),
        ({"CurvlinopsGGN": (-9.0, 3.0), "BackPackGGN": (-8.0, 2.0), "AsdlGGN": (-9.01, 4.0)}, ("CurvlinopsGGN", None)),
        ({"CurvlinopsGGN": Failed("A"), "BackPackGGN": Failed("B"), "AsdlGGN": (-9.0, 4.0)}, ("AsdlGGN", None)),
        ({"CurvlinopsGGN": Failed("A"), "BackPackGGN": Failed("B"), "AsdlGGN": Failed("C")}, ("", Failed("A"))),
    ],
)
def test_the_fastest_backend_of_equal_results(numbers: Any, fastest: Any, state: Path) -> None:
    told: Any = Told(numbers)
    assert run.fastest(told, Begin(TINY, state, 0)) == fastest


@pytest.mark.nightly
def test_failures_are_named(sides: tuple[Side, Side], state: Path) -> None:
    wrong = replace(TINY, structure="no such")
    line = run.compare(sides, wrong, state, LIMITS)
    assert line.theirs.failure == line.ours.failure != ""
    assert line.ratios == [] and line.ours.failure in str(line)


@pytest.mark.nightly
def test_memory_is_limited(sides: tuple[Side, Side], state: Path, tmp_path: Path) -> None:
    wide = replace(TINY, setting=Setting("MLP", 8, 4, (3, 3000, 3000, 2)))  # 36 MB
    wide.setting.save(tmp_path / "wide.pt")
    line = run.compare(sides, wide, tmp_path / "wide.pt", replace(LIMITS, n_bytes=2**20))
    assert line.theirs.failure == line.ours.failure == "out of memory"
    assert not run.compare(sides, TINY, state, LIMITS).ours.failure


@pytest.mark.nightly
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


def test_costs_are_measured_and_shown() -> None:
    tiny = cost_table.Setting("tiny", partial(models.mlp, 3, 4, 2), (3,), 2, 8)
    line = cost_table.measured(tiny, "all", "kron")
    assert line.fit > 1 and line.predict > 0 and line.factorisation >= 0 and line.forward > 0
    assert line.state > 4 * (16 + 9 + 4 + 16)  # bytes of the two layers' factors alone
    shown = cost_table.PAGE.read_text("utf-8").partition(cost_table.BEGIN)[2].partition(cost_table.END)[0]
    rows = re.findall(r"^\| `(\w+)`, `(\w+)` \|", shown, re.MULTILINE)
    assert rows == [choice for _, choices in cost_table.CHOICES for choice in choices]


def test_summary_says_what_the_table_says(tmp_path: Path) -> None:
    text = summary.PAGE.read_text("utf-8")
    found = summary.Summary.read(text)
    kinds = {kind: found.of(kind) for kind in summary.KINDS}
    assert sum(len(tasks.ratios) for tasks in kinds.values()) == len(found.ratios)
    said = (summary.ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    fits, predictions, sampled = (kinds[kind] for kind in list(kinds)[:3])
    for words in (
        f"Over the {len(found.ratios)} tasks",
        f"**{found.mean:.2g} times as fast",
        f"{fits.mean:.2g} times\nfor fits, {predictions.mean:.2g} times for predictions",
        f"Another {len(found.failures)} tasks",
        f"slower in {found.n_slower}\ntasks (orange): {fits.n_slower} fits",
        f"{sampled.n_slower} of sampled weights and {predictions.n_slower} other prediction",
    ):
        assert words in said
    for kind, tasks in kinds.items():
        smallest, largest = min(tasks.ratios.values()), max(tasks.ratios.values())
        (row,) = re.findall(rf"^\| {' '.join(kind.split())} \| (.*) \|$", said, re.MULTILINE)
        mean, (low, high), *counts = (re.findall(r"[\d.]+", cell.replace(",", "")) for cell in row.split(" | ")[1:])
        assert [float(mean[0]), float(low), float(high)] == pytest.approx([tasks.mean, smallest, largest], rel=0.06)
        assert counts == [[str(tasks.n_slower)], [str(len(tasks.failures))]]
    summary.plot(found, tmp_path / "speed.png")
    assert 0 < summary.PICTURE.stat().st_size < 100_000
    assert (tmp_path / "speed.png").stat().st_size > 1000


def test_summary_refuses_other_tables() -> None:
    with pytest.raises(ValueError, match="another form"):
        summary.Summary.read(f"{summary.HEADING}\n```text\nheader\na line\n```")


@pytest.mark.nightly
def test_the_command_of_a_gpu_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of each kind, with its page."""
    cpu = torch.device("cpu")
    (line,) = [line for line in gpu.LINES if line.name == "MLP 64-256-256-10, last layer, kron"]
    measured = gpu.measure(line, cpu, quick=True)
    assert not measured.error
    assert {"forward", "R", "fit per batch", "probit", "mc", "calibrate"} <= set(measured.ms)
    assert 0 < measured.operations["probit"] < 100
    case = gpu.compare("mixture", torch.float64, "cpu")
    assert case.equal and case.largest == 0
    found = {"machine": gpu.machine(cpu), "equality": [asdict(case) | {"equal": True}], "speed": [asdict(measured)]}
    page = gpu_page.rewritten(f"# A\n\n{gpu_page.HEADING}\n\nold\n\n## B\n", found)
    assert page.startswith("# A\n\n## On a GPU\n\nNo card") and page.endswith("|\n\n## B\n")
    assert "old" not in page and line.name in page and "1 of 1 cases" in page


def test_a_difference_is_found() -> None:
    expected = torch.tensor([2.0, -4.0])
    assert gpu.relative(expected + torch.tensor([0.0, 0.4]), expected) == pytest.approx(0.1)
    assert gpu.relative(torch.tensor([2.0, torch.nan]), expected) == float("inf")
    assert gpu.relative(expected[:1], expected) == float("inf")


def test_the_page_has_the_figures_that_are_stored() -> None:
    text = gpu_page.PAGE.read_text()
    assert text == gpu_page.rewritten(text, json.loads(gpu_page.RESULTS.read_text()))
