"""Subnetworks of single entries at random, the worst case: fit and prediction against R, which sees all weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks import models, work
from benchmarks.timing import Case, Job
from laplace import ParametricLaplace
from laplace.grid import from_names
from laplace.weights.masks_scored import RandomSubnetMask


def _fitted(model: nn.Module, batches: models.Batches, structure: str, indices: torch.Tensor) -> ParametricLaplace:
    la = from_names(model, "classification", "subnetwork", structure, subnetwork_indices=indices)
    la.fit(batches)
    return la


def _job(structure: str, size: int, device: torch.device, *, predict: bool) -> Job:
    model = models.mlp(784, 1024, 512, 256, 128, 10).to(device)
    batches = models.data((784,), 10, 1024, 256, device)
    generator = torch.Generator(device).manual_seed(0)
    indices = RandomSubnetMask(model, size, generator).select()
    fit = partial(_fitted, model, batches, structure, indices)
    reference = work.per_output_gradients(model, batches)
    if not predict:
        return Job(lambda _: fit(), reference)
    la = fit()
    note = work.factorised(la, batches[0][0])
    return Job(lambda _: work.predict(la, batches), reference, note=note)


def cases() -> list[Case]:
    """The lines of the table."""
    chosen = {("diag", 100): 1.0, ("diag", 1000): 1.0, ("diag", 10_000): 1.0, ("full", 100): 1.0, ("full", 1000): 2.0}
    lines: list[Case] = []
    for (structure, size), target in chosen.items():
        name = f"subnetwork, {size} of 1.5 M, {structure}"
        lines += [
            Case(f"{name} fit", target, "× R", partial(_job, structure, size, predict=False)),
            Case(f"{name} probit", target, "× R", partial(_job, structure, size, predict=True)),
        ]
    return lines
