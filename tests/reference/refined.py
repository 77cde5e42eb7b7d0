"""The linearised model refined by dense algebra in float64: its mode by Newton's method, a variational Gaussian."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.reference import curvature, likelihoods


def loss(f: Tensor, y: Tensor, likelihood: str) -> Tensor:
    """Summed unit negative log likelihood, 0-dim."""
    if likelihood == "regression":
        return 0.5 * (y - f).square().sum()
    if likelihood == "bernoulli":
        return functional.binary_cross_entropy_with_logits(f, y.view_as(f), reduction="sum")
    if likelihood in likelihoods.DENSITIES:
        return likelihoods.nll(f, y, likelihood).sum()
    return functional.cross_entropy(f, y, reduction="sum")


def objective(
    theta: Tensor, at: Tensor, f: Tensor, jacobian: Tensor, y: Tensor, likelihood: str, scale: Tensor, delta: Tensor
) -> Tensor:
    """−log p(D | f + J (θ − θ*)) − log p(θ) without constants, 0-dim; `scale` 0-dim, or `[C]` for regression."""
    outputs = f + jacobian @ (theta - at)
    data = (scale * 0.5 * (y - outputs).square()).sum() if scale.ndim else scale * loss(outputs, y, likelihood)
    return data + 0.5 * (delta * theta) @ theta


def mode(at: Tensor, f: Tensor, jacobian: Tensor, y: Tensor, likelihood: str, scale: Tensor, delta: Tensor) -> Tensor:
    """Its minimum by Newton's method with halved steps, `[P]`, from the dense Jacobian `[B, C, P]`."""
    theta = at.clone()
    for _ in range(100):
        leaf = theta.clone().requires_grad_()
        value = objective(leaf, at, f, jacobian, y, likelihood, scale, delta)
        (gradient,) = torch.autograd.grad(value, leaf)
        inner = curvature.output_hessian(f + jacobian @ (theta - at), likelihood, y) * scale
        hessian = torch.einsum("bcp,bcd,bdq->pq", jacobian, inner, jacobian) + torch.diag(delta)
        direction = -torch.linalg.solve(hessian, gradient)
        step = 1.0
        while step > 1e-12 and (
            objective(theta + step * direction, at, f, jacobian, y, likelihood, scale, delta) > value + 1e-13
        ):
            step /= 2
        theta = theta + step * direction
        if direction.norm() < 1e-13 * theta.norm():
            break
    return theta


def elbo(
    mean: Tensor, root: Tensor, at: Tensor, f: Tensor, jacobian: Tensor, y: Tensor, scale: float, delta: Tensor,
) -> Tensor:  # fmt: skip
    """Evidence lower bound of a Bernoulli model under N(mean, root rootᵀ), by Gauss–Hermite with 60 points."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    nodes, weights = torch.as_tensor(nodes), torch.as_tensor(weights) / math.sqrt(2 * math.pi)
    centre = f + jacobian @ (mean - at)
    spread = (jacobian @ root).square().sum(-1).sqrt()
    points = centre.unsqueeze(-1) + spread.unsqueeze(-1) * nodes
    targets = y.view_as(f).unsqueeze(-1).expand_as(points)
    expected = -functional.binary_cross_entropy_with_logits(points, targets, reduction="none") @ weights
    covariance = root @ root.T
    kl = 0.5 * (
        delta @ covariance.diagonal() + (delta * mean) @ mean - len(mean) - delta.log().sum()
        - 2 * torch.linalg.slogdet(root)[1]
    )  # fmt: skip
    return scale * expected.sum() - kl


def best_elbo(
    at: Tensor, f: Tensor, jacobian: Tensor, y: Tensor, scale: float, delta: Tensor, diagonal: bool
) -> tuple[float, Tensor, Tensor]:
    """The largest bound with its mean `[P]` and covariance `[P, P]`, by L-BFGS over the mean and a Cholesky factor."""
    n = len(at)
    mean = at.clone().requires_grad_()
    logs = (-0.5 * delta.log()).clone().requires_grad_()
    lower = torch.zeros(n, n, dtype=torch.float64, requires_grad=True)

    def root() -> Tensor:
        return torch.diag(logs.exp()) + (0 if diagonal else torch.tril(lower, -1))

    optimizer = torch.optim.LBFGS(
        [mean, logs, lower], max_iter=2000, max_eval=4000, tolerance_grad=1e-9, tolerance_change=1e-14,
        history_size=50, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = -elbo(mean, root(), at, f, jacobian, y, scale, delta)
        value.backward()
        return value

    optimizer.step(closure)
    with torch.no_grad():
        value = elbo(mean, root(), at, f, jacobian, y, scale, delta)
        return float(value), mean.detach(), root() @ root().T
