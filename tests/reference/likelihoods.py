"""Likelihoods by their densities: gradients and Fisher information by autograd and quadrature, moments by dense sums.

Written from textbook densities alone: `torch.distributions` for counts, the exponential family in its natural
parameters for a noise that depends on the input.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.integrate import quad
from scipy.special import ndtr
from torch import Tensor
from torch.nn.functional import softplus

DENSITIES = ("poisson", "heteroscedastic", "mean_log_variance")


def nll(f: Tensor, y: Tensor, likelihood: str) -> Tensor:
    """−log p(y | f) of every row, `[...]`, of outputs `[..., C]` (counts) or `[..., 2C]` and targets `[..., C]`."""
    if likelihood == "poisson":
        return -torch.distributions.Poisson(f.exp(), validate_args=False).log_prob(y).sum(-1)
    if likelihood == "mean_log_variance":
        normal = torch.distributions.Normal(*_normal(f, likelihood), validate_args=False)
        return -normal.log_prob(y).sum(-1)
    first, s = f.chunk(2, -1)
    second = -0.5 * softplus(s)
    log_partition = -first.square() / (4 * second) - 0.5 * (-2 * second).log()
    return -(first * y + second * y.square() - log_partition - 0.5 * math.log(2 * math.pi)).sum(-1)


def gradient(f: Tensor, y: Tensor, likelihood: str) -> Tensor:
    """Gradient of `nll`, `[B, C]`, by autograd."""
    leaf = f.detach().requires_grad_()
    return torch.autograd.grad(nll(leaf, y, likelihood).sum(), leaf)[0]


def fisher(f: Tensor, likelihood: str) -> Tensor:
    """E[∇ ∇ᵀ] of the gradients of `nll` at targets of p(y | f), `[B, C, C]`, by a sum over targets.

    Outputs of different targets have no covariance, so that every target may take the same nodes.
    """
    if likelihood == "poisson":
        counts = torch.arange(400, dtype=f.dtype).view(-1, 1, 1)
        masses = torch.distributions.Poisson(f.exp()).log_prob(counts).exp()  # [n, B, C]
        slopes = torch.stack([gradient(f, count.expand_as(f), likelihood) for count in counts])
        return torch.diag_embed((masses * slopes.square()).sum(0))
    mean, scale = _normal(f, likelihood)
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    total = f.new_zeros(*f.shape, f.shape[1])
    for node, weight in zip(nodes, weights / math.sqrt(2 * math.pi), strict=True):
        slope = gradient(f, mean + node * scale, likelihood)
        total = total + weight * slope.unsqueeze(2) * slope.unsqueeze(1)
    c = mean.shape[1]
    target = torch.arange(2 * c) % c
    return total * (target.unsqueeze(0) == target.unsqueeze(1))


def moments(mean: Tensor, covariance: Tensor, likelihood: str, n: int = 80) -> tuple[Tensor, Tensor, Tensor]:
    """E[y], E[Var(y | f)] and Var(E[y | f]) under f ~ N(mean, covariance), `[B, C]`, by Gauss–Hermite quadrature.

    Args:
        mean: `[B, C]`, or `[B, 2C]`.
        covariance: `[B, C, C]`, or `[B, 2C, 2C]`.
        likelihood: Its name.
        n: Nodes per dimension.
    """
    nodes, weights = (torch.as_tensor(part) for part in np.polynomial.hermite_e.hermegauss(n))
    weights = weights / math.sqrt(2 * math.pi)
    if likelihood == "poisson":
        deviation = covariance.diagonal(dim1=1, dim2=2).sqrt()
        rates = (mean + nodes.view(-1, 1, 1) * deviation).exp()
        values, spreads, weights = rates, rates, weights.view(-1, 1, 1)
    else:
        c = mean.shape[1] // 2
        places = torch.stack([torch.arange(c), torch.arange(c) + c], 1)  # of a target's two outputs
        pairs = covariance[:, places.unsqueeze(2), places.unsqueeze(1)]  # [B, C, 2, 2]
        root = torch.linalg.cholesky(pairs)
        grid = torch.cartesian_prod(nodes, nodes)
        f = mean[:, places] + torch.einsum("bcij,nj->nbci", root, grid)
        values, scales = _normal(f, likelihood)
        values, spreads = values[..., 0], scales[..., 0].square()
        weights = torch.cartesian_prod(weights, weights).prod(1).view(-1, 1, 1)
    expected = (weights * values).sum(0)
    return expected, (weights * spreads).sum(0), (weights * (values - expected).square()).sum(0)


def noisy_density(
    mean: Tensor, covariance: Tensor, y: Tensor, n: int = 401, likelihood: str = "heteroscedastic"
) -> Tensor:
    """log ∫ p(y_c | f) N(f; mean, covariance) df of every target, `[B, C]`, by a dense sum over pairs of outputs."""
    c = y.shape[1]
    places = torch.stack([torch.arange(c), torch.arange(c) + c], 1)
    root = torch.linalg.cholesky(covariance[:, places.unsqueeze(2), places.unsqueeze(1)])
    line = torch.linspace(-9, 9, n, dtype=mean.dtype)
    grid = torch.cartesian_prod(line, line)
    f = mean[:, places] + torch.einsum("bcij,nj->nbci", root, grid)
    logs = -nll(f, y.unsqueeze(-1), likelihood) - 0.5 * grid.square().sum(1).view(-1, 1, 1) - math.log(2 * math.pi)
    return logs.logsumexp(0) + 2 * math.log(18 / (n - 1))


def narrow_density(
    mean: Tensor, covariance: Tensor, y: Tensor, n: int = 2_000_001, likelihood: str = "heteroscedastic"
) -> Tensor:
    """The same of one pair (η, s), 0-dim, by a dense sum over s alone, given which y is Gaussian.

    Args:
        mean: `[2]`.
        covariance: `[2, 2]`.
        y: 0-dim.
        n: Terms of the sum: it resolves what is wide by 1e-4 standard deviations of s.
        likelihood: Its name.
    """
    line = torch.linspace(-14, 14, n, dtype=mean.dtype)
    s = mean[1] + line * covariance[1, 1].sqrt()
    slope = covariance[0, 1] / covariance[1, 1]
    first, rest = mean[0] + slope * (s - mean[1]), covariance[0, 0] - slope * covariance[0, 1]
    centre, deviation = _normal(torch.stack([first, s], -1), likelihood)
    scale = deviation[:, 0].square() if likelihood == "heteroscedastic" else 1.0  # of an error of the first output
    normal = torch.distributions.Normal(centre[:, 0], (deviation[:, 0].square() + rest * scale**2).sqrt())
    logs = normal.log_prob(y) - 0.5 * line.square() - 0.5 * math.log(2 * math.pi)
    return logs.logsumexp(0) + math.log(28 / (n - 1))


def sampled_moments(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean `[B, C]` and unbiased covariance `[B, C, C]` of samples `[S, B, C]`, in float64, one row after the other."""
    rows = samples.double().unbind(1)
    return torch.stack([row.mean(0) for row in rows]), torch.stack([torch.cov(row.T) for row in rows])


