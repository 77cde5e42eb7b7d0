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


def lowrank_ekfac(blocks: Sequence[Sequence[Tensor]], exact: Tensor, rank: int, width: int | None = None) -> Tensor:
    """S U_k Λ*_k U_kᵀ S + D `[p, p]` with the k largest entries Λ* of the diagonal of Uᵀ H U (Lee et al., 2020).

    Args:
        blocks: Factors.
        exact: H, `[p, p]`.
        rank: K.
        width: Eigenvectors of every side of whose products U is made, those with the largest eigenvalues; None for all.

    Raises:
        ValueError: Two corrected eigenvalues tie at the cut, or two eigenvalues of a side at its own.
    """
    basis = torch.block_diag(*(_leading(factors, width) for factors in blocks))
    corrected = (basis.T @ exact @ basis).diagonal()
    kept = _largest(corrected, rank)
    return with_diagonal(basis[:, kept] @ torch.diag(corrected[kept]) @ basis[:, kept].T, exact.diagonal())


def _leading(factors: Sequence[Tensor], width: int | None) -> Tensor:
    """Products of the leading eigenvectors of both sides, `[p, n]`."""
    sides: list[Tensor] = []
    for factor in factors:
        values, vectors = torch.linalg.eigh(factor)
        sides.append(vectors[:, _largest(values, len(values) if width is None else width)])
    return kron(sides[0], sides[1]) if len(sides) == 2 else sides[0]


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the largest values.

    Raises:
        ValueError: Two values tie at the cut.
    """
    order = values.argsort(descending=True)
    if count < len(values):
        last, next_one, small = values[order[count - 1]], values[order[count]], _TIE * values[order[0]]
        if last > small > last - next_one:
            raise ValueError(f"values {count} and {count + 1} tie: {last}, {next_one}")
    return order[:count]


def lowrank_kron(blocks: Sequence[Sequence[Tensor]], exact: Tensor, rank: int) -> Tensor:
    """S U_k Λ_k U_kᵀ S + D `[p, p]`: the k largest eigenvalues, scaled where they exceed the exact diagonal.

    Raises:
        ValueError: Two eigenvalues tie at the cut, so that U_k is not defined.
    """
    basis, values = eigenpairs(blocks)
    kept = _largest(values, rank)
    lowrank = basis[:, kept] @ torch.diag(values[kept]) @ basis[:, kept].T
    return with_diagonal(lowrank, exact.diagonal())


def with_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """A positive semi-definite matrix with its rows and columns scaled down to the diagonal, and filled up to it."""
    scale = torch.ones_like(diagonal)
    for i, (have, want) in enumerate(zip(matrix.diagonal().tolist(), diagonal.tolist(), strict=True)):
        if have > max(want, 0.0):  # which rounding may make negative
            scale[i] = (max(want, 0.0) / have) ** 0.5
    scaled = scale[:, None] * matrix * scale[None, :]
    return scaled + torch.diag(diagonal - scaled.diagonal())
