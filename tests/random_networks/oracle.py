"""The truth about a network by plain autograd in float64: one datum, and one backward pass per output, at a time."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Truth:
    """What is true of a network and its data, for the weights that are random.

    Attributes:
        theta: Trained weights, `[P]`.
        tensor_of: Number of the parameter tensor of each of them, `[P]`.
        J: Jacobian of the outputs, `[N, C, P]`.
        f: Outputs, `[N, C]`.
        loss: Negative log likelihood of every datum at noise 1, `[N]`.
        gradient: Its gradient with respect to f, `[N, C]`.
        inner: Its expected Hessian with respect to f, `[N, C, C]`.
    """

    theta: Tensor
    tensor_of: Tensor
    J: Tensor
    f: Tensor
    loss: Tensor
    gradient: Tensor
    inner: Tensor

    def curvature(self, kind: str, weights: Tensor) -> Tensor:
        """GGN (`"ggn"`) or empirical Fisher (`"ef"`) of data that count with some weights `[N]`, `[P, P]`."""
        if kind == "ef":
            g = torch.einsum("ncp,nc->np", self.J, self.gradient)
            return torch.einsum("n,np,nq->pq", weights, g, g)
        return torch.einsum("n,ncp,ncd,ndq->pq", weights, self.J, self.inner, self.J)


def nll(y: Tensor, y2: Tensor, likelihood: str, f: Tensor) -> Tensor:
    """−log p(y | f) of one datum at noise 1, without constants of a regression; y2 stands for y²."""
    if likelihood == "regression":
        return 0.5 * (f - y).square().sum()
    if likelihood == "classification":
        return f.logsumexp(0) - (f * y).sum()
    if likelihood == "bernoulli":
        return (F.softplus(f) - y * f).sum()
    if likelihood == "poisson":
        return (f.exp() - y * f + torch.lgamma(y + 1)).sum()
    if likelihood == "log cosh":
        return (f - y).cosh().log().sum()
    eta, s = f.chunk(2)  # heteroscedastic: the natural parameters
    precision = F.softplus(s)
    return (
        0.5 * (precision * y2 - 2 * eta * y + eta.square() / precision - precision.log() + math.log(2 * math.pi)).sum()
    )


def expected(f: Tensor, y: Tensor, likelihood: str) -> tuple[Tensor, Tensor]:
    """E[y] and E[y²] given f: a density is linear in y and y², so that they give its expected Hessian.

    Of a user's own loss the Hessian is that at y.
    """
    if likelihood == "log cosh":
        return y, y
    if likelihood == "heteroscedastic":
        eta, s = f.chunk(2)
        mean = eta / F.softplus(s)
        return mean, mean.square() + 1 / F.softplus(s)
    means = {"regression": f, "classification": f.softmax(0), "bernoulli": f.sigmoid(), "poisson": f.exp()}
    return means[likelihood], means[likelihood]  # no other density has a term in y²


def truth(model: nn.Module, x: Tensor, y: Tensor, likelihood: str, names: list[str], columns: Tensor) -> Truth:
    """The truth about some entries of some parameters.

    Args:
        model: The network; a copy in float64 is differentiated.
        x: `[N, D]`.
        y: Targets; classes as `[N]`.
        likelihood: Its name.
        names: Random parameters, in the model's order.
        columns: Entries of these, flattened and joined, `[P]`.
    """
    network = copy.deepcopy(model).double().requires_grad_(True)
    tensors = [dict(network.named_parameters())[name] for name in names]
    rows: list[list[Tensor]] = [[], [], [], [], []]
    for datum, target in zip(x.double(), y, strict=True):
        f = alone(network, datum)
        J = torch.stack([flat(gradient_of(f_c, tensors)) for f_c in f])
        f = f.detach().requires_grad_()
        target = F.one_hot(target, len(f)).double() if likelihood == "classification" else target.double()
        loss = nll(target, target.square(), likelihood, f)
        (gradient,) = torch.autograd.grad(loss, f)
        moments = expected(f.detach(), target, likelihood)
        inner = torch.autograd.functional.hessian(partial(nll, *moments, likelihood), f.detach())
        for row, value in zip(rows, (J[:, columns], f.detach(), loss.detach(), gradient, inner), strict=True):
            row.append(value)
    owners = torch.cat([torch.full((tensor.numel(),), i) for i, tensor in enumerate(tensors)])
    return Truth(flat(tensors)[columns], owners[columns], *map(torch.stack, rows))


def alone(network: nn.Module, datum: Tensor) -> Tensor:
    """Outputs `[C]` of a datum, which is given twice: norms refuse one number per channel."""
    return network(torch.stack([datum, datum]))[0]


def gradient_of(scalar: Tensor, tensors: list[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    if not scalar.requires_grad:
        return tuple(torch.zeros_like(tensor) for tensor in tensors)
    return torch.autograd.grad(
        scalar, tensors, retain_graph=True, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )


def flat(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def hessian(model: nn.Module, x: Tensor, y: Tensor, likelihood: str, names: list[str], columns: Tensor) -> Tensor:
    """Hessian of the summed loss, `[P, P]`, one backward pass per row.

    Fused attention has no second derivative, and the fused weight norm a wrong one.
    """
    network = copy.deepcopy(model).double().requires_grad_(True)
    tensors = [dict(network.named_parameters())[name] for name in names]
    with sdpa_kernel(SDPBackend.MATH), mock.patch.object(torch, "_weight_norm", weight_norm):
        total = torch.zeros((), dtype=torch.float64)
        for datum, target in zip(x.double(), y, strict=True):
            f = alone(network, datum)
            target = F.one_hot(target, len(f)).double() if likelihood == "classification" else target.double()
            total = total + nll(target, target.square(), likelihood, f)
        gradient = torch.cat([g.flatten() for g in gradient_of(total, tensors, create_graph=True)])
        return torch.stack([flat(gradient_of(entry, tensors)) for entry in gradient[columns]])[:, columns]


def weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def evidence(
    known: Truth, precision: Tensor, delta: Tensor, mean: float, sigma: float, temperature: float, likelihood: str
) -> Tensor:
    """Log evidence by Laplace's method, with a prior N(mean, diag(δ)⁻¹) and a posterior precision `[P, P]`."""
    log_likelihood = -known.loss.sum() / (sigma**2 * temperature)
    if likelihood == "regression":
        log_likelihood = log_likelihood - known.f.numel() * math.log(sigma * math.sqrt(2 * math.pi))
    ratio = torch.linalg.slogdet(precision)[1] - delta.log().sum()
    scatter = (delta * (known.theta - mean).square()).sum()
    return log_likelihood - 0.5 * (ratio + scatter)
