"""The structure of docs/add_a_structure.md in the registry: a plugin of pytest, for tests that are generated from it.

`pytest -p tests.conformance.tridiagonal -k tridiagonal` runs whatever the registry's structures go through.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "add_a_structure.md"


def documented() -> dict[str, Any]:
    """What the page's first example defines."""
    example = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)[0]
    module = sys.modules.setdefault("documented", ModuleType("documented"))  # where what is pickled is found again
    exec(compile(example, PAGE.name, "exec", dont_inherit=True), vars(module))
    return vars(module)


def tapered(dense: Tensor) -> Tensor:
    """What the structure keeps of a matrix `[P, P]`."""
    beside = torch.diag(dense.diagonal(1), 1) / 2
    return torch.diag(dense.diagonal()) + beside + beside.T


def pytest_configure() -> None:
    """Registers the structure, as the page does, with a truth, before tests are collected."""
    documented()
    # Not at the top: its lists of structures are made when it is imported.
    from tests.conformance.cases import KEPT

    KEPT["tridiagonal"] = lambda case, dense: tapered(dense)
