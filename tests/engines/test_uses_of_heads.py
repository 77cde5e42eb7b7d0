"""Last layers that are called in other ways than once, as a module, behind the trunk."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from laplace import Laplace
from tests.reference.compare import assert_close
from tests.reference.curvature import ggn


class Net(nn.Module):
    """Trunk and head; subclasses say how the head is used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


class ByFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.trunk(x), self.head.weight, self.head.bias)


class GradientsSwitched(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            f = self.head(self.trunk(x))
        return 2 * f


class TrunkWithoutGradients(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.trunk(x)
        return self.head(h)


class Scaled(Net):
    """What comes after the head has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return self.head(h) + self.head(torch.sin(self.trunk(x + 1)))


class Normed(Net):
    """A weight that a hook computes before the head is called."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.head)
        with torch.no_grad():  # a weight that has a graph cannot be copied
            self(torch.zeros(1, 3))


class Parametrised(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.head)


class ReadBefore(Net):
    """Reads the head's weight before the head is called."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = self.head.weight.norm(dim=1)
        return super().forward(x) / lengths


class FunctionAndModule(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return functional.linear(h, self.head.weight).sin() + self.head(torch.cos(h))


class ForwardAndCall(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return self.head.forward(h).sin() + self.head(torch.cos(h))


class InPresentMode(Net):
    """Puts the mode of gradients back to what it was before the head."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            f = self.head(h)
        return f.sin() + self.head(torch.cos(h))


class StopsGradients(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        with torch.no_grad():
            constant = self.head(h * h)
        return self.head(h) - constant / 2


class RemembersCalls(Net):
    """Would give other outputs at a second pass of one prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.state, Tensor)
        f = functional.linear(self.trunk(x), self.head.weight, self.head.bias) + self.state
        self.state = self.state + 1
        return f


NETWORKS = [
    Net, ByFunction, GradientsSwitched, TrunkWithoutGradients, Scaled, Twice, Normed, Parametrised, ReadBefore,
    FunctionAndModule, ForwardAndCall, InPresentMode, StopsGradients, RemembersCalls,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:a forward pass in evaluation mode writes the buffers")  # of RemembersCalls
@pytest.mark.parametrize("build", NETWORKS)
def test_curvature_of_heads(build: Callable[[], Net]) -> None:
    torch.manual_seed(0)
    model = build().double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(3, (7,))
    la = Laplace(model, "classification", "last_layer", "full", last_layer_name="head")
    la.fit([(x, y)])
    names = [name for name, _ in model.named_parameters() if name.startswith("head")]
    assert_close(la.H, ggn(model, x, y, names, "classification"), "algebra")
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    mean, variances = la.functional_variance_fast(x)
    assert_close(mean, copy.deepcopy(model)(x).detach(), "algebra")
    assert (variances > 0).all()
