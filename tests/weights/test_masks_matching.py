"""Masks by regular expression, by type of module and by a function."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from laplace.utils import CallableSubnetMask, ModuleTypeSubnetMask, RegexSubnetMask
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InvalidArgument, InvalidType
from tests import grid


class Block(nn.Module):
    """Two normalised layers, the second with its weight frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 3)
        self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


@pytest.fixture
def model() -> nn.Module:
    """Trainable vector: first.weight 0–5, first.bias 6–7, norm.weight 8–9, norm.bias 10–11, second.bias 12–14."""
    return Block()


@pytest.mark.parametrize(
    ("pattern", "indices"),
    [
        (r"bias$", [6, 7, 10, 11, 12, 13, 14]),
        (r"^norm\.", [8, 9, 10, 11]),
        (r"second", [12, 13, 14]),  # the frozen weight has no place
        (re.compile("NORM", re.IGNORECASE), [8, 9, 10, 11]),
        (r"^(first\.bias|norm\.weight)$", [6, 7, 8, 9]),
    ],
)
def test_regular_expressions(model: nn.Module, pattern: Any, indices: list[int]) -> None:
    mask = RegexSubnetMask(model, pattern)
    assert mask.select().tolist() == indices
    assert mask.n_params_subnet == len(indices)


@pytest.mark.parametrize(
    ("types", "indices"),
    [
        (nn.LayerNorm, [8, 9, 10, 11]),
        (nn.Linear, [*range(8), 12, 13, 14]),
        ([nn.LayerNorm, nn.Embedding], [8, 9, 10, 11]),
        (Block, list(range(15))),
    ],
)
def test_module_types(model: nn.Module, types: Any, indices: list[int]) -> None:
    assert ModuleTypeSubnetMask(model, types).select().tolist() == indices


def test_functions_choose_tensors_and_entries(model: nn.Module) -> None:
    seen: dict[str, torch.Size] = {}

    def choose(name: str, value: Tensor) -> bool | Tensor:
        seen[name] = value.shape
        chosen = value == value.max() if name == "first.weight" else name.startswith("second")
        value.zero_()  # a copy
        return chosen

    best = int(model.first.weight.argmax())
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert CallableSubnetMask(model, choose).select().tolist() == [best, 12, 13, 14]
    assert "second.weight" not in seen
    assert seen["first.weight"] == (2, 3)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    ones = CallableSubnetMask(model, lambda name, value: torch.ones(value.shape, dtype=torch.int64))
    assert ones.select().tolist() == list(range(15))


def test_a_tied_tensor_goes_by_either_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert RegexSubnetMask(model, r"^b\.weight").select().tolist() == [0, 1, 2, 3]
    assert ModuleTypeSubnetMask(model, nn.Linear).select().tolist() == list(range(6))


@pytest.mark.parametrize("structure", grid.STRUCTURES)
def test_they_select_subnetworks_of_every_structure(structure: str) -> None:
    model = grid.network()
    indices = RegexSubnetMask(model, "bias").select()
    la = Laplace(model, "classification", "subnetwork", structure, subnetwork_indices=indices)
    la.fit(grid.batches())
    assert la.n_params == len(indices) == 8
    assert la(grid.data()[0]).shape == (grid.N_DATA, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: RegexSubnetMask(m, "conv"), r"pattern='conv' matches none.*first\.weight"),
        (lambda m: RegexSubnetMask(m, r"second\.weight"), "none of the trainable"),
        (lambda m: RegexSubnetMask(m, "("), r"pattern='\('.*regular expression"),
        (lambda m: RegexSubnetMask(m, 3), "pattern=3"),
        (lambda m: ModuleTypeSubnetMask(m, nn.Embedding), r"Embedding.*'LayerNorm', 'Linear'"),
        (lambda m: ModuleTypeSubnetMask(m, nn.Tanh), "no module of these types"),
        (lambda m: CallableSubnetMask(m, lambda name, value: False).select(), "chose none of"),
        (lambda m: CallableSubnetMask(m, lambda name, value: value).select(), r"first\.weight.*float32.*\[2, 3\]"),
        (lambda m: CallableSubnetMask(m, lambda name, value: 1).select(), "returned 1"),
        (lambda m: CallableSubnetMask(m, lambda name, value: torch.full(value.shape, 2)).select(), "integers 0 and 1"),
    ],
)
def test_errors_say_what_there_is(model: nn.Module, make: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make(model)


def test_wrong_types_are_errors(model: nn.Module) -> None:
    with pytest.raises(InvalidType, match="classes of modules"):
        ModuleTypeSubnetMask(model, ["Linear"])
    with pytest.raises(InvalidType, match="choose=3"):
        CallableSubnetMask(model, 3)
