"""Arithmetic with Kronecker factors that may be dense, diagonal or grouped.

A *factor* is a tensor whose number of dimensions says what it is: `[n]` the diagonal of a diagonal matrix, `[n, n]` a
matrix, `[G, n, n]` one matrix per group (block-diagonal over the groups). A *block* is a list of one factor F or of
two, F₁ ⊗ F₂, for row-major parameters; a factor without groups beside a grouped one is shared by the groups.
A slab of vectors of a block has the shape `[M, G, n₁, n₂]`, with G = 1 and n₂ = 1 where there is nothing to number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.errors import CurvatureError, InvalidArgument

Block = Sequence[Tensor]


def block_shape(block: Block) -> tuple[int, int, int]:
    """(G, n₁, n₂) of a block.

    Raises:
        InvalidArgument: The block does not hold one or two factors of 1, 2 or 3 dimensions with equal groups.
    """
    groups = {factor.shape[0] for factor in block if factor.ndim == 3}
    square = all(
        factor.ndim in (1, 2, 3) and (factor.ndim == 1 or factor.shape[-1] == factor.shape[-2]) for factor in block
    )
    if len(block) not in (1, 2) or len(groups) > 1 or not square:
        shapes = [tuple(factor.shape) for factor in block]
        raise InvalidArgument(
            f"a block of Kronecker factors has shapes {shapes}; accepted are one or two factors [n], [n, n] or "
            "[G, n, n] with the same number of groups G."
        )
    last = block[1].shape[-1] if len(block) == 2 else 1
    return (groups.pop() if groups else 1), block[0].shape[-1], last


def block_size(block: Block) -> int:
    """Number of parameters of a block."""
    return math.prod(block_shape(block))


def left(factor: Tensor, slab: Tensor) -> Tensor:
    """F X over the axis n₁ of a slab `[M, G, n₁, n₂]`."""
    return factor.unsqueeze(-1) * slab if factor.ndim == 1 else factor @ slab


def right(factor: Tensor, slab: Tensor) -> Tensor:
    """X Fᵀ over the axis n₂ of a slab `[M, G, n₁, n₂]`."""
    return slab * factor if factor.ndim == 1 else slab @ factor.mT


def multiply(block: Block, slab: Tensor) -> Tensor:
    """(F₁ ⊗ F₂) vec(X) for every X of a slab `[M, G, n₁, n₂]`, in the same shape."""
    slab = left(block[0], slab)
    return slab if len(block) == 1 else right(block[1], slab)


def transposed(block: Block) -> list[Tensor]:
    """Factors of the transposed block."""
    return [factor if factor.ndim == 1 else factor.mT for factor in block]


def add(first: Tensor, second: Tensor) -> Tensor:
    """Sum of two factors of one size; stays a vector if both are.

    Raises:
        InvalidArgument: The sizes or the groups differ.
    """
    dims = {first.ndim, second.ndim}
    if first.shape[-1] != second.shape[-1] or dims == {2, 3} or (dims == {3} and first.shape != second.shape):
        raise InvalidArgument(
            f"Kronecker factors of shapes {tuple(first.shape)} and {tuple(second.shape)} cannot be added; "
            "accepted are factors of one size with equal groups."
        )
    if first.ndim == second.ndim:
        return first + second
    vector, matrix = (first, second) if first.ndim == 1 else (second, first)
    return matrix + torch.diag(vector)


def diagonal(factor: Tensor) -> Tensor:
    """Diagonal, `[n]`, or `[G, n]` for a grouped factor."""
    return factor if factor.ndim == 1 else factor.diagonal(dim1=-2, dim2=-1)


def outer(vectors: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> Tensor:
    """Table of `combine(v₁[i], v₂[j])` for one or two vectors `[n]` or `[G, n]`; `[G, n₁, n₂]`, G and n₂ may be 1."""
    first, *rest = (vector if vector.ndim == 2 else vector.unsqueeze(0) for vector in vectors)
    table = first.unsqueeze(-1)
    return table if not rest else combine(table, rest[0].unsqueeze(-2))


def dense(block: Block) -> Tensor:
    """The block as a matrix `[p, p]`."""
    shape = block_shape(block)
    size = math.prod(shape)
    like = block[0]
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    return multiply(block, eye.view(size, *shape)).reshape(size, size).mT


def logdet(block: Block) -> Tensor:
    """Log determinant log det (F₁ ⊗ F₂) = n₂ log det F₁ + n₁ log det F₂, summed over groups; 0-dim."""
    groups, first, second = block_shape(block)
    repeats = (second, first)
    total = torch.zeros((), dtype=block[0].dtype, device=block[0].device)
    for factor, repeat in zip(block, repeats, strict=False):
        value = factor.log() if factor.ndim == 1 else torch.logdet(factor)
        total = total + value.sum() * (repeat if factor.ndim == 3 else repeat * groups)
    return total


def eigh(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, at least 0, and eigenvectors of a positive semi-definite factor, computed in float64.

    float32 turns the zero eigenvalues of a rank-deficient factor into negative ones of the size of eps·λ_max, and a
    small prior precision does not lift them; so the work is done in float64 and what is left below zero is clamped.

    Args:
        factor: `[n]`, `[n, n]` or `[G, n, n]`.

    Returns:
        Values `[n]` or `[G, n]` and vectors of the shape of `factor`, in its dtype (at least float32). The vectors of
        a diagonal factor are ones `[n]`, the diagonal of the identity.

    Raises:
        CurvatureError: The factor is not finite.
    """
    if not bool(torch.isfinite(factor).all()):
        raise CurvatureError(
            f"a curvature factor of shape {tuple(factor.shape)} holds NaN or infinite entries; it must be finite. "
            "Check the data and the network's outputs for NaN, or fit in a wider dtype."
        )
    dtype = torch.promote_types(factor.dtype, torch.float32)
    if factor.ndim == 1:
        return factor.to(dtype).clamp(min=0), torch.ones_like(factor, dtype=dtype)
    values, vectors = torch.linalg.eigh(widened(factor))
    return values.clamp(min=0).to(dtype), vectors.to(dtype)
