"""Draws of a last layer with Kronecker factors: covariances of all inputs have one set of axes, and none is formed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace import Laplace, ParametricLaplace
from laplace.core.gaussian import GaussianOutputs
from laplace.likelihoods.categorical import Categorical

B, C, N = 6, 40, 3


class Large(TorchDispatchMode):
    """Counts eigendecompositions, and results as large as covariances of all inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        large = isinstance(result, Tensor) and result.numel() >= B * C * C
        if large or "eigh" in str(func):
            self.found.append(str(func))
        return result


def fitted(
    likelihood: Any = "classification", structure: str = "kron", n_outputs: int = C
) -> tuple[ParametricLaplace, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, n_outputs)).double().eval()
    for parameter in model.parameters():
        parameter.data = draw(*parameter.shape)
    y = draw(50, n_outputs) if likelihood == "regression" else torch.arange(50) % n_outputs
    options = {"sigma_noise": torch.full((n_outputs,), 5.0).double()} if likelihood == "regression" else {}
    la = Laplace(model, likelihood, "last_layer", structure, prior_precision=0.3, **options)
    la.fit([(draw(50, 3), y)])
    return la, draw(B, 3)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def symmetric_root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt().unsqueeze(1)) @ vectors.mT


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_samples_are_those_of_the_symmetric_root_of_the_covariance(likelihood: str) -> None:
    la, x = fitted(likelihood)
    prediction = la.predict(x)
    unit = GaussianOutputs(torch.zeros(B, C).double(), torch.ones(B, C).double())
    noise = unit.sample(N, seeded())
    root = symmetric_root(prediction.latent_covariance)
    expected = prediction.latent_mean + torch.einsum("bcd,sbd->sbc", root, noise)
    samples = la.functional_samples(x, n_samples=N, generator=seeded())
    assert torch.allclose(samples, expected, atol=1e-7)
    if likelihood == "classification":
        link = la(x, link_approx="mc", n_samples=N, generator=seeded())
        assert torch.allclose(link, expected.softmax(2).mean(0), atol=1e-7)


def test_nothing_as_large_as_the_covariances_is_computed() -> None:
    la, x = fitted()
    la(x)  # which decomposes the factors
    with Large() as large:
        la(x, link_approx="mc", n_samples=N)
        la.functional_samples(x, n_samples=N)
        la.predictive_samples(x, n_samples=N)
        la.predict(x, n_samples=N).latent_samples.sum()
    assert not large.found


def test_what_is_read_first_makes_no_difference() -> None:
    la, x = fitted()
    one, other = (la.predict(x, link_approx="mc", n_samples=N, generator=seeded()) for _ in range(2))
    covariance, probabilities = one.latent_covariance, other.mean
    assert torch.equal(one.mean, probabilities) and torch.equal(one.latent_samples, other.latent_samples)
    assert torch.equal(covariance, other.latent_covariance)
    assert torch.allclose(covariance, la.predict(x).latent_covariance, rtol=1e-12)
    again = Laplace(la.model, "classification", "last_layer", "kron")
    again.load_state_dict(la.state_dict())
    assert torch.equal(again(x, link_approx="mc", n_samples=N, generator=seeded()), probabilities)


def test_a_users_likelihood_says_what_its_links_give() -> None:
    class Own(Categorical):
        def predict(self, mean: Tensor, covariance: Tensor, *options: Any, **more: Any) -> Tensor:
            assert covariance.shape == (B, C, C)
            return torch.full_like(mean, 0.5)

    la, x = fitted(Own())
    assert bool((la.predict(x, link_approx="mc").mean == 0.5).all())


def test_samples_follow_the_prior_precision() -> None:
    la, x = fitted()
    delta = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)

    def total(value: Tensor) -> Tensor:
        la.prior_precision = value
        return la.functional_samples(x, n_samples=N, generator=seeded()).square().sum()

    (slope,) = torch.autograd.grad(total(delta), delta)
    step = 1e-5
    with torch.no_grad():
        difference = (total(delta + step) - total(delta - step)) / (2 * step)
    assert torch.allclose(slope, difference, rtol=1e-6)


@pytest.mark.parametrize("structure", ["diag", "full", "ekfac"])
def test_others_draw_from_their_covariances(structure: str) -> None:
    la, x = fitted(structure=structure, n_outputs=3)
    prediction = la.predict(x, n_samples=40_000, generator=seeded())
    steps = prediction.latent_samples - prediction.latent_mean
    found = torch.einsum("sbc,sbd->bcd", steps, steps) / len(steps)
    covariance = prediction.latent_covariance
    assert (found - covariance).abs().max() <= 0.03 * covariance.abs().max()
