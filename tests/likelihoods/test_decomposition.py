"""Aleatoric and epistemic parts against brute force, and the delta method against automatic differentiation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Dirichlet, MultivariateNormal

from laplace.core.gaussian import GaussianOutputs
from laplace.core.scores import binary_entropy, class_entropy
from laplace.errors import ApproximationWarning
from laplace.likelihoods import Bernoulli
from laplace.likelihoods import targets as decomposition
from laplace.likelihoods.links import delta, delta_elementwise, log_concentrations
from laplace.likelihoods.targets import Points
from tests.reference import decomposition as reference
from tests.reference.compare import assert_close

PARTS = ("aleatoric", "epistemic", "predictive_entropy", "expected_entropy")


def latents(c: int, spread: float = 1.0, b: int = 5) -> tuple[Tensor, Tensor]:
    factor = torch.randn(b, c, c + 2, dtype=torch.float64)
    return 2 * torch.randn(b, c, dtype=torch.float64), spread * factor @ factor.mT


@pytest.mark.parametrize("c", [2, 3, 7])
def test_delta_is_the_second_order_expansion(c: int) -> None:
    mean, covariance = latents(c, 0.1)
    assert_close(delta(mean, covariance), reference.delta(mean, covariance), "algebra")
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert_close(delta(mean, variance), reference.delta(mean, torch.diag_embed(variance)), "algebra")
    sigmoid = delta_elementwise(mean, covariance, torch.sigmoid)
    assert_close(sigmoid, reference.delta(mean, covariance, "sigmoid"), "algebra")
    assert_close(delta_elementwise(mean, covariance, torch.exp), mean.exp() * (1 + 0.5 * variance), "algebra")
    assert_close(delta_elementwise(mean, covariance, lambda f: 2 * f), 2 * mean, "exact")


def test_delta_beyond_its_reach_stays_a_distribution_and_says_so() -> None:
    mean, covariance = latents(4, 50.0)
    with pytest.warns(ApproximationWarning, match="too large"):
        cut = delta(mean, covariance)
    assert (cut >= 0).all()
    assert_close(cut.sum(1), torch.ones(5), "algebra")
    raw = reference.delta(mean, covariance)
    p = mean.softmax(1)
    ratio = (cut - p) / (raw - p)  # one factor per row
    limited = (raw < 0).any(1)
    assert limited.any()
    assert_close(ratio[limited], ratio[limited].mean(1, keepdim=True).expand(-1, 4), "backend")
    with pytest.warns(ApproximationWarning, match=r"\[0, 1\]"):
        cut = Bernoulli().predict(mean, covariance, "delta")
    assert ((cut >= 0) & (cut <= 1)).all()


@pytest.mark.parametrize("c", [2, 4])
def test_class_samples(c: int) -> None:
    probabilities = torch.randn(30, 5, c, dtype=torch.float64).softmax(-1)
    found, expected = (
        decomposition.of_probabilities(Points(probabilities), class_entropy),
        reference.parts(probabilities),
    )
    for name in PARTS:
        assert_close(getattr(found, name), expected[name], "algebra", label=name)
    mean = probabilities.mean(0)
    assert_close(found.total, mean * (1 - mean), "algebra", label="total")
    assert (found.mutual_information >= 0).all()


def test_binary_samples_are_two_classes() -> None:
    first = torch.rand(30, 5, 1, dtype=torch.float64)
    found = decomposition.of_probabilities(Points(first), binary_entropy)
    expected = reference.parts(torch.cat([first, 1 - first], 2))
    assert_close(found.aleatoric, expected["aleatoric"][:, :1], "algebra")
    assert_close(found.epistemic, expected["epistemic"][:, :1], "algebra")
    assert_close(found.predictive_entropy, expected["predictive_entropy"], "algebra")
    assert_close(found.mutual_information, expected["predictive_entropy"] - expected["expected_entropy"], "algebra")


@pytest.mark.parametrize("spread", [0.0, 0.5, 20.0])
def test_binary_quadrature(spread: float) -> None:
    mean, variance = 3 * torch.randn(6, 2, dtype=torch.float64), spread * torch.rand(6, 2, dtype=torch.float64)
    points = Points.of_gaussian(mean, variance).map(torch.sigmoid)
    found = decomposition.of_probabilities(points, binary_entropy)
    expected = reference.binary_parts(mean, variance)
    for name in PARTS:
        assert_close(getattr(found, name), expected[name], "backend", label=name)


def test_dirichlet_in_closed_form() -> None:
    mean, covariance = latents(3)
    log_alpha = log_concentrations(mean, covariance)
    found = decomposition.of_dirichlet(log_alpha, torch.float64)
    draws = Dirichlet(log_alpha.exp()).sample((40_000,))
    for name in PARTS:
        values = {
            "aleatoric": draws * (1 - draws),
            "epistemic": (draws - draws.mean(0)).square(),
            "expected_entropy": reference.entropy(draws),
        }.get(name)
        if values is None:
            expected = reference.entropy(Dirichlet(log_alpha.exp()).mean)
            assert_close(found.predictive_entropy, expected, "algebra")
            continue
        error = values.std(0) / math.sqrt(len(values))
        assert_close(getattr(found, name), values.mean(0), "mc", standard_error=error, label=name)


@pytest.mark.parametrize("sigma", [torch.tensor(0.3), torch.tensor([0.3, 0.5, 1.0])])
def test_gaussian_targets(sigma: Tensor) -> None:
    sigma = sigma.double()
    mean, covariance = latents(3)
    found = decomposition.of_gaussian(GaussianOutputs(mean, covariance), sigma)
    noise = torch.diag(sigma.square().expand(3))
    assert_close(found.total, (covariance + noise).diagonal(dim1=1, dim2=2), "algebra")
    assert_close(found.predictive_entropy, MultivariateNormal(mean, covariance + noise).entropy(), "algebra")
    assert_close(found.expected_entropy, MultivariateNormal(mean, noise.expand(5, 3, 3)).entropy(), "algebra")
    variance = covariance.diagonal(dim1=1, dim2=2)
    diagonal = decomposition.of_gaussian(GaussianOutputs(mean, variance), sigma)
    whole = decomposition.of_gaussian(GaussianOutputs(mean, torch.diag_embed(variance)), sigma)
    assert_close(diagonal.mutual_information, whole.mutual_information, "algebra")
