"""The baselines of the experiments, against what their papers define."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, distributions, nn

from protocol.baselines.ensemble import MEMBER_SEEDS, deep_ensemble, mean_probabilities
from protocol.baselines.flipout import Flipout, FlipoutSettings, fit_flipout
from protocol.baselines.hmc import HmcSettings, hmc, log_posterior, networks, predictions, split_r_hat, start_of
from protocol.baselines.swag import Swag, SwagSettings, choose_rate, fit_swag, renew_batch_norm
from protocol.data import Part
from protocol.networks import cnn, mlp
from protocol.training import Training, train


def blobs(n_data: int, seed: int = 0) -> Part:
    """Three classes in the plane."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n_data,), generator=generator)
    centres = torch.tensor([[1.0, 0.0], [-1.0, 1.0], [0.0, -1.5]])
    return Part(centres[y] + 0.5 * torch.randn(n_data, 2, generator=generator), y)


SHORT = Training(n_epochs=20, batch_size=16, rate=1e-2)


def test_ensemble_is_the_mean_of_its_members() -> None:
    data = blobs(60)
    members = deep_ensemble(lambda seed: mlp((2, 5, 3), seed), data, SHORT, seed=2, n_members=3)
    alone = train(mlp((2, 5, 3), 2 * MEMBER_SEEDS + 1), data, SHORT, 2 * MEMBER_SEEDS + 1)
    assert torch.equal(alone(data.x), members[1](data.x))
    expected = torch.stack([member(data.x).softmax(1) for member in members]).mean(0)
    torch.testing.assert_close(mean_probabilities(members, data.x), expected)


def test_swag_samples_have_its_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, variance = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.4, 0.1, 0.9])
    deviations = torch.randn(5, 3, generator=generator)
    samples = Swag(nn.Identity(), mean, variance, deviations).sample(200_000, generator)
    covariance = 0.5 * variance.diag() + deviations.T @ deviations / (2 * 4)
    torch.testing.assert_close(samples.mean(0), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(samples.T.cov(), covariance, atol=0.03, rtol=0)


def test_swag_takes_the_moments_of_the_iterates_of_sgd() -> None:
    data, how = blobs(40), SwagSettings(0.05, n_snapshots=6, n_epochs_between=2, rank=3, momentum=0.0, batch_size=40)
    model = mlp((2, 3), 0)
    posterior = fit_swag(model, data, how, 0)
    learner, iterates = copy.deepcopy(model), []  # full batches: their order does not matter
    for epoch in range(1, 13):
        loss = nn.functional.cross_entropy(learner(data.x), data.y)
        learner.zero_grad()
        loss.backward()
        for p in learner.parameters():
            p.data -= how.rate * (p.grad + how.weight_decay * p.data)
        if epoch % 2 == 0:
            iterates.append(nn.utils.parameters_to_vector(learner.parameters()).detach())
    torch.testing.assert_close(posterior.mean, torch.stack(iterates).mean(0))
    torch.testing.assert_close(posterior.variance, torch.stack(iterates).var(0, correction=0), atol=1e-6, rtol=1e-3)
    last = torch.stack([iterates[t] - torch.stack(iterates[: t + 1]).mean(0) for t in (3, 4, 5)])
    torch.testing.assert_close(posterior.deviations, last, atol=1e-6, rtol=1e-3)


def test_swag_renews_the_statistics_of_batch_norm() -> None:
    data, model = blobs(100), nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).eval()
    posterior = fit_swag(model, data, SwagSettings(n_snapshots=3, rank=2), 0)
    for sampled in posterior.networks(2, data, torch.Generator().manual_seed(0)):
        assert isinstance(sampled, nn.Sequential) and isinstance(sampled[1], nn.BatchNorm1d)
        torch.testing.assert_close(sampled[1].running_mean, sampled[0](data.x).mean(0).detach())
        assert not sampled[1].training and sampled[1].momentum == 0.1
    plain = mlp((2, 3), 0)
    renew_batch_norm(plain, data)  # nothing to do
    assert torch.equal(nn.utils.parameters_to_vector(plain.parameters()), start_of([mlp((2, 3), 0)])[0])


