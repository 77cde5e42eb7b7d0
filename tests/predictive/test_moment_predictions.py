"""Predictions of counts and of a noise that depends on the input: every quantity, of one posterior and of several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MixtureSameFamily

from laplace import Laplace, MixtureLaplace, ParametricLaplace
from tests import grid
from tests.pairs import nightly
from tests.reference import likelihoods as reference
from tests.reference.compare import assert_close

LIKELIHOODS = list(reference.DENSITIES)


def fitted(likelihood: str, structure: str = "full", **options: Any) -> tuple[ParametricLaplace, Tensor]:
    """A posterior that is narrow enough for its moments to be estimated by samples."""
    la = Laplace(
        grid.network(likelihood).double().eval(), likelihood, "all", structure, prior_precision=50.0, **options
    )
    x, y = (part.double() for part in grid.data(likelihood))
    la.fit([(x, y)])
    return la, x


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def targets(la: ParametricLaplace, x: Tensor, n: int) -> Tensor:
    """Samples of y, `[n, B, C]`, of other numbers than those of a prediction."""
    f = la.functional_samples(x, n_samples=n, generator=seeded(1))
    torch.manual_seed(2)
    return la.likelihood_object.conditional(f).sample()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_distribution_has_the_moments(likelihood: str) -> None:
    la, x = fitted(likelihood)
    n = 20_000
    found = la.predict(x, n_samples=n, generator=seeded())
    distribution = found.distribution()
    assert isinstance(distribution, MixtureSameFamily)
    assert_close(distribution.mean, found.mean, "mc", standard_error=found.variance.sqrt() / n**0.5)
    y = targets(la, x, n)
    squares = (y - found.mean).square()
    assert_close(squares.mean(0), found.variance, "mc", standard_error=1.5 * squares.std(0) / n**0.5)
    conditional = la.likelihood_object.conditional(found.latent_samples)
    terms = conditional.variance + (conditional.mean - found.mean).square()
    assert_close(distribution.variance, found.variance, "mc", standard_error=terms.std(0) / n**0.5)


@pytest.mark.parametrize("form", ["joint", "diagonal_output"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_moments_depend_on_no_link_and_on_no_form(likelihood: str, form: str) -> None:
    la, x = fitted(likelihood)
    for actual, expected in zip(la(x, link_approx="mc", **{form: True}), la(x), strict=True):
        assert_close(actual, expected, "algebra")


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_intervals_hold_their_share(likelihood: str) -> None:
    la, x = fitted(likelihood)
    found = la.predict(x, n_samples=20_000, generator=seeded())
    y = targets(la, x, 20_000)
    lower, upper = found.interval(0.8)
    for share, bound in (((y < lower), 0.1), ((y > upper), 0.1)):
        assert (share.double().mean(0) <= bound + 0.012).all()
        if likelihood != "poisson":  # counts have no quantile of every share
            assert (share.double().mean(0) >= bound - 0.012).all()
    inner = found.interval(0.8, observation_noise=False)
    means = la.predictive_samples(x, n_samples=20_000, generator=seeded(2))
    for end, share in zip(inner, (0.1, 0.9), strict=True):
        below = (means < end).double().mean(0)
        assert_close(below, torch.full_like(below, share), "mc", standard_error=0.3 * (2 / 20_000) ** 0.5)


@pytest.mark.parametrize("likelihood", ["mean_log_variance", *nightly("heteroscedastic", "poisson")])
def test_entropies(likelihood: str) -> None:
    """Against the mean of −log p(y | f) over other samples; what y says of f is small and positive."""
    la, x = fitted(likelihood)
    parts = la.predict(x, n_samples=1500, generator=seeded()).decomposition
    f = la.functional_samples(x, n_samples=1500, generator=seeded(1))
    conditional = la.likelihood_object.conditional(f)
    torch.manual_seed(0)
    values = -conditional.log_prob(conditional.sample())
    error = values.std(0) * (2 / 1500) ** 0.5
    assert_close(parts.expected_entropy, values.mean(0), "mc", standard_error=error)
    assert (parts.mutual_information >= 0).all()
    assert (parts.mutual_information.mean() > 0) and (parts.mutual_information < 1).all()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_sampled_weights(likelihood: str) -> None:
    """Of a last layer, which is linear in its weights, both predictives sample the same outputs."""
    la = Laplace(grid.network(likelihood).double().eval(), likelihood, "last_layer", "full", prior_precision=50.0)
    x, y = (part.double() for part in grid.data(likelihood))
    la.fit([(x, y)])
    n = 40_000
    known, drawn = la(x), la(x, "nn", n_samples=n, generator=seeded())
    f = la.functional_samples(x, n_samples=4000, generator=seeded(1))
    conditional = la.likelihood_object.conditional(f)
    assert_close(drawn[0], known[0], "mc", standard_error=conditional.mean.std(0) / n**0.5)
    terms = conditional.variance + (conditional.mean - known[0]).square()
    assert_close(drawn[1], known[1], "mc", standard_error=terms.std(0) / n**0.5)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_mixtures(likelihood: str) -> None:
    parts, weights = [], torch.tensor([0.3, 0.7], dtype=torch.float64)
    for seed in range(2):
        torch.manual_seed(seed)
        width = 3 if likelihood == "poisson" else 6
        network = nn.Sequential(nn.Linear(grid.WIDTH, 5), nn.Tanh(), nn.Linear(5, width)).double()
        parts.append(Laplace(network, likelihood, "all", "diag", prior_precision=50.0))
    la, (x, y) = MixtureLaplace(parts, weights=weights), (part.double() for part in grid.data(likelihood))
    la.fit([(x, y)])
    means, variances = (torch.stack(values) for values in zip(*(part(x) for part in parts), strict=True))
    share = weights.view(-1, 1, 1)
    mean = (share * means).sum(0)
    variance = (share * (variances + (means - mean).square())).sum(0)
    called, found = la(x), la.predict(x, n_samples=50, generator=seeded())
    for actual, expected in ((called[0], mean), (called[1], variance), (found.mean, mean), (found.variance, variance)):
        assert_close(actual, expected, "algebra")
    assert_close(found.decomposition.total, variance, "algebra")
    assert found.entropy.shape == (12,)
    lower, upper = found.interval(0.5)
    assert (lower <= upper).all()
    assert isinstance(found.distribution(), MixtureSameFamily)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_positions_are_rows(likelihood: str) -> None:
    """Tokens `[B, T, C]` of a network that sees each by itself are as many data."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    width = 4 if likelihood == "poisson" else 2
    x, y = torch.randn(4, 5, 3, dtype=torch.float64), torch.poisson(torch.full((4, 5, width), 2.0)).double()
    tokens = Laplace(network, likelihood, "all", "full", prior_precision=20.0)
    tokens.fit([(x, y)])
    rows = Laplace(network, likelihood, "all", "full", prior_precision=20.0)
    rows.fit([(x.flatten(0, 1), y.flatten(0, 1))])
    assert_close(tokens.log_marginal_likelihood(), rows.log_marginal_likelihood(), "algebra")
    for actual, expected in zip(tokens(x), rows(x.flatten(0, 1)), strict=True):
        assert_close(actual.flatten(0, 1), expected, "algebra")
    found = tokens.predict(x, n_samples=7)
    assert found.variance.shape == found.interval()[0].shape == (4, 5, width)
    assert found.entropy.shape == (4, 5)
    assert found.distribution().batch_shape == (4, 5)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_gaussian_process_of_all_data_is_the_posterior(likelihood: str) -> None:
    la, x = fitted(likelihood)
    process, _ = fitted(likelihood, "gp", n_subset=12)
    for actual, expected in zip(process(x), la(x), strict=True):
        assert_close(actual, expected, "backend")
    assert_close(process.log_marginal_likelihood(), la.log_marginal_likelihood(), "backend")


