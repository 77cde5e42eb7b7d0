"""The house rules, checked by reading the source of the package.

They keep what users depend upon: light imports that run one way, errors that help, and documentation of what can be
called. Sizes are not ruled: `make house` prints them beside those of the last release.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from laplace.likelihoods import LIKELIHOODS
from tests.fresh import printed
from tests.source import (
    FILES,
    ROOT,
    ancestors,
    attribute_is_described,
    calls,
    circles,
    decorators,
    file_of,
    for_type_checkers,
    import_graph,
    imports,
    in_function,
    is_public,
    name_of,
    nodes,
    overridden,
    packages_graph,
    room_of,
    where,
)

# Packages of other people's curvature, each at home in one file.
CURVATURE_PACKAGES = {"backpack", "asdl", "curvlinops"}
# What a module may import at its top level besides the standard library and itself.
ALWAYS_THERE = {"torch", "numpy", "tqdm"}
# Modules of this folder derive classes from another package's, which they import at their top; nothing imports them.
BRIDGES = "integrations/"
# Kinds of targets, which the likelihood alone tells apart.
TARGET_KINDS = {"class", "binary", "real", "other"}
# Who wrote a line, where, and which item of a plan it answers is no part of the library.
_NOT_OF_THE_PROJECT = re.compile(
    r"\b(issue #?\d+|(?:GH|PR)[- ]?#?\d+|claude|copilot|chatgpt|AI assistant|/work/|/tmp/|/home/\w+|/Users/\w+)",
    re.IGNORECASE,
)


# Statements that hide mistakes, or what is wrong.


@pytest.mark.parametrize("name", ["exit", "exec", "eval"])
def test_unwanted_builtins_are_not_called(name: str) -> None:
    assert not list(calls(name))


def test_cached_properties_have_no_lock() -> None:
    """Before Python 3.12 the standard library's have one, of the class."""
    taken = [(path.name, node) for path, node in nodes(ast.ImportFrom) if node.module == "functools"]
    assert not [name for name, node in taken if any(alias.name == "cached_property" for alias in node.names)]


def test_no_assert_and_no_stub() -> None:
    wrong = [where(path, node) for path, node in nodes(ast.Assert)]
    wrong += [where(path, node) for path, node in nodes(ast.Name) if node.id == "NotImplementedError"]
    assert not wrong


def test_errors_are_the_library_s_own() -> None:
    """But for the `ImportError` of a name that is imported when it is read, as an import statement would raise it."""
    builtin = {"Exception", "ValueError", "TypeError", "RuntimeError", "KeyError", "ImportError", "SystemExit"}
    wrong = []
    for path, node in nodes(ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if isinstance(raised, ast.Name) and raised.id in builtin:
            wrong.append((path.name, raised.id))
    assert {name for _, name in wrong} <= {"ImportError"}, wrong


def test_no_message_is_cut_off() -> None:
    wrong = []
    for path, node in nodes(ast.Raise):
        parts = [part for part in ast.walk(node) if isinstance(part, ast.JoinedStr)]
        ends = [
            part.values[-1] for part in parts if isinstance(part.up, ast.Call) and part.up is node.exc and part.values
        ]
        ends += [part for part in getattr(node.exc, "args", []) if isinstance(part, ast.Constant)]
        wrong += [where(path, end) for end in ends if isinstance(end, ast.Constant) and str(end.value).endswith(" ")]
    assert not wrong


def test_warnings_go_through_one_function() -> None:
    """`laplace.errors.warn` knows which line of the user's code they belong to."""
    wrong = []
    for path, node in nodes(ast.Call):
        called = ast.unparse(node.func)
        if called == "warnings.warn" and path.name != "errors.py":
            wrong.append(where(path, node))
        if called == "warn" and len(node.args) != 2:
            wrong.append(f"{where(path, node)} without a category")
    assert not wrong


def test_no_loop_without_a_bound_ends_at_a_tolerance() -> None:
    """Rounding differs between processors: a step that gains nothing would be tried for ever."""
    wrong = []
    for folder in ("laplace", "examples", "papers", "benchmarks", "docs", "tests/reference"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            loops = (
                [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.While)] if "while " in text else []
            )
            for node in (node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Compare)):
                compared = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
                numbers = any(isinstance(part, ast.Constant) and isinstance(part.value, float) for part in compared)
                if numbers or {"norm", "abs"} & {getattr(part, "attr", "") for part in compared}:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong


# What extensions replace is not asked by name.


@cache
def compared() -> list[tuple[Path, ast.AST, set[object]]]:
    """Constants, and attributes as they are written, of every comparison, pattern and table of cases."""
    found: list[tuple[Path, ast.AST, set[object]]] = []
    for path, node in nodes(ast.Compare, ast.match_case, ast.Dict):
        roots = node.keys if isinstance(node, ast.Dict) else [getattr(node, "pattern", node)]
        parts = [part for root in roots if root is not None for part in ast.walk(root)]
        constants = {part.value for part in parts if isinstance(part, ast.Constant)}
        found.append((path, node, constants | {ast.unparse(part) for part in parts if isinstance(part, ast.Attribute)}))
    return found


