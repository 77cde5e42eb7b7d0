"""Full curvature of a linear regression: the dense Bayesian one, its evidence included."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import MultivariateNormal

from laplace import Laplace

SIGMA, DELTA = 0.6, 0.8


def fitted(structure: str) -> tuple[Laplace, torch.Tensor, torch.Tensor]:
    """At the mode, where the evidence of a linear model is exact; features are the inputs and 1."""
    x, y = torch.randn(9, 3).double(), torch.randn(9, 1).double()
    rows = torch.cat([x, torch.ones(9, 1).double()], 1)
    precision = rows.T @ rows / SIGMA**2 + DELTA * torch.eye(4).double()
    mean = torch.linalg.solve(precision, rows.T @ y / SIGMA**2)[:, 0]
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(mean[:3])
        model.bias.copy_(mean[3:])
    la = Laplace(model, "regression", "all", structure, prior_precision=DELTA, sigma_noise=SIGMA)
    la.fit([(x[:4], y[:4]), (x[4:], y[4:])])
    return (
        la,
        precision,
        MultivariateNormal(torch.zeros(9).double(), SIGMA**2 * torch.eye(9).double() + rows @ rows.T / DELTA).log_prob(
            y[:, 0]
        ),
    )


def test_precision_covariance_and_evidence_of_a_linear_regression() -> None:
    la, precision, evidence = fitted("full")
    torch.testing.assert_close(la.posterior_precision, precision)
    torch.testing.assert_close(la.posterior_covariance, torch.linalg.inv(precision))
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence)
    x = torch.randn(2, 3).double()
    rows = torch.cat([x, torch.ones(2, 1).double()], 1)
    variance = (rows @ torch.linalg.inv(precision) * rows).sum(1)
    torch.testing.assert_close(la(x)[1].flatten(), variance)
