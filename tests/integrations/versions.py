"""Writes versions that are installed into the table of docs/integrations.md (`make versions`)."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
_ROW = re.compile(r"^\| ([\w-]+) \| (\d[\w.]*) \|", re.MULTILINE)


def stated() -> dict[str, str]:
    """Versions that the table states, by the package's name in lower case."""
    return {name.lower(): version for name, version in _ROW.findall(PAGE.read_text("utf-8"))}


def main() -> None:
    text = PAGE.read_text("utf-8")
    text = _ROW.sub(lambda row: f"| {row[1]} | {metadata.version(row[1])} |", text)
    text = re.sub(
        r"\b(pandas|onnxruntime|onnxscript) \d[\d.]*\d", lambda it: f"{it[1]} {metadata.version(it[1])}", text
    )
    PAGE.write_text(text, "utf-8")
    print(*(f"{name} {version}" for name, version in stated().items()), sep="\n")


if __name__ == "__main__":
    main()
