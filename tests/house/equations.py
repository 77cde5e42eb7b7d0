"""docs/equations.md: every numbered equation of the papers, where it is computed, and which tests check it.

    python -m tests.house.equations

writes the page; a test compares it with what this would write. What the equations say, and their tests, is in
`equations.txt`. Where they are computed is said by tags in docstrings, `[Redux, eq. 6]`: no file is named by hand, so
that code and tests move freely.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.source import FILES, ROOT, name_of, tree

LIST = Path(__file__).with_suffix(".txt")
PAGE = ROOT / "docs" / "equations.md"
PAPERS = ("Redux", "Mixtures", "Linearization")

INTRODUCTION = """# Equations

**Where is an equation of a paper computed, and which tests check its numbers?** Every numbered one has a row. Formulas
without a number have a name, as algorithms have. Where the code computes one, a docstring says so by a tag such as
`[Redux, eq. 6]`: search for it to come from the paper to the code. Files are relative to `laplace/`, tests to `tests/`;
"appendix" tells an appendix's numbers from those of the main text where both begin with 1. What the library computes
beyond these works has its formulas in [mathematics.md](mathematics.md). `python -m tests.house.equations` writes this
page; a test fails on an equation without a place, on a test that is gone, and on a tag of no equation."""

Key = tuple[str, str]
"""Work and number: `("Redux", "eq. 6")`."""


class Equation(NamedTuple):
    """An entry of the list.

    Attributes:
        says: What it says.
        tests: Names `module::test`; none of one that is not computed.
        same: The number, in the same work, of the equation that it repeats.
        why_not: Why the library does not compute it.
    """

    says: str
    tests: tuple[str, ...] = ()
    same: str | None = None
    why_not: str | None = None


class Listed(NamedTuple):
    titles: dict[str, str]
    equations: dict[Key, Equation]


def listed(text: str) -> Listed:
    """The list: of every work its title, and of every equation what it says and its tests, or why it has none."""
    titles: dict[str, str] = {}
    equations: dict[Key, Equation] = {}
    for section in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        head, *entries = re.split(r"\n+(?=\S)", section.strip())
        work, titles[head] = head, entries.pop(0)
        for entry in entries:
            number, says, rest = (line.strip() for line in entry.split("\n"))
            if (work, number) in equations:
                raise ValueError(f"[{work}, {number}] has two entries.")
            same, why_not = rest.removeprefix("as "), rest.removeprefix("none: ")
            if same != rest:
                equations[work, number] = Equation(says, same=same)
            elif why_not != rest:
                equations[work, number] = Equation(says, why_not=why_not)
            else:
                equations[work, number] = Equation(says, tuple(rest.split()))
    return Listed(titles, equations)


TAG = re.compile(r"\[([A-Z][^\[\]`]*?),\s+((?:appendix|eqs?\.|equation|algorithm|theorem|lemma|footnote)[^\[\]`]*)\]")
_IN_PROSE = re.compile(r"\b(?:equations? \(?|eqs?\. \(?|algorithms? |theorem |lemma )[A-Z]?\.?\d[\d.]*", re.IGNORECASE)


def anchor(work: str, number: str) -> str:
    """The name of an equation's row, which links go to: `"redux-eq-6"`."""
    return re.sub(r"\W+", "-", f"{work} {number}".lower()).strip("-")


def linked(text: str, page: str) -> str:
    """A docstring's text whose tags are links to rows of a page, as reStructuredText has them."""
    return TAG.sub(lambda tag: f"`{' '.join(tag[0].split())} <{page}#{anchor(*_words(tag))}>`__", text)


def _words(tag: re.Match[str]) -> list[str]:
    return [" ".join(part.split()) for part in tag.groups()]


def tags(text: str) -> list[Key]:
    """Work and number of all tags in a text, of which one may go over the end of a line."""
    return TAG.findall(re.sub(r"\s+", " ", text))


def cited_in_prose(source: str) -> list[str]:
    """Numbers that a source names outside of tags."""
    return _IN_PROSE.findall(TAG.sub("", re.sub(r"\s+(?:# )?", " ", source)))


