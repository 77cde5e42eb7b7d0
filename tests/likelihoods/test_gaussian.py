"""Noise, temperature, normalisers and predictive densities against torch.distributions."""

from __future__ import annotations

import pytest
import torch
from torch import distributions

from laplace.errors import InvalidArgument, UnsupportedError
from laplace.likelihoods import LIKELIHOODS, Bernoulli, Categorical, Gaussian, Preference, get_likelihood
from tests.reference.compare import assert_close

ONE = torch.ones((), dtype=torch.float64)
SIGMAS = [0.3 * ONE, torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.3, 2.0, 1.1], dtype=torch.float64)]


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_gaussian_log_likelihood(sigma, temperature) -> None:
    """At T = 1 the sum of log densities; T scales the data term, not the normaliser."""
    f, y = torch.randn(2, 9, 3, dtype=torch.float64)
    likelihood, terms = Gaussian(), Gaussian().loss_terms(f, y)
    value = likelihood.log_likelihood(terms, 9, 3, sigma, temperature * ONE)
    exact = distributions.Normal(f, sigma).log_prob(y).sum()
    normaliser = distributions.Normal(f, sigma).log_prob(f).sum()
    assert_close(value, (exact - normaliser) / temperature + normaliser, "algebra")


def test_gaussian_log_likelihood_is_differentiable_in_noise_and_temperature() -> None:
    terms = torch.rand(3, dtype=torch.float64)
    for sigma in SIGMAS:
        inputs = (sigma.clone().requires_grad_(), (2 * ONE).requires_grad_())
        torch.autograd.gradcheck(lambda s, t: Gaussian().log_likelihood(terms, 9, 3, s, t), inputs)
        torch.autograd.gradcheck(lambda s, t: Gaussian().curvature_scale("ggn", s, t), inputs)


def test_gaussian_noise_of_the_wrong_size() -> None:
    with pytest.raises(InvalidArgument, match="2 entries"):
        Gaussian().log_likelihood(torch.ones(3), 4, 3, torch.ones(2), torch.ones(()))
    with pytest.raises(InvalidArgument, match="scalar or"):
        Gaussian().curvature_scale("ggn", torch.ones(2, 2), torch.ones(()))


@pytest.mark.parametrize("kind", ["ggn", "hessian", "ef"])
def test_gaussian_curvature_scale(kind) -> None:
    """The scale turns unit curvature into that of −log N(y; f, σ²)."""
    f, y = torch.randn(2, 3, dtype=torch.float64)
    sigma = 0.3 * ONE

    def nll(f: torch.Tensor) -> torch.Tensor:
        return -distributions.Normal(f, sigma).log_prob(y).sum()

    scale = Gaussian().curvature_scale(kind, sigma, ONE)
    if kind == "ef":
        gradient, unit = torch.func.grad(nll)(f), Gaussian().gradient(f[None], y[None])[0]
        assert_close(scale * torch.outer(unit, unit), torch.outer(gradient, gradient), "algebra")
    else:
        assert_close(scale * torch.eye(3, dtype=torch.float64), torch.func.jacrev(torch.func.jacrev(nll))(f), "algebra")
    assert_close(Gaussian().curvature_scale(kind, sigma, 2 * ONE), scale / 2, "algebra")


def test_vector_noise_scales_each_output() -> None:
    scale = Gaussian().curvature_scale("ggn", SIGMAS[2], 2 * ONE)
    assert_close(scale, 1 / (2 * SIGMAS[2] ** 2), "algebra")
    with pytest.raises(UnsupportedError, match="divided by their noise"):
        Gaussian().curvature_scale("ef", SIGMAS[2], ONE)


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_unknown_curvature_kinds(name: str) -> None:
    with pytest.raises(InvalidArgument, match="accepted are 'ggn', 'hessian', 'ef'"):
        get_likelihood(name).curvature_scale("fisher", ONE, ONE)


@pytest.mark.parametrize("likelihood", [Categorical(), Preference(), Bernoulli()])
def test_without_noise_only_temperature_scales(likelihood) -> None:
    f = torch.randn(5, 2, dtype=torch.float64)
    if isinstance(likelihood, Bernoulli):
        y = torch.randint(2, (5, 2)).double()
        exact = distributions.Bernoulli(logits=f).log_prob(y).sum()
    else:
        y = torch.randint(2, (5,))
        exact = distributions.Categorical(logits=f).log_prob(y).sum()
    value = likelihood.log_likelihood(likelihood.loss_terms(f, y), 5, 2, 3 * ONE, 2 * ONE)
    assert_close(value, exact / 2, "algebra")
    for kind in ("ggn", "hessian", "ef"):
        assert_close(likelihood.curvature_scale(kind, 3 * ONE, 2 * ONE), 0.5, "exact")


@pytest.mark.parametrize("sigma", SIGMAS)
def test_gaussian_predictive_density(sigma) -> None:
    mean, y = torch.randn(2, 5, 3, dtype=torch.float64)
    variance = torch.rand(5, 3, dtype=torch.float64)
    for given, added in ((variance, variance), (None, 0.0)):
        exact = -distributions.Normal(mean, (added + sigma**2).sqrt().expand(5, 3)).log_prob(y).sum(1)
        assert_close(Gaussian().predictive_nll(mean, given, y, sigma), exact, "algebra")
