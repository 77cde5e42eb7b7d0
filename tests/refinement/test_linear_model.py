"""Expectations under a Gaussian over one output, narrow and wide."""

from __future__ import annotations

import pytest
import torch

from laplace.likelihoods import Bernoulli, Categorical
from laplace.refinement.linear_model import Smoothing

MEANS = torch.tensor([[-3.0], [0.0], [0.4], [2.0]], dtype=torch.float64)
Y = torch.tensor([[0.0], [1.0], [0.0], [1.0]], dtype=torch.float64)


@pytest.mark.parametrize("deviation", [0.3, 2.0, 5.0, 10.0, 30.0])
def test_sigmoid_expectations(deviation: float) -> None:
    """Against a sum over 200,001 points: 32 Gauss–Hermite points miss the curvature by 40 % at a deviation of 10."""
    likelihood = Bernoulli()
    smoothing = Smoothing.for_likelihood(likelihood, 1, 2, None, MEANS, widest=deviation)
    z = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    mass = torch.softmax(-z.square() / 2, 0)
    f = MEANS + deviation * z  # [B, points]
    loss = torch.nn.functional.softplus(torch.where(Y > 0, -f, f)) @ mass
    curvature = (f.sigmoid() * (-f).sigmoid()) @ mass
    root = torch.full_like(MEANS, deviation)
    torch.testing.assert_close(
        smoothing.mean(smoothing.losses(likelihood, MEANS, root, Y)), loss.sum(0, keepdim=True), rtol=1e-6, atol=0
    )
    residual = f.sigmoid() @ mass - Y.squeeze(1)
    torch.testing.assert_close(
        smoothing.gradient(likelihood, MEANS, root, Y).squeeze(1), residual, rtol=1e-6, atol=1e-7
    )
    found = smoothing.hessian(likelihood, MEANS, root, Y).diagonal().squeeze(1)
    torch.testing.assert_close(found, curvature, rtol=1e-5, atol=0)


def test_saturated_softmax_has_a_root() -> None:
    """With p₀ = 1 − 8.5e-18 the entry p₀ − p₀² is lost to rounding, and the matrix has a negative eigenvalue."""
    f = torch.tensor([[40.0, 0.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0])
    smoothing = Smoothing.for_likelihood(Categorical(), 3, 4, None, f)
    found = smoothing.hessian(Categorical(), f, 1e-6 * torch.eye(3, dtype=torch.float64).unsqueeze(0), y)
    columns = found.root()
    a = torch.exp(torch.tensor(-40.0, dtype=torch.float64))
    expected = a * torch.tensor([[2.0, -1.0, -1.0], [-1.0, 1.0, 0.0], [-1.0, 0.0, 1.0]], dtype=torch.float64)
    again = torch.einsum("kbc,kbd->bcd", columns, columns)[0]
    torch.testing.assert_close(again[1:], expected[1:], rtol=1e-3, atol=1e-3 * float(a))


@pytest.mark.parametrize(("n_outputs", "n_samples"), [(2, 200), (3, 200), (10, 400)])
def test_the_standard_error_is_that_of_other_points(n_outputs: int, n_samples: int) -> None:
    """The error of an expectation as its spread over seeds: not that of plain points, of which it is a fraction."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(20, n_outputs, dtype=torch.float64, generator=generator)
    y = torch.randint(n_outputs, (20,), generator=generator)
    root = torch.eye(n_outputs, dtype=torch.float64) + 0.3 * torch.randn(
        20, n_outputs, n_outputs, dtype=torch.float64, generator=generator
    )
    means, errors = [], []
    for seed in range(60):
        smoothing = Smoothing.for_likelihood(
            Categorical(), n_outputs, n_samples, torch.Generator().manual_seed(seed), f
        )
        losses = smoothing.losses(Categorical(), f, root, y)[:, 0]
        means.append(smoothing.mean(losses))
        errors.append(smoothing.standard_error(losses))
    spread, error = float(torch.stack(means).std()), sum(errors) / len(errors)
    assert 0.6 * spread < error < 1.6 * spread
    assert Smoothing.for_likelihood(Bernoulli(), 1, 2, None, f).standard_error(f[:, 0]) == 0


@pytest.mark.parametrize("n_outputs", [3, 5])
def test_the_standard_error_is_not_too_small(n_outputs: int) -> None:
    """Expectations under wide Gaussians, whose loss is least quadratic at the far points that a fit follows most."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(10, n_outputs, dtype=torch.float64, generator=generator)
    y = torch.randint(n_outputs, (10,), generator=generator)
    half = torch.randn(10, n_outputs, n_outputs, dtype=torch.float64, generator=generator)
    root = torch.linalg.cholesky(1.5 * half @ half.mT / n_outputs + 0.1 * torch.eye(n_outputs, dtype=torch.float64))
    means, errors = [], []
    for seed in range(300):
        smoothing = Smoothing.for_likelihood(Categorical(), n_outputs, 200, torch.Generator().manual_seed(seed), f)
        losses = smoothing.losses(Categorical(), f, root, y)[:, 0]
        means.append(float(smoothing.mean(losses)))
        errors.append(smoothing.standard_error(losses))
    spread = float(torch.tensor(means).std())
    assert 0.87 * spread < float(torch.tensor(errors).square().mean().sqrt()) < 1.1 * spread
