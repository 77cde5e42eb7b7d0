"""Low rank plus diagonal against Kronecker factors where layers are wide: an MLP 1024-2048-2048-2048-10."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models, work
from benchmarks.timing import Case, Job
from laplace import ParametricLaplace

_WIDTHS = (1024, 2048, 2048, 2048, 10)


def _setup(device: torch.device) -> tuple[nn.Module, models.Batches]:
    return models.mlp(*_WIDTHS).to(device), models.data(_WIDTHS[:1], _WIDTHS[-1], 512, 128, device)


def held(la: ParametricLaplace) -> int:
    """Numbers that the curvature of a fit consists of."""

    def count(state: Any) -> int:
        if isinstance(state, Tensor):
            return state.numel()
        values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
        return sum(count(value) for value in values)

    return count(la.fitted().curvature.state())


def _fit(structure: str, device: torch.device) -> Job:
    """The fit with the first prediction, which brings the factorisation."""
    model, batches = _setup(device)

    def run(name: str) -> ParametricLaplace:
        la = work.fitted(model, batches, "all", name)
        la(batches[0][0][:1])
        return la

    numbers = held(run(structure)) / sum(p.numel() for p in model.parameters())
    note = f"held: {numbers:.2f} numbers per parameter, kron {_kron_numbers():.2f}"
    return Job(lambda _: run(structure), partial(run, "kron"), note=note)


def _kron_numbers() -> float:
    """Entries of both factors of every layer, per parameter."""
    pairs = list(pairwise(_WIDTHS))
    return sum(i * i + o * o for i, o in pairs) / sum(math.prod(pair) + pair[1] for pair in pairs)


def _use(structure: str, call: Callable[[ParametricLaplace, models.Batches], object], device: torch.device) -> Job:
    """A call on a fit that is factorised already."""
    model, batches = _setup(device)
    fits = [work.fitted(model, batches, "all", name) for name in (structure, "kron")]
    for la in fits:
        call(la, batches)
    return Job(lambda _: call(fits[0], batches), partial(call, fits[1], batches))


def _evidence(la: ParametricLaplace, _: models.Batches) -> Tensor:
    delta = torch.ones(1, device=la.expansion_point.device, requires_grad=True)
    (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(delta), delta)
    return gradient


def cases() -> list[Case]:
    """The lines of the table."""
    name = "MLP 1024-2048-2048-2048-10"
    lines: list[Case] = []
    for structure in ("lowrank_kron", "diag"):
        lines += [
            Case(f"{name}, {structure} fit", 1, "× kron", partial(_fit, structure)),
            Case(f"{name}, {structure} probit", 1, "× kron", partial(_use, structure, work.predict)),
        ]
    return [*lines, Case(f"{name}, lowrank_kron evidence", 20, "× kron", partial(_use, "lowrank_kron", _evidence))]
