"""Full curvature: every pair of parameters, as their matrix or, of few data, as the rows that it is the product of.

Why this is no block structure with one block: blocks keep eigenvectors. Here the evidence at a scalar prior needs
eigenvalues alone, samples a Cholesky factor, and predictions its inverse, which together take half the time of the
eigenvectors, and a fifth less memory.

H = Aᵀ A of R rows A: weighted Jacobians, one row for every datum and column of a root of its output Hessian. Where R is
smaller than P the same posterior is factored between the rows, exactly (`large_structures/rows.py`), and H is formed
when it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core import eigen, linalg, nested
from laplace.core.batch import Inputs
from laplace.core.cached import Recent, cached_property, keeps_last
from laplace.core.gram import row_gram
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.log_det import log_det_relative
from laplace.core.pieces import bytes_at_once, operations_are_dear
from laplace.core.precision_policy import root_dtype, widened
from laplace.engines.cost import DOUBLE, Cost
from laplace.engines.profile import MatrixCost
from laplace.engines.sinks import FullSink
from laplace.errors import CurvatureError
from laplace.jacobian.blocks import CHUNK_BYTES, DenseBlock
from laplace.jacobian.full_sum import BlockPairs, MatrixSum, PairedMatrix, jacobian_product
from laplace.jacobian.jacobian import Jacobian
from laplace.structures import FORMS
from laplace.structures.base import AdditiveCurvature, Curvature, SignedOptions, nonnegative, other_structure
from laplace.structures.precision import (
    Form,
    Precision,
    SpectralScan,
    VariancesOverPriors,
    mean_weight,
    require_positive,
)

if TYPE_CHECKING:
    from laplace.engines.engine import BatchSummary, CurvatureEngine
    from laplace.engines.profile import BatchProfile

# The curvature: a matrix, or of few data the rows A of H = Aᵀ A in its place.


_WORTHWHILE = 2**31
"""Multiplications with the matrix from which on rows may be kept (about 1,000 weights): fewer take no time."""


def is_less_work(n_params: int, n_rows: int) -> bool:
    """True if a posterior over P weights takes fewer multiplications between the R rows of its data."""
    matrix = _multiplications(n_params, n_rows)
    return matrix >= _WORTHWHILE and _multiplications(n_rows, n_params) < matrix


def _multiplications(size: int, others: int) -> int:
    """Those of products `[n, n]` over all of the others, of half the entries, their eigenvalues and a factor."""
    return size**2 * (others // 2 + 2 * size)


@dataclass(frozen=True)
class FullCurvature(AdditiveCurvature):
    """The unit curvature as a matrix; of few data it begins as a `RowCurvature`."""

    sums: MatrixSum  # The sum over batches: `values` completes it
    signed: bool = False  # Whether negative eigenvalues are meant; else they are rounding, and zero
    name = "full"
    matrix_dims = 3
    options = SignedOptions
    is_exact = True
    is_wide = True

    @classmethod
    def from_matrix(cls, values: Tensor) -> FullCurvature:
        """The curvature H `[E, P, P]`."""
        return cls(MatrixSum.from_matrices(values))

    @cached_property
    def values(self) -> Tensor:
        """H, `[E, P, P]`."""
        return self.sums.complete()

    @property
    def n_terms(self) -> int:
        return self.sums.n_terms

    @classmethod
    def from_batch(cls, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, FullCurvature]:
        sums = MatrixSum(engine.problem.layout.n_params)
        few = cls is FullCurvature and is_less_work(sums.size, 1)
        return (FORMS["rows"](sums) if few else cls(sums)).with_batch(engine, x, y)

    def with_batch(self, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, FullCurvature]:
        """The batch is added to the sum in place, so that no second one is held."""
        sink = FullSink(len(engine.problem.slots), self.sums)
        return engine.accumulate(x, y, sink), FullCurvature(self.sums)

    @classmethod
    def cost(cls, profile: BatchProfile, options: Any) -> Cost:
        n_rows = (profile.n_batches or 0) * profile.n_data * profile.n_columns
        few = n_rows and is_less_work(profile.n_params, n_rows)
        rows = FORMS["rows"].cost_of(profile, n_rows) if few else None
        return cls.matrix_cost(profile) if rows is None else rows

    @classmethod
    def matrix_cost(cls, profile: BatchProfile) -> Cost:
        """That of the matrix, whatever the number of data."""
        square = profile.n_params**2
        sums = MatrixCost.from_profile(profile, profile.tensors)
        products = profile.n_columns == 0  # rows of the matrix, their transposes, and the sum
        fitted = profile.n_terms * square * (profile.itemsize if products else DOUBLE)
        piece = profile.piece_bytes([profile.n_params], profile.n_outputs)
        return Cost(
            fitted=fitted,
            running=3 * fitted if products else sums.running,
            adding=sums.completing,
            pieces=sums.pieces,
            posterior=(5 * DOUBLE + profile.itemsize) * square,
            projecting=(1 + 2 * DOUBLE // profile.itemsize) * piece,  # J, in float64, and J L
            vectors=profile.n_params if products else 0,
        )

    def __add__(self, other: Curvature) -> FullCurvature:
        if not isinstance(other, FullCurvature):
            return NotImplemented
        return FullCurvature.from_matrix(self.values + other.values)

    def scaled(self, factor: float) -> FullCurvature:
        return FullCurvature.from_matrix(factor * self.values)

    def minus(self, removed: Curvature, *, signed: bool = False, terms: torch.dtype | None = None) -> FullCurvature:
        if not isinstance(removed, FullCurvature):
            raise other_structure(self.name, removed.name)
        return FullCurvature.from_matrix(
            linalg.remaining_matrix(self.values, removed.values, signed=signed, terms=terms)
        )

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> Precision:
        return FullPrecision(self.indefinite(options.get("indefinite")), weights, prior)

    def indefinite(self, mode: str | None) -> FullCurvature:
        """The curvature with what is done about negative eigenvalues; None where there can be none."""
        return self if mode is None else self._mended(mode)

    @keeps_last
    def _mended(self, mode: str) -> FullCurvature:
        if mode == "error":
            return replace(self, signed=True)
        values, vectors = linalg.eigh(self.values, signed=True)
        matrix = (vectors * nonnegative(values, mode).unsqueeze(1)) @ vectors.mT
        return FullCurvature.from_matrix(matrix.to(self.values))

    @cached_property
    def spectrum(self) -> Tensor:
        """Eigenvalues of the single term, float64, rounding removed: all that a scalar prior's evidence needs."""
        return linalg.eigvalsh(self.values[0], signed=self.signed)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> VariancesOverPriors:
        mode = options.get("indefinite")
        signed = mode == "error"
        matrices = self.indefinite(mode).values
        values, vectors = linalg.eigh(torch.tensordot(weights.to(matrices), matrices, 1), signed=signed)

        def project(jacobian: Jacobian, dtype: torch.dtype) -> Jacobian:
            basis = vectors.to(dtype)
            return Jacobian((DenseBlock(torch.cat([piece @ basis for piece in jacobian.pieces()]).transpose(0, 1)),))

        def precisions(delta: Tensor) -> tuple[Tensor, ...]:
            return (require_positive(values + delta) if signed else values + delta,)

        return SpectralScan(project, precisions, values.amax().clamp(min=0))

    def is_finite(self) -> Tensor | bool:
        return self.sums.is_finite()

    def state(self) -> dict[str, Any]:
        return {"values": self.values}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> FullCurvature:
        return FullCurvature.from_matrix(state["values"])

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        nested.require_sizes("H", self.sums.values, None, layout.n_params, layout.n_params)

    def public(self) -> Tensor:
        return self.values.sum(0)


