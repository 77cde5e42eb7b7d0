"""A report as a page: it needs no other file."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from laplace.extensions import report
from laplace.extensions.document import Report
from tests.extensions.test_verdicts import classes, targets


class Addresses(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.found += [name for name, _ in attrs if name.startswith("on")]


def reports() -> dict[str, Report]:
    pytest.importorskip("matplotlib")
    (probs, y), network = classes("over-confident"), classes("under-confident")[0]
    mean, variance, values = targets("over-confident")
    return {
        "one model": report.of_probabilities(probs, y, classes=list("<&>\"'")),
        "two": report.of_probabilities(probs, y, network=network, ood=(network[:50], probs[:50])),
        "regression": report.of_gaussians(
            mean, variance, values, network=(mean, 2 * variance), ood=(variance, variance)
        ),
    }


def test_pages_need_no_other_file(tmp_path: Path) -> None:
    for name, found in reports().items():
        path = tmp_path / f"{name}.html"
        found.save(path)
        text = path.read_text()
        page = Addresses()
        page.feed(text)
        assert page.found and all(address.startswith("data:image/png;base64,") for address in page.found)
        assert not page.tags & {"script", "link", "iframe", "object"} and "url(" not in text and "@import" not in text
        assert len(text) < 1e6
        found.save(tmp_path / "report.png")
        found.save(tmp_path / "report.json")
        assert json.loads((tmp_path / "report.json").read_text()) == found.to_dict()
        assert found.verdict in repr(found)
