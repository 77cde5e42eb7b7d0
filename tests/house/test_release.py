"""Checks of a release find what is wrong, and what is here has nothing wrong but what is open until the day."""

from __future__ import annotations

from email.message import Message

import pytest

import laplace
from tests import release, smoke

CHANGELOG, CITATION = ((release.ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))


def metadata(**urls: str) -> Message:
    found = Message()
    for name, value in {
        "Name": "laplace-bayes", "Version": "1.0", "Summary": "s", "License-Expression": "MIT",
        "License-File": "LICENSE", "Requires-Python": ">=3.10", "Description-Content-Type": "text/markdown",
    }.items():  # fmt: skip
        found[name] = value
    for start in release.CLASSIFIERS:
        found["Classifier"] = f"{start} x"
    for label, address in urls.items():
        found["Project-URL"] = f"{label}, {address}"
    return found


def test_changelog_and_citation_are_of_the_version() -> None:
    assert not [*release.of_sources(CHANGELOG, CITATION, laplace.__version__)]
    assert len([*release.of_sources(CHANGELOG, CITATION, "9.9")]) == 2


def test_a_changelog_without_a_date_is_not_final() -> None:
    citation = "title: t\nversion: 1.0\nauthors:\nlicense: MIT\nrepository-code: r\ndate-released: 2027-01-01\n"
    assert [*release.of_sources("## 1.0, not yet\n", citation, "1.0", final=True)] == [
        "CHANGELOG.md has no date of 1.0, but 'not yet'"
    ]
    assert not [*release.of_sources("## 1.0, 2027-01-01\n", citation, "1.0", final=True)]
    assert [*release.of_sources("## 1.0, 2027-01-01\n", citation.replace("license: MIT\n", ""), "1.0")]


def test_placeholders_are_named_so_and_are_not_final() -> None:
    named = metadata(**{f"{name} (placeholder)": "https://example.org/x" for name in release.URLS})
    assert not [*release.of_metadata(named, "1.0")]
    assert len([*release.of_metadata(named, "1.0", final=True)]) == len(release.URLS)
    silent = metadata(**dict.fromkeys(release.URLS, "https://example.org/x"))
    assert len([*release.of_metadata(silent, "1.0")]) == len(release.URLS)
    filled = metadata(**dict.fromkeys(release.URLS, "https://elsewhere.net"))
    assert not [*release.of_metadata(filled, "1.0", final=True)]


@pytest.mark.parametrize("name", ["License-Expression", "Summary", "Classifier"])
def test_what_the_metadata_lack_is_named(name: str) -> None:
    found = metadata(**dict.fromkeys(release.URLS, "https://elsewhere.net"))
    del found[name]
    assert [*release.of_metadata(found, "1.0")]
    assert next(release.of_metadata(metadata(), "2.0")).startswith("the wheel is of version 1.0")


def test_the_first_example_of_the_readme_is_found() -> None:
    code, printed = release.example((release.ROOT / "README.md").read_text("utf-8"))
    assert "la.compare(test)" in code
    assert release.same_words(printed, printed.replace("1", "2"))
    assert not release.same_words(printed, printed.replace("NLL", "loss"))


def test_the_smoke_tests_pass(capsys: pytest.CaptureFixture[str]) -> None:
    smoke.main()
    assert f"laplace {laplace.__version__}" in capsys.readouterr().out


def test_forms_and_checklists_exist() -> None:
    forms = release.ROOT / ".github" / "ISSUE_TEMPLATE"
    assert {path.stem for path in forms.glob("*.yml")} == {"config", "wrong_number", "error", "question"}
    text = (release.ROOT / "RELEASING.md").read_text("utf-8")
    for name in ("make release-check ARGS=--final", "CITATION.cff", "CHANGELOG.md", "tests/smoke.py"):
        assert name in text
