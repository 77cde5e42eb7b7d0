"""Networks of the experiments, with weights that a seed determines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


def mlp(sizes: Sequence[int], seed: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths, inputs and outputs included, with an activation between them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Flatten()]
        for n_in, n_out in pairwise(sizes[:-1]):
            layers += [nn.Linear(n_in, n_out), activation()]
        return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def cnn(
    n_outputs: int,
    seed: int,
    n_channels: int = 16,
    n_inputs: int = 1,
    size: int = 8,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Two convolutions of width 3 with pooling, a hidden layer and a head; images `[B, n_inputs, size, size]`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wide = 2 * n_channels
        return nn.Sequential(
            nn.Conv2d(n_inputs, n_channels, 3, padding=1), activation(), nn.MaxPool2d(2),
            nn.Conv2d(n_channels, wide, 3, padding=1), activation(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(wide * (size // 4) ** 2, 4 * n_channels), activation(),
            nn.Linear(4 * n_channels, n_outputs),
        )  # fmt: skip


def strided_cnn(n_outputs: int, seed: int, n_channels: int = 16, size: int = 14) -> nn.Sequential:
    """As `cnn` with steps of two in place of pooling, after LeNet; grey images `[B, 1, size, size]`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wide, left = 2 * n_channels, -(-size // 4)
        return nn.Sequential(
            nn.Conv2d(1, n_channels, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(n_channels, wide, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(wide * left**2, 4 * n_channels), nn.ReLU(), nn.Linear(4 * n_channels, n_outputs),
        )  # fmt: skip


def cnn_with_batch_norm(n_outputs: int, seed: int, n_channels: int = 16, n_inputs: int = 3) -> nn.Sequential:
    """Three convolutions of width 3 with batch normalisation, then a head on channels averaged over quarters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wide = 2 * n_channels
        return nn.Sequential(
            nn.Conv2d(n_inputs, n_channels, 3, stride=2, padding=1), nn.BatchNorm2d(n_channels), nn.ReLU(),
            nn.Conv2d(n_channels, n_channels, 3, padding=1), nn.BatchNorm2d(n_channels), nn.ReLU(),
            nn.Conv2d(n_channels, wide, 3, stride=2, padding=1), nn.BatchNorm2d(wide), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * wide, n_outputs),
        )  # fmt: skip
