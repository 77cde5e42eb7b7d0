"""Dense references of a decision head: mode, leave-one-out, moments and stacking, all weights at once in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Dense(NamedTuple):
    """A softmax head over standardised features with an intercept, at its mode."""

    theta: Tensor  # [K (D + 1)], class by class, the intercept last
    precision: Tensor  # [P, P]
    mean: Tensor  # of the features, [D]
    scale: Tensor
    weighed: Tensor  # [D, D], of standardised features those on which the prior is isotropic

    def jacobian(self, x: Tensor) -> Tensor:
        """[B, K, P] of logits less their mean."""
        z = torch.cat([(x - self.mean) / self.scale @ self.weighed, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        n_classes = len(self.theta) // z.shape[1]
        plain = torch.einsum("kl,bd->bkld", torch.eye(n_classes, dtype=x.dtype), z).flatten(2)
        return plain - plain.mean(1, keepdim=True)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, K] and [B, K, K]."""
        jacobian = self.jacobian(x)
        return jacobian @ self.theta, jacobian @ torch.linalg.solve(self.precision, jacobian.mT)


def weighing(z: Tensor, share: Tensor, power: float) -> Tensor:
    """(C + I)^(power/2) of standardised features with shares, scaled so that their total variance stays."""
    covariance = z.T @ (share.unsqueeze(1) * z)
    values, vectors = torch.linalg.eigh(covariance + torch.eye(len(covariance), dtype=z.dtype))
    root = vectors @ (values ** (power / 2)).diag() @ vectors.T
    return root * (covariance.trace() / (root @ covariance @ root).trace()).sqrt()


def softmax_head(
    x: Tensor, y: Tensor, n_classes: int, decay: float, intercept: float, counts: Tensor, power: float = 0.5
) -> Dense:
    """Newton's method on all K (D + 1) weights."""
    share = counts / counts.sum()
    mean = share @ x
    scale = (share @ (x - mean).square()).sqrt()
    n_features = x.shape[1]
    prior = torch.tensor([*[decay] * n_features, intercept], dtype=x.dtype).repeat(n_classes)
    z = (x - mean) / scale
    weighed = weighing(z, share, power)
    dense = Dense(torch.zeros_like(prior), prior.diag(), mean, scale, weighed)
    jacobian, targets = dense.jacobian(x), torch.nn.functional.one_hot(y, n_classes).to(x)
    theta, precision = torch.zeros_like(prior), prior.diag()
    for _ in range(50):
        p = (jacobian @ theta).softmax(1)
        hessian = counts.view(-1, 1, 1) * (p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1))
        gradient = torch.einsum("nkp,nk->p", jacobian, counts.unsqueeze(1) * (p - targets)) + prior * theta
        precision = torch.einsum("nkp,nkl,nlq->pq", jacobian, hessian, jacobian) + prior.diag()
        theta = theta - torch.linalg.solve(precision, gradient)
    return Dense(theta, precision, mean, scale, weighed)


def under_the_others(z: Tensor, share: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """Rows of `weighing`'s features of every datum, under the covariance without it, [N, D]; its prior variance, [N].

    The factor that keeps the total variance stays.
    """
    weighed = weighing(z, share, power)
    eye = torch.eye(z.shape[1], dtype=z.dtype)
    covariance = z.T @ (share.unsqueeze(1) * z) + eye
    values, vectors = torch.linalg.eigh(covariance)
    factor = (weighed @ weighed).trace() / (values**power).sum()
    rows, variances = [], []
    for row, weight in zip(z, share, strict=True):
        values, vectors = torch.linalg.eigh(covariance - weight * row.outer(row))
        moved = factor * (vectors * values**power) @ (vectors.T @ row)
        rows.append(torch.linalg.solve(weighed, moved))
        variances.append(moved @ row)
    return torch.stack(rows), torch.stack(variances)


def without_each(
    dense: Dense, x: Tensor, y: Tensor, counts: Tensor, decay: float, power: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Moments of every datum after one Newton step on the loss of all others: the precision without its curvature.

    Weights are those of the prior of all data; the datum is seen with that of the others.
    """
    moments = []
    rows, variances = under_the_others((x - dense.mean) / dense.scale, counts / counts.sum(), power)
    n_classes = len(dense.theta) // (x.shape[1] + 1)
    centred = torch.eye(n_classes, dtype=x.dtype) - 1 / n_classes
    for row, other, variance, label, count in zip(dense.jacobian(x), rows, variances, y, counts, strict=True):
        p = (row @ dense.theta).softmax(0)
        less = dense.precision - count * row.T @ (p.diag() - p.outer(p)) @ row
        gradient = -count * row.T @ (p - torch.nn.functional.one_hot(label, len(p)))
        theta = dense.theta - torch.linalg.solve(less, gradient)
        seen = torch.kron(centred, torch.cat([other, other.new_ones(1)]).unsqueeze(0))
        off = (variance - other.square().sum()) / decay * centred
        moments.append((seen @ theta, seen @ torch.linalg.solve(less, seen.T) + off))
    means, covariances = zip(*moments, strict=True)
    return torch.stack(means), torch.stack(covariances)


def stacked(
    mean: Tensor, variance: Tensor, y: Tensor, temperatures: list[float], scales: list[float]
) -> tuple[Tensor, Tensor]:
    """Weights of all pairs (T, c) by 300 steps of EM with two pseudo-counts, and probabilities of every pair."""
    tried = [(t, c) for t in temperatures for c in scales]
    each = torch.stack([(mean / t / (1 + math.pi / 8 * c * variance / t**2).sqrt()).softmax(1) for t, c in tried])
    likely = each[:, torch.arange(len(y)), y].T
    weights = torch.full((len(tried),), 1 / len(tried), dtype=mean.dtype)
    for _ in range(300):
        shares = weights * likely / (likely @ weights).unsqueeze(1)
        weights = (shares.sum(0) + 2 / len(tried)) / (len(y) + 2)
    return weights, each
