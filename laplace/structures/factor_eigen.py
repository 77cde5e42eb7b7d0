"""The eigendecomposition of one Kronecker factor, in whatever form the factor is held."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from laplace.core.orthogonal_basis import DenseBasis, OrthogonalBasis, ThinBasis
from laplace.core.precision_policy import widened
from laplace.engines.kron_parts import KronBlock, KronParts
from laplace.engines.thin_factor import ThinFactor
from laplace.structures import algebra


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
    def of_matrix(cls, matrix: Tensor) -> FactorEigen:
        """That of a matrix `[G, n, n]`."""
        values, vectors = algebra.eigh(matrix)
        return cls(values, DenseBasis(vectors))

    @classmethod
    def of_thin(cls, factor: ThinFactor) -> FactorEigen:
        """That of eigenpairs of one matrix, whatever its leading dimensions."""
        pairs = eigenpairs(factor)
        values, vectors = widened(pairs.values).reshape(1, -1), widened(pairs.vectors).reshape(pairs.width, -1)
        with algebra.kept_for_later():
            return cls(functional.pad(values, (pairs.width - pairs.rank, 0)), ThinBasis.of(vectors))

    def over(self, count: float) -> FactorEigen:
        """That of the factor divided by a number."""
        return replace(self, values=self.values / count)


def input_eigen(parts: KronParts, block: KronBlock, output: FactorEigen) -> FactorEigen:
    """That of the input side over its positions; counts are diagonal already, and of a bias it is the number 1."""
    if block.input is None:
        return FactorEigen(output.values.new_ones(len(output.values), 1), None)
    positions = parts.positions(block)
    if block.input in parts.thin:
        return FactorEigen.of_thin(parts.thin[block.input]).over(positions)
    inputs = widened(parts.factors[block.input]) / positions
    return FactorEigen(inputs.unsqueeze(0), None) if inputs.ndim == 1 else FactorEigen.of_matrix(inputs)


def eigenpairs(factor: ThinFactor) -> ThinFactor:
    """A thin factor by its eigenpairs; itself if it is held by them."""
    return factor if factor.orthonormal else ThinFactor(*algebra.thin_eigh(factor.rows))


def without_rows(parts: KronParts) -> KronParts:
    """The sums with the eigenpairs of every thin side in place of its rows."""
    return replace(parts, thin={key: eigenpairs(side) for key, side in parts.thin.items()})
