"""The eigendecomposition of one Kronecker factor, in whatever form the factor is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from laplace.core.inference import kept_for_later
from laplace.core.orthogonal_basis import OrthogonalBasis, ThinBasis
from laplace.core.precision_policy import widened
from laplace.engines.kron_parts import KronBlock, KronParts, ThinFactor
from laplace.structures import algebra

_AT_ONCE = 2**21
"""Bytes of float64 matrices that one call decomposes: of small ones a call takes as long as its work."""


@dataclass(frozen=True)
class FactorEigen:
    """U diag(λ) Uᵀ, in float64.

    Attributes:
        values: λ, `[G, n]`; zeros first, where the sum was of fewer rows.
        basis: U, or None for the identity.
    """

    values: Tensor
    basis: OrthogonalBasis | None

    @classmethod
    def of_thin(cls, factor: ThinFactor) -> FactorEigen:
        """That of eigenpairs of one matrix, whatever its leading dimensions."""
        pairs = eigenpairs(factor)
        values, vectors = widened(pairs.values).reshape(1, -1), widened(pairs.vectors).reshape(pairs.width, -1)
        with kept_for_later():
            return cls(functional.pad(values, (pairs.width - pairs.rank, 0)), ThinBasis.of(vectors))

    def over(self, count: float) -> FactorEigen:
        """That of the factor divided by a number."""
        return FactorEigen(self.values / count, self.basis)


def alike(shapes: Mapping[str, torch.Size]) -> list[list[str]]:
    """Keys of matrices `[G, n, n]` in the order in which they are decomposed, those that one call takes together."""
    keys: dict[torch.Size, list[str]] = {}
    for key, shape in shapes.items():
        keys.setdefault(shape, []).append(key)
    counts = {shape: max(1, _AT_ONCE // (8 * max(1, shape.numel()))) for shape in keys}
    return [some[i : i + counts[shape]] for shape, some in keys.items() for i in range(0, len(some), counts[shape])]


def decomposed(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues `[G, n]` and eigenvectors of matrices `[G, n, n]` of one shape, by one call."""
    if len(matrices) == 1:
        return [algebra.eigh(matrices[0])]
    values, vectors = algebra.eigh(torch.stack(list(matrices)))
    # Copies: a part would hold all the others in memory and in files, also where a process keeps no more than its own.
    return [(one.clone(), its.clone()) for one, its in zip(values, vectors, strict=True)]


def input_eigen(
    parts: KronParts, block: KronBlock, output: FactorEigen, sides: Mapping[str, FactorEigen]
) -> FactorEigen:
    """That of the input side over its positions; counts are diagonal already, and of a bias it is the number 1.

    Args:
        parts: The sums.
        block: A Kronecker-factored one.
        output: That of its output side.
        sides: Those of sums that are no counts, by key.
    """
    if block.input is None:
        return FactorEigen(output.values.new_ones(len(output.values), 1), None)
    known = sides.get(block.input)
    counted = FactorEigen(widened(parts.factors[block.input]).unsqueeze(0), None) if known is None else known
    return counted.over(parts.positions(block))


def eigenpairs(factor: ThinFactor) -> ThinFactor:
    """A thin factor by its eigenpairs; itself if it is held by them."""
    return factor if factor.orthonormal else ThinFactor(*algebra.thin_eigh(factor.rows))


def without_rows(parts: KronParts) -> KronParts:
    """The sums with the eigenpairs of every thin side in place of its rows."""
    return replace(parts, thin={key: eigenpairs(side) for key, side in parts.thin.items()})
