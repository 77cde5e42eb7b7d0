"""What the benchmarks time: fits and predictions by the public interface, and the plain computations beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Batches
from laplace import ParametricLaplace
from laplace.grid import from_names


def fitted(model: nn.Module, batches: Batches, weights: str, structure: str, **options: Any) -> ParametricLaplace:
    """Constructs a Laplace approximation and fits it, as a user would."""
    la = from_names(model, "classification", subset_of_weights=weights, hessian_structure=structure, **options)
    la.fit(batches)
    return la


def predict(la: ParametricLaplace, batches: Batches) -> list[Tensor]:
    """Probit predictions of the linearised network, batch by batch."""
    return [la(x, pred_type="glm", link_approx="probit") for x, _ in batches]


def forward(model: nn.Module, batches: Batches) -> Callable[[], list[Tensor]]:
    """A plain forward pass over the batches without gradients."""

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [model(x) for x, _ in batches]

    return run


def per_output_gradients(model: nn.Module, batches: Batches) -> Callable[[], None]:
    """R: one forward pass and one `autograd.grad` of the summed output for each of the C outputs, per batch."""
    parameters = list(model.parameters())

    def run() -> None:
        for x, _ in batches:
            f = model(x)
            for c in range(f.shape[1]):
                torch.autograd.grad(f[:, c].sum(), parameters, retain_graph=True)

    return run


def factorised(la: ParametricLaplace, x: Tensor) -> str:
    """Triggers the factorisation by a first prediction of one batch; a note on what it took beyond a second one."""
    seconds: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        la(x, link_approx="probit")
        seconds.append(time.perf_counter() - start)
    return f"factorisation {max(0.0, seconds[0] - seconds[2]):.3f} s, not counted"


def held_bytes(value: Any) -> int:
    """Bytes of all tensors that can be reached, each storage once."""
    return _held(value, set())


def _held(value: Any, seen: set[int]) -> int:
    if isinstance(value, Tensor):
        pointer = value.untyped_storage().data_ptr()
        known = pointer in seen
        seen.add(pointer)
        return 0 if known else value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return sum(_held(part, seen) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(_held(part, seen) for part in value)
    inner = getattr(value, "__dict__", None)
    return 0 if inner is None or isinstance(value, type) else _held(inner, seen)