# The posterior precision, by its Cholesky factor.


@dataclass(frozen=True, eq=False)
class FullPrecision(Precision):
    """P = Σ_e w_e H_e + diag(δ), factorised in float64 [Redux, eq. 7] [Linearization, eq. 12]."""

    curvature: FullCurvature  # H
    weights: Tensor  # w, `[E]`
    prior: GaussianPrior  # δ

    def to_dense(self) -> Tensor:
        return self._reversed().flip(0, 1).to(self._dtype)

    def logdet(self) -> Tensor:
        """By the Cholesky factor, which samples and moments take too: a tenth of the cost of all eigenvalues."""
        return 2 * self._factor.diagonal().log().sum()

    def logdet_ratio(self) -> Tensor:
        """With a scalar prior O(P) after one eigendecomposition per fit, else one Cholesky factorisation."""
        if self.prior.is_scalar and self.curvature.n_terms == 1:
            values, delta = self.curvature.spectrum, self.prior.precision
            if self.curvature.signed:
                self._checked((1 + self.weights / delta * values) * delta)
            return log_det_relative(values, mean_weight(self.weights), delta, (len(values),))
        return self.logdet() - self.prior.logdet()

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        if exponent == 1:
            return self._times(vectors)
        flat = vectors.reshape(-1, vectors.shape[-1])
        reversed_order = flat.to(self._factor).flip(1)
        if exponent == -1:
            reversed_order = torch.linalg.solve_triangular(self._factor.mT, reversed_order, upper=True, left=False)
        turned = torch.linalg.solve_triangular(self._factor, reversed_order, upper=False, left=False)
        return turned.flip(1).to(vectors.dtype).view(vectors.shape)

    def _times(self, vectors: Tensor) -> Tensor:
        """P v without P, so that one vector costs one pass over H."""
        values = self.curvature.values
        curvature = sum(w * (vectors.to(H) @ H) for w, H in zip(self.weights.to(values), values, strict=True))
        return (curvature + self.prior.diagonal() * vectors).to(vectors.dtype)

    def _checked(self, eigenvalues: Tensor) -> Tensor:
        return require_positive(eigenvalues) if self.curvature.signed else eigenvalues

    @cached_property
    def _factor(self) -> Tensor:
        """Lower Cholesky factor R `[P, P]` of P in reversed order, if need be without the directions of rounding.

        Samples, log determinants and products with few rows need no more of P⁻¹ than solutions with it. In float64,
        differentiable in w and δ.
        """
        factor = linalg.cholesky(self._reversed())
        if factor is None:
            projected = self._projected()
            factor = linalg.cholesky(projected.flip(0, 1))
            if factor is None:
                self._checked(eigen.eigvalsh(projected.detach()))
                raise CurvatureError("the posterior precision is not positive definite; give a larger prior precision.")
        return factor

    def _reversed(self) -> Tensor:
        """P in reversed order of rows and columns; of one term no second matrix is made."""
        weights, (first, *others) = widened(self.weights), self.curvature.values
        values = widened(first).flip(0, 1).mul_(weights[0])
        for weight, term in zip(weights[1:], others, strict=True):
            values.add_(weight * widened(term).flip(0, 1))
        values.diagonal().add_(widened(self.prior.diagonal()).flip(0))
        return values

    def _projected(self) -> Tensor:
        """P with the curvature's directions of rounding set to zero; differentiable in w and δ."""
        prior = torch.diag(widened(self.prior.diagonal()))
        values = self.curvature.values
        curvature = torch.tensordot(widened(self.weights), widened(values), 1)
        if self.curvature.signed:
            return linalg.significant_part(curvature, values.dtype) + prior
        return linalg.positive_part(curvature) + prior

    @cached_property
    def root(self) -> Tensor:
        """Lower-triangular L `[P, P]` with L Lᵀ = P⁻¹, in float64, differentiable in w and δ."""
        return linalg.covariance_factor(self._factor)

    @property
    def scale(self) -> Tensor:
        """The root in the posterior's dtype."""
        return self.root.to(self._dtype)

    @property
    def covariance(self) -> Tensor:
        """P⁻¹, `[P, P]`."""
        return linalg.times_transpose(self.root).to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the posterior, not that in which H was summed."""
        return self.weights.dtype

    def diagonal_of_inverse(self) -> Tensor:
        return self.root.square().sum(1).to(self._dtype)

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        """Sums are in float64 in every form: float32 would lose what cancels in P⁻¹, λmax(P) / λmin(P) of it."""
        return self._contracted(jacobian, form).to(jacobian.summed_in(self._dtype))

    def centred_variance(self, jacobian: Jacobian) -> Tensor:
        if not jacobian.is_head:
            return super().centred_variance(jacobian)
        return self._head_diagonal(jacobian, centred=True).to(jacobian.summed_in(self._dtype))

    def _contracted(self, jacobian: Jacobian, form: Form) -> Tensor:
        if form == "diagonal" and jacobian.is_head:
            return self._head_diagonal(jacobian)
        # By pairs of layers, where that is less work than a product with J.
        pairs = (
            BlockPairs.from_blocks(jacobian.blocks)
            if BlockPairs.are_less_work(jacobian.blocks, jacobian.n_data)
            else None
        )
        if form == "joint":
            dense = pairs is None
            rows = self._times_root(jacobian.dense()) if dense else jacobian_product(pairs, jacobian.blocks, self.root)
            return row_gram(rows.flatten(0, 1))
        if pairs is not None:
            return self._paired((pairs, self._has_graph)).products(jacobian.blocks, diagonal=form == "diagonal")
        products = (self._times_root(piece) for piece in jacobian.pieces())
        return torch.cat([rows.square().sum(2) if form == "diagonal" else row_gram(rows) for rows in products])

    def _head_diagonal(self, jacobian: Jacobian, *, centred: bool = False) -> Tensor:
        """Variances of a head's outputs, `[B, C]`, or of these less their mean."""
        features = jacobian.head_features()
        dtype = self._root_dtype if jacobian.summed_in(self._dtype) == self._dtype else self._factor.dtype
        key = (features.shape[1], dtype, self._has_graph, centred)
        roots = self._recent_head(
            key, lambda: HeadRoots.from_root(self.root, jacobian.head_places(), dtype, centred=centred)
        )
        return roots.variances(features)

    @cached_property
    def _root_dtype(self) -> torch.dtype:
        if self.curvature.signed:
            return self._factor.dtype
        delta, values = self.prior.precision.detach(), self.curvature.values
        largest = delta.max() + (self.weights.detach() * values.flatten(1).norm(dim=1)).sum()
        return root_dtype(self._dtype, float(largest), float(delta.min()), values.device)

    @cached_property
    def _recent_head(self) -> Recent[HeadRoots]:
        return Recent()

    @property
    def _has_graph(self) -> bool:
        """True if what is computed from the root now belongs to a graph, and not only if that was so before."""
        return self._factor.requires_grad and torch.is_grad_enabled()

    def _times_root(self, piece: Tensor) -> Tensor:
        """J L of a piece `[b, C, P]`, its columns in reversed order."""
        rows = piece.flatten(0, 1).to(self._factor).flip(1)
        return torch.linalg.solve_triangular(self._factor.mT, rows, upper=True, left=False).view(piece.shape)

    @keeps_last
    def _paired(self, key: tuple[BlockPairs, bool]) -> PairedMatrix:
        return PairedMatrix(key[0], linalg.times_transpose(self.root))


