"""Every script runs, in its small form, with warnings as errors; the page is what the results say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from protocol.report import Report, Row

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "papers").glob("*.py"))


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.stem != "page"], ids=lambda path: path.stem)
def test_script_runs(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    plot = tmp_path / "plot.png"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--small", "--output", str(plot)])
    runpy.run_path(str(script), run_name="__main__")
    assert plot.exists()
    assert capsys.readouterr().out


def test_page_is_what_the_results_say(tmp_path: Path) -> None:
    written = tmp_path / "papers.md"
    runpy.run_path(str(ROOT / "papers" / "page.py"))["main"](written)
    assert written.read_text() == (ROOT / "docs" / "papers.md").read_text()
    papers = {path.name: path.read_text() for path in (tmp_path / "papers").glob("*.md")}
    assert papers == {path.name: path.read_text() for path in (ROOT / "docs" / "papers").glob("*.md")}


def test_page_opens_with_the_verdicts_of_every_paper_by_cause() -> None:
    page = runpy.run_path(str(ROOT / "papers" / "page.py"))
    verdicts = [("holds", ""), ("holds", ""), ("holds trivially", ""), ("fails", "real"), ("fails", "data"),
                ("fails", "real"), ("undecided", "data"), ("premise absent", "premise")]  # fmt: skip
    rows = tuple(Row("1", "a < b", "1", "", verdict, "", cause, "t = 1") for verdict, cause in verdicts)
    report = Report("papers/some.py", "A (2000)", "Theirs.", 10, 2.0, (), rows)
    written = page["page"]([report])
    title, question, table = written.split("\n\n")[:3]
    assert title.startswith("# ") and question.startswith("**Which claims")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert lines[2] == ["A (2000)", "[some](papers/a.md#some)", "10", "2", "8", "2", "1", "3: data 1, real 2", "1", "1"]
    assert "Of 8 claims" in written and "There are 1, which" in written
    (paper,) = page["pages"]([report]).items()
    assert paper[0] == "a" and "# The experiments of A (2000)\n" in paper[1]
    assert "| 1 | a < b | 1 | – | **fails** | data: t = 1 |" in paper[1]
