"""Members of one training and of restarts: their weights, what is dropped, and that nobody's network is touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace.errors import InvalidArgument, InvalidType, UnsupportedError
from laplace.extensions.snapshots import Snapshots

N, D, C = 40, 5, 3
Data = tuple[Tensor, Tensor]


def data(seed: int, n: int = N) -> Data:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=draws)
    return x, (x[:, :C] + torch.randn(n, C, generator=draws)).argmax(1)


def network(n_outputs: int = C) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, n_outputs))


def train(model: nn.Module, n_epochs: int = 10, loss: Any = nn.functional.cross_entropy, y: Any = None) -> Any:
    """One step of the optimiser per epoch, after each of which the caller is asked."""
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    x, labels = data(0)
    model.train()
    for _ in range(n_epochs):
        optimizer.zero_grad()
        loss(model(x), labels if y is None else y).backward()
        optimizer.step()
        yield
    model.eval()


def collected(n_restarts: int = 2, **options: Any) -> tuple[nn.Module, Snapshots]:
    model = network()
    states = laplace.snapshots(model, **options)
    for epoch, _ in enumerate(train(model, 60)):
        if epoch % 10 == 9:
            states.keep()
    if n_restarts:
        states.restarts(lambda one: list(train(one)), n_restarts, generator=torch.Generator().manual_seed(0))
    return model, states


def weights_of_pool(log_densities: Tensor) -> Tensor:
    """100 steps of EM from equal weights."""
    weights = torch.full((log_densities.shape[1],), 1 / log_densities.shape[1], dtype=torch.float64)
    for _ in range(100):
        shares = weights * log_densities.exp()
        weights = (shares / shares.sum(1, keepdim=True)).mean(0)
    return weights


def log_densities(networks: list[nn.Module], held_out: Data) -> Tensor:
    x, y = held_out
    logs = [one.eval()(x).double().log_softmax(1)[torch.arange(len(y)), y] for one in networks]
    return torch.stack(logs, 1).detach()


def test_half_of_the_weight_is_the_network_s_and_half_that_of_a_stacked_pool() -> None:
    model, states = collected()
    held_out = data(1)
    la = states.posterior([held_out], "classification", "all", "diag")
    choice = states.choice
    assert choice is not None and not choice.is_network and "restarts" in str(choice)
    assert la.components[0].model is model and la.n_components == len(choice.weights)
    kept = [part.model for part in la.components]
    every = [model, *(one for one in _networks(model, states) if not _same(one, model))]
    pool = weights_of_pool(log_densities(every, held_out))
    pool = pool[pool >= 0.01] / pool[pool >= 0.01].sum()
    assert len(kept) in (len(pool), len(pool) + 1)  # where the network's own weight is below 1 %, it stays
    expected = 0.5 * (pool if len(kept) == len(pool) else torch.cat([torch.zeros(1), pool]))
    expected[0] += 0.5
    assert torch.allclose(la.weights, expected, atol=1e-6)
    logs = log_densities(kept, held_out)
    mixed = -(logs + la.weights.log()).logsumexp(1)
    gap = mixed + logs[:, 0]
    assert choice.pool_nll == pytest.approx(float(mixed.mean()), abs=1e-5)
    assert choice.network_nll == pytest.approx(-float(logs[:, 0].mean()), abs=1e-5)
    assert choice.standard_error == pytest.approx(float(gap.std() / N**0.5), abs=1e-5)
    assert choice.pool_nll - choice.network_nll + choice.caution * choice.standard_error <= 0
    la.fit([data(0)])
    la.prior_precision = 1e8
    x = held_out[0]
    assert torch.allclose(
        la(x), sum(w * one(x).softmax(1) for w, one in zip(la.weights, kept, strict=True)).float(), atol=1e-3
    )


def _networks(model: nn.Module, states: Snapshots) -> list[nn.Module]:
    found: list[nn.Module] = []
    for kept in states._kept:
        for state in kept:
            one = copy.deepcopy(model)
            one.load_state_dict(state)
            found.append(one)
    return found


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_pool_that_is_not_shown_to_be_better_is_left() -> None:
    """On the data of the training the network that was trained longest is the best there is."""
    model, states = collected(0)
    la = states.posterior([data(0)], "classification", "all", "diag")
    assert states.choice is not None and states.choice.is_network and "alone" in str(states.choice)
    assert la.n_components == 1 and la.components[0].model is model
    la.fit([data(0)])
    assert la(data(1)[0]).shape == (N, C)


def test_nothing_is_written_to_the_network() -> None:
    model = network()
    model.eval()
    before, flags = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    states = laplace.snapshots(model)
    states.keep()
    random = torch.get_rng_state()
    states.restarts(lambda one: list(train(one, 3)), 2, generator=torch.Generator().manual_seed(0))
    states.posterior([data(1)], "classification")
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert flags == [module.training for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_restarts_begin_half_way() -> None:
    """θ/2 + fresh weights; where these are one number, as scales of a normalisation, half-way; frozen ones stay."""
    model = network()
    list(train(model))
    model[3].bias.requires_grad_(False)
    begun: list[dict[str, Tensor]] = []
    states = laplace.snapshots(model)
    states.restarts(lambda one: begun.append(copy.deepcopy(one.state_dict())), 2)
    trained = model.state_dict()
    first, second = begun
    assert torch.equal(first["1.weight"], 0.5 * trained["1.weight"] + 0.5)
    assert torch.equal(first["3.bias"], trained["3.bias"])
    for name in ("0.weight", "3.weight"):
        bound = 1 / first[name].shape[1] ** 0.5  # PyTorch's initial weights are uniform
        fresh = first[name] - 0.5 * trained[name]
        assert fresh.abs().max() <= bound + 1e-6 and fresh.abs().max() > 0.8 * bound
        assert not torch.equal(first[name], second[name])
    assert repr(states) == "Snapshots(0 states of the training, 2 of 2 restarts)"


def test_states_of_restarts_can_be_kept_and_are_the_last_ones() -> None:
    model = network()
    states = laplace.snapshots(model, most=3)
    for _ in train(model, 5):
        states.keep()

    def shortly(one: nn.Module) -> None:
        for _ in train(one, 4):
            states.keep(one)

    states.restarts(shortly, 1)
    assert len(states) == 6 and torch.equal(states._kept[0][-1]["0.weight"], model.state_dict()["0.weight"])


def test_a_training_that_fails_leaves_no_state() -> None:
    states = laplace.snapshots(network())
    with pytest.raises(ZeroDivisionError):
        states.restarts(lambda one: 1 / 0)
    assert len(states) == 0


def test_a_regression_has_the_noise_of_its_residuals() -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=draws)
    y = x[:, :2] + 0.3 * torch.randn(N, 2, generator=draws)
    model = network(2)
    states = laplace.snapshots(model)
    for _ in train(model, 30, nn.functional.mse_loss, x[:, :2]):
        states.keep()
    la = states.posterior([(x, y)], "regression", "all", "diag")
    noise = float((model(x).detach() - y).square().mean().sqrt())
    assert float(la.sigma_noise) == pytest.approx(noise, rel=1e-5)
    normal = torch.distributions.Normal(model(x).detach(), noise)
    assert states.choice is not None
    assert states.choice.network_nll == pytest.approx(-float(normal.log_prob(y).sum(1).mean()), rel=1e-4)
    assert float(states.posterior([(x, y)], "regression", sigma_noise=0.7).sigma_noise) == pytest.approx(0.7)


def test_positions_of_one_input_are_no_sample_by_themselves() -> None:
    x, y = data(1)
    model = nn.Linear(D, C)
    errors: list[float] = []
    for repeated in (x.unsqueeze(1), x.unsqueeze(1).expand(-1, 4, -1)):
        states = laplace.snapshots(model)
        torch.manual_seed(1)
        states.restarts(lambda one: None, 1)
        labels = y.unsqueeze(1).expand(repeated.shape[:2])
        states.posterior([(repeated, labels)], "classification")
        assert states.choice is not None and states.choice.n_data == N
        errors.append(states.choice.standard_error)
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)


class Own(nn.Module):
    """A parameter that nobody can draw anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_what_is_refused() -> None:
    with pytest.raises(InvalidType, match="model"):
        laplace.snapshots(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="most=0"):
        laplace.snapshots(network(), most=0)
    states = laplace.snapshots(network())
    with pytest.raises(InvalidArgument, match="no state was kept"):
        states.posterior([data(1)], "classification")
    with pytest.raises(InvalidArgument, match="keep"):
        states.keep(network())
    with pytest.raises(InvalidArgument, match="n=0"):
        states.restarts(lambda one: None, 0)
    with pytest.raises(UnsupportedError, match=r"'0', a Own.*reset_parameters"):
        laplace.snapshots(nn.Sequential(Own(), nn.Linear(D, C))).restarts(lambda one: None)
