"""Discovery of the last layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from laplace.errors import InvalidArgument
from laplace.weights.discovery import find_last_layer


def net(*tail: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), *tail)


@pytest.mark.parametrize(
    "tail",
    [
        (),
        (nn.Flatten(),),
        (nn.Softmax(-1),),
        (nn.Dropout(),),
        (nn.Identity(),),
        (nn.Dropout(), nn.Flatten(), nn.ReLU()),
    ],
)
def test_past_tails_without_parameters(tail):
    assert find_last_layer(net(*tail), torch.randn(2, 4)) == "2"


class Backwards(nn.Module):
    """Defined in another order than executed; a parameter of its own; a module that is never called."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.body = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(()))
        self.never = nn.Linear(9, 9)

    def forward(self, x):
        return self.head(self.body(self.scale * x))


def test_order_of_execution_decides():
    assert find_last_layer(Backwards(), torch.randn(2, 4)) == "head"
    assert find_last_layer(nn.Sequential(nn.ReLU(), Backwards()), torch.randn(2, 4)) == "1.head"
    assert find_last_layer(nn.Linear(4, 2), torch.randn(2, 4)) == ""


def test_mapping_and_tuple_inputs():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 2)

        def forward(self, data):
            return self.lin(data["x"])

    x = torch.randn(2, 3)
    assert find_last_layer(Takes(), {"x": x, "labels": torch.zeros(2)}) == "lin"
    assert find_last_layer(Takes(), x, forward_fn=lambda model, x: model({"x": x})) == "lin"


def test_parametrised_layers_are_layers():
    model = net()
    model[2] = parametrizations.weight_norm(nn.Linear(3, 2))
    assert find_last_layer(model, torch.randn(2, 4)) == "2"


def test_attention_at_the_end_is_reported_and_not_overlooked():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            x = self.lin(x)
            return self.attention(x, x, x, need_weights=False)[0]

    with pytest.raises(InvalidArgument, match=r"'attention' is of type MultiheadAttention.*last_layer_name="):
        find_last_layer(Attends(), torch.randn(2, 3, 4))


def test_errors_name_the_module_and_the_mend():
    with pytest.raises(InvalidArgument, match=r"'3' is of type LayerNorm.*last_layer_name=.*'2'"):
        find_last_layer(net(nn.LayerNorm(2)), torch.randn(2, 4))
    with pytest.raises(InvalidArgument, match=r"no module with parameters.*last_layer_name="):
        find_last_layer(nn.Sequential(nn.ReLU()), torch.randn(2, 4))


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_random_state_are_left_as_they_were(fails):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)).train()
    model[1].eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    keys = [list(vars(module)) for module in model.modules()]
    before = torch.get_rng_state()
    x = torch.randn(2, 5 if fails else 4, generator=torch.Generator().manual_seed(0))

    def forward(model, x):
        torch.rand(3)
        return model(x)

    if fails:
        with pytest.raises(RuntimeError):
            find_last_layer(model, x, forward)
    else:
        assert find_last_layer(model, x, forward) == "3"
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == flags
    assert [list(vars(module)) for module in model.modules()] == keys
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


def test_compiled_models():
    x = torch.randn(2, 4)
    compiled = torch.compile(net(), backend="eager")
    with torch.no_grad():  # Compilation itself warns about non-leaf inputs under gradients.
        compiled(x)
    assert find_last_layer(compiled, x) == "2"
    assert isinstance(compiled.get_submodule("2"), nn.Linear)
    partly = nn.Sequential(nn.Linear(4, 4), torch.compile(net(nn.Flatten()), backend="eager"))
    with torch.no_grad():
        partly(x)
    name = find_last_layer(partly, x)
    assert name == "1._orig_mod.2"
    assert isinstance(partly.get_submodule(name), nn.Linear)
