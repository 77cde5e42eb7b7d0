"""Every script runs, in its small form, with warnings as errors; the page is what the results say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

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
