"""Arrays `[K, B, …]` of cotangents and data with their first two dimensions arranged in another way."""

from __future__ import annotations

import torch
from torch import Tensor


def of_each(values: Tensor, outputs: Tensor) -> Tensor:
    """Entries `[K, B, …]` of `[C, B, …]` at outputs of every datum, `[B, K]`."""
    return values[outputs.T, torch.arange(len(outputs), device=outputs.device)]


def by_row(values: Tensor, n_positions: int) -> Tensor:
    """`[S·C, B, …]` as `[C, B·S, …]`."""
    return values.unflatten(0, (n_positions, -1)).movedim(0, 2).flatten(1, 2)
