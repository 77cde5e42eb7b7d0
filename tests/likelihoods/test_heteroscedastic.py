"""Regression in natural parameters: the density of its Gaussian and its derivatives, and the Fisher information."""

from __future__ import annotations

import torch
from torch.distributions import Normal
from torch.nn.functional import softplus

from laplace.likelihoods import Heteroscedastic


def test_loss_gradient_and_fisher_information() -> None:
    f, y = torch.randn(7, 4).double().requires_grad_(), torch.randn(7, 2).double()
    eta, precision = f[:, :2], softplus(f[:, 2:])
    loss = -Normal(eta / precision, precision.rsqrt()).log_prob(y).sum()
    torch.testing.assert_close(Heteroscedastic().loss_terms(f, y), loss.view(1))
    (gradient,) = torch.autograd.grad(loss, f)
    torch.testing.assert_close(Heteroscedastic().gradient(f, y), gradient)
    # E[g gᵀ] over y of N(η/λ, 1/λ) by quadrature, of the first output's pair (η, s).
    z = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    weights = Normal(0.0, 1.0).log_prob(z).exp() * (z[1] - z[0])
    at, scale = f[:1].detach(), softplus(f[:1, 2:]).detach()
    drawn = at[:, :2] / scale + scale.rsqrt() * z.unsqueeze(1)
    pair = Heteroscedastic().gradient(at.expand(len(z), -1), drawn)[:, [0, 2]]
    dense = Heteroscedastic().hessian(at).dense
    assert dense is not None
    torch.testing.assert_close(dense[0][[0, 2]][:, [0, 2]], (pair * weights.unsqueeze(1)).T @ pair)
