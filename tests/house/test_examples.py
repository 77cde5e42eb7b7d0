"""Every script in examples/ runs, in its small form, with warnings as errors."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

# A package that an example needs besides those of the tests.
NEEDS = {"language_models": "transformers"}
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    if script.stem in NEEDS:
        pytest.importorskip(NEEDS[script.stem])
    plot = tmp_path / "plot.png"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--small", "--output", str(plot)])
    runpy.run_path(str(script), run_name="__main__")
    assert plot.exists()
    assert capsys.readouterr().out
