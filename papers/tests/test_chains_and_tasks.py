"""Baselines of chains and of tasks in turn: cyclical SGHMC and VOGN, against what their papers define."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from protocol.baselines.csghmc import CyclicalSettings, sample_networks
from protocol.baselines.vogn import Vogn, VognSettings, gradient_moments
from protocol.data import Part
from protocol.networks import mlp
from protocol.wide_resnet import wide_resnet


def blobs(n_data: int) -> Part:
    """Three classes in the plane."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (n_data,), generator=generator)
    centres = torch.tensor([[1.0, 0.0], [-1.0, 1.0], [0.0, -1.5]])
    return Part(centres[y] + 0.5 * torch.randn(n_data, 2, generator=generator), y)


def test_cyclical_chain_leaves_samples_that_have_learnt() -> None:
    data, model = blobs(100), mlp((2, 8, 3), 0)
    samples = sample_networks(model, data, CyclicalSettings(2, 10, 3, 5, batch_size=25), 0)
    again = sample_networks(model, data, CyclicalSettings(2, 10, 3, 5, batch_size=25), 0)
    assert len(samples) == 6
    assert all(torch.equal(a(data.x), b(data.x)) for a, b in zip(samples, again, strict=True))
    assert all(float((each(data.x).argmax(1) == data.y).float().mean()) > 0.8 for each in samples)


def test_noise_of_the_cyclical_chain_has_its_variance() -> None:
    # one step of friction 1 without gradients, at the temperature 1/N: 2 η α / N²
    def flat(outputs: Tensor, _: Tensor) -> Tensor:
        return 0 * outputs.sum()

    model, data = nn.Linear(200, 200), Part(torch.ones(10, 200), torch.zeros(10))
    how = CyclicalSettings(1, 1, 1, 1, rate=0.3, friction=1.0, weight_decay=0.0, batch_size=10)
    (sampled,) = sample_networks(model, data, how, 0, flat)
    moved = parameters_to_vector(sampled.parameters()) - parameters_to_vector(model.parameters())
    torch.testing.assert_close(moved.square().mean(), torch.tensor(2 * 0.3 / 10**2), rtol=0.03, atol=0)


def test_moments_are_those_of_gradients_one_by_one() -> None:
    data, model = blobs(12), mlp((2, 5, 3), 0)[1:]
    rows = []
    for x, y in zip(data.x, data.y, strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    gradient, squares = gradient_moments(model, data.x, data.y)
    torch.testing.assert_close(gradient, torch.stack(rows).mean(0))
    torch.testing.assert_close(squares, torch.stack(rows).square().mean(0))


def test_vogn_ends_where_its_natural_gradient_is_zero() -> None:
    data = blobs(150)
    how = VognSettings(n_epochs=600, rate=1e-2, forgetting=1e-2, initial=1e-2, n_samples=4)
    vogn = Vogn(nn.Sequential(nn.Linear(2, 3)), 2.0, how, 0)
    vogn.learn([(data.x, data.y)], len(data))
    samples = vogn.mean + vogn.precision.rsqrt() * torch.randn(4000, 9, generator=torch.Generator().manual_seed(1))
    moments = []
    for sample in samples:
        nn.utils.vector_to_parameters(sample, vogn.model.parameters())
        moments.append(torch.stack(gradient_moments(vogn.model, data.x, data.y)))
    gradient, squares = torch.stack(moments).mean(0) * len(data)
    slope = gradient + 2.0 * vogn.mean
    assert bool((slope.abs() < 0.3 * vogn.precision.sqrt()).all())
    torch.testing.assert_close(vogn.precision, 2.0 + squares, rtol=0.1, atol=0)


def test_vogn_keeps_what_its_prior_knows() -> None:
    data = blobs(60)
    vogn = Vogn(nn.Sequential(nn.Linear(2, 3)), 1.0, VognSettings(n_epochs=20, rate=1e-2), 0)
    vogn.mean, vogn.precision = torch.arange(9.0), torch.full((9,), 1e8)
    nn.utils.vector_to_parameters(vogn.mean, vogn.model.parameters())
    vogn.learn([(data.x, data.y)], len(data))
    torch.testing.assert_close(vogn.mean, torch.arange(9.0), atol=1e-3, rtol=0)
    assert bool((vogn.precision > 1e8 * (1 - 1e-6)).all())


def test_wide_residual_network_has_the_size_of_the_paper() -> None:
    model = wide_resnet(10, 0)
    assert sum(p.numel() for p in model.parameters()) == 2_748_890  # 11 MB
    assert wide_resnet(10, 0, 10, 1)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