def test_rate_of_swag_is_the_largest_that_is_confident_enough() -> None:
    data, how = blobs(60), SwagSettings(n_snapshots=4, rank=3, batch_size=16)
    model = train(mlp((2, 5, 3), 0), data, SHORT, 0)
    rates = (1e-3, 1e-1)
    rate, networks = choose_rate(model, data, data, how, 0, 0.0, rates, n_samples=2)
    again = fit_swag(model, data, how.at(1e-1), 0).networks(2, data, torch.Generator().manual_seed(0))
    assert rate == 1e-1
    assert torch.equal(mean_probabilities(networks, data.x), mean_probabilities(again, data.x))
    assert choose_rate(model, data, data, how, 0, 1.1, rates)[0] == 1e-3


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(3, 2), (2, 3)), (nn.Conv2d(3, 2, 3, padding=1, stride=2), (2, 3, 4, 4))]
)
def test_flipout_has_the_layer_as_its_mean_and_decorrelates_data(layer: nn.Linear | nn.Conv2d, shape: tuple) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    variational = Flipout(layer, -1.0, torch.Generator().manual_seed(1))
    with torch.no_grad():
        variational.bias_rho.fill_(-50.0)
        samples = torch.stack([variational(x) for _ in range(6000)]) - layer(x)
        scale = nn.functional.softplus(torch.tensor(-1.0))
        ones = torch.full_like(layer.weight, float(scale**2))
        variance = variational.apply_layer(x**2, ones, None)
    error = (variance / 6000).sqrt()
    assert bool((samples.mean(0).abs() < 5 * error).all())
    torch.testing.assert_close(samples.var(0), variance, atol=0, rtol=0.2)
    between = (samples[:, 0] * samples[:, 1]).mean(0).abs()  # shared noise would give the product of the inputs
    assert bool((between < 5 * (variance[0] * variance[1] / 6000).sqrt()).all())


def test_divergence_of_flipout_is_that_of_gaussians() -> None:
    layer = nn.Linear(3, 2)
    variational = Flipout(layer, -2.0, torch.Generator())
    scale, prior = nn.functional.softplus(torch.tensor(-2.0)), distributions.Normal(0.0, 0.5)
    expected = sum(distributions.kl_divergence(distributions.Normal(p, scale), prior).sum() for p in layer.parameters())
    torch.testing.assert_close(variational.divergence(4.0), expected)


def test_flipout_learns_and_samples_networks() -> None:
    data = blobs(200)
    posterior = fit_flipout(mlp((2, 8, 3), 0), data, SHORT, FlipoutSettings(), 0)
    sampled = posterior.networks(10)
    assert not torch.equal(sampled[0](data.x), sampled[1](data.x))
    assert float((mean_probabilities(sampled, data.x).argmax(1) == data.y).float().mean()) > 0.85
    images = Part(torch.rand(20, 1, 8, 8), torch.arange(20) % 2)
    assert fit_flipout(cnn(2, 0, 2), images, Training(1), FlipoutSettings(), 0).networks(1)[0](images.x).shape == (
        20,
        2,
    )


def test_hmc_samples_a_gaussian() -> None:
    covariance = torch.tensor([[1.0, 0.6], [0.6, 0.5]])
    precision, mean = covariance.inverse(), torch.tensor([3.0, -1.0])

    def gradients(theta: Tensor) -> tuple[Tensor, Tensor]:
        product = (theta - mean) @ precision
        return -product, -0.5 * (product * (theta - mean)).sum(1)

    chains = hmc(gradients, torch.randn(4, 2) + mean, HmcSettings(200, 1000, 12), 0)
    flat = chains.weights.flatten(0, 1)
    assert 0.7 < chains.acceptance < 0.95
    torch.testing.assert_close(flat.mean(0), mean, atol=0.1, rtol=0)
    torch.testing.assert_close(flat.T.cov(), covariance, atol=0.12, rtol=0)
    assert float(split_r_hat(chains.weights).max()) < 1.02
    apart = chains.weights + torch.arange(4).view(4, 1, 1)
    assert float(split_r_hat(apart).min()) > 1.3


def test_hmc_samples_the_weights_of_a_network() -> None:
    data, models = blobs(50), [mlp((2, 3), seed) for seed in range(3)]
    density = log_posterior(models[0], data, 2.0)
    start = start_of(models)
    loss = nn.functional.cross_entropy(models[1](data.x), data.y, reduction="sum")
    torch.testing.assert_close(density(start)[1][1], -loss - start[1].square().sum())
    (-loss).backward()
    gradient = torch.cat([p.grad.flatten() for p in models[1].parameters()]) - 2 * start[1]
    torch.testing.assert_close(density(start)[0][1], gradient)
    chains = hmc(density, start, HmcSettings(50, 50, 8), 0)
    assert chains.weights.shape == (3, 50, 9) and chains.log_density.shape == (3, 50)
    sampled = networks(models[0], chains, 5)
    p = predictions(models[0], chains, data.x)
    assert p.shape == (3, 50, 50, 3) and float(split_r_hat(p).min()) > 0
    torch.testing.assert_close(p[-1, -1], sampled[-1](data.x).softmax(1))
    torch.testing.assert_close(start_of(sampled)[-1], chains.weights[-1, -1])
    assert float((mean_probabilities(sampled, data.x).argmax(1) == data.y).float().mean()) > 0.8
