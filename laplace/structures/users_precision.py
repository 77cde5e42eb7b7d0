"""Posterior precisions that were computed elsewhere: a root of the covariance, or Kronecker factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.core.gram import row_gram
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.orthogonal_basis import DenseBasis
from laplace.core.precision_policy import widened
from laplace.engines.kron_parts import KronBlock
from laplace.errors import CurvatureError
from laplace.jacobian.jacobian import Jacobian
from laplace.structures.precision import Form, Precision

if TYPE_CHECKING:
    from laplace.compat.kron import KronDecomposed
    from laplace.structures.kron import KronPrecision
    from laplace.structures.spectra import BlockSpectrum


@dataclass(frozen=True, eq=False)
class FixedRootPrecision(Precision):
    """A precision that is known by a root of its covariance, with the graph that leads to it."""

    root: Tensor  # L with L Lᵀ = P⁻¹, `[P, P]`, or standard deviations `[P]`

    @property
    def _is_diagonal(self) -> bool:
        return self.root.ndim == 1

    def logdet(self) -> Tensor:
        root = widened(self.root)
        return -2 * (root.log().sum() if self._is_diagonal else torch.linalg.slogdet(root).logabsdet)

    def logdet_ratio(self) -> Tensor:
        """The ratio for a prior N(0, I), since nothing is known of it here."""
        return self.logdet()

    def quad(self, vectors: Tensor) -> Tensor:
        return self._whitened(vectors).square().sum(-1)

    def _whitened(self, vectors: Tensor) -> Tensor:
        """L⁻¹ v of vectors `[..., P]`."""
        if self._is_diagonal:
            return vectors / self.root
        rows = vectors.reshape(-1, vectors.shape[-1])
        return torch.linalg.solve(widened(self.root), widened(rows).T).T.to(vectors).view_as(vectors)

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        if self._is_diagonal:
            return vectors * self.root if exponent == -0.5 else vectors * self.root ** (-2 * exponent)
        if exponent == 1:
            rows = self._whitened(vectors).reshape(-1, vectors.shape[-1])
            return torch.linalg.solve(widened(self.root).T, widened(rows).T).T.to(vectors).view_as(vectors)
        return (vectors if exponent == -0.5 else vectors @ self.root) @ self.root.T

    @property
    def public(self) -> Tensor:
        return self.root.square().reciprocal() if self._is_diagonal else self.to_dense()

    @property
    def scale(self) -> Tensor:
        return self.root

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        if form == "joint":
            return self._gram(self._times_root(jacobian.dense()).flatten(0, 1), jacobian)
        rows = (self._times_root(piece) for piece in jacobian.pieces())
        return torch.cat([r.square().sum(2) if form == "diagonal" else self._gram(r, jacobian) for r in rows])

    def _gram(self, rows: Tensor, jacobian: Jacobian) -> Tensor:
        return row_gram(rows, dtype=jacobian.summed_in(rows.dtype))

    def _times_root(self, piece: Tensor) -> Tensor:
        """J L of a piece `[b, C, P]`, as one flat product: its rounding is that of joint covariances, graph or not."""
        if self._is_diagonal:
            return piece * self.root
        return (piece.flatten(0, 1) @ self.root).view(piece.shape)

    def diagonal_of_inverse(self) -> Tensor:
        return self.root.square() if self._is_diagonal else self.root.square().sum(1)

    @property
    def covariance(self) -> Tensor:
        return torch.diag(self.root.square()) if self._is_diagonal else self.root @ self.root.T


def precision_of_factors(
    matrix: KronDecomposed, blocks: tuple[KronBlock, ...], layout: Layout, dtype: torch.dtype
) -> KronPrecision:
    """The matrix by its factors, with the graph that leads to it.

    Half of the smallest eigenvalue of a block stands for its prior, which is not known here: the rest is positive.
    """
    from laplace.structures.kron import KronPrecision
    from laplace.structures.spectra import Spectra

    tables = [widened(table).expand(shape) for table, shape in zip(matrix.spectra(), matrix.shapes, strict=True)]
    prior = torch.stack([0.5 * table.detach().amin() for table in tables]).to(dtype)
    if not bool((prior > 0).all()):
        raise CurvatureError(f"the matrix is not positive definite: its smallest eigenvalue is {2 * prior.min():.3g}.")
    spectra = tuple(
        _spectrum(block, [widened(side) for side in vectors], table - widened(delta))
        for block, vectors, table, delta in zip(blocks, matrix.eigenvectors, tables, prior, strict=True)
    )
    return KronPrecision(Spectra(spectra, dtype), prior.new_ones(1), GaussianPrior(prior, prior.new_zeros(()), layout))


def _spectrum(block: KronBlock, vectors: list[Tensor], values: Tensor) -> BlockSpectrum:
    from laplace.structures.spectra import BlockSpectrum

    bases = [None if side.ndim == 1 else side for side in vectors]
    if block.kind != "kron" or block.index is not None:
        return BlockSpectrum(values.flatten(), basis=bases[0])
    left, right = (None if side is None else DenseBasis(side.view(-1, *side.shape[-2:])) for side in (*bases, None)[:2])
    groups, n_left, n_right = values.shape
    output_first = len(bases) == 1 or not block.input_first
    return BlockSpectrum(values.flatten(), left, right, (groups, n_left, n_right), output_first=output_first)
