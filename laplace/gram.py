"""Symmetric products xᵀx, at little more than half the cost of a product."""

from __future__ import annotations

from torch import Tensor

_SYMMETRIC_BLOCK = 256


def add_gram(total: Tensor, x: Tensor, sign: float = 1.0) -> None:
    """Adds ±xᵀx of x `[N, D]` to the upper block triangle of total `[D, D]`; `mirror` completes it."""
    width = x.shape[1]
    for start in range(0, width, _SYMMETRIC_BLOCK):
        rows = x[:, start : start + _SYMMETRIC_BLOCK]
        total[start : start + rows.shape[1], start:].addmm_(rows.T, x[:, start:], alpha=sign)


def mirror(total: Tensor) -> Tensor:
    """Completes sums of `add_gram`, `[..., D, D]`, in place."""
    for start in range(0, total.shape[-1], _SYMMETRIC_BLOCK):
        stop = start + _SYMMETRIC_BLOCK
        total[..., stop:, start:stop] = total[..., start:stop, stop:].transpose(-1, -2)
    return total


def gram(x: Tensor) -> Tensor:
    """xᵀx of `[N, D]`, at little more than half the cost of the product."""
    total = x.new_zeros(x.shape[1], x.shape[1])
    add_gram(total, x)
    return mirror(total)


def group_gram(x: Tensor) -> Tensor:
    """Σ x xᵀ over all but the last two dimensions of `[..., G, D]`, `[G, D, D]`."""
    groups, width = x.shape[-2:]
    if groups == 1:
        return gram(x.reshape(-1, width)).unsqueeze(0)
    flat = x.reshape(-1, groups, width).permute(1, 2, 0)
    return flat @ flat.transpose(1, 2)
