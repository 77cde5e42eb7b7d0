"""Memory of a fit of every structure, against what `la.plan` says before it.

Of a ResNet-50 with 100 outputs where a structure suits that, else of a small network.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks import models
from benchmarks.timing import Case, Job
from laplace import Laplace, ParametricLaplace

TARGET_GIB = 6.0
"""Of the whole process, on a CPU."""


def fit_job(structure: str, device: torch.device) -> Job:
    """Fits two batches of eight images; low rank a single one."""
    model = models.resnet50().to(device).eval()
    batches = models.data((3, 32, 32), 100, 16, 8, device)[: 1 if structure == "lowrank" else 2]
    # Power iterations take time, and no memory.
    options: dict[str, Any] = {"structure_kwargs": {"power_iterations": 0}} if structure == "lowrank" else {}

    def made() -> ParametricLaplace:
        return Laplace(model, "classification", "all", structure, **options)

    return Job(lambda _: made().fit(batches), planned=lambda: made().plan(batches).peak_bytes)


def small_job(structure: str, device: torch.device) -> Job:
    """Fits four batches of 64 data: blocks of 6,060 entries, or a matrix of 5,360."""
    sizes = (100, 60, 10) if structure == "block" else (48, 80, 15, 10)
    model = models.mlp(*sizes).to(device).eval()
    batches = models.data(sizes[:1], sizes[-1], 256, 64, device)

    def made() -> ParametricLaplace:
        return Laplace(model, "classification", "all", structure)

    return Job(lambda _: made().fit(batches), planned=lambda: made().plan(batches).peak_bytes)


def cases() -> list[Case]:
    """The lines of the table."""
    small = [Case(f"small MLP, {name} fit", TARGET_GIB, "GiB", partial(small_job, name)) for name in ("block", "full")]
    return small + [
        Case(f"ResNet-50, C=100, {structure} fit", TARGET_GIB, "GiB", partial(fit_job, structure))
        for structure in ("diag", "kron", "lowrank", "ekfac", "lowrank_kron")
    ]
