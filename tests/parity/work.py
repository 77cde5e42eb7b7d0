"""The networks, data and posteriors that both packages are asked about. Imports PyTorch alone.

Weights and data are drawn once and saved (`save`); both packages read the same file (`load`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

N_DATA, N_TEST = 8, 5
LIKELIHOODS = ("classification", "regression")
# Hyper-parameters of every posterior; the noise is of regression.
PRIOR, PRIOR_MEAN, NOISE, TEMPERATURE = 0.7, 0.05, 0.6, 1.3
# Samples of outputs and of weights; steps of Adam, and their size, when the prior is tuned.
SAMPLES, WEIGHT_SAMPLES, STEPS, RATE = 10_000, 1_000, 15, 0.05


class Residual(nn.Module):
    """A convolutional network with a skip connection, written with functions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, padding=1)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 1, H, W]` -> `[B, 3]`."""
        h = torch.tanh(self.stem(x))
        return self.head((h + torch.tanh(self.conv(h))).mean((2, 3)))


class Transformer(nn.Module):
    """An encoder block from linear layers alone: attention and a network per token, each with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.up, self.down, self.head = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 4]` -> `[B, 3]`."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(q @ k.mT / 2.0, dim=-1) @ v)
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(x.mean(1))


class EncoderLayer(nn.Module):
    """`nn.TransformerEncoderLayer`: packed attention weights and layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 4]` -> `[B, 3]`."""
        return self.head(self.encoder(x).mean(1))


def mlp() -> nn.Sequential:
    """A dense network, 3 inputs, 3 outputs."""
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def lenet() -> nn.Sequential:
    """Convolutions, pooling and dense layers, as in LeNet."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (3,)),
    "lenet": (lenet, (1, 10, 10)),
    "residual": (Residual, (1, 5, 5)),
    "transformer": (Transformer, (4, 4)),
    "encoder layer": (EncoderLayer, (4, 4)),
}


@dataclass(frozen=True)
class Posterior:
    """What a posterior is of: five names, of which `backend` is None for a package's default."""

    model: str
    likelihood: str
    subset: str
    structure: str
    backend: str | None = None

    def __str__(self) -> str:
        return "/".join([self.model, self.likelihood, self.subset, self.structure, self.backend or "default"])

    @property
    def empirical(self) -> bool:
        """Whether its curvature is an empirical Fisher."""
        return (self.backend or "").endswith("EF")


GRID = (
    ("all", "full"), ("all", "kron"), ("all", "diag"), ("last_layer", "full"), ("last_layer", "kron"),
    ("last_layer", "diag"), ("subnetwork", "full"), ("subnetwork", "diag"), ("all", "gp"), ("last_layer", "gp"),
)  # fmt: skip
BACKENDS = ("CurvlinopsGGN", "CurvlinopsEF", "BackPackGGN", "BackPackEF", "AsdlGGN", "AsdlEF")


def posteriors() -> list[Posterior]:
    """Every model by the default backend; a dense and a convolutional one by every backend."""
    found = [Posterior(m, k, *cell) for m in MODELS for k in LIKELIHOODS for cell in GRID]
    for model in ("mlp", "lenet"):
        parametric = [cell for cell in GRID if cell[1] != "gp"]
        found += [Posterior(model, k, *cell, b) for k in LIKELIHOODS for cell in parametric for b in BACKENDS]
    return found


@dataclass(frozen=True)
class Data:
    """Inputs and targets of training, and inputs of the predictions."""

    x: Tensor
    y: Tensor
    test: Tensor

    def loader(self) -> torch.utils.data.DataLoader:
        """The data in order, three batches."""
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(self.x, self.y), batch_size=3)


def save(path: Path) -> None:
    """Draws weights and data of every model, and writes them to a file."""
    state: dict[str, dict[str, Tensor]] = {}
    for seed, (name, (build, shape)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        network = build().double()
        for parameter in network.parameters():  # nowhere trivial, not even in biases and scales
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
        state[name] = network.state_dict()
        draws = torch.randn(N_DATA + N_TEST, *shape, dtype=torch.float64)
        targets = {
            "regression": torch.randn(N_DATA, 3, dtype=torch.float64),
            "classification": torch.arange(N_DATA) % 3,
        }
        state[f"{name} data"] = {"x": draws[:N_DATA], "test": draws[N_DATA:], **targets}
    torch.save(state, path)


def load(path: Path, model: str) -> nn.Module:
    """A fresh network with the saved weights, float64, in evaluation mode."""
    network = MODELS[model][0]().double().eval()
    network.load_state_dict(torch.load(path, weights_only=True)[model])
    return network


def data(path: Path, model: str, likelihood: str) -> Data:
    """The saved data of a model."""
    saved = torch.load(path, weights_only=True)[f"{model} data"]
    return Data(saved["x"], saved[likelihood], saved["test"])


def priors(n_tensors: int) -> Tensor:
    """One prior precision per tensor."""
    return torch.linspace(0.3, 2.0, n_tensors, dtype=torch.float64)


def subnetwork(n_params: int) -> Tensor:
    """Indices of a subnetwork: every third parameter, `[⌈P/3⌉]`."""
    return torch.arange(0, n_params, 3)
