"""The modules of a network, in PyTorch's order."""

from __future__ import annotations

from torch import nn

from laplace.network.tree import modules_of


def test_modules_are_those_of_pytorch_in_its_order() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.ModuleDict({"a": shared, "b": nn.Tanh()}), shared)
    model[0].register_module("none", None)
    assert modules_of(model) == list(model.modules())
