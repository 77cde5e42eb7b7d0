"""Many scalar priors at once: the Jacobian is rotated into the curvature's eigenbasis once, candidates only rescale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.curvature.blocks import Block
from laplace.curvature.factors import IndexBlock, OuterBlock
from laplace.curvature.jacobian import Jacobian


@dataclass(frozen=True)
class SpectralScan:
    """Functional variances of P(δ) = U (s λ + δ) Uᵀ for many δ.

    Attributes:
        project: The Jacobian in the eigenbasis.
        precisions: Eigenvalues of P per block at a scalar δ `[1]`, without gradient.
    """

    project: Callable[[Jacobian], Jacobian]
    precisions: Callable[[Tensor], tuple[Tensor, ...]]

    def variance(self, projected: Jacobian, precision: Tensor, *, diagonal: bool) -> Tensor:
        """J P(δ)⁻¹ Jᵀ per datum, `[B, C, C]`, or its diagonals `[B, C]`.

        Args:
            projected: What `project` gave.
            precision: δ, `[1]`.
            diagonal: Variances only.
        """
        return self.variances(projected, precision, diagonal=diagonal)[0]

    def variances(self, projected: Jacobian, precisions: Tensor, *, diagonal: bool) -> Tensor:
        """J P(δ)⁻¹ Jᵀ of n precisions δ `[n]`, `[n, B, C, C]` or `[n, B, C]`, from one look at the Jacobian.

        Pieces that are computed when they are asked for are so once for all δ, not once for each.
        """
        values = [self.precisions(precision) for precision in precisions.split(1)]
        inverses = [1 / torch.stack(block) for block in zip(*values, strict=True)]
        contract = _norms if diagonal else _grams
        return projected.sum_over_blocks(lambda i, block: contract(block, inverses[i]))


def _has_factors(block: Block) -> bool:
    """Whether a block contracts factors, which needs no dense pieces."""
    return isinstance(block, IndexBlock) or (isinstance(block, OuterBlock) and block.n_positions == 1)


def _norms(block: Block, weights: Tensor) -> Tensor:
    """`Block.weighted_norms` of weights `[n, p]`, `[n, B, K]`."""
    if _has_factors(block):
        return torch.vmap(block.weighted_norms)(weights)
    pieces = [torch.einsum("kbp,np->nbk", piece.square(), weights) for piece in block.pieces()]
    return torch.cat(pieces, 1)


def _grams(block: Block, weights: Tensor) -> Tensor:
    """`Block.weighted_gram` of weights `[n, p]`, `[n, B, K, K]`."""
    if _has_factors(block):
        return torch.vmap(block.weighted_gram)(weights)
    found: list[Tensor] = []
    for piece in block.pieces():
        rows = piece.transpose(0, 1)  # [b, K, p]
        found.append(torch.stack([(rows * weight) @ rows.transpose(1, 2) for weight in weights]))
    return torch.cat(found, 1)
