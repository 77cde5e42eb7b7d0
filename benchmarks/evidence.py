"""A hundred evidence steps after one fit: log marginal likelihood and its gradient in the prior precision."""

from __future__ import annotations

import time
from functools import partial

import torch

from benchmarks import models, work
from benchmarks.timing import Case, Job
from laplace import ParametricLaplace

_STEPS = 100


def _steps(la: ParametricLaplace) -> None:
    """Gradient ascent on log δ; an optimiser of torch would take a fifth of the time for itself."""
    log_prior = torch.zeros(1, device=la.expansion_point.device, requires_grad=True)
    for _ in range(_STEPS):
        (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(log_prior.exp()), log_prior)
        with torch.no_grad():
            log_prior += 1e-4 * gradient


def _full(device: torch.device) -> Job:
    """P = 1,290; the factorisation counts, so every run has a fresh fit."""
    model, batches = models.mlp(64, 128, 128, 10).to(device), models.data((64,), 10, 1024, 256, device)
    return Job(_steps, prepare=partial(work.fitted, model, batches, "last_layer", "full"))


def _lenet(structure: str, device: torch.device) -> Job:
    """All layers of LeNet, P = 61,706; the factorisation comes first."""
    model, batches = models.lenet().to(device), models.data((1, 28, 28), 10, 1024, 256, device)
    la = work.fitted(model, batches, "all", structure)
    start = time.perf_counter()
    la.log_marginal_likelihood()
    note = f"factorisation {time.perf_counter() - start:.3f} s, not counted"
    return Job(lambda _: _steps(la), note=note)


def _large(structure: str, device: torch.device) -> Job:
    """P = 1,462,538: beside the same steps by operations on whole tensors, which leave the cache."""
    model = models.mlp(784, 1024, 512, 256, 10).to(device)
    la = work.fitted(model, models.data((784,), 10, 256, 128, device), "all", structure)
    la.log_marginal_likelihood()
    curvature, theta = torch.rand_like(la.expansion_point), la.expansion_point

    def plain() -> None:
        log_prior = torch.zeros(1, device=device, requires_grad=True)
        for _ in range(_STEPS):
            delta = log_prior.exp()
            value = -0.5 * ((curvature / delta).log1p().sum() + (delta * theta.square().sum()).sum())
            torch.autograd.grad(value, log_prior)

    return Job(lambda _: _steps(la), plain)


def _few_data(device: torch.device) -> Job:
    """Fit and evidence of 64 data, whose factors of 784 and 256 inputs are held by their eigenpairs."""
    model, batches = models.mlp(784, 256, 128, 64, 10).to(device), models.data((784,), 10, 64, 32, device)
    matrix = torch.randn(784, 784, dtype=torch.float64, device=device)
    return Job(
        lambda _: work.fitted(model, batches, "all", "kron").log_marginal_likelihood(),
        reference=lambda: torch.linalg.eigh(matrix @ matrix.T),
    )


def cases() -> list[Case]:
    """The lines of the table."""
    return [
        Case("Kron fit and evidence, MLP 784-…-10, 64 data", 0.5, "× eigh of 784²", _few_data),
        Case("100 evidence steps, full last layer, P=1290", 0.4, "s", _full),
        Case("100 evidence steps, LeNet 28×28, kron", 0.02, "s", partial(_lenet, "kron")),
        Case("100 evidence steps, LeNet 28×28, diag", 0.023, "s", partial(_lenet, "diag")),
        Case("100 evidence steps, MLP 784-1024-512-256-10, diag", 0.5, "× whole tensors", partial(_large, "diag")),
        Case("100 evidence steps, MLP 784-1024-512-256-10, kron", 0.5, "× whole tensors", partial(_large, "kron")),
    ]
