"""Curvature and loss of weighted data, one datum after the other: Σ_b w_b times what datum b says.

Whole weights are those of repeated data, of which no formula has to be told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference import curvature

KINDS: dict[str, Callable[..., Tensor]] = {
    "ggn": curvature.ggn,
    "ef": curvature.empirical_fisher,
    "hessian": curvature.exact_hessian,
}


def matrix(model: nn.Module, x: Any, y: Tensor, weights: Tensor, likelihood: str, kind: str) -> Tensor:
    """Σ_b w_b H_b over all trainable parameters, `[P, P]`."""
    names = curvature.trainable_names(model)
    each = [KINDS[kind](model, datum, y[n : n + 1], names, likelihood) for n, datum in enumerate(curvature.samples(x))]
    return torch.einsum("b,bpq->pq", weights, torch.stack(each))


def loss(model: nn.Module, x: Any, y: Tensor, weights: Tensor, likelihood: str) -> Tensor:
    """Σ_b w_b ℓ_b, 0-dim; ignored labels have none."""
    data = enumerate(curvature.samples(x))
    each = [curvature.loss(curvature.outputs(model, datum), y[n : n + 1], likelihood) for n, datum in data]
    return (weights * torch.stack(each)).sum().detach()


def repeated(x: Any, y: Tensor, times: Tensor) -> tuple[Any, Tensor]:
    """The data with each of them as often as it says, `[B]` integers."""
    rows = torch.repeat_interleave(torch.arange(len(y)), times)
    return (x[rows] if isinstance(x, Tensor) else {key: value[rows] for key, value in x.items()}), y[rows]
