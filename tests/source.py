"""The source of the package as syntax trees: what is imported, defined, overridden and called, and where."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "laplace"
FILES = sorted(PACKAGE.rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef
Class = tuple[Path, ast.ClassDef]
"""A class with its file: two classes of one name are two classes."""


@cache
def tree(path: Path) -> ast.Module:
    """Syntax tree of a file whose nodes know their parent (attribute `up`)."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(module):
        for child in ast.iter_child_nodes(node):
            child.up = node
    return module


@cache
def by_type(path: Path) -> Mapping[type[ast.AST], list[ast.AST]]:
    """Nodes of a file by their types, in the order of `ast.walk`: which rules ask for, many times."""
    found: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
    for node in ast.walk(tree(path)):
        found[type(node)].append(node)
    return found


def name_of(path: Path) -> str:
    """Path within the package: `weights/problem.py`."""
    return path.relative_to(PACKAGE).as_posix()


def where(path: Path, node: ast.AST) -> str:
    return f"laplace/{name_of(path)}:{getattr(node, 'lineno', 1)}"


def nodes(*types: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    """Nodes of these types with their files; of several types, those of one after the other in every file."""
    for path in FILES:
        for kind in types:
            yield from ((path, node) for node in by_type(path).get(kind, ()))


def functions() -> Iterator[tuple[Path, Function]]:
    yield from nodes(ast.FunctionDef, ast.AsyncFunctionDef)


def calls(*names: str) -> Iterator[tuple[Path, ast.Call]]:
    for path, node in nodes(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in names:
            yield path, node


def ancestors(node: ast.AST) -> Iterator[ast.AST]:
    while (node := getattr(node, "up", None)) is not None:
        yield node


def in_function(node: ast.AST) -> bool:
    return any(isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) for up in ancestors(node))


def for_type_checkers(node: ast.AST) -> bool:
    return any(isinstance(up, ast.If) and "TYPE_CHECKING" in ast.unparse(up.test) for up in ancestors(node))


def is_public(name: str) -> bool:
    return not name.startswith("_")


def decorators(node: Function | ast.ClassDef) -> set[str]:
    return {ast.unparse(decorator).split("(")[0].rsplit(".", 1)[-1] for decorator in node.decorator_list}


def body_of(function: Function) -> list[ast.stmt]:
    """Statements of a function after its docstring."""
    return function.body[ast.get_docstring(function, clean=False) is not None :]


def house() -> list[str]:
    """Folders `name/` of the package, and single modules `name.py`, as docs/design.md lists them."""
    page = (ROOT / "docs" / "design.md").read_text("utf-8")
    (listed,) = re.findall(r"^```\nlaplace/\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    entries = [re.match(r"(?: +\w+(?:\.py|/))+", line) for line in listed.splitlines()]
    return [name for entry in entries if entry for name in entry[0].split()]


# Imports.


def imports() -> Iterator[tuple[Path, ast.AST, str]]:
    """Every imported dotted name, relative ones made absolute; of `from laplace.a import b` it is `laplace.a.b`."""
    for path, node in nodes(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield path, node, alias.name
            continue
        module = module_of(path, node)
        for alias in node.names:
            yield path, node, f"{module}.{alias.name}" if module.split(".")[0] == "laplace" else module


def module_of(path: Path, node: ast.ImportFrom) -> str:
    """The module that a `from` names, absolute."""
    if not node.level:
        return node.module or ""
    base = ["laplace", *path.relative_to(PACKAGE).parts[: -node.level]]
    return ".".join([*base, node.module or ""]).rstrip(".")


@cache
def file_of(dotted: str) -> Path | None:
    """The file behind a dotted name: of the module itself, or of the one that the name is imported from."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:cut])
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.exists():
                return candidate
    return None


@cache
def import_graph() -> dict[str, set[str]]:
    """The files that every file imports when it is imported itself."""
    graph: dict[str, set[str]] = {name_of(path): set() for path in FILES}
    for path, node, dotted in imports():
        if not for_type_checkers(node) and not in_function(node) and (imported := _own_file(path, dotted)):
            graph[name_of(path)].add(name_of(imported))
    return graph


@cache
def packages_graph() -> dict[str, set[str]]:
    """The packages, and single modules of the root, that each of them imports, in functions as well."""
    graph: dict[str, set[str]] = {room_of(path): set() for path in FILES}
    for path, node, dotted in imports():
        if not for_type_checkers(node) and (imported := _own_file(path, dotted)):
            graph[room_of(path)].add(room_of(imported))
    return {room: others - {room} for room, others in graph.items()}


def room_of(path: Path) -> str:
    """`weights/problem.py` → `weights`, `named.py` → `named`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _own_file(path: Path, dotted: str) -> Path | None:
    imported = file_of(dotted) if dotted.split(".", maxsplit=1)[0] == "laplace" else None
    return imported if imported != path else None


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Sets of files of which each leads to each other one (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == order[node]:
            cut = stack.index(node)
            components.append(set(stack[cut:]))
            del stack[cut:]

    for node in graph:
        if node not in order:
            visit(node)
    return [component for component in components if len(component) > 1]


# Classes.


def classes() -> Iterator[Class]:
    yield from nodes(ast.ClassDef)


def bases(path: Path, node: ast.ClassDef) -> list[Class]:
    """Direct bases of a class that the package defines, followed through imports."""
    resolved = (_class_named(path, ast.unparse(base).split("[")[0]) for base in node.bases)
    return [base for base in resolved if base is not None and base[1] is not node]


def _class_named(path: Path, name: str) -> Class | None:
    """The class that a name, dotted or not, means in a file."""
    first, _, rest = name.partition(".")
    for statement in ast.walk(tree(path)):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return path, statement
        if not isinstance(statement, ast.ImportFrom) or module_of(path, statement).split(".")[0] != "laplace":
            continue
        for alias in statement.names:
            if (alias.asname or alias.name) == first:
                source = file_of(f"{module_of(path, statement)}.{alias.name}")
                if source is not None and source != path:
                    return _class_named(source, rest or alias.name)
    return None


def overridden(path: Path, node: ast.ClassDef, method: str) -> Iterator[tuple[Class, ast.FunctionDef]]:
    """Definitions of a method in the bases of a class, nearest first, each with the class that has it."""
    for base in bases(path, node):
        for item in base[1].body:
            if isinstance(item, ast.FunctionDef) and item.name == method:
                yield base, item
        yield from overridden(*base, method)


def attribute_is_described(path: Path, node: ast.ClassDef, attribute: str) -> bool:
    """True if a base class declares an attribute and describes it in its docstring."""
    for base_path, base in bases(path, node):
        declared = any(isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == attribute for item in base.body)
        if declared and f"\n    {attribute}:" in (ast.get_docstring(base) or ""):
            return True
        if attribute_is_described(base_path, base, attribute):
            return True
    return False
