"""The import of the library, and a first fit, beside the import of torch, each in a process of its own."""

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


_TORCH = "import gc, torch; gc.collect()"
"""Both go through the objects that torch leaves once, as Python does sooner or later: within the library's import or
after it, whichever module comes next."""

_FIT = """
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
x = torch.randn(100, 16)
la = Laplace(model, "classification")
la.fit([(x, torch.arange(100) % 10)])
la(x)
"""


def _beside_torch(script: str, device: torch.device) -> Job:
    """Bytecode is there from the run that does not count."""
    del device
    library = _python(f"{_TORCH}; {script}")
    return Job(lambda _: library(), _python(_TORCH))


def cases() -> list[Case]:
    """The lines of the table."""
    named = "from laplace import Laplace"
    return [
        Case("import laplace", 1.08, "× import torch", partial(_beside_torch, named), in_other_processes=True),
        Case(
            "import, first fit, prediction",
            1.25,
            "× import torch",
            partial(_beside_torch, f"{named}\n{_FIT}"),
            in_other_processes=True,
        ),
    ]
