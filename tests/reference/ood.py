"""Scores of distance from the data, dense and in float64, input by input."""

from __future__ import annotations

import torch
from torch import Tensor


def energy(f: Tensor) -> Tensor:
    """−log Σ_c exp f_c, `[B]` (Liu et al., 2020)."""
    return torch.stack([-row.exp().sum().log() for row in f])


def doubt(probabilities: Tensor) -> Tensor:
    """1 − max_c p_c, `[B]`."""
    return torch.stack([1 - max(row) for row in probabilities])


def entropy(probabilities: Tensor) -> Tensor:
    """−Σ_c p_c log p_c, `[B]`."""
    return torch.stack([-sum(p * p.log() for p in row) for row in probabilities])  # type: ignore[arg-type]


def mutual_information(mean: Tensor, covariance: Tensor, n_nodes: int = 48) -> Tensor:
    """H(E p) − E H(p) of a softmax of two outputs, `[B]`, by quadrature over their difference."""
    nodes = torch.linspace(-9, 9, 200 * n_nodes + 1, dtype=mean.dtype)
    weights = torch.softmax(-0.5 * nodes.square(), 0)
    found = []
    for m, v in zip(mean, covariance, strict=True):
        d = (m[0] - m[1]) + (v[0, 0] + v[1, 1] - v[0, 1] - v[1, 0]).sqrt() * nodes
        p = torch.stack([torch.sigmoid(d), torch.sigmoid(-d)], 1)
        found.append(entropy((weights @ p).unsqueeze(0))[0] - weights @ torch.special.entr(p).sum(1))
    return torch.stack(found)


def shrunk(scatter: Tensor, n: int) -> Tensor:
    """The covariance by oracle approximating shrinkage of the scatter of n vectors, `[D, D]` (Chen et al., 2010)."""
    covariance, width = scatter / n, len(scatter)
    mean = covariance.trace() / width
    alpha = covariance.square().mean()
    gap = (n + 1) * (alpha - mean**2 / width)
    share = min(1.0, float((alpha + mean**2) / gap)) if gap > 0 else 1.0
    return (1 - share) * covariance + share * mean * torch.eye(width, dtype=scatter.dtype)


def scatters(features: Tensor, labels: Tensor) -> dict[int, tuple[int, Tensor, Tensor]]:
    """Number, mean and scatter of every class."""
    found = {}
    for label in sorted(set(labels.tolist())):
        own = features[labels == label]
        mean = own.mean(0)
        found[label] = len(own), mean, (own - mean).T @ (own - mean)
    return found


def mahalanobis(features: Tensor, labels: Tensor, at: Tensor, *, classwise: bool) -> Tensor:
    """min_c (φ − μ_c)ᵀ Σ⁻¹ (φ − μ_c), `[B]`: a covariance for all (Lee et al., 2018), or one for every class."""
    classes = scatters(features, labels)
    tied = shrunk(torch.stack([scatter for _, _, scatter in classes.values()]).sum(0), len(features))
    distances = []
    for n, mean, scatter in classes.values():
        if classwise and n < 2:
            continue
        inverse = torch.linalg.inv(shrunk(scatter, n) if classwise else tied)
        distances.append(torch.stack([(row - mean) @ inverse @ (row - mean) for row in at]))
    return torch.stack(distances).amin(0)


def leverage(features: Tensor, labels: Tensor, at: Tensor, ridge: float) -> Tensor:
    """min_c φᵀ (Σ φφᵀ + ridge)⁻¹ φ, `[B]`, with a 1 among the features."""

    def with_one(rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.ones_like(rows[:, :1])], 1)

    leverages = []
    for label in sorted(set(labels.tolist())):
        own = with_one(features[labels == label])
        inverse = torch.linalg.inv(own.T @ own + ridge * torch.eye(own.shape[1], dtype=own.dtype))
        leverages.append(torch.stack([row @ inverse @ row for row in with_one(at)]))
    return torch.stack(leverages).amin(0)
