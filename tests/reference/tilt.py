"""A width that follows the input, by dense float64 matrices: leverages, distances, and the predictions that follow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

RIDGE = 1e-3


def leverages(train: Tensor, inputs: Tensor) -> Tensor:
    """aᵀ (A + ρ tr(A)/d)⁻¹ a of inputs `[B, T, d]`, a mean over T positions, with A summed over `[N, T, d]`."""
    rows = train.double().reshape(-1, train.shape[-1])
    total = sum(torch.outer(row, row) for row in rows)
    assert isinstance(total, Tensor)
    inverse = torch.linalg.inv(total + RIDGE * total.trace() / len(total) * torch.eye(len(total)).double())
    return torch.stack([torch.stack([a @ inverse @ a for a in one]).mean() for one in inputs.double()])


def left_out_leverages(train: Tensor) -> Tensor:
    """The same of the training inputs `[N, d]`, each against the matrix of all others, with the same ridge."""
    rows = train.double()
    total = rows.T @ rows
    ridge = RIDGE * total.trace() / len(total) * torch.eye(len(total)).double()
    return torch.stack([a @ torch.linalg.inv(total - torch.outer(a, a) + ridge) @ a for a in rows])


def distances(held_out: list[Tensor], new: list[Tensor]) -> tuple[Tensor, Tensor]:
    """r of held-out and of new inputs, from their leverages in every layer."""

    def mean(values: list[Tensor]) -> Tensor:
        return sum(v / lower_median(h) for v, h in zip(values, held_out, strict=True)) / len(values)  # type: ignore

    middle = lower_median(mean(held_out))
    return mean(held_out) / middle, mean(new) / middle


def lower_median(values: Tensor) -> Tensor:
    return values.sort().values[(len(values) - 1) // 2]


def squared_temperature(r: Tensor, width: float, far: float) -> Tensor:
    """T² = (1 + c r) / (1 + c), and beyond r_far its value there times r / r_far."""
    inside = (1 + width * r.clamp(max=far)) / (1 + width)
    return torch.where(r > far, inside * r / far, inside)


def probabilities(f: Tensor, r: Tensor, width: float, far: float, variances: Tensor | float = 0.0) -> Tensor:
    """Softmax of the tempered logits, whose variance c Σ(δ) the probit link takes in as that of any logits."""
    logits = f.double() / squared_temperature(r, width, far).sqrt()[:, None]
    return (logits / (1 + math.pi / 8 * torch.as_tensor(variances)).sqrt()).softmax(1)


def variance(sigma: Tensor, r: Tensor, width: float, far: float, variances: Tensor | float = 0.0) -> Tensor:
    """Var[y] of a regression, `[B, C]`."""
    return squared_temperature(r, width, far)[:, None] * sigma.double().square() + torch.as_tensor(variances)


def widest(losses: dict[float, Tensor], network: Tensor, widths: tuple[float, ...], n_errors: float) -> float:
    """The first of the widths whose losses `[n]` are not shown to be larger than the network's; else 0."""
    for width in widths:
        gap = losses[width] - network
        if gap.mean() + n_errors * gap.std() / math.sqrt(len(gap)) <= 0:
            return width
    return 0.0


def mixed_probabilities(parts: list[tuple[Tensor, Tensor, float]], weights: list[float], width: float) -> Tensor:
    """Σ_k π_k p_k of networks with logits, r and r_far of their own, and one c."""
    each = [weight * probabilities(f, r, width, far) for weight, (f, r, far) in zip(weights, parts, strict=True)]
    return torch.stack(each).sum(0)


def mixed_moments(
    parts: list[tuple[Tensor, Tensor, float]], weights: list[float], sigma: Tensor, width: float
) -> tuple[Tensor, Tensor]:
    """Mean and Var[y] of a mixture of regressions, by raw second moments."""
    means = [f.double() for f, _, _ in parts]
    seconds = [variance(sigma, r, width, far) + f.double().square() for f, r, far in parts]
    mean = torch.stack([weight * m for weight, m in zip(weights, means, strict=True)]).sum(0)
    second = torch.stack([weight * s for weight, s in zip(weights, seconds, strict=True)]).sum(0)
    return mean, second - mean.square()