def test_likelihoods_are_told_apart_by_their_registry() -> None:
    names = set(LIKELIHOODS) | {f"Likelihood.{name.upper()}" for name in LIKELIHOODS}
    assert not {name_of(path) for path, _, said in compared() if said & names}


def test_kinds_of_targets_are_told_apart_by_the_likelihood() -> None:
    """What depends on the kind of target is a method of an object that the likelihood has."""
    telling = [
        where(path, node)
        for path, node, said in compared()
        if said & TARGET_KINDS or any(str(part).endswith(".target_kind") for part in said)
    ]
    assert not telling


# Imports.


def test_no_optional_import_at_module_level() -> None:
    wrong = [
        where(path, node)
        for path, node in nodes(ast.Import, ast.ImportFrom)
        if not in_function(node) and any(isinstance(up, ast.Try) for up in ancestors(node))
        if not name_of(path).startswith(BRIDGES)
    ]
    assert not wrong


def test_modules_need_only_what_is_always_there() -> None:
    allowed = ALWAYS_THERE | set(sys.stdlib_module_names) | {"laplace"}
    wrong = [
        f"{where(path, node)} {module}"
        for path, node, module in imports()
        if module.split(".")[0] not in allowed and not in_function(node) and not for_type_checkers(node)
        if not name_of(path).startswith(BRIDGES)
    ]
    assert not wrong


def test_bridges_to_other_packages_are_imported_by_nothing() -> None:
    """But by each other: they are there only where their package is."""
    for path, _, module in imports():
        if (file := file_of(module)) is not None and name_of(file).startswith(BRIDGES) and file.name != "__init__.py":
            assert name_of(path).startswith(BRIDGES)


def test_every_curvature_package_has_one_home() -> None:
    homes = defaultdict(set)
    for path, node, module in imports():
        package = module.split(".")[0]
        if package in CURVATURE_PACKAGES:
            assert in_function(node), where(path, node)
            homes[package].add(name_of(path))
    assert homes.keys() == CURVATURE_PACKAGES
    assert all(len(files) == 1 for files in homes.values()), homes


def test_imports_have_no_circles() -> None:
    """Of the files of a package as of all others: what is imported for type checkers alone is not imported."""
    assert not circles(import_graph())


def test_packages_have_no_circles() -> None:
    """A package is a unit, as is a single module of the root; imports within functions are imports."""
    assert not circles(packages_graph())


_IMPORT_COST = """
import sys
import numpy, torch, torch.func, torch.utils.data
before = set(sys.modules)
import laplace
print(*sorted(set(sys.modules) - before))
"""


def test_import_is_light() -> None:
    """Counted, not timed: beside torch nothing but the package itself, tqdm and some of the standard library."""
    new = [module for module in printed(_IMPORT_COST) if module.split(".")[0] != "laplace"]
    light = ALWAYS_THERE | set(sys.stdlib_module_names)
    assert not [module for module in new if module.split(".")[0] not in light]
    assert not [module for module in new if module.startswith(("torch._dynamo", "torch._inductor", "torch.onnx"))]
    assert len(new) < 80


# Documentation.


def called_from_outside() -> set[tuple[str, str]]:
    """Files and names of what users find in an `__all__`, and of what files of other packages import."""
    found = set()
    for path, _, dotted in imports():
        file = file_of(dotted) if dotted.split(".")[0] == "laplace" else None
        if file is not None and (room_of(file) != room_of(path) or path.name == "__init__.py"):
            found.add((name_of(file), dotted.rsplit(".", 1)[-1]))
    return found


def test_public_names_are_documented() -> None:
    """Classes and functions that users or other packages call, and public methods of these classes.

    An implementation of what a base class documents, a method or an attribute, needs no docstring of its own.
    """
    called, wrong = called_from_outside(), []
    for path, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
        outermost = [up for up in ancestors(node) if isinstance(up, ast.ClassDef | ast.FunctionDef)][-1:] or [node]
        hidden = not is_public(node.name) or in_function(node) or decorators(node) & {"overload", "setter"}
        if hidden or (name_of(path), outermost[0].name) not in called or ast.get_docstring(node) is not None:
            continue
        inherited = isinstance(node.up, ast.ClassDef) and (
            any(ast.get_docstring(original) for _, original in overridden(path, node.up, node.name))
            or ("property" in decorators(node) and attribute_is_described(path, node.up, node.name))
        )
        if not inherited:
            wrong.append(f"{where(path, node)} {node.name}")
    assert not wrong


def test_the_source_speaks_of_the_project_alone() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*FILES, *sorted((ROOT / "docs").rglob("*.md"))]
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if _NOT_OF_THE_PROJECT.search(line)
    ]
    assert not wrong


def test_every_directory_is_a_package() -> None:
    """Without `__init__.py` a directory works here and is missing from a wheel."""
    assert not {name_of(path.parent) for path in FILES if not (path.parent / "__init__.py").exists()}
