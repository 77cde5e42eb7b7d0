"""A posterior precision of Kronecker factors that a user computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.orthogonal_basis import DenseBasis
from laplace.core.precision_policy import widened
from laplace.engines.kron_parts import KronBlock
from laplace.errors import CurvatureError

if TYPE_CHECKING:
    from laplace.compat.kron import KronDecomposed
    from laplace.structures.kron import KronPrecision
    from laplace.structures.spectra import BlockSpectrum


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
