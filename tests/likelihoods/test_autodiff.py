"""A user's likelihood from three methods: Poisson counts with a log link against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, distributions

from laplace.errors import CurvatureError, InvalidArgument, InvalidData, UnsupportedError
from laplace.likelihoods import LikelihoodFromLoss, get_likelihood
from tests.reference.compare import assert_close

ONE = torch.ones((), dtype=torch.float64)


class Poisson(LikelihoodFromLoss):
    name = "poisson"

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.exp() - y * f + torch.lgamma(y + 1)).sum()

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(f.exp().expand(n, *f.shape), generator=generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f.exp()


class Student(Poisson):
    """Heavy tails: not log-concave."""

    name = "student"

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return (1 + (y - f).square()).log().sum()


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    f = torch.randn(6, 2, dtype=torch.float64)
    return f, torch.poisson(f.exp())


def test_poisson_derivatives(data) -> None:
    f, y = data
    likelihood = get_likelihood(Poisson())
    y = likelihood.check_targets(f, y)
    log_prob = distributions.Poisson(f.exp()).log_prob(y)
    assert_close(likelihood.log_likelihood(likelihood.loss_terms(f, y), 6, 2, ONE, ONE), log_prob.sum(), "algebra")
    assert_close(likelihood.gradient(f, y), f.exp() - y, "algebra")
    form = likelihood.hessian(f, y)
    assert_close(form.matrix(), torch.diag_embed(f.exp()), "algebra")
    assert_close(form.diagonal(), f.exp(), "algebra")
    assert_close(form.total(), torch.diag(f.exp().sum(0)), "algebra")
    root = form.root()
    assert_close(torch.einsum("kbc,kbd->bcd", root, root), form.matrix(), "algebra")
    assert likelihood.count(f, y) == 6
    assert_close(likelihood.curvature_scale("ggn", ONE, 2 * ONE), 0.5, "exact")


def test_poisson_fisher_samples(data) -> None:
    f, y = data
    g = Poisson().sample_gradients(f, y, 1_000, torch.Generator().manual_seed(0))
    outer = torch.einsum("sbc,sbd->sbcd", g, g)
    assert_close(outer.mean(0), torch.diag_embed(f.exp()), "mc", standard_error=outer.std(0) / math.sqrt(1_000))


def test_poisson_prediction_is_log_normal(data) -> None:
    mean, _ = data
    variance = torch.rand(6, 2, dtype=torch.float64)
    n = 20_000
    predicted = Poisson().predict(mean, variance, "mc", n, torch.Generator().manual_seed(0))
    exact = (mean + variance / 2).exp()
    assert_close(predicted, exact, "mc", standard_error=exact * (variance.exp() - 1).sqrt() / math.sqrt(n))


def test_what_is_not_there_says_so(data) -> None:
    f, y = data
    with pytest.raises(UnsupportedError, match="'probit' has no meaning for likelihood='poisson'; accepted are 'mc'"):
        Poisson().predict(f, f.exp(), "probit")
    with pytest.raises(UnsupportedError, match="predictive_nll"):
        Poisson().predictive_nll(f, None, y, ONE)
    with pytest.raises(InvalidArgument, match="needs targets"):
        Poisson().hessian(f)
    with pytest.raises(InvalidData, match="one row of targets"):
        Poisson().check_targets(f, y[:3])
    with pytest.raises(InvalidData, match="NaN"):
        Poisson().check_targets(f, y / 0 * 0)


def test_a_density_that_is_not_log_concave_is_refused() -> None:
    f = torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(CurvatureError, match="not convex"):
        Student().hessian(f, f + 5).root()
