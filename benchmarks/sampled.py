"""The network at sampled weights, against a plain loop that writes every sample into a copy of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import vector_to_parameters

from benchmarks import models, work
from benchmarks.timing import Case, Job
from laplace import ParametricLaplace
from laplace.engines.engine import MEMORY_BUDGET
from laplace.predictive.sampled_weights import outputs_at

Build = Callable[[], nn.Module]
Posterior = tuple[nn.Module, ParametricLaplace, Tensor]


def _posterior(build: Build, shape: tuple[int, ...], n_data: int, structure: str, device: torch.device) -> Posterior:
    model, batches = build().to(device), models.data(shape, 10, 64, 64, device)
    return model, work.fitted(model, batches, "all", structure), batches[0][0][:n_data]


def _prediction_job(
    build: Build, shape: tuple[int, ...], n_data: int, structure: str, n_samples: int, device: torch.device
) -> Job:
    """Means over samples; both draw the weights."""
    model, la, x = _posterior(build, shape, n_data, structure, device)
    other = copy.deepcopy(model)

    def plain() -> Tensor:
        outputs: list[Tensor] = []
        with torch.no_grad():
            for theta in la.sample(n_samples):
                vector_to_parameters(theta, other.parameters())
                outputs.append(other(x))
            return torch.stack(outputs).softmax(-1).mean(0)

    options = {"pred_type": "nn", "link_approx": "mc", "n_samples": n_samples}
    return Job(lambda _: la(x, **options), plain)


def _passes_job(build: Build, shape: tuple[int, ...], n_data: int, n_samples: int, device: torch.device) -> Job:
    """Outputs at weights that were drawn before."""
    model, la, x = _posterior(build, shape, n_data, "diag", device)
    thetas, parameters = la.sample(n_samples), dict(model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]

    def plain() -> Tensor:
        outputs: list[Tensor] = []
        with torch.no_grad():
            for theta in thetas:
                pairs = zip(parameters.items(), theta.split(sizes), strict=True)
                tensors = {name: values.view_as(p) for (name, p), values in pairs}
                outputs.append(functional_call(model, tensors, (x,)))
        return torch.stack(outputs)

    def run(_: object) -> Tensor:
        with torch.no_grad():
            return outputs_at(la.problem, x, thetas, MEMORY_BUDGET)

    return Job(run, plain)


def cases() -> list[Case]:
    """The lines of the table."""
    small, wide = partial(models.mlp, 16, 32, 32, 10), partial(models.mlp, 784, 256, 128, 64, 10)
    passes = partial(_passes_job, small, (16,), 10, 1000)
    lines = [Case("nn, 1000 samples, small MLP, 10 data, passes", 0.05, "× calls", passes)]
    for name, build, shape, n_data, structure, n_samples, target in (
        ("small MLP, 10 data", small, (16,), 10, "kron", 1000, 0.5),
        ("small MLP, 10 data", small, (16,), 10, "diag", 1000, 0.3),
        ("LeNet 8×8, 64 data", models.digits_lenet, (1, 8, 8), 64, "kron", 50, 1.1),
        ("LeNet 8×8, 64 data", models.digits_lenet, (1, 8, 8), 64, "diag", 50, 1.1),
        ("MLP 784-…, 32 data", wide, (784,), 32, "kron", 50, 1.1),
    ):
        job = partial(_prediction_job, build, shape, n_data, structure, n_samples)
        lines.append(Case(f"nn, {n_samples} samples, {name}, {structure}", target, "× loop", job))
    return lines