# Variances of a head's outputs: of P⁻¹ no more than the blocks of single outputs is needed, φᵀ (P⁻¹)_cc φ.


_COLUMNS = 32
"""Columns of every output's triangle that are multiplied at once, with the rows below the first of them."""


@dataclass(frozen=True)
class HeadRoots:
    """Lower triangular roots of the blocks (P⁻¹)_cc = L_c L_cᵀ, for sums of squares |L_cᵀ φ|²."""

    # Of all outputs some columns side by side, without the rows that are zero: `[D − s, w·C]` for the w from the
    # s-th on, the last ones the fewest
    columns: tuple[Tensor, ...]
    n_outputs: int  # C

    @classmethod
    def from_root(cls, root: Tensor, order: Tensor, dtype: torch.dtype, *, centred: bool = False) -> HeadRoots:
        """From a root of P⁻¹ `[P, P]`, in which they are differentiable, and places `[C, D]` of (output, feature).

        Or, `centred`, those of the outputs less their mean.
        """
        shared = torch.stack([root[entries].mean(0) for entries in order.T]) if centred else 0.0  # [D, P]
        # By an orthogonal factorisation of the rows, which unlike a Cholesky one of their Gram always exists.
        mode = "reduced" if root.requires_grad and torch.is_grad_enabled() else "r"
        lower = torch.stack([torch.linalg.qr((root[entries] - shared).T, mode)[1].T for entries in order]).to(dtype)
        width = order.shape[1] if operations_are_dear(root.device) else _COLUMNS
        starts = range(0, order.shape[1], width)
        columns = (lower[:, start:, start : start + width].permute(1, 2, 0).flatten(1) for start in starts)
        return cls(tuple(part.contiguous() for part in columns), len(order))

    def variances(self, features: Tensor) -> Tensor:
        """φᵀ (P⁻¹)_cc φ of features `[B, D]`, `[B, C]` [Mixtures, appendix A, last-layer outputs]."""
        features = features.to(self.columns[0])
        step = max(1, bytes_at_once(CHUNK_BYTES, features.device) // (8 * self.n_outputs * features.shape[1]))
        return torch.cat([self._of_some(rows) for rows in features.split(step)])

    def _of_some(self, features: Tensor) -> Tensor:
        first, *others = self.columns
        squares = (features @ first).square()
        for columns in others:
            products = features[:, features.shape[1] - len(columns) :] @ columns
            squares[:, : columns.shape[1]].addcmul_(products, products)
        return squares.unflatten(1, (-1, self.n_outputs)).sum(1)
