"""Arrays `[K, B, …]` of cotangents and data with their first two dimensions arranged in another way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def of_each(values: Tensor, outputs: Tensor) -> Tensor:
    """Entries `[K, B, …]` of `[C, B, …]` at outputs of every datum, `[B, K]`."""
    return values[outputs.T, torch.arange(len(outputs), device=outputs.device)]


def by_row(values: Tensor, n_positions: int) -> Tensor:
    """`[S·C, B, …]` as `[C, B·S, …]`."""
    return values.unflatten(0, (n_positions, -1)).movedim(0, 2).flatten(1, 2)


def concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The parts one after the other; without numbers their shape, for which PyTorch imports its compiler."""
    first = parts[0]
    if not first.is_meta:
        return torch.cat(list(parts), dim)
    return first.new_empty(*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :])


def entries_of(rows: Tensor, index: Tensor) -> Tensor:
    """Some entries `[..., q]` of rows `[..., n]`; without numbers by an operation that needs no compiler."""
    return rows.index_select(-1, index) if rows.is_meta else rows[..., index]
