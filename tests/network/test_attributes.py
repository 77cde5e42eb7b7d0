"""What modules hold besides tensors: nothing that changed is taken for the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.network.model_guard import private_copy
from laplace.network.watch import ModelState, attributes_of


class Layer(nn.Module):
    """Attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.name, self.nothing, self.sizes = 2.0, "a", None, (1, 2)
        self.values, self.table, self.chosen = [1, 2], {"a": [1]}, {1, 2}
        self.one: Any = ("adapter",)
        self.other: Any = object()
        self.inner = nn.Linear(2, 2)


def network() -> Any:
    return nn.Sequential(Layer(), nn.Conv2d(1, 1, 3), nn.Identity())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda m: setattr(m[0], "scale", 3.0),
    "a number for nothing": lambda m: setattr(m[0], "nothing", 0),
    "nothing for a string": lambda m: setattr(m[0], "name", None),
    "a tuple": lambda m: setattr(m[0], "sizes", (1, 3)),
    "an entry of a list": lambda m: m[0].values.append(3),
    "an entry of an inner list": lambda m: m[0].table["a"].append(3),
    "an entry of a set": lambda m: m[0].chosen.add(3),
    "another list": lambda m: setattr(m[0], "values", [2, 1]),
    "a new attribute": lambda m: setattr(m[0], "new", 1),
    "an attribute less": lambda m: delattr(m[0], "scale"),
    "one for another": lambda m: (delattr(m[0], "nothing"), setattr(m[0], "new", None)),
    "a plain one for another kind": lambda m: setattr(m[0], "other", 1),
    "another kind for a plain one": lambda m: setattr(m[0], "scale", object()),
    "an own setting": lambda m: setattr(m[1], "padding_mode", "reflect"),
    "a module": lambda m: m.__setitem__(2, nn.Identity()),
    "the order of modules": lambda m: m.insert(0, m.pop(2)),
    "a name of a module": lambda m: m._modules.update({"3": m._modules.pop("2")}),
    "a module more": lambda m: m.append(nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_that_changed_is_taken_for_the_same(change: str) -> None:
    model = network()
    state = ModelState.from_model(model)
    assert ModelState.from_model(model).settings == state.settings
    CHANGES[change](model)
    assert ModelState.from_model(model).settings != state.settings


UNCHANGED: dict[str, Callable[[Any], Any]] = {
    "an equal list": lambda m: setattr(m[0], "values", [1, 2]),
    "one name in another form": lambda m: setattr(m[0], "one", ["adapter"]),
    "another object": lambda m: setattr(m[0], "other", object()),
    "the training mode": lambda m: m.eval(),
    "a weight": lambda m: nn.init.zeros_(m[0].inner.weight),
    "a hook": lambda m: m[0].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", UNCHANGED)
def test_what_makes_no_difference_leaves_the_attributes_equal(change: str) -> None:
    model = network()
    attributes = attributes_of(model)
    UNCHANGED[change](model)
    assert attributes == attributes_of(model)


def test_attributes_are_those_of_then() -> None:
    model = network()
    attributes = attributes_of(model)
    model[0].values.append(3)
    model[0].table["a"].append(3)
    assert dict(attributes["values"]) == {"0": ("list", 1, 2)}
    assert dict(attributes["table"]) == {"0": ("dict", ("tuple", "a", 1))}
    assert "other" not in attributes


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_of_a_state_is_that_of_another_network(copied: Callable[[ModelState], ModelState]) -> None:
    state = ModelState.from_model(network())
    assert copied(state).settings is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_scripted_part_of_a_network_is_preserved_and_compared() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))), nn.Linear(4, 3))
    buffers = [buffer.clone() for buffer in model.buffers()]
    x = torch.randn(8, 3)
    with private_copy(model):
        model.train()
        model(x)
    assert all(map(torch.equal, model.buffers(), buffers))
    la = Laplace(model, "regression", "last_layer", "diag", last_layer_name="1")
    la.fit([(x, x)])
    la(x)
    assert la.fingerprint is not None and la.fingerprint.state.settings == ModelState.from_model(model).settings
    assert all(map(torch.equal, model.buffers(), buffers))
