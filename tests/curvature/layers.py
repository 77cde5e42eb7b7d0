"""Small networks, each with one layer in one configuration, for the tables of what other packages differentiate."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace.engines.engine import CurvatureEngine
from laplace.likelihoods import get_likelihood
from laplace.weights.base import AllWeights
from tests.reference import curvature as reference

N_DATA, N_CLASSES = 4, 3
SHAPES = {0: (5,), 1: (2, 7), 2: (2, 5, 5), 3: (2, 3, 3, 3)}
"""Shape of a datum by the number of its dimensions of space."""


@dataclass(frozen=True)
class Built:
    """A network with data of a classification.

    Attributes:
        model: In float64 and evaluation mode.
        x: `[B, ...]`.
        y: Labels `[B]`.
    """

    model: nn.Module
    x: Tensor
    y: Tensor

    def engine(self, backend: Any, likelihood: str = "classification", **options: Any) -> CurvatureEngine:
        """The engine of a backend for all weights."""
        problem = AllWeights(self.model).discover(self.x)
        return backend(self.model, likelihood, **options).engine(problem, get_likelihood(likelihood))


def chain(dimensions: int, *layers: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Built:
    """Some layers, and a linear one on what they give, flattened."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(repr([dimensions, len(layers)]).encode()))
        made = [layer() for layer in layers]
        x = torch.randn(N_DATA, *SHAPES[dimensions])
        width = nn.Sequential(*made).eval()(x.clone()).flatten(1).shape[1]
        return built(nn.Sequential(*made, nn.Flatten(), nn.Linear(width, N_CLASSES)), x, dtype)


def built(model: nn.Module, x: Tensor, dtype: torch.dtype = torch.float64) -> Built:
    """A network with random parameters and statistics, none of them trivial, and labels."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.3 * (tensor.ndim > 1))
    labels = torch.randint(N_CLASSES, (len(x),), generator=generator)
    return Built(model.to(dtype).eval(), x.to(dtype), labels)


@dataclass(frozen=True)
class Truth:
    """J `[B, C, P]`, the GGN and the empirical Fisher `[P, P]`."""

    jacobian: Tensor
    ggn: Tensor
    ef: Tensor


def truth(case: Built) -> Truth:
    """What a network's curvatures are, by plain loops."""
    J, f = reference.flat_jacobian(case.model, case.x, reference.trainable_names(case.model))
    r = reference.residual(f, case.y, "classification")
    gradients = torch.einsum("bcp,bc->bp", J, r)
    inner = reference.output_hessian(f, "classification", case.y)
    return Truth(J, torch.einsum("bcp,bcd,bdq->pq", J, inner, J), gradients.T @ gradients)


def dense_jacobian(engine: CurvatureEngine, x: Tensor) -> Tensor:
    """J `[B, C, P]` of an engine."""
    return torch.cat([jacobian.dense() for jacobian, _ in engine.jacobian(x)])


class Steps(nn.Module):
    """Two layers and a function of them, of the network's inputs and of a shared activation.

    Args:
        forward: The function.
        middle: The layer between.
    """

    def __init__(self, forward: Callable[[Steps, Tensor], Tensor], middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), middle or nn.Linear(5, 5), nn.Linear(5, N_CLASSES)
        self.activation, self.in_place = nn.Tanh(), nn.ReLU(inplace=True)
        self.steps = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(self, x)


STEPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "modules": lambda m, x: m.last(m.activation(m.second(m.activation(m.first(x))))),
    "residual": lambda m, x: m.last(m.activation(m.second(m.first(x))) + x),
    "function between": lambda m, x: m.last(F.gelu(m.second(m.activation(m.first(x))))),
    "written in place between": lambda m, x: m.last(m.activation(m.second(m.first(x).mul_(2.0)))),
    "outputs changed in place": lambda m, x: m.last(m.activation(m.second(m.activation(m.first(x))))).mul_(3.0),
    "activation in place": lambda m, x: m.last(m.in_place(m.second(m.activation(m.first(x))))),
    "layer twice": lambda m, x: m.last(m.second(m.activation(m.second(m.first(x))))),
    "weight by a function": lambda m, x: m.last(F.linear(m.activation(m.second(m.first(x))), m.second.weight)),
    "branches": lambda m, x: m.last(m.activation(m.first(x)) * m.second(x)),
}
"""Networks by what happens in them."""


@cache
def network(name: str) -> tuple[Built, Truth]:
    """A network of `STEPS` with its truth."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        case = built(Steps(STEPS[name]), torch.randn(N_DATA, *SHAPES[0]))
    return case, truth(case)
