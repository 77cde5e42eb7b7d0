"""What a release needs, checked on the archives in dist/, see RELEASING.md.

    python -m tests.release [--final]

Version, changelog, citation and the wheel's metadata must agree. The wheel is installed into a fresh environment
without extras, where `tests/smoke.py` runs, and, after scikit-learn is added, the first example of README.md, which
must print what it says. `--final` also refuses what is open until the day: placeholders, and a changelog without a
date. The environment variable PIP_ARGS has more arguments for pip.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import laplace

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "example.org"
"""The host of addresses that are not known before the first release; it is reserved for examples."""
URLS = {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
CLASSIFIERS = (
    "Development Status ::",
    "Intended Audience ::",
    "Programming Language :: Python :: 3",
    "Topic ::",
    "Typing ::",
)
_EXAMPLE = re.compile(
    r"^```python\n(import torch\nfrom sklearn.*?)^```\n+```text\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def of_sources(changelog: str, citation: str, version: str, *, final: bool = False) -> Iterator[str]:
    """What is wrong in CHANGELOG.md and CITATION.cff, beside the version of the package."""
    first = re.search(r"^## (\S+?), (.+)$", changelog, re.MULTILINE)
    if first is None or first[1] != version:
        yield f"CHANGELOG.md does not begin with '## {version}, ...'"
    elif final and not re.fullmatch(r"\d{4}-\d\d-\d\d", first[2]):
        yield f"CHANGELOG.md has no date of {version}, but '{first[2]}'"
    fields = dict(re.findall(r"^([\w-]+): *(.*)$", citation, re.MULTILINE))
    if fields.get("version") != version:
        yield f"CITATION.cff is of version {fields.get('version')}, the package of {version}"
    for name in ("title", "authors", "license", "repository-code", *(["date-released"] if final else [])):
        if name not in fields:
            yield f"CITATION.cff has no {name}"
    if final and PLACEHOLDER in citation:
        yield "CITATION.cff has a placeholder"


def of_metadata(metadata: Message, version: str, *, final: bool = False) -> Iterator[str]:
    """What is wrong in the METADATA of a wheel."""
    if metadata["Version"] != version:
        yield f"the wheel is of version {metadata['Version']}, the package of {version}"
    for name in (
        "Name",
        "Summary",
        "License-Expression",
        "License-File",
        "Requires-Python",
        "Description-Content-Type",
    ):
        if not metadata[name]:
            yield f"the wheel's metadata have no {name}"
    classifiers = metadata.get_all("Classifier") or []
    for wanted in CLASSIFIERS:
        if not any(found.startswith(wanted) for found in classifiers):
            yield f"no classifier '{wanted} ...'"
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL") or [])
    for name in sorted(URLS - {label.removesuffix(" (placeholder)") for label in urls}):
        yield f"[project.urls] has no {name}"
    for label, address in urls.items():
        if (PLACEHOLDER in address) != label.endswith(" (placeholder)"):
            yield f"[project.urls] {label}: name what is a placeholder so, and nothing else"
        elif final and PLACEHOLDER in address:
            yield f"[project.urls] {label} is to be filled in"


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(files.read(name).decode("utf-8"))


def example(readme: str) -> tuple[str, str]:
    """README's first example, and what it prints."""
    found = _EXAMPLE.search(readme)
    if found is None:
        raise ValueError("README.md has no first example with its output.")
    return found[1], found[2]


def same_words(one: str, other: str) -> bool:
    """Whether two texts differ in numbers alone: those of training change with the version of PyTorch."""
    return _NUMBER.sub("#", one).split() == _NUMBER.sub("#", other).split()


def in_a_fresh_environment(wheel: Path) -> Iterator[str]:
    """What does not run where nothing but the wheel, and what it requires, is installed."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "env", with_pip=True)
        python = Path(folder) / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([python, *arguments], cwd=folder, env=clean, capture_output=True, text=True)

        def install(*what: str) -> subprocess.CompletedProcess[str]:
            return run("-m", "pip", "install", "--quiet", *shlex.split(os.environ.get("PIP_ARGS", "")), *what)

        code, printed = example((ROOT / "README.md").read_text("utf-8"))
        steps = {
            "the wheel's installation": lambda: install(str(wheel)),
            "tests/smoke.py": lambda: run(str(ROOT / "tests" / "smoke.py")),
            "scikit-learn's installation": lambda: install("scikit-learn"),
            "README's first example": lambda: run("-c", code),
        }
        printed_there = ""
        for name, step in steps.items():
            done = step()
            printed_there = done.stdout
            print(f"{name}: {'failed' if done.returncode else 'done'}", flush=True)
            if done.returncode:
                yield f"{name} failed:\n{done.stderr}"
                return
        if not same_words(printed_there, printed):
            yield f"README's first example does not print what it says, but\n{printed_there}"


def main() -> int:
    """Prints what is wrong; 1 where something is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--final", action="store_true", help="refuse placeholders, and a changelog without a date")
    final = parser.parse_args().final
    wheels, archives = [*(ROOT / "dist").glob("*.whl")], [*(ROOT / "dist").glob("*.tar.gz")]
    if len(wheels) != 1 or len(archives) != 1:
        raise SystemExit("dist/ must have one wheel and one source archive: `make dist`")
    changelog, citation = ((ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    faults = [*of_sources(changelog, citation, laplace.__version__, final=final)]
    faults += of_metadata(metadata_of(wheels[0]), laplace.__version__, final=final)
    faults += in_a_fresh_environment(wheels[0])
    print("\n".join(faults) or f"{wheels[0].name} is ready" + ("" if final else ", but for what --final asks"))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
