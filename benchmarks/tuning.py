"""A grid of a hundred prior precisions on validation data, against a grid of one."""

from __future__ import annotations

import warnings
from functools import partial

import torch

from benchmarks import models, work
from benchmarks.timing import Case, Job
from laplace import ParametricLaplace
from laplace.errors import TuningWarning

_CANDIDATES = 100


def _search(la: ParametricLaplace, batches: models.Batches, n_candidates: int) -> None:
    """By the negative log predictive density of probit predictions; random data may put the best on an edge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        la.optimize_prior_precision(method="gridsearch", val_loader=batches, grid_size=n_candidates)


def _job(structure: str, device: torch.device) -> Job:
    model, batches = models.wide_resnet().to(device).eval(), models.data((3, 32, 32), 10, 256, 128, device)
    la = work.fitted(model, batches, "last_layer", structure)
    return Job(lambda _: _search(la, batches, _CANDIDATES), partial(_search, la, batches, 1))


def _small_job(structure: str, device: torch.device) -> Job:
    """A trunk that costs little more than its head, so that the candidates show."""
    model, batches = models.mlp(64, 512, 512, 10).to(device), models.data((64,), 10, 1024, 256, device)
    la = work.fitted(model, batches, "last_layer", structure)
    return Job(lambda _: _search(la, batches, _CANDIDATES), partial(_search, la, batches, 1))


def cases() -> list[Case]:
    """The lines of the table."""
    lines = [
        Case(f"100 candidates, last layer, WRN-16-4, {structure}", 2, "× one", partial(_job, structure))
        for structure in ("kron", "diag", "full")
    ]
    return [*lines, Case("100 candidates, last layer, small MLP, kron", 5, "× one", partial(_small_job, "kron"))]
