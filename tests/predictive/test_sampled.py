"""Predictions by sampled weights: those of a plain loop, with their gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

from laplace import Laplace
from laplace.engines import at_weights
from laplace.engines.at_weights import outputs_at
from tests.engines.test_at_weights import BUDGET, SAMPLES, X, at_once, mlp

CELLS = [("all", "kron"), ("all", "diag"), ("last_layer", "full"), ("subnetwork", "full")]


def fitted(weights: str, structure: str, net: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = (mlp() if net is None else net).double()
    if weights == "subnetwork":
        options["subnetwork_indices"] = torch.tensor([0, 3, 7, 24, 30, 41])
    la = Laplace(model, "classification", weights, structure, **options)
    la.fit([(X, torch.arange(6) % 3)])
    return la


@pytest.mark.parametrize(("subset", "structure"), CELLS)
def test_samples_are_those_of_a_plain_loop(subset: str, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted(subset, structure)
    state = copy.deepcopy(la.model.state_dict())
    parameters = list(la.model.parameters())

    def draw(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
        samples = (f(X, pred_type="nn", n_samples=SAMPLES, generator=torch.Generator().manual_seed(5), **options)
                   for f in (la.functional_samples, la.predictive_samples))  # fmt: skip
        call = la(X, pred_type="nn", link_approx="mc", n_samples=SAMPLES, generator=torch.Generator().manual_seed(5))
        return (*samples, call)

    first, again = draw(), draw()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    monkeypatch.setattr(at_weights, "LEAST_SAMPLES", SAMPLES + 1)
    for a, b in zip(first, draw(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert all(p is q and p.grad is None for p, q in zip(parameters, la.model.parameters(), strict=True))
    assert all(torch.equal(state[name], tensor) for name, tensor in la.model.state_dict().items())
    if subset != "last_layer":
        assert at_once(la.problem)[0] > 1


def test_frozen_parameters_stay_where_they_are() -> None:
    net = mlp()
    net.get_parameter("0.weight").requires_grad_(False)
    la = fitted("all", "full", net)
    thetas = la.sample(SAMPLES)
    other = copy.deepcopy(net)
    expected = []
    for theta in thetas:
        vector_to_parameters(theta, [p for p in other.parameters() if p.requires_grad])
        expected.append(other(X).detach())
    samples = outputs_at(la.problem, X, thetas, BUDGET)
    torch.testing.assert_close(samples, torch.stack(expected), rtol=1e-10, atol=1e-10)
    assert not samples.requires_grad


def test_gradients_by_inputs_and_hyper_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted("all", "diag", enable_backprop=True)
    delta = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def gradients() -> tuple[Tensor, ...]:
        la.prior_precision = delta
        x = X.clone().requires_grad_()
        p = la(x, pred_type="nn", link_approx="mc", n_samples=SAMPLES, generator=torch.Generator().manual_seed(5))
        return torch.autograd.grad(p[:, 0].square().sum(), (x, delta))

    together = gradients()
    assert at_once(la.problem)[0] > 1
    monkeypatch.setattr(at_weights, "LEAST_SAMPLES", SAMPLES + 1)
    for a, b in zip(together, gradients(), strict=True):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore::laplace.errors.TuningWarning")
def test_candidates_of_a_grid_are_predicted_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted() -> tuple[list[int], list[Tensor]]:
        seen: list[Tensor] = []

        def loss(p: Tensor, y: Tensor) -> Tensor:
            seen.append(p)
            return functional.nll_loss(p.log(), y)

        la = fitted("all", "kron")
        torch.manual_seed(4)
        la.optimize_prior_precision(
            method="gridsearch", pred_type="nn", link_approx="mc", n_samples=SAMPLES, grid_size=5, loss=loss,
            val_loader=[(X, torch.arange(6) % 3)],
        )  # fmt: skip
        return at_once(la.problem), seen

    (decision, *_), together = predicted()
    monkeypatch.setattr(at_weights, "LEAST_SAMPLES", SAMPLES + 1)
    none, apart = predicted()
    assert len(together) == len(apart) >= 5 and decision > 1 and not none
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
