"""Runs both packages, compares, prints the table and writes it to docs/differences.md: `python -m tests.parity.run`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path

from tests.parity import work
from tests.parity.compare import DIFFERENCES, Comparison, Numbers, compare, rows
from tests.parity.work import Posterior

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "differences.md"
BEGIN, END = "<!-- side by side -->", "<!-- end of side by side -->"


def interpreter() -> Path | None:
    """Python of an environment with laplace-torch: the variable LAPLACE_TORCH names it."""
    named = os.environ.get("LAPLACE_TORCH")
    return Path(named).absolute() if named else None


def start(python: Path, package: Path | None, state: Path, result: Path) -> subprocess.Popen[bytes]:
    """Starts the script.

    Args:
        python: Interpreter.
        package: Folder from which `laplace` is imported; None for what the interpreter has.
        state: Weights and data.
        result: Where the numbers go.
    """
    home = result.with_suffix("")
    home.mkdir()
    (home / "tests").symlink_to(ROOT / "tests", target_is_directory=True)
    if package is not None:
        (home / "laplace").symlink_to(package / "laplace", target_is_directory=True)
    settings = {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "tests.parity.measure", str(state), str(result)]
    return subprocess.Popen(command, cwd=home, env=settings, stdout=subprocess.DEVNULL)


def side_by_side(theirs: Path, folder: Path) -> tuple[Comparison, str]:
    """The comparison, and what the page says of it."""
    state, there, here = folder / "state.pt", folder / "theirs.npz", folder / "ours.npz"
    work.save(state)
    running = [start(theirs, None, state, there), start(Path(sys.executable), ROOT, state, here)]
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError("a script failed before its end; its message stands above")
    numbers = Numbers.load(there), Numbers.load(here)
    found = compare(*numbers, state)
    return found, page(found, *numbers, state)


def page(found: Comparison, there: Numbers, here: Numbers, state: Path) -> str:
    """The section of docs/differences.md."""
    differing = sum(map(len, found.differing.values()))
    told = (
        f"One script, run under laplace-torch {there.about['laplace-torch']} and under this library (torch"
        f" {there.about['torch'].split('+')[0]}, float64), compares {found.equal + differing} quantities of"
        f" {len(work.posteriors())} posteriors: curvature, evidence and its gradients, variances, the probabilities of"
        f" every link, moments of samples, tuned priors. {found.equal} agree to ten digits, sampled ones to five"
        f" standard errors; {differing} differ for the reasons in the first {len(DIFFERENCES)} rows;"
        f" {len(found.failing)} posteriors cannot be fitted with laplace-torch. This library's numbers agree with a"
        " dense oracle in the same way, wherever the tests have one: all but the training and Kronecker factors of"
        " `nn.TransformerEncoderLayer`. The other rows are scripts of their own."
    )
    lines = [
        *textwrap.wrap(told, 120),
        "",
        "| what | laplace-torch | this library | truth |",
        "|---|---|---|---|",
        *map(str, rows(there, here, state)),
        "",
        "What cannot be fitted with laplace-torch, and is fitted by this library:",
        "",
        "| network | posterior | backend | error |",
        "|---|---|---|---|",
        *_failures(found.failing),
    ]
    return "\n".join(lines)


def _failures(failing: dict[Posterior, str]) -> list[str]:
    cells = Counter((p.model, f"{p.subset}, `{p.structure}`", p.backend, error) for p, error in failing.items())
    return [f"| {m} | {what} | {f'`{b}`' if b else 'default'} | `{error}` |" for m, what, b, error in cells]


def written(text: str, section: str) -> str:
    """The page with the section between its marks replaced."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{section}\n{END}", text)


def main() -> int:
    """Everything; the exit status says whether there are faults."""
    python = interpreter()
    if python is None:
        print("LAPLACE_TORCH must name the Python of an environment that has laplace-torch; `make parity` makes one.")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found, section = side_by_side(python, Path(folder))
    print(section, *found.faults, sep="\n")
    if not found.faults:
        PAGE.write_text(written(PAGE.read_text("utf-8"), section), "utf-8")
    return int(bool(found.faults))


if __name__ == "__main__":
    sys.exit(main())
