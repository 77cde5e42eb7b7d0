"""Log determinants relative to a prior, log det(s H + Δ) − log det Δ, from eigenvalues of H.

With c = s/δ the term of an eigenvalue h is log(1 + c h), and its slope in c is h / (1 + c h). Nothing cancels where
terms are small, and an eigenvalue of zero adds nothing: a null space may be left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laplace.core.layout import repeated
from laplace.core.precision_policy import widened

_PIECE = 2**16
"""Eigenvalues that are gone through at once, so that what is computed of them stays in the cache of one core."""


def log_det_ratio(values: Tensor, ratios: Tensor, sizes: Sequence[int]) -> Tensor:
    """Σ_i Σ_j log(1 + c_i h_ij), 0-dim, differentiable in both.

    Args:
        values: H, `[p]`, one run after the other; c h > −1.
        ratios: C, `[n]`, s/δ of every run.
        sizes: Lengths of the runs, n of them.
    """
    if len(values) <= _PIECE:
        return (values * (ratios if len(sizes) == 1 else repeated(ratios, sizes))).log1p().sum()
    return _InPieces.apply(values, ratios, sizes)[0]  # pyright: ignore[reportOptionalSubscript]


def _runs(values: Tensor, ratios: Tensor, sizes: Sequence[int]) -> Sequence[tuple[Tensor, Tensor]]:
    """Every run with its ratio, `[1]`."""
    if len(sizes) == 1:
        return [(values, ratios)]
    return list(zip(values.split(list(sizes)), ratios.split(1), strict=True))


def _slopes(values: Tensor, ratios: Tensor, sizes: Sequence[int]) -> Tensor:
    """Σ_j h_ij / (1 + c_i h_ij) of every run, `[n]`."""
    return torch.stack([(run / (1 + run * ratio)).sum() for run, ratio in _runs(values, ratios, sizes)])


class _InPieces(torch.autograd.Function):
    """The sum and its slopes in one pass, without temporaries of the size of `values`, and without a graph of them.

    Where its gradient is to have a graph, that is the graph of `_slopes`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, ratios: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        value = widened(values.new_zeros(()))
        slopes: list[Tensor] = []
        for run, ratio in _runs(values, ratios, sizes):
            slope = torch.zeros_like(value)
            for piece in run.split(_PIECE):
                scaled = piece * ratio
                value = value + scaled.log1p().sum()
                slope = slope + (piece / scaled.add_(1)).sum()
            slopes.append(slope)
        return value, torch.stack(slopes).to(ratios.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, ratios, ctx.sizes = inputs
        ctx.save_for_backward(values, ratios, output[1])
        ctx.save_for_forward(values, ratios)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, ratios, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():
            slopes = _slopes(values, ratios, ctx.sizes)
        by_values = gradients[0].to(values) * _by_values(values, ratios, ctx.sizes) if ctx.needs_input_grad[0] else None
        return by_values, gradients[0].to(slopes) * slopes, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, ratios = ctx.saved_tensors
        value = widened(values.new_zeros(()))
        if tangents[0] is not None:
            value = value + (tangents[0] * _by_values(values, ratios, ctx.sizes)).sum()
        if tangents[1] is not None:
            value = value + (tangents[1] * _slopes(values, ratios, ctx.sizes)).sum()
        return value, None


def _by_values(values: Tensor, ratios: Tensor, sizes: Sequence[int]) -> Tensor:
    """C_i / (1 + c_i h_ij), `[p]`."""
    return torch.cat([ratio / (1 + run * ratio) for run, ratio in _runs(values, ratios, sizes)])
