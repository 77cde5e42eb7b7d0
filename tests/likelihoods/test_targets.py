"""Targets of users' own likelihoods: by samples, by a distribution, by name, or refused with what to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Poisson

from laplace import Laplace, MixtureLaplace, Prediction
from laplace.errors import UnsupportedError
from laplace.likelihoods import LikelihoodFromLoss
from laplace.likelihoods.categorical import SoftmaxLikelihood
from laplace.likelihoods.targets import TARGETS
from tests import grid
from tests import problems as catalogue
from tests.reference.compare import assert_close

QUANTITIES = ("variance", "entropy", "decomposition")


class Counts(LikelihoodFromLoss):
    """A user's Poisson likelihood with a log link."""

    name = "counts"

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.exp() - y * f + torch.lgamma(y + 1)).sum()

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(f.exp().expand(n, *f.shape), generator=generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f.exp()


class Described(Counts):
    """The same, with its distribution."""

    name = "described"

    def conditional(self, f: Tensor) -> Distribution:
        return Independent(Poisson(f.exp()), 1)


@dataclass(frozen=True)
class Silent(SoftmaxLikelihood):
    """Classes, of whose target nothing is said."""

    name = "silent"
    target = TARGETS["other"]

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        return y

    def inverse_link(self, f: Tensor) -> Tensor:
        return f.softmax(-1)


class Named(Silent):
    name = "named"
    target_kind = "class"


def counts(likelihood: Any = None, seed: int = 0, **options: Any) -> tuple[Prediction, Tensor, Tensor]:
    """A prediction by samples, and the Gaussian of its latents."""
    problem = catalogue.get("mlp_regression")
    la = Laplace(problem.make_model(), likelihood or Counts(), "all", "kron", prior_precision=30.0)
    generator = torch.Generator().manual_seed(1)
    la.fit([(problem.x, torch.poisson(torch.ones_like(problem.y), generator=generator))])
    options = {"n_samples": 500, "diagonal_output": True, **options}
    found = la.predict(problem.x, link_approx="mc", generator=torch.Generator().manual_seed(seed), **options)
    return found, found.latent_mean, found.latent_variance


@pytest.mark.parametrize("likelihood", [Counts(), Described()], ids=lambda likelihood: likelihood.name)
def test_moments_by_samples(likelihood: LikelihoodFromLoss) -> None:
    """Against those of a Poisson mixture over a log-normal rate."""
    found, mean, variance = counts(likelihood)
    rate = (mean + variance / 2).exp()
    epistemic = variance.expm1() * rate.square()
    rates, parts = found.latent_samples.exp(), found.decomposition
    assert_close(found.mean, rate, "mc", standard_error=rates.std(0) / 500**0.5)
    spread = (rates - rates.mean(0)).square().std(0) / 500**0.5
    assert_close(parts.epistemic, epistemic, "mc", standard_error=spread)
    # A variance by pairs of targets has an error of its own: Var (y − y')²/2 is λ/2 + λ².
    error = ((rates / 2 + rates.square()).mean(0) + rates.var(0)).sqrt() / 500**0.5
    assert_close(parts.aleatoric, rate, "mc", standard_error=error)
    assert_close(found.variance, parts.total, "exact")


def test_entropies_by_samples() -> None:
    """Against sums over counts of the mixture of the same rates."""
    found, _, _ = counts(n_samples=400)
    rates, values = found.latent_samples.exp(), torch.arange(60.0, dtype=torch.float64).view(-1, 1, 1, 1)
    logs = values * rates.log() - rates - torch.lgamma(values + 1)  # [count, S, B, C]
    expected = -(logs.exp() * logs).sum((0, 3)).mean(0)
    assert_close(
        found.decomposition.expected_entropy, expected, "mc", standard_error=1.5 * rates.shape[2] ** 0.5 / 400**0.5
    )
    assert (found.decomposition.mutual_information > 0).all()
    assert_close(found.entropy, found.decomposition.predictive_entropy, "exact")


def test_intervals_by_samples() -> None:
    found, _, _ = counts()
    lower, upper = found.interval(0.9)
    assert torch.equal(lower, lower.round()) and torch.equal(upper, upper.round())  # of counts
    inner = found.interval(0.9, observation_noise=False)
    rates = found.latent_samples.exp()
    assert_close(inner[0], rates.quantile(0.05, 0), "exact")
    assert (upper - lower > inner[1] - inner[0]).all()


def test_the_order_of_reading_changes_nothing() -> None:
    first, *_ = counts(n_samples=20)
    second, *_ = counts(n_samples=20)
    variance, entropy = first.variance, first.entropy
    assert torch.equal(second.entropy, entropy)
    assert torch.equal(second.variance, variance)


def test_a_distribution_is_a_mixture_over_samples() -> None:
    found, *_ = counts(Described(), n_samples=50)
    distribution = found.distribution()
    assert isinstance(distribution, MixtureSameFamily)
    assert_close(distribution.mean, found.mean, "algebra")
    assert_close(distribution.variance, found.variance, "algebra")
    assert distribution.log_prob(torch.ones_like(found.mean)).shape == found.mean.shape[:1]
    found, *_ = counts(n_samples=50)  # the same, by the methods of the likelihood
    y = torch.poisson(found.mean)
    assert_close(found.distribution().log_prob(y), distribution.log_prob(y), "algebra")
    assert found.distribution().sample((2,)).shape == (2, *found.mean.shape)


def test_mixtures_by_samples() -> None:
    parts = []
    for seed in range(2):
        torch.manual_seed(seed)
        parts.append(Laplace(grid.network("regression").double(), Counts(), "all", "diag", prior_precision=50.0))
    la, x = MixtureLaplace(parts), grid.data("regression")[0].double()
    la.fit([(x, torch.ones(12, 3, dtype=torch.float64))])
    found = la.predict(x, link_approx="mc", n_samples=400, generator=torch.Generator().manual_seed(0))
    assert_close(found.decomposition.total, found.variance, "mc", standard_error=found.variance / 10)
    assert (found.decomposition.mutual_information >= 0).all()
    assert found.interval()[0].shape == (12, 3)


def test_what_is_not_said_is_refused_with_what_to_write() -> None:
    la = Laplace(grid.network(), Silent(), "all", "diag")
    la.fit(grid.batches())
    found = la.predict(grid.data()[0], n_samples=5)
    assert found.mean.shape == (12, 3)
    for name in QUANTITIES:
        with pytest.raises(UnsupportedError, match=r"'silent' .* define conditional\(f\)"):
            getattr(found, name)
    with pytest.raises(UnsupportedError, match="probabilities has no meaning for likelihood='silent'"):
        _ = found.probabilities


def test_a_target_by_name() -> None:
    """`target_kind` in a user's class stands for the library's target of that name."""
    assert Named().target is TARGETS["class"]
    assert Named().target_kind == "class"
    assert Silent().target_kind == "other"
    la = Laplace(grid.network(), Named(), "all", "diag")
    la.fit(grid.batches())
    assert isinstance(la.predict(grid.data()[0]).distribution(), Categorical)
