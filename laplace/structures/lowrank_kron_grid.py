"""The candidates of eigenvalue-corrected low rank: products of the vectors that are held of both sides of a tensor.

Of k + oversampling vectors of either side all products are candidates, (k + oversampling)² at most; of an embedding
those of every row of its table. The exact diagonal of the curvature in them is what columns are chosen by, and weighed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from laplace.core.orthogonal_basis import DenseBasis, OrthogonalBasis
from laplace.core.precision_policy import widened
from laplace.engines.kron_parts import KronBlock
from laplace.jacobian.blocks import Block, ProductBasis
from laplace.jacobian.outer import unpicked
from laplace.structures.low_rank_factors import Side


@dataclass(frozen=True, eq=False)
class Grid:
    """The candidates of one tensor.

    Attributes:
        basis: Vectors of both sides; None of a tensor without factors, which has no candidates.
    """

    basis: ProductBasis | None

    @property
    def size(self) -> int:
        """Number of candidates."""
        return 0 if self.basis is None else self.basis.size

    def project(self, block: Block) -> Block:
        """Products of a Jacobian block with the candidates; of single entries of a tensor those of all of it."""
        return block if self.basis is None else unpicked(block).in_basis(self.basis)

    def table(self, values: Tensor) -> Tensor:
        """Values `[E, n]` of the candidates by group and by the vectors of both sides, `[E, G, r_in, r_out]`."""
        if self.basis is None:
            return values.unflatten(1, (0, 0, 0))
        table = values.unflatten(1, self.basis.shape_in_basis)
        return table.mT if self.basis.output_first else table

    def carried(self, table: Tensor, to: Grid) -> Tensor:
        """Diagonal of Vᵀ U diag(λ*) Uᵀ V in other candidates V: Σ_i (v_j · u_i)² λ*_i, as a table.

        Args:
            table: λ* of these candidates U, `[E, G, r_in, r_out]`.
            to: V.
        """
        if self.basis is None or to.basis is None:
            return table
        wide = widened(table)
        if self.basis.inputs is not None and to.basis.inputs is not None:
            wide = _squared_products(self.basis.inputs, to.basis.inputs).mT @ wide
        if self.basis.output is not None and to.basis.output is not None:
            wide = wide @ _squared_products(self.basis.output, to.basis.output)
        return wide.to(table)


def _squared_products(one: OrthogonalBasis, other: OrthogonalBasis) -> Tensor:
    return (widened(one.matrix()).mT @ widened(other.matrix())).square()


def grids(blocks: Sequence[KronBlock], sides: Mapping[str, Side], factors: Mapping[str, Tensor]) -> tuple[Grid, ...]:
    """The candidates of every tensor.

    Args:
        blocks: What the sides mean.
        sides: Low-rank sides by key.
        factors: Counts of the rows of embeddings by key.
    """
    return tuple(_grid(block, sides, factors) for block in blocks)


def _grid(block: KronBlock, sides: Mapping[str, Side], factors: Mapping[str, Tensor]) -> Grid:
    if block.kind != "kron":
        return Grid(None)
    output = sides[block.output].basis
    inputs, n_inputs = _inputs(block.input, sides, factors)
    pair, widths = (DenseBasis(output), inputs), (output.shape[1], n_inputs)
    (left, right), (rows, columns) = (pair[::-1], widths[::-1]) if block.input_first else (pair, widths)
    return Grid(ProductBasis(left, right, (len(output), rows, columns), not block.input_first))


def _inputs(
    key: str | None, sides: Mapping[str, Side], factors: Mapping[str, Tensor]
) -> tuple[OrthogonalBasis | None, int]:
    """Vectors of the input side, None for all rows of a table and of a bias, and its width."""
    if key is None:
        return None, 1
    if key in sides:
        return DenseBasis(sides[key].basis), sides[key].basis.shape[1]
    return None, len(factors[key])
