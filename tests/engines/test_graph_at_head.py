"""A last layer's graph starts where the head is called: heads that are called in other ways, and what comes after."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "build", [Net, ByFunction, GradientsSwitched, TrunkWithoutGradients, Scaled, Twice, Normed, Parametrised]
)
def test_curvature_of_heads(build: Callable[[], Net]) -> None:
    torch.manual_seed(0)
    model = build().double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(3, (7,))
    la = Laplace(model, "classification", "last_layer", "full", last_layer_name="head")
    la.fit([(x, y)])
    names = [name for name, _ in model.named_parameters() if name.startswith("head")]
    assert_close(la.H, ggn(model, x, y, names, "classification"), "algebra")
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    variances = la.functional_variance_fast(x)[1]
    assert (variances > 0).all()
