"""Fully connected networks and the odd ways in which a dense layer can be used."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.Tanh, bias: bool = True) -> nn.Sequential:
    """Linear layers of the given sizes with an activation between them."""
    layers: list[nn.Module] = []
    for i, (size_in, size_out) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(size_in, size_out, bias=bias)] + ([activation()] if i < len(sizes) - 2 else [])
    return nn.Sequential(*layers)


class ReusedTwice(nn.Module):
    """One hidden layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.hidden, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 3]` -> `[B, 3]`."""
        h = torch.tanh(self.inp(x))
        h = torch.tanh(self.hidden(h))
        return self.head(torch.tanh(self.hidden(h)))


class FunctionalReuse(nn.Module):
    """A layer that is called, and whose weight is used once more behind the module's back."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.hidden, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 3]` -> `[B, 2]`."""
        h = torch.tanh(self.inp(x))
        return self.head(torch.tanh(self.hidden(h)) + F.linear(h.sin(), self.hidden.weight))


class FunctionalOnly(nn.Module):
    """A layer whose module is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 3]` -> `[B, 2]`."""
        return self.head(torch.tanh(F.linear(x, self.inp.weight, self.inp.bias)))


class BareParameter(nn.Module):
    """Parameters that belong to no layer: a matrix, a scale and a 0-dim temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(3, 6), nn.Linear(6, 3)
        self.mix = nn.Parameter(torch.randn(6, 6) / 2)
        self.scale = nn.Parameter(torch.ones(6))
        self.sharpness = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 3]` -> `[B, 3]`."""
        h = torch.tanh(self.inp(x)) @ self.mix
        return self.head(torch.tanh(h * self.scale)) * self.sharpness


class Adapter(nn.Module):
    """LoRA-like: a frozen layer plus a trainable low-rank product."""

    def __init__(self, size_in: int, size_out: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(size_in, size_out).requires_grad_(False)
        self.down = nn.Linear(size_in, rank, bias=False)
        self.up = nn.Linear(rank, size_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, I]` -> `[B, O]`."""
        return self.base(x) + 2.0 * self.up(self.down(x))


class PairReward(nn.Module):
    """A reward of each candidate of a pair: `[B, 2, d]` -> `[B, 2]`, and `[B, d]` -> `[B, 1]`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Rewards, by the layers' own handling of the middle dimension."""
        return self.net(x).squeeze(-1) if x.dim() == 3 else self.net(x)


class PairView(PairReward):
    """The same with the pair folded into the batch, pair by pair."""

    def forward(self, x: Tensor) -> Tensor:
        """Rewards, by a view `[2B, d]`."""
        return self.net(x.reshape(-1, x.shape[-1])).view(x.shape[0], -1)


class PairCat(PairReward):
    """The same with all first candidates before all second ones."""

    def forward(self, x: Tensor) -> Tensor:
        """Rewards, by concatenation of the halves `[2B, d]`."""
        if x.dim() == 2:
            return self.net(x)
        both = self.net(torch.cat([x[:, 0], x[:, 1]]))
        return torch.cat(both.chunk(2), dim=1)


class DictInput(nn.Module):
    """Takes a mapping with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(5, 5, 3)

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        """`{"input_ids": [B, 3], "extra": [B, 2]}` -> `[B, 3]`."""
        return self.net(torch.cat([data["input_ids"], data["extra"]], dim=1))


class LogitsOutput:
    """What a model of a language library returns: an object with the outputs in an attribute."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class LogitsObject(nn.Module):
    """Returns an object with `.logits`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 5, 3)

    def forward(self, x: Tensor) -> LogitsOutput:
        """`[B, 3]` -> logits `[B, 3]`."""
        return LogitsOutput(self.net(x))


class RowView(nn.Module):
    """Positions folded into the batch: `(B·T, D)` inside, `[B, T, D]` outside."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.head = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 3]` -> `[B, 3]`."""
        h = torch.tanh(self.lin(x.reshape(-1, 3))).view(x.shape[0], x.shape[1], 5)
        return self.head(_weighted_mean(h, dim=1))


class SharedPositions(nn.Module):
    """Dense layers on tokens, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.head = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 3]` -> `[B, 3]`."""
        return self.head(_weighted_mean(torch.tanh(self.lin(x)), dim=1))


class TimeMajor(SharedPositions):
    """Dense layers on tokens, time first: with T = B the shapes look the same."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 3]` -> `[B, 3]`."""
        return self.head(_weighted_mean(torch.tanh(self.lin(x.transpose(0, 1))), dim=0))


def _weighted_mean(h: Tensor, dim: int) -> Tensor:
    """Mean with a different weight for each position, so that a swap of batch and time is seen."""
    shape = [1] * h.dim()
    shape[dim] = -1
    weight = torch.arange(1, h.shape[dim] + 1, dtype=h.dtype, device=h.device).view(shape)
    return (h * weight).sum(dim) / weight.sum()
