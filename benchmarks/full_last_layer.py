"""Full last layer: the one structure whose cost is quadratic in features times classes."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks import models
from benchmarks.last_layer import fit_job, predict_job
from benchmarks.timing import Case


def _setup(device: torch.device, n_data: int) -> tuple[nn.Module, models.Batches]:
    return models.mlp(64, 256, 256, 10).to(device), models.data((64,), 10, n_data, 256, device)


def cases() -> list[Case]:
    """The lines of the table."""
    return [
        Case("full last layer, MLP 64-256-256-10, fit", 25, "× forward", partial(fit_job, _setup, "full", 4096)),
        Case("full last layer, MLP 64-256-256-10, probit", 8, "× forward", partial(predict_job, _setup, "full", 4096)),
    ]
