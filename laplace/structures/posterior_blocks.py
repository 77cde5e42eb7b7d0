"""Blocks of a posterior precision: what predictions and samples ask of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laplace.core.gram import row_gram
from laplace.core.precision_policy import wide_dtype, widened
from laplace.jacobian.blocks import Block, MappedBlock
from laplace.structures.eigenblocks import BlockSpectrum
from laplace.structures.powers import power


class PosteriorBlock(ABC):
    """A block P of a block-diagonal posterior precision, differentiable in what it was made of."""

    @abstractmethod
    def gram(self, block: Block, *, wide: bool) -> Tensor:
        """J P⁻¹ Jᵀ of every datum, `[B, C, C]`; summed in float64 where that is wanted."""

    @abstractmethod
    def norms(self, block: Block) -> Tensor:
        """Its diagonals, `[B, C]`."""

    @abstractmethod
    def covariance(self, block: Block, *, wide: bool) -> Tensor:
        """J P⁻¹ Jᵀ over all data, `[B·C, B·C]`, data major; likewise."""

    @abstractmethod
    def times(self, vectors: Tensor, exponent: float) -> Tensor:
        """P^exponent v of vectors `[..., p]`."""

    @abstractmethod
    def diagonal(self, exponent: float) -> Tensor:
        """Diagonal of P^exponent, `[p]`."""

    @abstractmethod
    def matrix(self, exponent: float) -> Tensor:
        """P^exponent, `[p, p]`."""


@dataclass(frozen=True)
class EigenBlock(PosteriorBlock):
    """P = U diag(λ) Uᵀ in a basis that does not depend on hyper-parameters, or follows them.

    Attributes:
        spectrum: U, in the dtype of Jacobians.
        values: λ, `[p]`, in the same.
    """

    spectrum: BlockSpectrum
    values: Tensor

    @cached_property
    def _variances(self) -> Tensor:
        return 1 / self.values

    def gram(self, block: Block, *, wide: bool) -> Tensor:
        return self.spectrum.project(block).weighted_gram(self._summed(wide))

    def norms(self, block: Block) -> Tensor:
        return self.spectrum.project(block).weighted_norms(self._variances)

    def covariance(self, block: Block, *, wide: bool) -> Tensor:
        return row_gram(self.spectrum.rotate(block.by_output()), self._summed(wide))

    def _summed(self, wide: bool) -> Tensor:
        """Variances in the dtype in which covariances are summed."""
        return widened(self._variances) if wide else self._variances

    def times(self, vectors: Tensor, exponent: float) -> Tensor:
        return self.spectrum.rotate(self.spectrum.rotate(vectors) * self.values**exponent, back=True)

    def diagonal(self, exponent: float) -> Tensor:
        return self.spectrum.diagonal(self.values**exponent)

    def matrix(self, exponent: float) -> Tensor:
        eye = torch.eye(self.spectrum.size, dtype=self.values.dtype, device=self.values.device)
        return self.times(eye, exponent)


@dataclass(frozen=True)
class MovingBlock(PosteriorBlock):
    """A dense block whose eigenvectors move with hyper-parameters that require a gradient.

    Attributes:
        precision: P with its graph, `[p, p]`, float64.
        eigen: Eigenvalues `[p]` and eigenvectors of P, float64, constants.
        dtype: Of Jacobians.
    """

    precision: Tensor
    eigen: tuple[Tensor, Tensor]
    dtype: torch.dtype

    @cached_property
    def _root(self) -> Tensor:
        return self.matrix(-0.5)

    def gram(self, block: Block, *, wide: bool) -> Tensor:
        ones = widened(self._ones) if wide else self._ones
        return MappedBlock(block, lambda piece: piece @ self._root).weighted_gram(ones)

    def norms(self, block: Block) -> Tensor:
        return MappedBlock(block, lambda piece: piece @ self._root).weighted_norms(self._ones)

    @property
    def _ones(self) -> Tensor:
        return self._root.new_ones(len(self._root))

    def covariance(self, block: Block, *, wide: bool) -> Tensor:
        return row_gram(block.by_output() @ self._root, dtype=wide_dtype(self._root.device) if wide else None)

    def times(self, vectors: Tensor, exponent: float) -> Tensor:
        return vectors @ self.matrix(exponent).to(vectors)

    def diagonal(self, exponent: float) -> Tensor:
        return self.matrix(exponent).diagonal()

    def matrix(self, exponent: float) -> Tensor:
        return power(self.precision, self.eigen, exponent).to(self.dtype)
