"""Posterior precision of a block-diagonal curvature in the eigenbasis of every block, and what is asked of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.core.gram import row_gram
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import CurvatureError
from laplace.jacobian.blocks import Block, MappedBlock
from laplace.jacobian.jacobian import Jacobian
from laplace.structures import algebra
from laplace.structures.damping import Damping
from laplace.structures.eigenblocks import BlockSpectrum, Spectra, dense_spectrum
from laplace.structures.indefinite import require_positive
from laplace.structures.powers import power
from laplace.structures.precision import Precision
from laplace.structures.variances_over_priors import SpectralScan

if TYPE_CHECKING:
    from laplace.compat.kronecker import KronDecomposed


@dataclass(frozen=True, eq=False)
class KronPrecision(Precision):
    """P with blocks U (s λ + δ) Uᵀ, or with Ritter et al.'s damping U ((√s λ_l + √δ)(√s λ_r + √δ)) Uᵀ.

    A prior that is constant in a block is added exactly, and so is any prior to a dense or diagonal block; a prior
    that varies within a Kronecker block enters by its diagonal in the eigenbasis.

    Attributes:
        spectra: The eigendecomposition of every block.
        weights: Scale of every curvature term, `[E]`.
        prior: δ.
        damping: Replaces s B ⊗ A + δ by (b √s B + √δ) ⊗ (a √s A + √δ) (Ritter et al., 2018); None adds δ exactly.
    """

    spectra: Spectra
    weights: Tensor
    prior: GaussianPrior
    damping: Damping | None = None

    @property
    def _scale(self) -> Tensor:
        """s: the spectra of several terms hold the ratios of their weights to the mean already."""
        return self.weights.mean()

    def _varies(self, i: int) -> bool:
        """True if the prior varies within a dense block, which then has no fixed eigenbasis."""
        return self.spectra[i].matrix is not None and self._priors[i].numel() > 1

    @cached_property
    def _priors(self) -> tuple[Tensor, ...]:
        """δ of every block's entries: `[1]` where it is one number, else `[p]`."""
        return self.spectra.priors(self.prior)

    # Evidence.

    def logdet_ratio(self) -> Tensor:
        """One pass over all eigenvalues, O(P), where the prior is constant in every block and nothing dampens."""
        if self.damping is not None or any(delta.numel() > 1 for delta in self._priors):
            blocks = torch.stack([self._block_logdet(i) for i in range(len(self.spectra))])
            return blocks.sum() - self.prior.logdet()
        if self.spectra.signed:
            with torch.no_grad():
                self._require_positive(torch.cat([self._values(i) for i in range(len(self.spectra))]))
        deltas = self.prior.precision if self.prior.is_scalar else torch.cat(self._priors)
        return self.spectra.log_det_ratio(self._scale, deltas)

    def _block_logdet(self, i: int) -> Tensor:
        if self._varies(i):
            return 2 * self._cholesky(i).diagonal().log().sum()
        values = self._require_positive(self._values(i))
        repeats = self.spectra[i].size / values.numel()
        return values.log().sum() * repeats

    def _values(self, i: int) -> Tensor:
        """Eigenvalues of the posterior block, `[p]`, differentiable in scale and prior."""
        spectrum = self.spectra[i]
        prior = self.spectra.prior(i, self._priors[i])
        left, right = spectrum.left_values, spectrum.right_values
        if self.damping is None or spectrum.is_bias or left is None or right is None:
            return self._scale * spectrum.values + prior
        root, scale = widened(prior).sqrt().view(-1, *_folded(spectrum, prior)), widened(self._scale).sqrt()
        of_left, of_right = self.damping.sides(output_first=spectrum.output_first)
        damped = (of_left * scale * left.unsqueeze(2) + root) * (of_right * scale * right.unsqueeze(1) + root)
        return damped.flatten()

    def eigenvalues(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Eigenvalues of every block, `[p]`, without gradient; the prior must not vary within dense blocks.

        Raises:
            CurvatureError: P is not positive definite.
        """
        with torch.no_grad():
            return tuple(self._require_positive(self._values(i)).to(dtype) for i in range(len(self.spectra)))

    def _require_positive(self, values: Tensor) -> Tensor:
        """Some eigenvalues of P if they are positive, as they must be; an error counts those of all blocks."""
        if self.spectra.signed and bool((values <= 0).any()):
            require_positive(torch.cat([block for _, block in self._decomposed]))
            require_positive(values)
        return values

    def _dense_block(self, i: int, *, projected: bool = False) -> Tensor:
        """S H + diag(δ) of a dense block with a varying prior, float64; `projected`: without the rounding of H."""
        matrix, prior = self.spectra[i].matrix, self._priors[i]
        if matrix is None:
            return torch.diag(self._values(i))
        if projected and self.spectra.signed:
            matrix = algebra.significant_part(matrix, self.spectra.dtype)
        elif projected:
            matrix = algebra.positive_part(matrix)
        return widened(self._scale) * matrix + torch.diag(widened(prior).expand(len(matrix)))

    def _cholesky(self, i: int) -> Tensor:
        """Cholesky factor of a dense block with a varying prior, in float64.

        Raises:
            CurvatureError: The block is not positive definite in spite of H's projection.
        """
        factor = algebra.cholesky(self._dense_block(i))
        if factor is None:
            factor = algebra.cholesky(self._dense_block(i, projected=True))
        if factor is None:
            for _, values in self._decomposed:
                self._require_positive(values)
            raise CurvatureError("the posterior precision is not positive definite; give a larger prior precision.")
        return factor

    def quad(self, vectors: Tensor) -> Tensor:
        parts = vectors.split([spectrum.size for spectrum in self.spectra], -1)
        total = torch.zeros((), dtype=vectors.dtype, device=vectors.device)
        for i, (spectrum, part) in enumerate(zip(self.spectra, parts, strict=True)):
            exact = widened(part)
            if spectrum.matrix is None:
                total = total + (spectrum.rotate(exact).square() * self._values(i)).sum(-1)
            else:  # by the block itself, whose derivative in the weights of several terms no eigenbasis has
                product = widened(self._scale) * (exact @ spectrum.matrix) + widened(self._priors[i]) * exact
                total = total + (product * exact).sum(-1)
        return total.to(vectors.dtype)

    def product(self, vectors: Tensor) -> Tensor:
        """In the prior's dtype, which is enough for a penalty and half the cost of float64."""
        return self.bmm(vectors.detach(), exponent=1)

    # Predictions.

    @cached_property
    def _posterior(self) -> tuple[PosteriorBlock, ...]:
        """Every posterior block, in the Jacobians' dtype.

        Raises:
            CurvatureError: P is not positive definite.
        """
        dtype = self.prior.precision.dtype
        blocks: list[PosteriorBlock] = []
        for i, (spectrum, values) in enumerate(self._decomposed):
            values = self._require_positive(values)
            if self._moves(i) and spectrum.basis is not None:
                precision = self._dense_block(i, projected=self.spectra.signed and self._varies(i))
                eigen = values.detach(), spectrum.basis.detach()
                blocks.append(MovingBlock(precision, eigen, dtype))
            else:
                blocks.append(EigenBlock(spectrum.cast(dtype), values.to(dtype)))
        return tuple(blocks)

    def _moves(self, i: int) -> bool:
        """True if the eigenvectors of a dense block depend on a hyper-parameter that requires a gradient."""
        matrix = self.spectra[i].matrix
        if matrix is None or not torch.is_grad_enabled():
            return False
        follows = self._priors[i].requires_grad or self.weights.requires_grad
        return matrix.requires_grad or (self._varies(i) and follows)

    @property
    def _decomposed(self) -> list[tuple[BlockSpectrum, Tensor]]:
        """Basis and eigenvalues of every posterior block, float64, without gradient where both move."""
        decomposed: list[tuple[BlockSpectrum, Tensor]] = []
        for i, spectrum in enumerate(self.spectra):
            if not self._varies(i):
                decomposed.append((spectrum, self._values(i)))
                continue
            with torch.no_grad():
                if self.spectra.signed:
                    own = dense_spectrum(self._dense_block(i, projected=True), signed=wide_dtype(self._scale.device))
                    decomposed.append((own, own.values))
                else:
                    own = dense_spectrum(self._dense_block(i))
                    # P is at least its prior, also where rounding of H says less.
                    decomposed.append((own, own.values.maximum(widened(self._priors[i].min()))))
        return decomposed

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        return self.spectra.regrouped(jacobian).sum_over_blocks(
            lambda i, block: self._posterior[i].gram(block, wide=jacobian.wide)
        )

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        return self.spectra.regrouped(jacobian).sum_over_blocks(lambda i, block: self._posterior[i].norms(block))

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        return self.spectra.regrouped(jacobian).sum_over_blocks(
            lambda i, block: self._posterior[i].covariance(block, wide=jacobian.wide)
        )

    def solve(self, vectors: Tensor) -> Tensor:
        with torch.no_grad():
            return self.bmm(vectors, exponent=-1)

    def sample(self, noise: Tensor) -> Tensor:
        """P^(−1/2) ε with the symmetric root."""
        return self.bmm(noise, exponent=-0.5)

    def bmm(self, vectors: Tensor, exponent: float = -1) -> Tensor:
        """P^exponent v of vectors `[..., P]`; P⁻¹ v unless told otherwise."""
        parts = vectors.split([spectrum.size for spectrum in self.spectra], -1)
        return torch.cat([own.times(part, exponent) for own, part in zip(self._posterior, parts, strict=True)], -1)

    def inv_square_form(self, vectors: Tensor) -> Tensor:
        """W P⁻¹ Wᵀ of `[B, K, P]`, `[B, K, K]`."""
        return vectors @ self.bmm(vectors, exponent=-1).transpose(1, 2)

    def diag(self, exponent: float = 1) -> Tensor:
        """Diagonal of P^exponent, `[P]`."""
        return torch.cat([block.diagonal(exponent) for block in self._posterior])

    def diagonal_of_inverse(self) -> Tensor:
        return self.diag(exponent=-1)

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """P^exponent, `[P, P]`."""
        return torch.block_diag(*[block.matrix(exponent) for block in self._posterior])

    def to_dense(self) -> Tensor:
        return self.to_matrix()

    @property
    def public(self) -> KronDecomposed | KronPrecision:
        """P by the factors of every tensor, if eigenvalues are their products and a prior is constant in a tensor."""
        from laplace.structures.kron_public import decomposed_precision  # as in `KronCurvature.public`

        if not self.spectra.factored or not self.prior.is_constant_per_tensor:
            return self
        deltas = torch.cat([delta.view(1) for delta in self.prior.per_block()])
        return decomposed_precision(self.spectra, self._scale, deltas, damping=self.damping)

    @property
    def covariance(self) -> Tensor:
        return self.to_matrix(exponent=-1)

    @property
    def scale(self) -> Tensor:
        return self.to_matrix(exponent=-0.5)


def _folded(spectrum: BlockSpectrum, prior: Tensor) -> tuple[int, int]:
    """Trailing shape in which a prior in the eigenbasis meets `[G, L, R]` eigenvalues."""
    return (1, 1) if prior.numel() == 1 or spectrum.shape is None else spectrum.shape[1:]


def spectral_scan(spectra: Spectra, weights: Tensor, layout: Layout, *, damping: Damping | None = None) -> SpectralScan:
    """Functional variances at many scalar priors from spectra that are known.

    Args:
        spectra: The eigendecomposition of every block at these weights.
        weights: Scale of every curvature term, `[E]`, without gradient.
        layout: The random parameter tensors.
        damping: As of `KronPrecision`.
    """
    bases = tuple(spectrum.cast(weights.dtype) for spectrum in spectra)

    def precisions(delta: Tensor) -> tuple[Tensor, ...]:
        prior = GaussianPrior(delta, weights.new_zeros(()), layout)
        return KronPrecision(spectra, weights, prior, damping=damping).eigenvalues(delta.dtype)

    return SpectralScan(lambda jacobian: spectra.project(jacobian, bases), precisions)


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


@dataclass(frozen=True, eq=False)
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
        return self.spectrum.rotate(self.spectrum.rotate(vectors) * self.values.pow(exponent), back=True)

    def diagonal(self, exponent: float) -> Tensor:
        return self.spectrum.diagonal(self.values**exponent)

    def matrix(self, exponent: float) -> Tensor:
        eye = torch.eye(self.spectrum.size, dtype=self.values.dtype, device=self.values.device)
        return self.times(eye, exponent)


@dataclass(frozen=True, eq=False)
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
