"""The paper cites what its bibliography has, shows figures that exist, and says what the documentation says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAPER = (ROOT / "paper" / "paper.md").read_text("utf-8")
BIBLIOGRAPHY = (ROOT / "paper" / "paper.bib").read_text("utf-8")


def test_every_citation_has_its_entry_and_every_entry_is_cited() -> None:
    cited = set(re.findall(r"@(\w+)", PAPER))
    entries = re.findall(r"^@\w+\{(\w+),", BIBLIOGRAPHY, re.MULTILINE)
    assert cited == set(entries)
    assert len(entries) == len(set(entries))


def test_figures_exist_and_are_referred_to() -> None:
    figures = re.findall(r"\]\((\S+?\.png)\)", PAPER)
    assert figures and not [figure for figure in figures if not (ROOT / "paper" / figure).exists()]
    assert set(re.findall(r"\\label\{(\S+?)\}", PAPER)) == set(re.findall(r"\\autoref\{(\S+?)\}", PAPER))


@pytest.mark.parametrize(
    "section",
    [
        "Summary",
        "Statement of need",
        "State of the field",
        "Design",
        "Checks",
        "Limits",
        "Acknowledgements",
        "References",
    ],
)
def test_the_sections_that_the_journal_asks_for_are_there(section: str) -> None:
    assert f"\n# {section}\n" in PAPER


def test_figures_of_speed_are_those_of_the_benchmarks() -> None:
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text("utf-8").split())
    found = re.search(
        r"Over the (\d+) tasks .*?\*\*([\d.]+) times .*?: (\d+) times for fits, (\d+) times for pre", page
    )
    assert found is not None
    tasks, speed, fits, predictions = found.groups()
    told = " ".join(PAPER.split())
    assert f"{speed} times as fast on the geometric mean over the {tasks} tasks" in told
    assert f"{fits} times for fits and {predictions} times for predictions" in told
