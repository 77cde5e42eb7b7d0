"""Predictions of every registered likelihood: shapes, refusals, gradients, links."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace.enums import LinkApprox
from laplace.errors import UnsupportedError
from laplace.likelihoods import LIKELIHOODS, Bernoulli, Categorical, Gaussian, Preference, get_likelihood
from laplace.likelihoods.links import LINKS
from tests.reference import predictive as reference
from tests.reference.compare import assert_close

# The delta method says so where the variance is too large for it.
pytestmark = pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning")

PAIRS = [(name, link) for name in LIKELIHOODS for link in get_likelihood(name).links]


def latents(c: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    factor = torch.randn(5, c, c + 1, dtype=dtype)
    return torch.randn(5, c, dtype=dtype), factor @ factor.mT


@pytest.mark.parametrize(("name", "link"), PAIRS)
def test_diagonal_and_full_covariances_agree(name, link) -> None:
    mean, covariance = latents()
    variance = covariance.diagonal(dim1=1, dim2=2)
    results = [
        get_likelihood(name).predict(mean, given, link, 10, torch.Generator().manual_seed(0))
        for given in (variance, torch.diag_embed(variance))
    ]
    assert results[0].shape == mean.shape
    assert_close(results[0], results[1], "algebra")


@pytest.mark.parametrize(("name", "link"), PAIRS)
def test_predictions_are_differentiable(name, link) -> None:
    mean, covariance = latents()

    def predict(mean: Tensor, root: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return get_likelihood(name).predict(mean, root @ root.mT, link, 3, generator)

    root = torch.linalg.cholesky(covariance)
    torch.autograd.gradcheck(predict, (mean.requires_grad_(), root.requires_grad_()))


@pytest.mark.parametrize(("name", "link"), PAIRS)
def test_links_of_a_likelihood_are_registered(name, link) -> None:
    assert link in LINKS
    assert LinkApprox(link) in get_likelihood(name).links


@pytest.mark.parametrize("link", list(LINKS))
def test_regression_returns_the_mean_under_every_link(link) -> None:
    mean, covariance = latents()
    assert Gaussian().predict(mean, covariance, link) is mean
    assert Gaussian().latent_prediction


@pytest.mark.parametrize("link", list(LINKS))
def test_rewards_are_latents_and_pairs_are_probabilities(link) -> None:
    likelihood = Preference()
    mean, covariance = latents(1)
    assert likelihood.predict(mean, covariance, link) is mean
    assert likelihood.inverse_link(mean) is mean
    mean, covariance = latents(2)
    probs = likelihood.predict(mean, covariance, link, 10, torch.Generator().manual_seed(0))
    expected = Categorical().predict(mean, covariance, link, 10, torch.Generator().manual_seed(0))
    assert_close(probs, expected, "exact")
    assert_close(likelihood.inverse_link(mean), mean.softmax(-1), "exact")
    assert likelihood.latent_prediction


def test_bernoulli_links() -> None:
    mean, covariance = latents(3)
    assert_close(
        Bernoulli().predict(mean, covariance, "probit"), reference.bernoulli_probit(mean, covariance), "algebra"
    )
    exact, error = reference.monte_carlo(mean, covariance, 50_000, torch.Generator().manual_seed(1), link="sigmoid")
    drawn = Bernoulli().predict(mean, covariance, "mc", 50_000, torch.Generator().manual_seed(2))
    assert_close(drawn, exact, "mc", standard_error=error * 2**0.5)
    for link in ("bridge", "bridge_norm", "nonsense"):
        with pytest.raises(UnsupportedError, match="accepted are 'probit', 'probit_centred', 'mc'"):
            Bernoulli().predict(mean, covariance, link)


def test_bernoulli_agrees_with_two_classes() -> None:
    """σ(f) is softmax([f, 0]): the Monte-Carlo links of both draw the same expectation."""
    mean, covariance = latents(1)
    two_means = torch.cat([mean, torch.zeros_like(mean)], 1)
    two_covariances = torch.zeros(5, 2, 2, dtype=torch.float64)
    two_covariances[:, :1, :1] = covariance
    one = Bernoulli().predict(mean, covariance, "mc", 40_000, torch.Generator().manual_seed(0))
    two = Categorical().predict(two_means, two_covariances, "mc", 40_000, torch.Generator().manual_seed(1))
    assert_close(one[:, 0], two[:, 0], "mc", standard_error=(0.5 / 40_000**0.5) * 2**0.5)
