"""Wide residual networks (Zagoruyko and Komodakis, 2016), the papers' network for CIFAR-10."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class WideBlock(nn.Module):
    """Two convolutions beside a shortcut, activations first.

    Args:
        n_inputs: Channels in.
        n_outputs: Channels out.
        stride: Of the first convolution.
    """

    def __init__(self, n_inputs: int, n_outputs: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(n_inputs), nn.BatchNorm2d(n_outputs)])
        self.first = nn.Conv2d(n_inputs, n_outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(n_outputs, n_outputs, 3, padding=1, bias=False)
        same = n_inputs == n_outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(n_inputs, n_outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, n_inputs, H, W]` to `[B, n_outputs, H/stride, W/stride]`."""
        first, second = self.norms
        h = F.relu(first(x))
        return self.second(F.relu(second(self.first(h)))) + self.shortcut(h)


def wide_resnet(n_outputs: int, seed: int, depth: int = 16, width: int = 4) -> nn.Sequential:
    """WRN-depth-width for images `[B, 3, 32, 32]`: 2.75 million parameters at 16 and 4."""
    n_blocks = (depth - 4) // 6
    channels = [16, 16 * width, 32 * width, 64 * width]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Conv2d(3, channels[0], 3, padding=1, bias=False)]
        for stage, n_channels in enumerate(channels[1:]):
            for block in range(n_blocks):
                n_inputs = channels[stage] if block == 0 else n_channels
                layers.append(WideBlock(n_inputs, n_channels, 2 if stage > 0 and block == 0 else 1))
        return nn.Sequential(
            *layers, nn.BatchNorm2d(channels[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(channels[-1], n_outputs),
        )  # fmt: skip
