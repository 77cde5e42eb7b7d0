"""The code in README.md runs as printed, in order, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.portable

README = Path(__file__).parents[2] / "README.md"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def blocks() -> list[tuple[str, str]]:
    return _BLOCK.findall(README.read_text(encoding="utf-8"))


def assert_same_output(actual: str, expected: str) -> None:
    """Words agree exactly, numbers to 2 % and 0.05: training differs a little between machines."""
    assert _NUMBER.sub("#", actual).split() == _NUMBER.sub("#", expected).split()
    numbers = [[float(number) for number in _NUMBER.findall(text)] for text in (actual, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=0.05)


def test_snippets_run_and_print_what_they_say(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    output = ""
    for number, (language, text) in enumerate(blocks()):
        if language == "python":
            exec(compile(text, f"README.md, block {number}", "exec"), namespace)
            output = capsys.readouterr().out
        else:
            assert_same_output(output, text)
    assert namespace.keys() > {"__name__"}


def test_files_that_the_readme_names_exist() -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", README.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (README.parent / target).exists()]
    assert not missing
