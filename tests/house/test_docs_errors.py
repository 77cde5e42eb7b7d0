"""docs/errors.md names every error and warning, and quotes messages as the source has them."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from laplace import errors
from tests.source import calls, nodes, tree

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text("utf-8")
CLASSES = [name for name, found in inspect.getmembers(errors, inspect.isclass) if found.__module__ == errors.__name__]

_ENTRY = re.compile(r"^(`[^`\n]+`(?: and `[^`\n]+`)*) \(([\w ]+)\)\n: ", re.MULTILINE)
ENTRIES = [(quote, classes) for quotes, classes in _ENTRY.findall(PAGE) for quote in re.findall(r"`([^`]+)`", quotes)]
_VARIES = "…"


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_named(name: str) -> None:
    assert re.search(rf"`(laplace\.errors\.)?{name}`", PAGE)


def test_every_entry_is_read() -> None:
    assert len(_ENTRY.findall(PAGE)) == len(re.findall(r"^: ", PAGE, re.MULTILINE)) > 100


@pytest.mark.parametrize(("quote", "classes"), ENTRIES)
def test_quoted_messages_are_in_the_source(quote: str, classes: str) -> None:
    """From its first word on, with … for what varies; a note of a tuning warning is a message of its own."""
    assert set(classes.split(" or ")) <= set(CLASSES)
    assert any(begins(quote, text) for text in messages())


def test_every_warning_has_an_entry() -> None:
    texts = [rendered(call.args[0], path) for path, call in calls("warn")]
    whole = [
        text for text in texts if not text.startswith(_VARIES)
    ]  # of others the beginning is put together elsewhere
    missing = [text for text in whole if not any(begins(quote, text) for quote, _ in ENTRIES)]
    assert len(texts) > 20 and not missing


def begins(quote: str, text: str) -> bool:
    """Whether a message, with … in the place of its values, begins as the quotation says."""
    first, *others = quote.split(_VARIES)
    return text.startswith(first) and re.match(".*".join(map(re.escape, [first, *others])), text, re.DOTALL) is not None


def documented(message: str) -> bool:
    """Whether a message that a user meets has an entry, which is found by its words."""
    return any(re.search(".*?".join(map(re.escape, quote.split(_VARIES))), message, re.DOTALL) for quote, _ in ENTRIES)


@cache
def messages() -> list[str]:
    """Every string of the package."""
    return sorted({rendered(node, path) for path, node in nodes(ast.JoinedStr, ast.Constant) if _is_string(node)})


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def rendered(node: ast.AST, path: Path) -> str:
    """A string of the source with the file's own constants filled in, and … for whatever else varies."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(rendered(part, path) for part in parts)
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name):
            return constants(path).get(name, _VARIES)
    return _VARIES


@cache
def constants(path: Path) -> dict[str, str]:
    """Strings that a file names at its top."""
    return {
        target.id: node.value.value
        for node in tree(path).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