@cache
def places() -> dict[Key, list[str]]:
    """`file:function` of all tags in docstrings of functions, methods and classes."""
    found: dict[Key, list[str]] = {}
    for path in FILES:
        for name, docstring in documented(tree(path)):
            for key in tags(docstring):
                found.setdefault(key, []).append(f"{name_of(path)}:{name}")
    return found


def documented(node: ast.AST, outer: str = "") -> Iterator[tuple[str, str]]:
    """Names, dotted, and docstrings of what is defined in a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield outer + child.name, ast.get_docstring(child) or ""
            yield from documented(child, f"{outer}{child.name}.")


@cache
def named_tests() -> dict[str, list[str]]:
    """`folder/file.py::test`, relative to tests/, of every `module::test`."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE):
            where = f"{path.relative_to(ROOT / 'tests').as_posix()}::{name}"
            found.setdefault(f"{path.stem}::{name}", []).append(where)
    return found


def faults(
    equations: Mapping[Key, Equation], where: Mapping[Key, list[str]], tests: Mapping[str, list[str]]
) -> Iterator[str]:
    """What is wrong with the list, the tags and the tests, by their names, with the mend."""
    for (work, number), found in where.items():
        tag, equation = f"[{work}, {number}]", equations.get((work, number))
        if equation is None:
            yield f"{tag} in {', '.join(found)} is no equation of {LIST.name}; correct it, or add the equation."
        elif equation.same is not None:
            yield f"{tag} in {', '.join(found)} repeats {equation.same}: tag that."
        elif equation.why_not is not None:
            yield f"{tag} in {', '.join(found)} is listed as not computed: give it its tests in {LIST.name}."
    for (work, number), equation in equations.items():
        tag = f"[{work}, {number}]"
        if equation.same is not None and (work, equation.same) not in equations:
            yield f"{tag} repeats {equation.same}, which is not in {LIST.name}."
        if equation.tests and (work, number) not in where:
            yield f"{tag} has no place: write the tag into the docstring of what computes it, or say why nothing does."
        for name in equation.tests:
            if len(tests.get(name, ())) != 1:
                yield f"{tag}: there are {len(tests.get(name, ()))} tests {name}; name one of tests/ in {LIST.name}."


def page(titles: Mapping[str, str], equations: Mapping[Key, Equation]) -> str:
    """The whole page."""
    where, tests = places(), named_tests()
    others = [work for work in titles if work not in PAPERS]
    parts = [INTRODUCTION]
    for work in PAPERS:
        keys = [key for key in equations if key[0] == work]
        parts += [f"## {work}", titles[work], table([(key[1], key) for key in keys], equations, where, tests)]
        left_out = [(key[1], equations[final(key, equations)]) for key in keys]
        reasons = [f"{number} ({equation.why_not})" for number, equation in left_out if equation.why_not is not None]
        parts += ["Not computed: " + "; ".join(reasons) + "."] if reasons else []
    named = [(f"{key[0]}, {key[1]}", key) for key in equations if key[0] in others]
    sources = "\n".join(f"- {titles[work]}" for work in others)
    parts += ["## Other works", sources, table(named, equations, where, tests)]
    return "\n\n".join(parts) + "\n"


def final(key: Key, equations: Mapping[Key, Equation]) -> Key:
    """The equation itself, or the one that it repeats."""
    same = equations[key].same
    return key if same is None else (key[0], same)


def table(
    named: Iterable[tuple[str, Key]],
    equations: Mapping[Key, Equation],
    where: Mapping[Key, list[str]],
    tests: Mapping[str, list[str]],
) -> str:
    lines = ["| number | says | computed in | tested by |", "|---|---|---|---|"]
    for name, key in named:
        own = final(key, equations)
        if equations[own].why_not is None:
            found = [path for test in equations[own].tests for path in tests[test]]
            says = equations[key].says.replace("|", "\\|") + ("" if own == key else f" ({own[1]})")
            lines.append(f'| <a id="{anchor(*key)}"></a>{name} | {says} | {codes(where[own])} | {codes(found)} |')
    return "\n".join(lines)


def codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    PAGE.write_text(page(*listed(LIST.read_text("utf-8"))), "utf-8")
