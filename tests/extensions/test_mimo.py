"""One network with several inputs and heads as a mixture."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, MixtureLaplace, from_mimo
from laplace.errors import InvalidArgument, InvalidData
from tests import grid
from tests.reference.compare import assert_close

HEADS, CLASSES, WIDTH = 3, 3, 5


class Stacked(nn.Module):
    """The heads along a dimension of their own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).unflatten(1, (HEADS, CLASSES))


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(
            nn.Linear(HEADS * grid.WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, HEADS * CLASSES)
        ).double()  # fmt: skip


def single(model: nn.Sequential, head: int) -> nn.Sequential:
    """A network of one input that computes x ↦ f_m(x, …, x), with copied weights."""
    trunk, last = model[0], model[2]
    first = nn.Linear(grid.WIDTH, WIDTH).double()
    own = nn.Linear(WIDTH, CLASSES).double()
    rows = slice(head * CLASSES, (head + 1) * CLASSES)
    with torch.no_grad():
        first.weight.copy_(trunk.weight.unflatten(1, (HEADS, grid.WIDTH)).sum(1))
        first.bias.copy_(trunk.bias)
        own.weight.copy_(last.weight[rows])
        own.bias.copy_(last.bias[rows])
    return nn.Sequential(first, nn.Tanh(), own)


def batches(likelihood: str = "classification") -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y.double() if y.is_floating_point() else y) for x, y in grid.batches(likelihood)]


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("stacked", [False, True])
def test_heads_are_last_layers_of_single_networks(likelihood: str, structure: str, stacked: bool) -> None:
    """Predictions and evidence are those of a mixture of networks that have one head each."""
    model, x = network(), grid.data(seed=9)[0].double()
    whole = Stacked(model) if stacked else model
    name = "inner.2" if stacked else "2"
    mimo = from_mimo(
        whole, HEADS, likelihood, hessian_structure=structure, last_layer_name=name, weights="evidence",
        prior_precision=0.3,
    )  # fmt: skip
    heads = [Laplace(single(model, m), likelihood, "last_layer", structure, prior_precision=0.3) for m in range(HEADS)]
    apart = MixtureLaplace(heads, weights="evidence")
    for mixture in (mimo, apart):
        mixture.fit(batches(likelihood))
    assert [la.n_params for la in mimo.components] == [CLASSES * (WIDTH + 1)] * HEADS
    assert_close(mimo.log_marginal_likelihood(), apart.log_marginal_likelihood(), "backend")
    assert_close(mimo.weights, apart.weights, "backend")
    if likelihood == "classification":
        assert_close(mimo(x), apart(x), "backend")
    else:
        for found, expected in zip(mimo(x), apart(x), strict=True):
            assert_close(found, expected, "backend")


def test_defaults() -> None:
    """The full GGN of each head, found by an example; the network is lent, not copied."""
    model, x = network(), grid.data(seed=9)[0].double()
    before = copy.deepcopy(model.state_dict())
    mimo = from_mimo(model, HEADS, example=x)
    assert [type(la).__name__ for la in mimo.components] == ["FullSubnetLaplace"] * HEADS
    assert all(la.model is model for la in mimo.components)
    mimo.fit(batches())
    mimo.optimize_prior_precision(n_steps=3)
    assert_close(mimo(x).sum(1), torch.ones(len(x)), "algebra")
    other = from_mimo(model, HEADS, last_layer_name="2")
    other.load_state_dict(mimo.state_dict())
    assert torch.equal(other(x), mimo(x))
    assert torch.equal(copy.deepcopy(mimo)(x), mimo(x))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_all_weights() -> None:
    model, x = network(), grid.data(seed=9)[0].double()
    mimo = from_mimo(model, HEADS, "classification", "all", "diag")
    mimo.fit(batches())
    expected = []
    for head in range(HEADS):
        part = Laplace(
            model, "classification", "all", "diag",
            forward_fn=lambda net, x, m=head: net(torch.cat([x] * HEADS, 1))[:, m * CLASSES : (m + 1) * CLASSES],
        )  # fmt: skip
        part.fit(batches())
        expected.append(part(x))
    assert_close(mimo(x), torch.stack(expected).mean(0), "algebra")


def test_a_head_is_fitted_at_inputs_of_its_own() -> None:
    """With M inputs each is seen in its own place."""
    model, (x, y) = network(), grid.data()
    inputs = [x.double().roll(m, 0) for m in range(HEADS)]
    mimo = from_mimo(model, HEADS, last_layer_name="2")
    la = mimo.components[1]
    la.fit([(*inputs, y.roll(1, 0))])
    expected = nn.functional.cross_entropy(model(torch.cat(inputs, 1))[:, 3:6], y.roll(1, 0), reduction="sum")
    assert_close(la.loss, expected, "algebra")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "last_layer_name"),
        ({"last_layer_name": "1"}, "nn.Linear"),
        ({"last_layer_name": "2", "n_heads": 2}, "9 outputs"),
        ({"last_layer_name": "2", "n_heads": 0}, "n_heads"),
        ({"last_layer_name": "2", "subset_of_weights": "subnetwork"}, "subset_of_weights"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        from_mimo(network(), **{"n_heads": HEADS} | options)


def test_refused_data_and_networks() -> None:
    mimo = from_mimo(network(), HEADS, last_layer_name="2")
    x = torch.zeros(2, grid.WIDTH, dtype=torch.float64)
    with pytest.raises(InvalidData, match="tuple of 3"):
        mimo.fit([(x, x, torch.tensor([0, 1]))])
    frozen = network()
    frozen[2].requires_grad_(False)
    with pytest.raises(InvalidArgument, match="frozen"):
        from_mimo(frozen, HEADS, last_layer_name="2")
    wrong = nn.Sequential(nn.Linear(HEADS * grid.WIDTH, HEADS * 2), nn.Linear(HEADS * 2, 4)).double()
    mimo = from_mimo(wrong, HEADS, last_layer_name="0")
    with pytest.raises(InvalidData, match="heads"):
        mimo.fit([(x, torch.tensor([0, 1]))])