@pytest.mark.turns
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("approximation", ["nystrom", "variational"])
def test_other_posteriors_over_functions(likelihood: str, approximation: str) -> None:
    options = {
        "nystrom": {"subsample_size": 12, "n_eigenvalues": 8},
        "variational": {"inducing_locations": "random", "num_inducing": 6},
    }
    la = Laplace(
        grid.network(likelihood).double().eval(), likelihood, "all", "gp", functional_approximation=approximation,
        prior_precision=50.0, **options[approximation],
    )  # fmt: skip
    x, y = (part.double() for part in grid.data(likelihood))
    la.fit([(x, y)])
    mean, variance = la(x)
    assert mean.shape == variance.shape == y.shape
    assert (variance > 0).all()


@pytest.mark.parametrize("likelihood", ["poisson", *nightly("mean_log_variance", "heteroscedastic")])
def test_refinement_raises_the_joint_density(likelihood: str) -> None:
    la, x = fitted(likelihood)
    batches = [(x, grid.data(likelihood)[1].double())]
    before = la.log_likelihood - 0.5 * la.scatter
    assert la.refine(batches).converged
    assert la.log_likelihood - 0.5 * la.scatter > before
    evidence = la.log_marginal_likelihood()
    bound = la.refine(batches, method="variational").elbo
    assert bound is not None and abs(bound - evidence) < 2  # of one posterior that is nearly Gaussian


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_gradients_reach_inputs_and_the_prior(likelihood: str) -> None:
    la, x = fitted(likelihood)
    la.enable_backprop = True
    leaf = x.clone().requires_grad_()
    sum(part.sum() for part in la(leaf)).backward()
    assert leaf.grad is not None and leaf.grad.abs().max() > 0
    la.enable_backprop = False
    prior = torch.tensor([50.0], dtype=torch.float64, requires_grad=True)
    la.prior_precision = prior
    (gradient,) = torch.autograd.grad(la(x)[1].sum(), prior)
    assert gradient.item() < 0
