"""Networks whose outputs have positions, by brute force: every position of every datum is a row of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.reference import curvature


class Rows(nn.Module):
    """A network with outputs `[B, *positions, C]`, or with the channels elsewhere, as one with outputs `[B·T, C]`."""

    def __init__(self, network: nn.Module, channel_dim: int = -1) -> None:
        super().__init__()
        self.network = network
        self.channel_dim = channel_dim

    def forward(self, x: Any) -> Tensor:
        f = curvature.outputs(self.network, x).movedim(self.channel_dim, -1)
        return f.reshape(-1, f.shape[-1])


def target_rows(y: Tensor, labels: bool, channel_dim: int = -1) -> Tensor:
    """Labels `[B, *positions]` as `[B·T]`, values of the shape of the outputs as `[B·T, C]`."""
    return y.flatten() if labels else y.movedim(channel_dim, -1).flatten(0, -2)
