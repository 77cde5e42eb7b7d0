"""Runs the tests of packages that wrap laplace-torch, with this library in its place, and ours around their calls.

    python -m tests.clients.run FOLDER

`FOLDER` holds the source archives of the packages that have tests there, and `curvlinops-2`, `curvlinops-3`, folders of
both major versions of curvlinops. Everything runs three times: without curvlinops, and beside each of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OWN_TESTS = {
    "laplace_bayesopt": ("tests/botorch/test_laplace_botorch.py", []),
    "maldideepkit": ("tests/test_uncertainty.py", ["-k", "Laplace"]),
}
"""Files of tests in the source archives."""

CURVLINOPS = ("tests/conformance/test_backends.py", ["-k", "urvlinops or kfac or sampled"])
"""Our tests of its numbers, which run where it is."""


def main(folder: Path) -> int:
    """Runs all, and returns the number of runs that failed."""
    sources = _unpacked(folder)
    failed = 0
    for beside in (None, "curvlinops-2", "curvlinops-3"):
        print(f"\n== {beside or 'without curvlinops'}", flush=True)
        # Their folders `tests` are found before this one: the plugins are modules of a folder of their own.
        path = [ROOT, HERE, *([] if beside is None else [folder / beside])]
        runs = [(sources[name], [test, *chosen]) for name, (test, chosen) in OWN_TESTS.items()]
        runs += [(ROOT, [str(HERE / "wrappers.py"), "--noconftest"])]
        if beside is not None:
            runs += [(ROOT, [CURVLINOPS[0], *CURVLINOPS[1]])]
        failed += sum(_pytest(where, arguments, path) for where, arguments in runs)
    return failed


def _unpacked(folder: Path) -> dict[str, Path]:
    """Folders of the source archives, by the names of their packages."""
    found: dict[str, Path] = {}
    for archive in sorted(folder.glob("*.tar.gz")):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        found[archive.name.rpartition("-")[0]] = folder / archive.name.removesuffix(".tar.gz")
    return found


def _pytest(where: Path, arguments: list[str], path: list[Path]) -> bool:
    """True if a run of pytest failed."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "stand_ins", "-p", "spectra"]
    if where != ROOT or "--noconftest" in arguments:  # by the rules of the package, not of this project
        words += ["-c", os.devnull, "--rootdir", str(where)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([*words, *arguments], cwd=where, env=environment, check=False).returncode != 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
