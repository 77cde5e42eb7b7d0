"""Targets of which entries are missing, or have weights: Σ_bc w_bc of loss and curvature, one output at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Dense:
    """What weighted targets say of some parameters.

    Attributes:
        jacobian: J, `[N, C, P]`.
        outputs: f, `[N, C]`.
        curvature: Σ_bc w_bc λ_bc J_bc J_bcᵀ, `[P, P]`.
        log_likelihood: Σ_bc w_bc log p(y_bc | f_bc), 0-dim.
        theta: The parameters, `[P]`.
    """

    jacobian: Tensor
    outputs: Tensor
    curvature: Tensor
    log_likelihood: Tensor
    theta: Tensor

    def precision(self, delta: float) -> Tensor:
        return self.curvature + delta * torch.eye(len(self.theta), dtype=self.theta.dtype)

    def variances(self, precision: Tensor) -> Tensor:
        """J P⁻¹ Jᵀ, `[N, C, C]`."""
        return self.jacobian @ torch.linalg.solve(precision, self.jacobian.mT)

    def evidence(self, precision: Tensor, delta: float) -> Tensor:
        """Log evidence under the prior N(0, 1/δ)."""
        occam = torch.linalg.slogdet(precision)[1] - len(self.theta) * math.log(delta)
        return self.log_likelihood - 0.5 * (occam + delta * self.theta.square().sum())


def dense(
    model: nn.Module, x: Tensor, y: Tensor, weights: Tensor, names: list[str], likelihood: str, sigma: Tensor,
    *, fisher: bool = False,
) -> Dense:  # fmt: skip
    """The truth about a network.

    Args:
        model: Double precision.
        x: Inputs, `[N, D]`.
        y: Targets, `[N, C]`; what is under a weight of 0 is not read.
        weights: w, `[N, C]`.
        names: Parameters, in order.
        likelihood: `"regression"` or `"bernoulli"`.
        sigma: Noise of the regression, 0-dim or `[C]`.
        fisher: Whether the curvature is Σ_b g_b g_bᵀ of gradients of the loss instead, for weights of 0 and 1.
    """
    tensors = [dict(model.named_parameters())[name] for name in names]
    f = model(x)
    rows = [torch.autograd.grad(one, tensors, retain_graph=True) for one in f.flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).view(*f.shape, -1)
    f, y = f.detach(), torch.where(weights > 0, y, 0.0)
    if likelihood == "regression":
        variance = sigma.square().expand_as(f)
        losses = 0.5 * ((y - f).square() / variance + (2 * math.pi * variance).log())
        slopes, lambdas = (f - y) / variance, 1 / variance
    else:
        p = f.sigmoid()
        losses = F.binary_cross_entropy_with_logits(f, y, reduction="none")
        slopes, lambdas = p - y, p * (1 - p)
    curvature = torch.einsum("ncp,nc,ncq->pq", jacobian, weights * lambdas, jacobian)
    if fisher:
        gradients = torch.einsum("ncp,nc->np", jacobian, weights * slopes)
        curvature = gradients.T @ gradients
    theta = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return Dense(jacobian, f, curvature, -(weights * losses).sum(), theta)
