"""docs/equations.md is what would be written: every equation has its place and its tests, and no tag is of none."""

from __future__ import annotations

import pytest

from tests.house import equations as generator
from tests.house.equations import Equation, cited_in_prose, faults, listed, named_tests, places, tags
from tests.source import FILES, name_of, tree

TITLES, EQUATIONS = listed(generator.LIST.read_text("utf-8"))


def test_the_page_is_what_would_be_written() -> None:
    written = generator.PAGE.read_text("utf-8")
    assert written == generator.page(TITLES, EQUATIONS), "run `python -m tests.house.equations`"
    assert len(written.splitlines()) < 200


def test_every_equation_has_its_place_and_its_tests() -> None:
    assert not list(faults(EQUATIONS, places(), named_tests()))


def test_every_numbered_equation_of_the_papers_is_listed() -> None:
    numbered = {
        "Redux": [f"eq. {n}" for n in range(1, 10)] + [f"appendix eq. {n}" for n in range(1, 17)],
        "Mixtures": [f"eq. {n}" for n in range(1, 15)],
        "Linearization": ["eq. 10", "eq. 12", "eq. 14", "eq. B.1"] + [f"eq. A.{n}" for n in range(1, 8)],
    }
    keys = {(work, number) for work, numbers in numbered.items() for number in numbers}
    assert not keys - set(EQUATIONS)


def test_numbers_are_cited_by_tags_in_docstrings() -> None:
    """A number in prose has no row, and a tag in a comment or in the docstring of a module has no function."""
    prose = {name_of(path): found for path in FILES if (found := cited_in_prose(path.read_text("utf-8")))}
    assert not prose, "write [Redux, eq. 6], in the docstring of the function that computes it"
    for path in FILES:
        within = [key for _, docstring in generator.documented(tree(path)) for key in tags(docstring)]
        assert sorted(tags(path.read_text("utf-8"))) == sorted(within), f"{name_of(path)}: a tag outside of docstrings"


# The generator itself.

TEXT = """# Redux
A title.

eq. 1
    a | b
    test_one::test_it
eq. 2
    once more
    as eq. 1
eq. 3
    nothing
    none: a definition
"""
FEW = listed(TEXT)[1]
WHERE = {("Redux", "eq. 1"): ["evidence.py:Evidence"]}
TESTS = {"test_one::test_it": ["test_one.py::test_it"]}


def test_a_list_is_read() -> None:
    expected = {
        ("Redux", "eq. 1"): Equation("a | b", ("test_one::test_it",)),
        ("Redux", "eq. 2"): Equation("once more", same="eq. 1"),
        ("Redux", "eq. 3"): Equation("nothing", why_not="a definition"),
    }
    assert FEW == expected  # noqa: SIM300
    assert not list(faults(FEW, WHERE, TESTS))
    with pytest.raises(ValueError, match="two entries"):
        listed(TEXT + TEXT.partition("\n\n")[2])


def test_tags_are_found_wherever_a_line_ends() -> None:
    text = "P⁻¹ `[P, P]` [Redux, eq. 5] [Guo et al., 2017,\n    eq. 3], [Redux, appendix B, probit]; [B, C] [K, 2]."
    assert tags(text) == [("Redux", "eq. 5"), ("Guo et al., 2017", "eq. 3"), ("Redux", "appendix B, probit")]


@pytest.mark.parametrize(
    "text", ["(2021, equation 10)", "eq. A.6 of", "equations 14 and 15", "# algorithms\n# 4.1, 5.3"]
)
def test_numbers_in_prose_are_seen(text: str) -> None:
    assert cited_in_prose(text)


def test_tags_and_words_are_no_numbers_in_prose() -> None:
    assert not cited_in_prose(
        "The equation of [Redux, eq. 6], an algorithm of [Halko et al., 2011,\n    algorithm 4.1]"
    )


@pytest.mark.parametrize(
    ("where", "tests", "words"),
    [
        (WHERE, {}, "0 tests test_one::test_it"),
        (WHERE, {"test_one::test_it": ["a/test_one.py::test_it", "b/test_one.py::test_it"]}, "2 tests"),
        ({}, TESTS, "[Redux, eq. 1] has no place"),
        (WHERE | {("Redux", "eq. 99"): ["a.py:f"]}, TESTS, "[Redux, eq. 99] in a.py:f is no equation"),
        (WHERE | {("Redox", "eq. 1"): ["a.py:f"]}, TESTS, "[Redox, eq. 1] in a.py:f is no equation"),
        (WHERE | {("Redux", "eq. 2"): ["a.py:f"]}, TESTS, "repeats eq. 1: tag that"),
        (WHERE | {("Redux", "eq. 3"): ["a.py:f"]}, TESTS, "listed as not computed"),
    ],
)
def test_faults_are_told(where, tests, words: str) -> None:
    (fault,) = faults(FEW, where, tests)
    assert words in fault
