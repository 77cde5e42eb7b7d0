"""The import of the library, beside that of torch, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.timing import Case, Job

_ROOT = Path(__file__).parents[1]


def _python(script: str) -> Callable[[], object]:
    return partial(subprocess.run, [sys.executable, "-c", script], cwd=_ROOT, check=True)


def _import(device: torch.device) -> Job:
    """Bytecode is there from the run that does not count.

    Both go through the objects that torch leaves once, as Python does sooner or later: within the library's import or
    after it, whichever module comes next.
    """
    del device
    torch_alone = "import gc, torch; gc.collect()"
    library = _python(f"{torch_alone}; import laplace")
    return Job(lambda _: library(), _python(torch_alone))


def cases() -> list[Case]:
    """The line of the table."""
    return [Case("import laplace", 1.08, "× import torch", _import)]
