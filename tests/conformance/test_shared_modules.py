"""A module that a network knows by several names: one module, whose parameters are those of one layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.structures import STRUCTURES
from tests.reference.compare import assert_close


class Known(nn.Module):
    """A network that lists its layers a second time, as many do."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(2, 4), nn.Linear(4, 3)
        self.layers = nn.ModuleList([self.first, self.head] if twice else [])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


@pytest.mark.parametrize("weights", ["all", "last_layer", "subnetwork"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_second_name_changes_nothing(structure: str, weights: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 2).double(), torch.randint(0, 3, (6,))
    once, twice = Known(False).double(), Known(True).double()
    twice.load_state_dict(once.state_dict(), strict=False)
    twice.layers[0].load_state_dict(once.first.state_dict())
    before, held = copy.deepcopy(twice.state_dict()), list(twice.parameters())
    options = {"subnetwork_indices": torch.tensor([0, 3, 13, 20])} if weights == "subnetwork" else {}
    evidence = []
    for model in (once, twice):
        la = Laplace(model, "classification", weights, structure, **options)
        la.fit([(x, y)])
        evidence.append((la.log_marginal_likelihood(), la(x), la(x, "nn", generator=torch.Generator().manual_seed(0))))
    for found, expected in zip(evidence[1], evidence[0], strict=True):
        assert_close(found, expected, "backend")
    assert all(a is b and isinstance(a, nn.Parameter) for a, b in zip(twice.parameters(), held, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in twice.state_dict().items())


@pytest.mark.parametrize("name", ["head", "layers.1"])
def test_a_head_may_be_named_by_either(name: str) -> None:
    torch.manual_seed(0)
    model, x, y = Known(True), torch.randn(6, 2), torch.randint(0, 3, (6,))
    la = Laplace(model, "classification", "last_layer", "full", last_layer_name=name)
    la.fit([(x, y)])
    expected = Laplace(model, "classification", "last_layer", "full")
    expected.fit([(x, y)])
    assert torch.equal(la(x), expected(x))
    assert torch.equal(la.H, expected.H)
    assert isinstance(model.head.weight, nn.Parameter)
