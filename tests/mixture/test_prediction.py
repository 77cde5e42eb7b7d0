"""`mixture.predict`: every quantity against the components' own ones and against brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, MixtureSameFamily

from laplace import Laplace, MixtureLaplace, Prediction
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.predictive.prediction import quantile
from tests import grid
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def mixture(likelihood: str, **options: Any) -> tuple[MixtureLaplace, Tensor]:
    parts = []
    for seed in range(3):
        torch.manual_seed(seed)
        network = grid.network(likelihood).double()
        parts.append(Laplace(network, likelihood, "all", "kron", **options))
    found = MixtureLaplace(parts, weights=WEIGHTS)
    found.fit([(x.double(), y.double() if y.is_floating_point() else y) for x, y in grid.batches(likelihood)])
    return found, grid.data(likelihood)[0].double()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def each(la: MixtureLaplace, x: Tensor, **options: Any) -> list[Prediction]:
    return [part.predict(x, **options) for part in la.components]


def average(values: list[Tensor]) -> Tensor:
    return torch.einsum("k,k...->...", WEIGHTS, torch.stack(values))


@pytest.mark.parametrize("likelihood", ["regression", "classification", "bernoulli"])
@pytest.mark.parametrize("options", [{}, {"diagonal_output": True}, {"joint": True}], ids=str)
def test_moments_agree_with_calling(likelihood: str, options: dict[str, Any]) -> None:
    la, x = mixture(likelihood)
    found, called = la.predict(x, **options), la(x, **options)
    parts = each(la, x, **options)
    if isinstance(called, tuple):
        assert_close(found.latent_mean.reshape(called[0].shape), called[0], "algebra")
        assert_close(found.latent_covariance, called[1], "algebra")
    else:
        assert_close(found.probabilities, called, "algebra")
    mean = average([part.latent_mean for part in parts])
    second = average([part.latent_variance + part.latent_mean.square() for part in parts])
    assert_close(found.latent_mean, mean, "algebra")
    assert_close(found.latent_variance, second - mean.square(), "algebra")
    assert found.latent.covariance.shape == parts[0].latent.covariance.shape


@pytest.mark.parametrize("n_outputs_dependent", [False, True])
def test_regression(n_outputs_dependent: bool) -> None:
    la, x = mixture("regression", sigma_noise=0.5)
    found = la.predict(x, diagonal_output=not n_outputs_dependent, n_samples=4000, generator=seeded())
    parts = each(la, x)
    assert_close(found.variance, found.latent_variance + 0.25, "algebra")
    assert_close(found.decomposition.total, found.variance, "algebra")
    assert_close(found.decomposition.aleatoric, torch.full_like(found.mean, 0.25), "algebra")
    assert_close(found.sigma_noise, torch.tensor(0.5, dtype=torch.float64), "algebra")
    for level in (0.5, 0.95):
        for noise in (0.0, 0.25):
            ends = found.interval(level, observation_noise=noise > 0)
            for end, target in zip(ends, (0.5 - level / 2, 0.5 + level / 2), strict=True):
                z = [(end - p.latent_mean) / (p.latent_variance + noise).sqrt() for p in parts]
                reached = average([torch.special.ndtr(value) for value in z])
                assert_close(reached, torch.full_like(end, target), "algebra")
    target = found.distribution()
    assert isinstance(target, MixtureSameFamily)
    assert_close(target.mean, found.mean, "algebra")
    if not n_outputs_dependent:
        assert_close(target.variance, found.variance, "algebra")
    # Differential entropy, by other samples.
    y = la.predict(x, n_samples=4000, generator=seeded(1)).distribution().sample((4000,))
    density = la.predict(x).distribution().log_prob(y) if n_outputs_dependent else None
    if density is not None:
        error = density.std(0) / 4000**0.5
        assert_close(found.entropy, -density.mean(0), "mc", standard_error=1.5 * error)
        assert (found.decomposition.mutual_information > 0).all()
    with pytest.raises(UnsupportedError, match="probabilities"):
        _ = found.probabilities


@pytest.mark.parametrize(("likelihood", "kind"), [("classification", Categorical), ("bernoulli", Bernoulli)])
def test_labels(likelihood: str, kind: type) -> None:
    la, x = mixture(likelihood)
    n = 4000
    found = la.predict(x, link_approx="mc", n_samples=n, generator=seeded())
    assert isinstance(found.distribution(), kind)
    assert_close(found.variance, found.mean * (1 - found.mean), "algebra")
    parts, p = found.decomposition, la.predictive_samples(x, n_samples=20_000, generator=seeded(1))
    error = p.std(0) / n**0.5
    assert_close(parts.mean, p.mean(0), "mc", standard_error=error)
    assert_close(parts.aleatoric, (p * (1 - p)).mean(0), "mc", standard_error=(p * (1 - p)).std(0) / n**0.5)
    assert_close(parts.epistemic, p.var(0), "mc", standard_error=(p - p.mean(0)).square().std(0) / n**0.5)
    assert (parts.mutual_information >= average([q.decomposition.mutual_information for q in each(la, x)]) - 0.02).all()
    assert_close(found.probability_samples.mean(0), p.mean(0), "mc", standard_error=error)
    lower, upper = found.interval(0.8)
    samples = p if likelihood == "classification" else la.predictive_samples(x, n_samples=20_000, generator=seeded(2))
    inside = ((samples >= lower) & (samples <= upper)).double().mean(0)
    assert_close(inside, torch.full_like(inside, 0.8), "mc", standard_error=0.4 * (1 / n + 1 / 20_000) ** 0.5 * 1.5)


def test_a_mixture_of_dirichlets() -> None:
    la, x = mixture("classification")
    found = la.predict(x, link_approx="bridge")
    dirichlets = found.distribution("probabilities")
    assert isinstance(dirichlets, MixtureSameFamily)
    assert_close(dirichlets.mean, found.probabilities, "algebra")
    assert_close(found.decomposition.epistemic, dirichlets.variance, "algebra")
    assert_close(found.decomposition.total, found.variance, "algebra")


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_sampled_weights(likelihood: str) -> None:
    la, x = mixture(likelihood)
    found = la.predict(x, "nn", n_samples=50, generator=seeded())
    again = la.predict(x, "nn", n_samples=50, generator=seeded())
    assert torch.equal(found.latent_samples, again.latent_samples)
    assert found.latent_samples.shape == (50, *found.mean.shape)
    lower, upper = found.interval(0.5)
    assert (lower < upper).all()
    assert_close(found.decomposition.total, found.variance, "algebra")


@pytest.mark.filterwarnings("ignore:sigma_noise is 1")  # two of three networks are a thousand away from the data
def test_samples_are_of_the_components_by_their_weights() -> None:
    la, x = mixture("regression")
    for part, shift in zip(la.components, (-1e3, 0.0, 1e3), strict=True):
        with torch.no_grad():
            list(part.weights.model.parameters())[-1].add_(shift)
    la.fit([(x, grid.data("regression")[1].double())])
    samples = la.predict(x, n_samples=6000, generator=seeded()).latent_samples[:, 0, 0]
    shares = torch.stack([(samples < -500).double(), (samples.abs() < 500).double(), (samples > 500).double()])
    assert_close(shares.mean(1), WEIGHTS, "mc", standard_error=(WEIGHTS * (1 - WEIGHTS) / 6000).sqrt())


def test_one_component_is_itself() -> None:
    la, x = mixture("regression")
    single = MixtureLaplace([la.components[0]])
    found, own = single.predict(x), la.components[0].predict(x)
    for name in ("mean", "latent_covariance", "variance", "entropy"):
        assert_close(getattr(found, name), getattr(own, name), "algebra", label=name)
    assert_close(torch.stack(found.interval()), torch.stack(own.interval()), "algebra")


def test_derivatives_of_a_quantile() -> None:
    means = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    variances = (0.5 + torch.rand(3, 4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda m, v: quantile(m, v, WEIGHTS, 0.3), (means, variances))


def test_a_quantile_between_modes_that_lie_far_apart_is_finite() -> None:
    means = torch.tensor([[-1e6], [1e6]], dtype=torch.float64, requires_grad=True)
    middle = quantile(means, torch.ones(2, 1, dtype=torch.float64), torch.tensor([0.5, 0.5]), 0.5)
    assert middle.isfinite().all() and middle.abs() <= 1e6
    assert torch.autograd.grad(middle.sum(), means)[0].isfinite().all()


def test_positions() -> None:
    torch.manual_seed(0)
    parts = [Laplace(nn.Conv2d(2, 3, 1), "classification", "all", "diag", channel_dim=1) for _ in range(2)]
    la, x = MixtureLaplace(parts), torch.randn(4, 2, 5, 5)
    la.fit([(x, torch.randint(0, 3, (4, 5, 5)))])
    found = la.predict(x, n_samples=10)
    assert found.probabilities.shape == found.decomposition.aleatoric.shape == (4, 3, 5, 5)
    assert found.entropy.shape == (4, 5, 5)
    assert found.latent_samples.shape == (10, 4, 3, 5, 5)
    assert_close(found.probabilities, la(x), "float32")
    assert found.distribution("latent").batch_shape == (4, 5, 5)
    with pytest.raises(InvalidArgument, match="level"):
        found.interval(2.0)