def count_density(mean: Tensor, variance: Tensor, y: Tensor, n: int = 100_001) -> Tensor:
    """log ∫ Poisson(y; exp(f)) N(f; mean, variance) df, element-wise, by a dense sum over all f that matter."""
    low = mean - 14 * variance.sqrt()
    high = torch.maximum(mean + 14 * variance.sqrt(), y.clamp(min=1).log() + 3)
    f = low + torch.linspace(0, 1, n, dtype=mean.dtype).view(-1, *(1,) * mean.ndim) * (high - low)
    normal = torch.distributions.Normal(mean, variance.sqrt(), validate_args=False)
    logs = y * f - f.exp() - torch.lgamma(y + 1) + normal.log_prob(f)
    return logs.logsumexp(0) + ((high - low) / (n - 1)).log()


def distribution(mean: Tensor, covariance: Tensor, y: float, likelihood: str) -> float:
    """P(Y ≤ y) under one pair of outputs with mean `[2]` and covariance `[2, 2]`, by SciPy's adaptive quadrature.

    Given the second output s, y is Gaussian. Its distribution function is integrated over s by parts of one deviation.
    """
    (first, s), ((a, b), (_, v)) = mean.tolist(), covariance.tolist()
    slope, deviation = (b / v, math.sqrt(v)) if v else (0.0, 0.0)
    rest = a - slope * b

    def given(z: float) -> float:
        at, numerator = s + z * deviation, first + slope * z * deviation
        if likelihood == "heteroscedastic":
            precision = max(at, 0.0) + math.log1p(math.exp(-abs(at))) if at > -30 else math.exp(at)
            standard = (y * precision - numerator) / math.sqrt(precision + rest)
        else:
            standard = (y - numerator) / math.sqrt(math.exp(min(at, 700.0)) + rest)
        return math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * ndtr(standard)

    return sum(quad(given, low / 2, (low + 1) / 2, limit=200)[0] for low in range(-16, 16))


def _normal(f: Tensor, likelihood: str) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of y given outputs `[..., 2C]`."""
    first, s = f.chunk(2, -1)
    if likelihood == "mean_log_variance":
        return first, (0.5 * s).exp()
    return first / softplus(s), softplus(s).rsqrt()
