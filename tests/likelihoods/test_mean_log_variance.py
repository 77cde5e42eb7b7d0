"""Regression with a logarithm of a variance: PyTorch's loss and its derivatives, and the Fisher information."""

from __future__ import annotations

import torch
from torch.distributions import Normal
from torch.nn.functional import gaussian_nll_loss

from laplace.likelihoods import MeanLogVariance


def test_loss_gradient_and_fisher_information() -> None:
    f, y = torch.randn(7, 4).double().requires_grad_(), torch.randn(7, 2).double()
    mean, log_variance = f.chunk(2, 1)
    loss = gaussian_nll_loss(mean, y, log_variance.exp(), full=True, reduction="sum")
    torch.testing.assert_close(MeanLogVariance().loss_terms(f, y), loss.view(1))
    (gradient,) = torch.autograd.grad(loss, f)
    torch.testing.assert_close(MeanLogVariance().gradient(f, y), gradient)
    # E[g²] over y of N(m, exp(l)) by quadrature; means of odd powers are 0.
    z = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    weights = Normal(0.0, 1.0).log_prob(z).exp() * (z[1] - z[0])
    at = f[:1].detach()
    drawn = at[:, :2] + (0.5 * at[:, 2:]).exp() * z.unsqueeze(1)
    squares = MeanLogVariance().gradient(at.expand(len(z), -1), drawn).square()
    torch.testing.assert_close(MeanLogVariance().hessian(at).diag[0], weights @ squares)
