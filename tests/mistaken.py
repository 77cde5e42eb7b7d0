"""Networks and data of the tables of mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from tests import grid

C, R, B = "classification", "regression", "bernoulli"
X, Y = grid.data()
XR, YR = grid.data(R)
Y1 = YR[:, :1]
WIDE = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net(n_outputs: int = 3) -> nn.Module:
    return grid.network(n_outputs=n_outputs)


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, 3))


def new(model: nn.Module | None = None, likelihood: str = C, weights: str = "all", structure: str = "full",
        **options: Any) -> Any:  # fmt: skip
    return Laplace(net() if model is None else model, likelihood, weights, structure, **options)


def fitted(*args: Any, **options: Any) -> Any:
    la = new(*args, **options)
    la.fit([(X, Y if la.likelihood == C else YR)])
    return la


def fit(x: Any, y: Any, model: nn.Module | None = None, likelihood: str = C, weights: str = "all") -> None:
    new(model, likelihood, weights).fit([(x, y)])


class Net(nn.Module):
    """A network of two layers and what users make of its outputs."""

    def __init__(self, end: Callable[[Tensor], Any] = lambda f: f, n_outputs: int = 3) -> None:
        super().__init__()
        self.body, self.head, self.end = nn.Linear(3, 4), nn.Linear(4, n_outputs), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.head(torch.tanh(self.body(x))))


class Unused(Net):
    """Has a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class NoGrad(Net):
    """Was decorated for evaluation."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class FixedBody(Net):
    """Computes its features without gradients, and yet they are trainable."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            features = torch.tanh(self.body(x))
        return self.head(features)


class Matrix(nn.Module):
    """Multiplies by itself, without a layer of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Listed(nn.Module):
    """Hides its layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(3, 3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class OwnLinear(nn.Linear):
    """A layer of an adapter package: derived from PyTorch's."""


class Sines(nn.Module):
    """A layer that no rule explains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,oi->bo", x, self.weight.sin())


class TwoHeads(nn.Module):
    """Adds what two heads say."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.one(h) + self.two(h)


class Switched(Net):
    """Has an adapter that an attribute switches."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.enabled = nn.Linear(3, 3), True

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.adapter(x) if self.enabled else x)


class AlwaysDropped(Net):
    """Draws a dropout mask in evaluation mode too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(nn.functional.dropout(x, 0.3, training=True))


class WithLabels(nn.Module):
    """Takes the mapping whole, and may be given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, data: Any, labels: Tensor | None = None) -> Tensor:
        assert labels is None
        return self.net(data["x"])


def tiny_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config).eval()


def tiny_t5() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()
