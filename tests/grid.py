"""The grid of classes with a small network and data for each likelihood: what tests of behaviour run over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.likelihoods import LIKELIHOODS as NAMES
from laplace.parametric import ParametricLaplace
from laplace.structures import STRUCTURES as REGISTRY
from tests.pairs import turns

WEIGHTS = ("all", "last_layer", "subnetwork")
STRUCTURES = tuple(REGISTRY)
FIRST = ("full", "kron", "diag")
CELLS = [(weights, structure) for weights in WEIGHTS for structure in FIRST]
CELLS += [(WEIGHTS[i % 3], structure) for i, structure in enumerate(STRUCTURES) if structure not in FIRST]
"""Every choice of weights with the three structures that differ most, and every other structure with one in turn."""
TURNS = [(weights, structure) for structure, weights in turns(STRUCTURES, WEIGHTS)]
"""Every structure with one choice of weights in turn."""
REREAD = tuple(name for name, structure in REGISTRY.items() if structure.n_passes > 1)
DIAGONAL = [("all", "diag"), ("last_layer", "kron"), ("subnetwork", "full")]
"""Every choice of weights and every structure once, where a product would only repeat itself."""
LIKELIHOODS = tuple(NAMES)
PAIRS = ("heteroscedastic", "mean_log_variance")
"""Likelihoods with two outputs per target."""

N_DATA, WIDTH = 12, 3
INDICES = torch.tensor([0, 3, 17, 20, 21, 25])


class Rewards(nn.Module):
    """A reward per item: `[B, 2, d]` -> `[B, 2]`, `[B, d]` -> `[B, 1]`."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(WIDTH, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        r = self.head(torch.tanh(self.trunk(x)))
        return r.squeeze(-1) if x.ndim == 3 else r


def network(likelihood: str = "classification", n_outputs: int = 3) -> nn.Module:
    """A network that is always the same, in training mode, as a user's is after training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        if likelihood == "reward_modeling":
            return Rewards()
        width = 2 * n_outputs if likelihood in PAIRS else n_outputs
        return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, width))


def data(likelihood: str = "classification", n_outputs: int = 3, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `N_DATA` data."""
    generator = torch.Generator().manual_seed(seed)
    pair = (2,) if likelihood == "reward_modeling" else ()
    x = torch.randn(N_DATA, *pair, WIDTH, generator=generator)
    if likelihood == "poisson":
        return x, torch.poisson(torch.full((N_DATA, n_outputs), 2.0), generator=generator)
    if likelihood in ("regression", *PAIRS):
        return x, torch.randn(N_DATA, n_outputs, generator=generator)
    if likelihood == "bernoulli":
        return x, torch.randint(2, (N_DATA, n_outputs), generator=generator).float()
    return x, torch.randint(2 if pair else n_outputs, (N_DATA,), generator=generator)


def batches(likelihood: str = "classification", size: int = 5, **options: int) -> list[tuple[Tensor, Tensor]]:
    """The data in batches, the last one smaller."""
    x, y = data(likelihood, **options)
    return list(zip(x.split(size), y.split(size), strict=True))


def make(
    weights: str, structure: str, likelihood: Any = "classification", model: nn.Module | None = None, **options: Any
) -> ParametricLaplace:
    """An unfitted posterior of a cell."""
    if weights == "subnetwork":
        options.setdefault("subnetwork_indices", INDICES)
    name = likelihood if isinstance(likelihood, str) else likelihood.name
    return Laplace(network(name) if model is None else model, likelihood, weights, structure, **options)


def fitted(weights: str, structure: str, likelihood: str = "classification", **options: Any) -> ParametricLaplace:
    """A fitted posterior of a cell."""
    la = make(weights, structure, likelihood, **options)
    la.fit(batches(likelihood))
    return la


def predict(la: ParametricLaplace, likelihood: str = "classification") -> list[Tensor]:
    """A prediction at the training inputs, as a list of tensors."""
    prediction = la(data(likelihood)[0])
    return [prediction] if isinstance(prediction, Tensor) else list(prediction)
