"""Eigenvalue-corrected and low-rank Kronecker curvature of one tensor, dense, from its factors and the exact block.

Factors are those of `tests.reference.kfac`: one list per group, `[B, A]` of a weight or `[B]` of a bias.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.kfac import kron

_TIE = 1e-6


def eigenpairs(blocks: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """Eigenvectors `[p, p]` of the block that factors stand for, products of those of both sides, and eigenvalues."""
    bases: list[Tensor] = []
    values: list[Tensor] = []
    for factors in blocks:
        sides = [torch.linalg.eigh(factor) for factor in factors]
        if len(sides) == 2:
            bases.append(kron(sides[0][1], sides[1][1]))
            values.append(torch.outer(sides[0][0], sides[1][0]).flatten())
        else:
            bases.append(sides[0][1])
            values.append(sides[0][0])
    return torch.block_diag(*bases), torch.cat(values)


def ekfac(blocks: Sequence[Sequence[Tensor]], exact: Tensor) -> Tensor:
    """U diag(Uᵀ H U) Uᵀ `[p, p]` of the exact block H `[p, p]` (George et al., 2018)."""
    basis, _ = eigenpairs(blocks)
    corrected = (basis.T @ exact @ basis).diagonal()
    return basis @ torch.diag(corrected) @ basis.T


def lowrank_kron(blocks: Sequence[Sequence[Tensor]], exact: Tensor, rank: int) -> Tensor:
    """S U_k Λ_k U_kᵀ S + D `[p, p]`: the k largest eigenvalues, scaled where they exceed the exact diagonal.

    Raises:
        ValueError: Two eigenvalues tie at the cut, so that U_k is not defined.
    """
    basis, values = eigenpairs(blocks)
    order = values.argsort(descending=True)
    if rank < len(values):
        last, next_one, small = values[order[rank - 1]], values[order[rank]], _TIE * values[order[0]]
        if last > small > last - next_one:
            raise ValueError(f"eigenvalues {rank} and {rank + 1} tie: {last}, {next_one}")
    kept = order[:rank]
    lowrank = basis[:, kept] @ torch.diag(values[kept]) @ basis[:, kept].T
    return with_diagonal(lowrank, exact.diagonal())


def with_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """A positive semi-definite matrix with its rows and columns scaled down to the diagonal, and filled up to it."""
    scale = torch.ones_like(diagonal)
    for i, (have, want) in enumerate(zip(matrix.diagonal().tolist(), diagonal.tolist(), strict=True)):
        if have > want:
            scale[i] = (max(want, 0.0) / have) ** 0.5
    scaled = scale[:, None] * matrix * scale[None, :]
    return scaled + torch.diag(diagonal - scaled.diagonal())
