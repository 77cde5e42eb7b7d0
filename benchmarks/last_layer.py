"""Last layer, Kronecker-factored and diagonal: the overhead on top of a forward pass, and very many classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks import models, work
from benchmarks.timing import Case, Job

Setup = Callable[[torch.device, int], tuple[nn.Module, models.Batches]]


def _wrn(device: torch.device, n_data: int) -> tuple[nn.Module, models.Batches]:
    return models.wide_resnet().to(device).eval(), models.data((3, 32, 32), 10, n_data, 128, device)


def _many_classes(device: torch.device, n_data: int) -> tuple[nn.Module, models.Batches]:
    return models.mlp(64, 512, 512, 200).to(device), models.data((64,), 200, n_data, 256, device)


def fit_job(setup: Setup, structure: str, n_data: int, device: torch.device) -> Job:
    """Construction and fit against a forward pass over the same batches."""
    model, batches = setup(device, n_data)
    return Job(lambda _: work.fitted(model, batches, "last_layer", structure), work.forward(model, batches))


def predict_job(setup: Setup, structure: str, n_data: int, device: torch.device) -> Job:
    """Probit predictions against a forward pass over the same batches; the factorisation comes first."""
    model, batches = setup(device, n_data)
    la = work.fitted(model, batches, "last_layer", structure)
    note = work.factorised(la, batches[0][0])
    return Job(lambda _: work.predict(la, batches), work.forward(model, batches), note=note)


def _vocabulary_job(structure: str, device: torch.device) -> Job:
    """3,100 classes on 768 features: fit, factorisation and prediction."""
    model, batches = models.mlp(64, 768, 3100).to(device), models.data((64,), 3100, 1024, 256, device)
    return Job(lambda _: work.predict(work.fitted(model, batches, "last_layer", structure), batches))


def cases() -> list[Case]:
    """The lines of the table."""
    lines: list[Case] = []
    for structure in ("kron", "diag"):
        lines += [
            Case(f"last layer, WRN-16-4, {structure} fit", 1.1, "× forward", partial(fit_job, _wrn, structure, 256)),
            Case(
                f"last layer, WRN-16-4, {structure} probit",
                1.1,
                "× forward",
                partial(predict_job, _wrn, structure, 256),
            ),
        ]
    lines.append(Case("last layer, C=200, kron fit", 4, "× forward", partial(fit_job, _many_classes, "kron", 4096)))
    for structure in ("kron", "diag"):
        build = partial(predict_job, _many_classes, structure, 1024)
        lines.append(Case(f"last layer, C=200, {structure} probit", 3, "× forward", build))
    for structure in ("kron", "diag"):
        build = partial(_vocabulary_job, structure)
        lines.append(Case(f"last layer, C=3100, {structure} fit and probit", 1, "GiB", build))
    return lines
