"""Predictive uncertainty taken apart, by brute force in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def delta(mean: Tensor, covariance: Tensor, link: str = "softmax") -> Tensor:
    """g(μ) + ½ tr(B Σ), `[B, C]`, with the Hessian B of g by automatic differentiation (Daxberger et al., B.4.6)."""

    def g(f: Tensor) -> Tensor:
        return torch.softmax(f, -1) if link == "softmax" else torch.sigmoid(f)

    rows = []
    for mu, sigma in zip(mean, covariance, strict=True):
        traces = [(torch.autograd.functional.hessian(lambda f, k=k: g(f)[k], mu) * sigma).sum() for k in range(len(mu))]
        rows.append(g(mu) + 0.5 * torch.stack(traces))
    return torch.stack(rows)


def entropy(p: Tensor) -> Tensor:
    """−Σ p log p over the last dimension."""
    return -(p * p.clamp(min=1e-300).log()).sum(-1)


def parts(probabilities: Tensor) -> dict[str, Tensor]:
    """Equation B.1 and its entropies from samples `[S, B, C]` of class probabilities, from one-hot targets' moments."""
    mean = probabilities.mean(0)
    within = torch.diag_embed(probabilities) - probabilities.unsqueeze(-1) * probabilities.unsqueeze(-2)
    between = (probabilities - mean).unsqueeze(-1) * (probabilities - mean).unsqueeze(-2)
    return {
        "aleatoric": within.mean(0).diagonal(dim1=-2, dim2=-1),
        "epistemic": between.mean(0).diagonal(dim1=-2, dim2=-1),
        "predictive_entropy": entropy(mean),
        "expected_entropy": entropy(probabilities).mean(0),
    }


def binary_parts(mean: Tensor, variance: Tensor, n_nodes: int = 20_001) -> dict[str, Tensor]:
    """The same of independent labels with σ(f), f ~ N(mean, variance), on a fine grid; entropies summed over labels."""
    nodes = torch.linspace(-12, 12, n_nodes, dtype=torch.float64)
    weights = (-0.5 * nodes**2).exp()
    weights = weights / weights.sum()
    p = torch.sigmoid(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes)

    def expected(values: Tensor) -> Tensor:
        return (values * weights).sum(-1)

    def binary(q: Tensor) -> Tensor:
        return entropy(torch.stack([q, 1 - q], -1))

    average = expected(p)
    return {
        "aleatoric": expected(p * (1 - p)),
        "epistemic": expected(p**2) - average**2,
        "predictive_entropy": binary(average).sum(-1),
        "expected_entropy": expected(binary(p)).sum(-1),
    }
