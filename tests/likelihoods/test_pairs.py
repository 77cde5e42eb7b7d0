"""Targets with a noise of their own: densities under Gaussian outputs against quadrature."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace.errors import ApproximationWarning, InvalidData
from laplace.likelihoods import Heteroscedastic
from laplace.likelihoods.base import MomentLikelihood
from laplace.metrics import gaussian_crps
from laplace.tuning.losses import find_score
from tests.likelihoods.test_moments import LIKELIHOODS, NOISY, latents
from tests.reference import likelihoods as reference
from tests.reference.compare import assert_close

ONE = torch.ones((), dtype=torch.float64)


@pytest.mark.parametrize("likelihood", NOISY, ids=lambda likelihood: likelihood.name)
def test_density_of_a_noise_of_its_own(likelihood: MomentLikelihood) -> None:
    mean, variance, y = torch.randn(4, 2), torch.rand(4, 2) + 0.1, torch.randn(4, 2)
    expected = -Normal(mean, variance.sqrt()).log_prob(y).sum(1)
    assert_close(likelihood.predictive_nll(mean, variance, y, ONE), expected, "float32")
    with pytest.raises(InvalidData, match="without a variance"):
        likelihood.predictive_nll(mean, None, y, ONE)


@pytest.mark.parametrize("likelihood", NOISY, ids=lambda likelihood: likelihood.name)
@pytest.mark.parametrize("spread", [1e-4, 0.3, 1.0])
def test_density_of_a_noise_of_its_own_under_gaussian_outputs(spread: float, likelihood: MomentLikelihood) -> None:
    """The score that tuning minimises is exact, where the variance of y may say little."""
    mean, covariance = latents(spread)
    y = 3 * torch.randn(5, 2, dtype=torch.float64)
    summary = likelihood.target.summary(likelihood, mean, covariance, "probit", for_scores=True)
    actual = find_score("nll", likelihood)(likelihood, summary, y, ONE)
    pairs = [[c, c + 2] for c in range(2)]  # of a target's two outputs
    truth = [
        [
            reference.narrow_density(m[i], v[i][:, i], t, 100_001, likelihood.name)
            for i, t in zip(pairs, row, strict=True)
        ]
        for m, v, row in zip(mean, covariance, y, strict=True)
    ]
    assert_close(actual, -torch.tensor(truth, dtype=torch.float64).sum(1), "backend")
    candidates = tuple(part.expand(3, *part.shape) for part in summary)
    assert_close(find_score("nll", likelihood)(likelihood, candidates, y, ONE), actual.expand(3, 5), "algebra")


@pytest.mark.parametrize("eta", [3.0, 100.0, 3000.0])
@pytest.mark.parametrize(("s", "variance"), [(-2.0, 0.3), (1.0, 4.0)])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
@pytest.mark.turns
def test_density_where_the_first_parameter_is_almost_known(
    eta: float, s: float, variance: float, correlation: float
) -> None:
    """Then y decides s, to a small part of its standard deviation; also where it is far from what was expected."""
    likelihood = Heteroscedastic()
    mean = torch.tensor([eta, s], dtype=torch.float64)
    shared = correlation * (1e-10 * variance) ** 0.5
    covariance = torch.tensor([[1e-10, shared], [shared, variance]], dtype=torch.float64)
    precision = torch.nn.functional.softplus(mean[1])
    for offset in (0.0, 2.5, -8.0):
        y = eta / precision + offset / precision.sqrt()
        actual = find_score("nll", likelihood)(
            likelihood, (mean.unsqueeze(0), covariance.unsqueeze(0)), y.reshape(1, 1), ONE
        )
        assert_close(actual[0], -reference.narrow_density(mean, covariance, y), "backend", label=str(offset))


@pytest.mark.parametrize("y", [7717.0, 771.7, 50.0, -7717.0])
def test_density_where_the_second_parameter_is_hardly_known(y: float) -> None:
    """The precisions that y is likely at lie between the nodes of any grid over those that are possible."""
    likelihood, sign = Heteroscedastic(), 1.0 if y > 0 else -1.0
    mean = torch.tensor([1.97 * sign, 26.9], dtype=torch.float64)
    covariance = torch.tensor([[2.66e-5, 0.0626 * sign], [0.0626 * sign, 580.0]], dtype=torch.float64)
    target = torch.tensor([[y]], dtype=torch.float64)
    actual = find_score("nll", likelihood)(likelihood, (mean.unsqueeze(0), covariance.unsqueeze(0)), target, ONE)
    assert_close(actual[0], -reference.narrow_density(mean, covariance, target[0, 0]), "backend")


@pytest.mark.parametrize("likelihood", NOISY, ids=lambda likelihood: likelihood.name)
def test_density_of_a_noise_of_its_own_is_differentiable(likelihood: MomentLikelihood) -> None:
    mean, covariance = latents(c=2)
    y, root = torch.randn(5, 1, dtype=torch.float64), torch.linalg.cholesky(covariance)

    def nll(mean: Tensor, root: Tensor) -> Tensor:
        return find_score("nll", likelihood)(likelihood, (mean, root @ root.mT), y, ONE)

    torch.autograd.gradcheck(nll, (mean.requires_grad_(), root.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_summaries_of_samples_for_scores_have_their_covariances(dtype: torch.dtype) -> None:
    """Of η with s, and between targets, against the covariance of every row by itself; so have densities."""
    likelihood, (mean, covariance) = Heteroscedastic(), latents(0.4)
    samples = MultivariateNormal(mean, covariance).sample((30,)).to(dtype)
    summary = likelihood.target.summary_of_samples(likelihood, samples, for_scores=True)
    expected = reference.sampled_moments(samples)
    tolerance = "algebra" if dtype == torch.float64 else "float32"
    for part, truth in zip(summary, expected, strict=True):
        assert part.dtype == dtype
        assert_close(part.double(), truth, tolerance)
    y = torch.randn(5, 2, dtype=torch.float64)
    actual = find_score("nll", likelihood)(likelihood, summary, y.to(dtype), ONE)
    density = reference.noisy_density(*expected, y.to(dtype).double())
    assert_close(actual.double(), -density.sum(1), "backend" if dtype == torch.float64 else "float32")


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_density_where_moments_have_no_float(likelihood: MomentLikelihood, dtype: torch.dtype) -> None:
    """Under weak priors a variance of y overflows, while its density is an ordinary number."""
    mean = torch.tensor([[0.5, -0.5]], dtype=dtype)
    y = torch.full((1, 2 if likelihood.name == "poisson" else 1), 3.0, dtype=dtype)
    variance = torch.full_like(mean, 2000.0).requires_grad_()
    with pytest.warns(ApproximationWarning) if likelihood.name == "poisson" else nullcontext():
        predicted = likelihood.target.summary(likelihood, mean, variance, "probit")
    assert bool(predicted[1].isfinite().all())
    summary = likelihood.target.summary(likelihood, mean, torch.diag_embed(variance), "probit", for_scores=True)
    actual = find_score("nll", likelihood)(likelihood, summary, y, ONE)
    f = (mean[0].double() + 2000**0.5 * torch.linspace(-11, 11, 400_001, dtype=torch.float64).unsqueeze(1)).T
    weights = torch.softmax(-0.5 * torch.linspace(-11, 11, 400_001, dtype=torch.float64).square(), 0)
    if likelihood.name == "poisson":
        logs = likelihood.conditional(f.T).base_dist.log_prob(y.double())
        expected = -(logs + weights.log().unsqueeze(1)).logsumexp(0).sum()
    elif likelihood.name == "mean_log_variance":  # y is N(m, exp(l) + r) given l
        logs = Normal(0.5, (f[1].exp() + 2000).sqrt()).log_prob(torch.tensor(3.0, dtype=torch.float64))
        expected = -(logs + weights.log()).logsumexp(0)
    else:  # y is N(a/λ, (1 + r/λ)/λ) given s
        precision = f[1].exp().log1p().where(f[1] < 30, f[1])
        known = precision > 1e-140
        scale = ((1 + 2000 / precision[known]) / precision[known]).sqrt()
        logs = Normal(0.5 / precision[known], scale).log_prob(torch.tensor(3.0, dtype=torch.float64))
        expected = -(logs + weights[known].log()).logsumexp(0)
    assert_close(actual[0], expected, "float32")
    (slope,) = torch.autograd.grad(actual.sum(), variance)
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize("name", ["crps", "entropy"])
def test_scores_of_a_noise_of_its_own(name: str) -> None:
    """Of Gaussians with the moments of y, whichever of the two summaries is known."""
    likelihood = Heteroscedastic()
    mean, covariance = latents()
    y, score = torch.randn(5, 2, dtype=torch.float64), find_score(name, likelihood)
    values = [
        score(likelihood, likelihood.target.summary(likelihood, mean, covariance, "probit", for_scores=latent), y, ONE)
        for latent in (False, True)
    ]
    assert_close(values[0], values[1], "algebra")
    m, aleatoric, epistemic = reference.moments(mean, covariance, "heteroscedastic")
    normal = Normal(m, (aleatoric + epistemic).sqrt())
    if name == "entropy":
        assert_close(values[0], normal.entropy().sum(1), "backend")
    else:
        expected = gaussian_crps(m, normal.variance, y)
        assert_close(values[0].mean(), expected, "backend")
    with pytest.raises(InvalidData, match="without a variance"):
        score(likelihood, m, y, ONE)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
def test_conditionals_and_their_samples(likelihood: MomentLikelihood) -> None:
    f, _ = latents()
    width = f.shape[1] if likelihood.name == "poisson" else f.shape[1] // 2
    conditional = likelihood.conditional(f.expand(3, *f.shape))
    y = conditional.sample()
    assert y.shape == (3, 5, width)
    assert_close(conditional.log_prob(y), -reference.nll(f.expand(3, *f.shape), y, likelihood.name), "algebra")


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
def test_summaries_of_samples_agree_with_those_of_their_gaussian(likelihood: MomentLikelihood) -> None:
    mean, covariance = latents(0.05)
    n = 100_000
    samples = MultivariateNormal(mean, covariance).sample((n,))
    drawn = likelihood.target.summary_of_samples(likelihood, samples)
    known = likelihood.target.summary(likelihood, mean, covariance, "probit")
    means = likelihood.conditional(samples[:5000]).mean
    assert_close(drawn[0], known[0], "mc", standard_error=means.std(0) / n**0.5)
    terms = likelihood.conditional(samples[:5000]).variance + (means - means.mean(0)).square()
    assert_close(drawn[1], known[1], "mc", standard_error=terms.std(0) / n**0.5)
