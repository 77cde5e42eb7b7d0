"""Kernels of the linearised network, k(x, x') = J(x) D⁻¹ J(x')ᵀ (Immer et al., 2021, equation 14), from factors.

For a layer with inputs a and output gradients g the kernel is Σ_tt' (a_t · a'_t')(g_ct · g'_c't'), summed over layers:
products of the factors, without a Jacobian `[B, C, P]`. Everything is contracted in float64, for a posterior variance
is a difference of two kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laplace.core.precision_policy import wide_dtype, widened
from laplace.jacobian.blocks import Block, DenseBlock
from laplace.jacobian.contractions import total
from laplace.jacobian.factored import flat_product
from laplace.jacobian.jacobian import Jacobian

Scales = Sequence[Tensor] | None
"""A factor per random parameter, 0-dim or `[1]` each: its prior variance; None for ones."""


def kernel(first: Jacobian, second: Jacobian, scales: Scales = None) -> Tensor:
    """K between the data of two Jacobians, `[B, C, M, C]`, float64.

    Args:
        first: J of B data.
        second: J of M data.
        scales: Prior variance of every random parameter.
    """
    pairs = zip(first.blocks, second.blocks, strict=True)
    return total(_scaled(block_kernel(x, y), scales, i) for i, (x, y) in enumerate(pairs)).permute(1, 0, 3, 2)


def kernel_at(jacobian: Jacobian, scales: Scales = None) -> Tensor:
    """k(x_b, x_b) of every datum, `[B, C, C]`, float64."""
    return jacobian.sum_over_blocks(lambda i, block: _scaled(_double(block).weighted_gram(_ones(block)), scales, i))


def kernel_diagonal(jacobian: Jacobian, scales: Scales = None) -> Tensor:
    """Its diagonals, `[B, C]`, float64."""
    return jacobian.sum_over_blocks(lambda i, block: _scaled(_double(block).weighted_norms(_ones(block)), scales, i))


def block_kernel(x: Block, y: Block) -> Tensor:
    """Σ_p J[k, b, p] J'[l, m, p] of the blocks of one tensor, `[K, B, L, M]`, float64."""
    kernels = [_by_factors(u, v) for u in x.terms for v in y.terms]
    if None in kernels:
        return _multiplied_out(x, y)
    return total(kernel() for kernel in kernels if kernel is not None)


def _by_factors(x: Block, y: Block) -> Callable[[], Tensor] | None:
    """The kernel as the first of two blocks knows it, or the second."""
    by_first = x.kernel_by_factors(y)
    if by_first is not None:
        return by_first
    by_second = y.kernel_by_factors(x)
    return None if by_second is None else lambda: by_second().permute(2, 3, 0, 1)


def _multiplied_out(x: Block, y: Block) -> Tensor:
    """The kernel by dense pieces of both, contracted and dropped."""
    others = [widened(y.dense())] if isinstance(y, DenseBlock) else None
    rows: list[Tensor] = []
    for piece in x.pieces():
        columns = [flat_product(widened(piece), widened(other)) for other in (others or y.pieces())]
        rows.append(torch.cat(columns, 3))
    return torch.cat(rows, 1)


def _scaled(values: Tensor, scales: Scales, i: int) -> Tensor:
    return values if scales is None else widened(scales[i]).reshape(()) * values


def _double(block: Block) -> Block:
    return block.cast(wide_dtype(block.bound().device))


def _ones(block: Block) -> Tensor:
    return torch.ones(block.size, dtype=wide_dtype(block.bound().device), device=block.bound().device)
