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
        for halvings in range(41):
            step = 0.5**halvings
            reached = objective(theta + step * direction, at, f, jacobian, y, likelihood, scale, delta)
            if reached <= value + 1e-13:
                break
        theta = theta + step * direction
        if direction.norm() < 1e-13 * theta.norm():
            break
    return theta


def _nodes(count: int) -> tuple[Tensor, Tensor]:
    """Gauss–Hermite points and weights of a standard normal, `[count]` each."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.as_tensor(nodes), torch.as_tensor(weights) / math.sqrt(2 * math.pi)


def _expected(centre: Tensor, rows: Tensor, y: Tensor) -> Tensor:
    """E log p(y | f) of every datum under N(centre, rows rowsᵀ), `[B]`: of binary targets, or of labels of 3 classes.

    A softmax of 3 classes sees two differences of its outputs, over which the expectation is a product of sums.
    """
    if y.is_floating_point():
        nodes, weights = _nodes(60)
        points = centre.unsqueeze(-1) + rows.square().sum(-1).sqrt().unsqueeze(-1) * nodes
        targets = y.view_as(centre).unsqueeze(-1).expand_as(points)
        return -(functional.binary_cross_entropy_with_logits(points, targets, reduction="none") @ weights).sum(1)
    nodes, weights = _nodes(40)
    points = torch.cartesian_prod(nodes, nodes)
    differences = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]], dtype=torch.float64)
    own, spread = centre @ differences.T, differences @ rows
    root = torch.linalg.cholesky(spread @ spread.mT)
    logits = functional.pad(own.unsqueeze(1) + torch.einsum("bij,sj->bsi", root, points), (0, 1))
    labels = y.view(-1, 1, 1).expand(-1, len(points), 1)
    return logits.log_softmax(2).gather(2, labels).squeeze(2) @ torch.outer(weights, weights).flatten()


def elbo(
    mean: Tensor, root: Tensor, at: Tensor, f: Tensor, jacobian: Tensor, y: Tensor, scale: float, delta: Tensor,
) -> Tensor:  # fmt: skip
    """Evidence lower bound of binary targets, or of 3 classes, under N(mean, root rootᵀ), by Gauss–Hermite points."""
    expected = _expected(f + jacobian @ (mean - at), jacobian @ root, y)
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


def expected_slopes(mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """E of gradient `[B, C]` and Hessian `[B, C, C]` of the loss of labels under N(mean, covariance), of C outputs.

    By the derivatives of E log p in mean and covariance (Opper and Archambeau, 2009), on 24 points per output.
    """
    nodes, weights = _nodes(24)
    c = mean.shape[1]
    points = torch.cartesian_prod(*[nodes] * c)
    mass = torch.cartesian_prod(*[weights] * c).prod(1)
    root = torch.linalg.cholesky(covariance)
    f = mean.unsqueeze(1) + torch.einsum("bij,sj->bsi", root, points)
    p = f.softmax(2)
    gradient = torch.einsum("bsc,s->bc", p, mass) - functional.one_hot(y, c)
    second = torch.diag_embed(torch.einsum("bsc,s->bc", p, mass)) - torch.einsum("bsc,bsd,s->bcd", p, p, mass)
    return gradient, second


def expected_slopes_of_binary(mean: Tensor, variance: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """E of gradient and second derivative of the loss of binary targets under N(mean, variance), `[B, C]` each."""
    nodes, weights = _nodes(60)
    p = (mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes).sigmoid()
    return p @ weights - y, (p * (1 - p)) @ weights
