"""Binary targets against torch.distributions, also where a sigmoid rounds to 1."""

from __future__ import annotations

import torch
from torch.distributions import Bernoulli as Distribution

from laplace.likelihoods import Bernoulli


def test_loss_gradient_and_hessian() -> None:
    f = torch.linspace(-40, 40, 12, dtype=torch.float64).view(6, 2).requires_grad_()
    y = (torch.arange(12).view(6, 2) % 3 == 0).double()
    loss = -Distribution(logits=f).log_prob(y).sum()
    torch.testing.assert_close(Bernoulli().loss_terms(f, y), loss.view(1))
    (gradient,) = torch.autograd.grad(loss, f, create_graph=True)
    torch.testing.assert_close(Bernoulli().gradient(f, y), gradient, rtol=1e-9, atol=1e-16)
    (second,) = torch.autograd.grad(gradient.sum(), f)
    torch.testing.assert_close(Bernoulli().hessian(f).diag, second, rtol=1e-7, atol=1e-15)


def test_labels_that_were_not_observed_count_nothing() -> None:
    f, y = torch.ones(1, 2), torch.tensor([[1.0, float("nan")]])
    assert torch.equal(Bernoulli().loss_terms(f, y), Bernoulli().loss_terms(f[:, :1], y[:, :1]))
    assert Bernoulli().gradient(f, y)[0, 1] == 0 and Bernoulli().hessian(f, y).diag[0, 1] == 0
