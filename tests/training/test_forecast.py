"""The warning of a posterior that online training made worse than its own network, and what it must not touch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import OnlineLaplace, marglik_training
from laplace.errors import CalibrationWarning
from laplace.training.forecast import losses_without_each

N, D, C = 120, 8, 4
Batches = list[tuple[Tensor, Tensor]]


def blobs(noise: float, n: int = 4 * N) -> tuple[Tensor, Tensor]:
    """Classes around centres; far apart where there is little noise."""
    draws = torch.Generator().manual_seed(0)
    y = torch.arange(n) % C
    return torch.randn(C, D, generator=draws)[y] + noise * torch.randn(n, D, generator=draws), y


def train(x: Tensor, y: Tensor, weights: Any = "all", likelihood: Any = "classification", **options: Any) -> Any:
    """A posterior by online training on the first N data."""
    torch.manual_seed(0)
    n_outputs = C if likelihood == "classification" else y.shape[1]
    model = nn.Sequential(nn.Linear(x.shape[1], 30), nn.Tanh(), nn.Linear(30, n_outputs))
    defaults: dict[str, Any] = {"n_epochs": 60, "n_epochs_burnin": 20, "marglik_frequency": 5}
    return marglik_training(
        model, batches(x[:N], y[:N]), likelihood, "kron", optimizer_kwargs={"lr": 0.01}, subset_of_weights=weights,
        **defaults | options,
    )[0]  # fmt: skip


def batches(x: Tensor, y: Tensor) -> Batches:
    return list(zip(x.split(50), y.split(50), strict=True))


def harm(la: Any, x: Tensor, y: Tensor) -> float:
    """By how much the posterior's negative log likelihood of other data is larger than the network's."""
    rows = torch.arange(len(y) - N)
    ours, network = la(x[N:]), la.model(x[N:]).detach().softmax(1)
    return float((network[rows, y[N:]].log() - ours[rows, y[N:]].log()).mean())


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_posterior_that_is_worse_on_new_data_is_warned_of(weights: str) -> None:
    x, y = blobs(0.3)
    with pytest.warns(CalibrationWarning, match=r"online training: .* Call la\.calibrate"):
        la = train(x, y, weights)
    before, worse = copy.deepcopy(la.model.state_dict()), harm(la, x, y)
    assert worse > 0.08
    precision = torch.tensor(1.0) if weights == "last_layer" else None
    losses = losses_without_each(la, precision, batches(x[:N], y[:N]))
    assert losses is not None and len(losses[0]) == N
    assert float((losses[0] - losses[1]).mean()) == pytest.approx(worse, rel=0.2)
    la.calibrate(batches(x[N : 2 * N], y[N : 2 * N]))
    assert harm(la, x, y) < 0.01
    assert all(torch.equal(before[name], tensor) for name, tensor in la.model.state_dict().items())


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_network_that_fits_noise_is_better_with_its_posterior_and_not_warned_of(weights: str) -> None:
    """Of labels at random its certainty has to be taken back, whatever it reaches on the training data."""
    x, y = blobs(0.3)
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))]
    la = train(x, y, weights, prior_prec_init=0.03, n_epochs_burnin=60)  # one estimate, at the end
    assert harm(la, x, y) < 0


def test_a_regression_is_not_warned_of() -> None:
    x, _ = blobs(0.3)
    train(x, x[:, :2] + 0.3 * x.roll(1, 0)[:, :2], likelihood="regression")


def test_leaving_out_is_right_to_first_order() -> None:
    """A ridge regression whose data have little weight each: the formula is its leave-one-out."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, dtype=torch.float64, generator=draws)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(100, 1, dtype=torch.float64, generator=draws)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    gram, prior, sigma = x.T @ x, 2.0, 0.5
    model.weight.data = torch.linalg.solve(gram / sigma**2 + prior * torch.eye(3), x.T @ y / sigma**2).T
    online = OnlineLaplace(model, [(x, y)], "regression", "full", prior_prec_init=prior, sigma_noise_init=sigma)
    online.la.fit([(x, y)])
    losses = losses_without_each(online.la, None, [(x, y)])
    assert losses is not None
    for i in range(0, 100, 20):
        kept = torch.arange(100) != i
        precision = x[kept].T @ x[kept] / sigma**2 + prior * torch.eye(3)
        mean = x[i] @ torch.linalg.solve(precision, x[kept].T @ y[kept] / sigma**2)
        loss = -torch.distributions.Normal(mean, sigma).log_prob(y[i]).item()
        assert losses[1][i].item() == pytest.approx(loss, rel=0.1)


def test_weights_and_random_states_are_those_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = blobs(0.3)
    with pytest.warns(CalibrationWarning):
        first = train(x, y, "last_layer")
    state = torch.get_rng_state()
    monkeypatch.setattr("laplace.training.online.warn_if_worse", lambda *given: None)
    second = train(x, y, "last_layer")
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first(x), second(x)) and torch.equal(first.prior_precision, second.prior_precision)


@pytest.mark.parametrize(("n_data", "burnin"), [(N, 99), (29, 20)])
def test_nothing_is_said_without_an_estimate_or_of_few_data(n_data: int, burnin: int) -> None:
    x, y = blobs(0.3)
    train(x[:n_data], y[:n_data], n_epochs_burnin=burnin)


def test_outputs_with_positions_are_passed_over() -> None:
    x, y = blobs(0.3)
    la = train(x[:20], y[:20], n_epochs=2)
    data = [(x.view(-1, 5, D), y.view(-1, 5))]
    la.fit(data)
    assert losses_without_each(la, None, data) is None
