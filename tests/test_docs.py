"""The pages in docs/ are true: their examples run, and what they name exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from laplace.engines.kron_parts import DENSE_BLOCK_LIMIT
from laplace.engines.options import MEMORY_BUDGET
from laplace.jacobian.contractions import CHUNK_BYTES
from laplace.structures import STRUCTURES

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TREE = re.compile(r"^```\nlaplace/\n(.*?)^```$", re.DOTALL | re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def tree_entries(tree: str) -> list[str]:
    """Files and folders of the package as a tree lists them: names at the start of lines, two blanks between names."""
    return [name for line in tree.splitlines() for name in re.findall(r"\w+(?:\.py|/)", line[:23])]


@pytest.mark.portable
@each_page
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    with STRUCTURES.temporarily():
        for number, text in enumerate(_PYTHON.findall(page.read_text("utf-8"))):
            exec(compile(text, f"{page.name}, example {number}", "exec", dont_inherit=True), namespace)
    assert namespace


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8"))
    assert not [target for target in targets if not (page.parent / target).exists()]


@each_page
def test_named_files_and_modules_exist(page: Path) -> None:
    words = re.findall(r"`([\w./]+)`", page.read_text("utf-8"))
    paths = [word for word in words if "/" in word and not word.startswith("/")]
    missing = [path for path in paths if not any((base / path).exists() for base in (ROOT, ROOT / "laplace"))]
    for word in words:
        if word.startswith("laplace.") and not word.endswith(".py"):
            missing += [] if _resolves(word) else [word]
    assert not missing


def test_quoted_limits_are_those_of_the_code() -> None:
    design = (ROOT / "docs" / "design.md").read_text("utf-8")
    quoted = [f"({CHUNK_BYTES >> 20} MiB", f"({MEMORY_BUDGET >> 30} GiB)", f"up to {DENSE_BLOCK_LIMIT}\nentries"]
    assert not [words for words in quoted if words not in design]


def _resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            if name not in dir(found):
                return False
            found = getattr(found, name)
        return True
    return False


def test_the_house_is_the_one_that_stands() -> None:
    (tree,) = _TREE.findall((ROOT / "docs" / "design.md").read_text("utf-8"))
    package = ROOT / "laplace"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert sorted(tree_entries(tree)) == sorted(
        folders | {path.name for path in package.glob("*.py")} - {"__init__.py"}
    )
