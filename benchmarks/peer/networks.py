"""Networks of the comparison beyond those of `benchmarks.models`. Imports PyTorch alone."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import models


class Residual(nn.Module):
    """A stem, three residual pairs of 3×3 convolutions without norms, the mean over positions, and a linear layer.

    Args:
        channels: Of every convolution.
        n_classes: Outputs.
    """

    def __init__(self, channels: int = 16, n_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.first = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3))
        self.second = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(channels, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 3, H, W]` to `[B, n_classes]`."""
        h = self.stem(x)
        for first, second in zip(self.first, self.second, strict=True):
            h = h + second(torch.relu(first(torch.relu(h))))
        return self.head(torch.relu(h).mean((2, 3)))


class Block(nn.Module):
    """Attention with one head and a network per token, each with a skip connection, from linear layers alone.

    Args:
        width: Of a token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, width]` to the same."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v)
        return x + self.down(torch.relu(self.up(x)))


class Encoder(nn.Module):
    """Two encoder blocks, the mean over tokens, and a linear layer.

    Args:
        packed: `nn.TransformerEncoderLayer` with its packed attention weights and layer norms; else `Block`.
        width: Of a token.
        n_classes: Outputs.
    """

    def __init__(self, *, packed: bool, width: int = 32, n_classes: int = 10) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.Sequential(*(layer() if packed else Block(width) for _ in range(2)))
        self.head = nn.Linear(width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, width]` to `[B, n_classes]`."""
        return self.head(self.blocks(x).mean(1))


def build(name: str, sizes: tuple[int, ...]) -> nn.Module:
    """The network of a setting, in evaluation mode."""
    makers = {
        "WRN-16-4": models.wide_resnet,
        "LeNet 28×28": models.lenet,
        "LeNet 8×8": models.digits_lenet,
        "MLP": models.mlp,
        "residual": Residual,
        "ResNet, BatchNorm": partial(models.wide_resnet, depth=10, width=1),
        "encoder, linear": partial(Encoder, packed=False),
        "encoder, nn": partial(Encoder, packed=True),
    }
    return makers[name](*sizes).eval()


SHAPES: dict[str, tuple[int, ...]] = {
    "WRN-16-4": (3, 32, 32),
    "LeNet 28×28": (1, 28, 28),
    "LeNet 8×8": (1, 8, 8),
    "residual": (3, 16, 16),
    "ResNet, BatchNorm": (3, 16, 16),
    "encoder, linear": (16, 32),
    "encoder, nn": (16, 32),
}
"""Of one input; that of an MLP is its first width."""
