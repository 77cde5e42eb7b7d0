"""Many scalar priors at once: what does not depend on the prior is computed once, candidates only rescale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.gram import row_gram
from laplace.jacobian.blocks import Block
from laplace.jacobian.factors import IndexBlock, OuterBlock
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.jacobian import Jacobian


class VariancesOverPriors(ABC):
    """Functional variances of P(δ) for many scalar δ."""

    @abstractmethod
    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        """J P(δ)⁻¹ Jᵀ per datum as a function of n priors δ `[n]`, `[n, B, C, C]` or `[n, B, C]`, without gradient.

        Pieces of the Jacobian that are computed when they are asked for are so once for all n.

        Args:
            jacobian: J.
            diagonal: Variances only.
        """


def one_by_one(at: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of n priors `[n]` from one of a single prior `[1]`."""
    return lambda deltas: torch.stack([at(delta) for delta in deltas.split(1)])


@dataclass(frozen=True)
class SpectralScan(VariancesOverPriors):
    """Functional variances of P(δ) = U (s λ + δ) Uᵀ: the Jacobian is rotated into the eigenbasis once.

    Attributes:
        project: The Jacobian in the eigenbasis.
        precisions: Eigenvalues of P per block at a scalar δ `[1]`, without gradient.
    """

    project: Callable[[Jacobian], Jacobian]
    precisions: Callable[[Tensor], tuple[Tensor, ...]]

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        projected = self.project(jacobian)

        def at(precisions: Tensor) -> Tensor:
            values = [self.precisions(precision) for precision in precisions.split(1)]
            inverses = [1 / torch.stack(block) for block in zip(*values, strict=True)]
            if jacobian.wide and not diagonal:
                inverses = [inverse.double() for inverse in inverses]
            contract = _norms if diagonal else _grams
            return projected.sum_over_blocks(lambda i, block: contract(block, inverses[i]))

        return at


def _has_factors(block: Block) -> bool:
    """Whether a block contracts factors, which needs no dense pieces."""
    return isinstance(block, IndexBlock | HeadBlock) or (isinstance(block, OuterBlock) and block.n_positions == 1)


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
        found.append(torch.stack([row_gram(rows, weight) for weight in weights]))
    return torch.cat(found, 1)
