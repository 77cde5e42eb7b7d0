"""Low-rank Kronecker factors with the exact diagonal, against the whole Kronecker factors: space and cost of each step.

A fit of Kronecker factors leaves its eigendecompositions to the first prediction, a truncated one makes them in the
fit: both together are compared as well.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks import models, work
from benchmarks.timing import Case, Job
from laplace import ParametricLaplace

_WIDTHS = (784, 1024, 1024, 10)


def _setup(device: torch.device) -> tuple[nn.Module, models.Batches]:
    return models.mlp(*_WIDTHS).to(device), models.data(_WIDTHS[:1], _WIDTHS[-1], 1024, 256, device)


def _both(device: torch.device, batches: models.Batches, model: nn.Module) -> tuple[ParametricLaplace, ...]:
    return tuple(work.fitted(model, batches, "all", name) for name in ("lowrank_kron", "kron"))


def _space(device: torch.device) -> Job:
    """Not a time: what a posterior holds after a prediction, as a note; the times are those of fit and prediction."""
    model, batches = _setup(device)
    sizes: list[float] = []
    for la in _both(device, batches, model):
        work.factorised(la, batches[0][0])
        sizes.append(work.held_bytes((la.fitted().curvature, la.posterior())) / 2**20)
    x = batches[0][0]

    def run(structure: str) -> None:
        work.fitted(model, batches, "all", structure)(x)

    note = f"held: {sizes[0]:.0f} MiB, Kron's {sizes[1]:.0f} MiB, {sizes[0] / sizes[1]:.2f} of it"
    return Job(lambda _: run("lowrank_kron"), lambda: run("kron"), note=note)


def _fit(device: torch.device) -> Job:
    model, batches = _setup(device)
    run = partial(work.fitted, model, batches, "all")
    return Job(lambda _: run("lowrank_kron"), lambda: run("kron"))


def _corrected(device: torch.device) -> Job:
    """Against `ekfac`, whose eigenvalues they are; what both hold is a note."""
    model, batches = _setup(device)
    low = partial(work.fitted, model, batches, "all", "lowrank_kron", structure_kwargs={"corrected": True})
    whole = partial(work.fitted, model, batches, "all", "ekfac")
    sizes = [work.held_bytes(fit().fitted().curvature) / 2**20 for fit in (low, whole)]
    note = f"held: {sizes[0]:.0f} MiB, ekfac's {sizes[1]:.0f} MiB"
    return Job(lambda _: low(), whole, note=note)


def _predict(device: torch.device) -> Job:
    model, batches = _setup(device)
    low, whole = _both(device, batches, model)
    notes = [work.factorised(la, batches[0][0]) for la in (low, whole)]
    return Job(lambda _: work.predict(low, batches), lambda: work.predict(whole, batches), note=notes[0])


def _evidence(device: torch.device) -> Job:
    model, batches = _setup(device)
    low, whole = _both(device, batches, model)

    def step(la: ParametricLaplace) -> None:
        log_prior = torch.zeros(1, device=device, requires_grad=True)
        torch.autograd.grad(la.log_marginal_likelihood(log_prior.exp()), log_prior)

    for la in (low, whole):  # what a fit computes once is not part of a step
        step(la)
    return Job(lambda _: step(low), lambda: step(whole))


def cases() -> list[Case]:
    """The lines of the table."""
    lines = {
        "fit": (1.0, _fit),
        "fit and first probit": (1.0, _space),
        "probit": (1.0, _predict),
        "evidence step": (5.0, _evidence),
    }
    plain = [
        Case(f"lowrank_kron, MLP 784-1024-1024-10, {name}", target, "× kron", job)
        for name, (target, job) in lines.items()
    ]
    return [*plain, Case("lowrank_kron corrected, MLP 784-1024-1024-10, fit", 1.0, "× ekfac", _corrected)]
