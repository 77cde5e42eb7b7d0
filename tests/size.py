"""The size of the library, room by room, beside that of another tree: `python -m tests.size [REF]`.

What is counted is code without blanks, comments and docstrings, lines of docstrings, files, and modules that a single
other one imports. Without a REF of git the numbers beside them are those that were written down at the last release, by
`python -m tests.size --write`. Nothing fails by these numbers: they are for who adds to them.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RELEASED = Path(__file__).with_suffix(".json")


class Size(NamedTuple):
    code: int = 0
    docstrings: int = 0
    files: int = 0
    one_importer: int = 0

    def plus(self, other: Size) -> Size:
        return Size(*map(sum, zip(self, other, strict=True)))


def sizes(root: Path) -> dict[str, Size]:
    """Sizes of the packages below `root/laplace`, of its single modules together, and of the whole."""
    package = root / "laplace"
    files = {path: ast.parse(path.read_text("utf-8")) for path in sorted(package.rglob("*.py"))}
    importers = Counter(other for path, tree in files.items() for other in _imported(path, tree, root))
    rooms: dict[str, Size] = {}
    for path, tree in files.items():
        parts = path.relative_to(package).parts
        room = parts[0] if len(parts) > 1 else "(root)"
        code, docstrings = lines(path, tree)
        size = Size(code, docstrings, 1, importers[path] == 1)
        rooms[room] = rooms.get(room, Size()).plus(size)
        rooms["whole"] = rooms.get("whole", Size()).plus(size)
    return dict(sorted(rooms.items(), key=lambda item: (item[0] == "whole", item[0])))


def lines(path: Path, tree: ast.Module) -> tuple[int, int]:
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(path.read_text("utf-8").splitlines(), 1)
    code = [line for number, line in lines if number not in documented and line.strip() and line.strip()[0] != "#"]
    return len(code), len(documented)


def _imported(path: Path, tree: ast.Module, root: Path) -> set[Path]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "laplace":
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names if alias.name.split(".")[0] == "laplace")
    found = set()
    for name in names:
        parts = name.split(".")
        candidates = [root.joinpath(*parts[:cut]).with_suffix(".py") for cut in (len(parts), len(parts) - 1)]
        found.update([file for file in candidates if file.exists() and file != path][:1])
    return found


def released() -> dict[str, Size]:
    return {room: Size(*numbers) for room, numbers in json.loads(RELEASED.read_text("utf-8")).items()}


def of_ref(ref: str) -> dict[str, Size]:
    """Sizes at a commit, a branch or a tag."""
    archive = subprocess.run(["git", "archive", ref, "laplace"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
        return sizes(Path(folder))


def table(now: dict[str, Size], before: dict[str, Size]) -> str:
    heads = ["code", "before", "docstrings", "before", "files", "before", "one importer", "before"]
    lines = [f"{'':16}" + "".join(f"{head:>13}" for head in heads)]
    rooms = [*(room for room in now if room != "whole"), *(room for room in before if room not in now), "whole"]
    for room in rooms:
        pairs = zip(now.get(room, Size()), before.get(room, Size()), strict=True)
        lines.append(f"{room:16}" + "".join(f"{number:13,}" for pair in pairs for number in pair))
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    now = sizes(ROOT)
    if arguments == ["--write"]:
        rooms = (f'  "{room}": {list(map(int, size))}' for room, size in now.items())
        RELEASED.write_text("{\n" + ",\n".join(rooms) + "\n}\n", "utf-8")
    print(table(now, of_ref(arguments[0]) if arguments and arguments[0] != "--write" else released()))


if __name__ == "__main__":
    main(sys.argv[1:])
