"""Convolutional networks: every dimension, padding mode, group and transposition, and the normalisations."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def conv_net(*layers: nn.Module, features: int, outputs: int = 3) -> nn.Sequential:
    """Layers, then Flatten and a dense head on that many features."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, outputs))


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, K, H, W]` -> the same shape."""
        h = torch.tanh(self.norm1(self.conv1(x)))
        return torch.tanh(x + self.norm2(self.conv2(h)))


class ResidualCNN(nn.Module):
    """Stem, one residual block, global average pooling, head."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.BatchNorm2d(3))
        self.activation = nn.ReLU(inplace=True) if inplace else nn.GELU()
        self.block = ResidualBlock(3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 1, H, W]` -> `[B, 3]`."""
        return self.head(self.block(self.activation(self.stem(x))).mean((2, 3)))
