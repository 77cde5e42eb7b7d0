"""AGENTS.md and llms.txt: one page each for coding assistants.

    python -m tests.agents.page

writes what is generated: the table of choices, which is README's, and `llms.txt`, which lists the pages of the
documentation with their titles. Tests compare the files with what this would write, and run every call of the page.
"""

from __future__ import annotations

import re

from tests.source import ROOT

AGENTS, LLMS, README = ROOT / "AGENTS.md", ROOT / "llms.txt", ROOT / "README.md"
_CHOICES = re.compile(r"(<!-- choices: .*? -->\n\n).*?(<!-- end -->)", re.DOTALL)
_TABLE = re.compile(r"^\| your network \|.*?\n\n", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def text() -> str:
    return AGENTS.read_text("utf-8")


def with_choices(page: str) -> str:
    """The page with README's table of weights and structures."""
    table = _TABLE.search(README.read_text("utf-8"))
    if table is None:
        raise ValueError("README.md has no table that begins with 'your network'.")
    return _CHOICES.sub(lambda match: match[1] + table[0] + match[2], page)


def llms() -> str:
    """What the library is, the five calls, and links to all pages by their titles."""
    first, five = (README.read_text("utf-8").split("\n\n")[1], _BLOCK.findall(text())[0])
    pages = [AGENTS, README, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/tutorials").glob("*.md"))]
    links = [f"- [{title(page.read_text('utf-8'))}]({page.relative_to(ROOT).as_posix()})" for page in pages]
    head = f"# laplace\n\n> {' '.join(first.split())}\n\n```python\n{five}```\n\n## Pages\n\n"
    return head + "\n".join(links) + "\n"


def title(page: str) -> str:
    return next(line for line in page.splitlines() if line.startswith("# ")).removeprefix("# ")


def section(name: str) -> str:
    """The part of the page under a heading of the second level."""
    return text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def blocks(part: str) -> list[str]:
    """The code of a part, block by block."""
    return _BLOCK.findall(part)


def rows(part: str) -> list[list[str]]:
    """The cells of the table of a part, without its head."""
    lines = [line.strip("| ") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.split(" | ")] for line in lines[2:]]


def names() -> set[str]:
    """Every word in the page's code, but for what its tables say not to write, and for comments."""
    allowed = text()
    for name in ("What not to do", "Names that do not exist"):
        allowed = allowed.replace(section(name), "\n".join(f"`{row[-1]}`" for row in rows(section(name))))
    code = "\n".join(blocks(allowed) + re.findall(r"`([^`\n]+)`", allowed))
    return set(re.findall(r"\w+", re.sub(r"  # .*", "", code)))


if __name__ == "__main__":
    AGENTS.write_text(with_choices(text()), "utf-8")
    LLMS.write_text(llms(), "utf-8")
