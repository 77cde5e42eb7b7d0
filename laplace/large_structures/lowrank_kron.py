"""Low rank plus diagonal: the dominant Kronecker eigenvectors of every weight, and the exact diagonal.

Per tensor H ≈ S U Λ Uᵀ S + D (Lee et al., 2020, "Estimating Model Uncertainty of Neural Networks in Sparse Information
Form"; Daxberger et al., 2021, appendix B): U are the k eigenvectors of left ⊗ right with the largest eigenvalues Λ. The
papers take S = I and D = diag(H) − diag(U Λ Uᵀ), which may be negative, so that the sum may be indefinite. Here

    s_p = min(1, √(H_pp / (U Λ Uᵀ)_pp)),    D_pp = H_pp − s_p² (U Λ Uᵀ)_pp ≥ 0:

where the low-rank part exceeds the exact diagonal its rows and columns are scaled down to meet it. The sum is positive
semi-definite, its diagonal exact, and it is that of the papers wherever theirs has D ≥ 0.

Kronecker factors are never formed: their dominant eigenvectors are found from products with few vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from laplace.core import linalg, nested
from laplace.core.arguments import check_counts
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property, keeps_last
from laplace.core.checks import is_true
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.layout import Layout, linked
from laplace.core.log_det import EigenvaluePairs, log_det_ratio
from laplace.core.orthogonal_basis import DenseBasis, OrthogonalBasis
from laplace.core.precision_policy import wide_dtype, widened
from laplace.engines.cost import DOUBLE, Cost, SideCosts, widest_gradient
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.engines.kron_parts import UNUSED, KronBlock, KronParts, KronSketch, Probe, require_blocks
from laplace.engines.profile import BatchProfile
from laplace.engines.sinks import DiagSink, KronSink, PairOfSinks
from laplace.errors import CurvatureError, InvalidArgument, StateError
from laplace.jacobian.blocks import Block, ProductBasis, TensorShape, chunks, total
from laplace.jacobian.jacobian import Jacobian
from laplace.jacobian.outer import unpicked
from laplace.large_structures import kronecker_eigenvectors
from laplace.large_structures.ekfac import Correction
from laplace.large_structures.kronecker_eigenvectors import (
    Columns,
    FactorSide,
    GaussianProbes,
    Ranges,
    columns_of,
    corrected_columns_of,
    pair_bytes,
)
from laplace.large_structures.woodbury import cancels, products, shrinkage, shrinkage_slope, whitened_power
from laplace.structures.base import Curvature, DataPass, require_finite, require_read
from laplace.structures.diag import DiagCurvature
from laplace.structures.precision import Form, Precision, mean_weight, weighted

# The candidates of eigenvalue-corrected low rank: products of the vectors that are held of both sides of a tensor.
#
# Of k + oversampling vectors of either side all products are candidates, (k + oversampling)² at most; of an embedding
# those of every row of its table. The exact diagonal of the curvature in them is what columns are chosen by, and
# weighed.


@dataclass(frozen=True, eq=False)
class TensorCandidates:
    """The candidates of one tensor."""

    basis: ProductBasis | None  # Vectors of both sides; None of a tensor without factors, which has no candidates

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

    def carried(self, table: Tensor, to: TensorCandidates) -> Tensor:
        """Diagonal of Vᵀ U diag(λ*) Uᵀ V in other candidates V, Σ_i (v_j · u_i)² λ*_i; both as tables."""
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


# Low rank plus diagonal curvature of one tensor, and the log determinant of what its low rank adds to a diagonal.
#
# With c = s/δ and A = (I + c D)⁻¹ it is log det K of the small
#
#     K = I + c Λ^½ Uᵀ S A S U Λ^½,    dK/dc = Λ^½ Uᵀ S A² S U Λ^½,    d log det K / dc = tr(K⁻¹ dK/dc).


_ROUNDING = 32
"""A rest of the diagonal up to so many units of its rounding is zero."""


@dataclass(frozen=True, eq=False)
class TensorCurvature:
    """Unit curvature S U Λ Uᵀ S + D of one tensor, differentiable in the weights of its terms."""

    columns: Columns  # U
    values: Tensor  # Λ, `[K]`, float64
    scaling: Tensor  # S, `[p]`
    rest: Tensor  # D, `[p]`

    @classmethod
    def from_columns(
        cls, columns: Columns, diagonal: Tensor, weights: Tensor, dtype: torch.dtype, summed: torch.dtype
    ) -> TensorCurvature:
        """S and D in a dtype, from columns and the exact diagonal `[p]` of terms [Redux, appendix B, with diagonal].

        `summed` is the dtype in which the diagonal was summed, to whose rounding D is known.
        """
        diagonal = diagonal.clamp(min=0)
        if not len(columns):
            return cls(columns, diagonal.new_zeros(0), torch.ones_like(diagonal).to(dtype), diagonal.to(dtype))
        values = widened(weights) @ columns.values
        lowrank = columns.diagonal(values)
        exceeds = lowrank > diagonal
        positive = exceeds & (diagonal > 0)
        ratio = torch.where(positive, diagonal, 1.0) / torch.where(positive, lowrank, 1.0)
        scaling = torch.where(exceeds & ~positive, 0.0, ratio.sqrt())
        rest = torch.where(exceeds, 0.0, diagonal - lowrank)
        rest = torch.where(rest > _ROUNDING * torch.finfo(summed).eps * diagonal, rest, 0.0)
        return cls(columns, values, scaling.to(dtype), rest.to(dtype))

    @property
    def size(self) -> int:
        """Number of entries, p."""
        return len(self.rest)


def log_det_inside(parts: Sequence[TensorCurvature], ratios: Sequence[Tensor]) -> Tensor:
    """Σ log det K over tensors for their c `[1]` or `[p]`, 0-dim, float64, differentiable in ratios and parts."""
    pairs = [(part, widened(ratio)) for part, ratio in zip(parts, ratios, strict=True) if len(part.columns)]
    if not pairs:
        return widened(ratios[0].new_zeros(()))
    some, of = zip(*pairs, strict=True)
    if all(ratio.numel() == 1 for ratio in of) and not any(part.values.requires_grad for part in some):
        return _LogDetInside.apply(torch.cat(of), some)[0]  # pyright: ignore[reportOptionalSubscript]
    grams = [part.columns.gram((ratio * _damped(part, ratio)).unsqueeze(0)) for part, ratio in pairs]
    return _log_det(_cholesky(_inside(some, grams).squeeze(1)))


class _LogDetInside(torch.autograd.Function):
    """The sum and its slope in every ratio; where its gradient is to have a graph, that is the graph of the slopes."""

    @staticmethod
    def forward(ctx: Any, ratios: Tensor, parts: Sequence[TensorCurvature]) -> tuple[Tensor, Tensor]:
        ctx.parts = parts
        value, slopes = _value_and_slopes(ratios, parts)
        ctx.save_for_backward(ratios, slopes)
        ctx.mark_non_differentiable(slopes)
        return value, slopes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ratios, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():
            slopes = _value_and_slopes(ratios, ctx.parts)[1]
        return gradients[0] * slopes, None


def _value_and_slopes(ratios: Tensor, parts: Sequence[TensorCurvature]) -> tuple[Tensor, Tensor]:
    """Σ log det K, 0-dim, and d log det K / dc of every tensor, `[n]`, for c `[n]`."""
    grams = [part.columns.gram_of(partial(_weights, part, c)) for part, c in zip(parts, ratios.unbind(), strict=True)]
    inside, slopes = _inside(parts, grams).unbind(1)
    factor = _cholesky(ratios.view(-1, 1, 1) * inside)
    return _log_det(factor), (torch.cholesky_inverse(factor) * slopes).sum((1, 2))


def _weights(part: TensorCurvature, ratio: Tensor, at: slice) -> Tensor:
    """S² A and S² A² of some entries of a tensor, `[2, n]`, for one c, float64.

    They are rounded to the curvature's dtype, as S and D are: log det K is moved by no more than that for a column.
    """
    rest, scaling = part.rest[at], part.scaling[at]
    damping = (1 + ratio.to(rest.dtype) * rest).reciprocal()
    weights = scaling.square() * damping
    return widened(torch.stack([weights, weights * damping]))


def _damped(part: TensorCurvature, ratios: Tensor) -> Tensor:
    """S² A of the entries of a tensor, `[p]`, for c in as many dimensions, or one."""
    return widened(part.scaling).square() / (1 + ratios * widened(part.rest))


def _inside(parts: Sequence[TensorCurvature], grams: Sequence[Tensor]) -> Tensor:
    """Λ^½ Uᵀ diag(w) U Λ^½ of every tensor, from its m Grams `[m, k, k]`, in one size by zeros, `[n, m, K, K]`."""
    rank = max(len(part.columns) for part in parts)
    roots = torch.stack([pad(part.values.sqrt(), (0, rank - len(part.values))) for part in parts])
    stacked = torch.stack([pad(gram, (0, rank - gram.shape[-1]) * 2) for gram in grams])
    return stacked * (roots.unsqueeze(2) * roots.unsqueeze(1)).unsqueeze(1)


def _log_det(factor: Tensor) -> Tensor:
    """Σ log det K, 0-dim, of Cholesky factors `[n, K, K]`."""
    return 2 * factor.diagonal(dim1=1, dim2=2).log().sum()


def _cholesky(inside: Tensor) -> Tensor:
    """Cholesky factors of K, of K − I `[..., K, K]`.

    Raises:
        CurvatureError: The prior is so small that a K is singular by rounding.
    """
    factor = linalg.cholesky(inside + torch.eye(inside.shape[-1], dtype=inside.dtype, device=inside.device))
    if factor is None:
        raise CurvatureError("the posterior precision is not positive definite; give a larger prior precision.")
    return factor


# P = s (S U Λ Uᵀ S + D) + diag(δ) per tensor, for any diagonal prior, by algebra on k × k matrices (Woodbury, 1950).
#
# With B = s D + δ, V = √s S U √Λ and K = I + Vᵀ B⁻¹ V: log det P = log det B + log det K and
#
#     P⁻¹ = B⁻¹ − B⁻¹ V K⁻¹ Vᵀ B⁻¹.


@dataclass(frozen=True, eq=False)
class _SolvedTensor:
    """One tensor's P at fixed hyper-parameters, with the graph that leads to them, in float64."""

    part: TensorCurvature  # Its curvature
    inverse: Tensor  # B⁻¹, `[p]`
    roots: Tensor  # √(s Λ), `[K]`
    factor: Tensor  # Cholesky factor of K, `[K, K]`

    @cached_property
    def _weights(self) -> Tensor:
        """S B⁻¹, `[p]`: what the entries of U are multiplied with in B⁻¹ V."""
        return widened(self.part.scaling) * self.inverse

    def reduced(self, block: Block, dtype: torch.dtype, form: Form) -> tuple[Tensor, Tensor | None]:
        """J P⁻¹ Jᵀ in one of the forms, computed in `dtype`.

        The second term takes away what the first one has: True, 0-dim, is returned too where too little is left for
        `dtype`, and None where nothing is taken away, or `dtype` is the widest, in which squares can take its place.
        """
        first = weighted(block, self.inverse.to(dtype), form, wide=False)
        if not len(self.roots):
            return first, None
        z = torch.linalg.solve_triangular(self.factor.to(dtype), self._applied(block, dtype).flatten(1), upper=False)
        z = z.T.unflatten(0, (block.n_data, -1))
        rest = first - products(z, form)
        if dtype != wide_dtype(first.device):
            return rest, cancels(first, rest, form, units=1)
        return self._squares(block, z, form) if is_true(cancels(first, rest, form)) else rest, None

    def _squares(self, block: Block, z: Tensor, form: Form) -> Tensor:
        """The same as sums of squares, φᵀ P⁻¹ φ = |B^(−½) φ − W y|² + |y|² with W = B^(−½) V and y = K⁻¹ Wᵀ B^(−½) φ.

        By dense rows φ; zᵀ = φᵀ B^(−½) W R⁻ᵀ, for K = R Rᵀ, of all of them.
        """
        some = list(chunks(block.n_data, block.n_cotangents * block.size, block.device))
        if form != "joint" and len(some) > 1:
            return torch.cat([self._squares(block.at(data), z[data], form) for data in some])
        y = torch.linalg.solve_triangular(self.factor, z.flatten(0, 1), upper=False, left=False)  # [B · C, K]
        deviations = self.inverse.sqrt()
        rows = widened(block.by_output()) * deviations
        outside = rows - self.part.columns.combined(y * self.roots) * (widened(self.part.scaling) * deviations)
        return products(torch.cat([outside, y], 1).unflatten(0, (block.n_data, -1)), form)

    def _applied(self, block: Block, dtype: torch.dtype) -> Tensor:
        """J B⁻¹ V, `[K, B, C]`."""
        weights, roots = self._weights.to(dtype), self.roots.to(dtype)
        rows = self.part.columns.rows(dtype)
        return torch.cat([block.apply(row * weights) * roots[some, None, None] for some, row in rows])

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        """P⁻¹ v, or B^(−½) (I + W Wᵀ)^(−½) v with W = B^(−½) V, of v `[..., p]`."""
        deviations = self.inverse.sqrt()
        if not len(self.roots):
            return vectors * (deviations if exponent == -0.5 else self.inverse)
        whiten, shrinking, columns = (
            widened(self.part.scaling) * deviations,
            self._shrinking(exponent),
            self.part.columns,
        )

        def removed(white: Tensor) -> Tensor:
            inside = (columns.inside(white * whiten) * self.roots) @ shrinking
            return columns.combined(inside * self.roots) * whiten

        return whitened_power(vectors, exponent, deviations, removed)

    def _shrinking(self, exponent: float) -> Tensor:
        """The matrix g(K) by which the low rank takes from a power, `[K, K]`."""
        core = self.factor @ self.factor.T
        values, vectors = linalg.eigh(core)
        eigen = values.clamp(min=1), vectors
        constant = (vectors * shrinkage(eigen[0], exponent)) @ vectors.T
        return constant + shrinkage_slope(core, eigen, exponent) if core.requires_grad else constant

    def diagonal(self) -> Tensor:
        """Diagonal of P⁻¹, `[p]`."""
        if not len(self.roots):
            return self.inverse
        whitened = torch.linalg.solve_triangular(self.factor, torch.diag(self.roots), upper=False)
        removed = self.part.columns.forms(whitened.T @ whitened) * self._weights.square()
        least = 1 / (1 / self.inverse + self.part.columns.diagonal(self.roots.square()) * self.part.scaling.square())
        return torch.maximum(self.inverse - removed, least)  # (P⁻¹)_pp is at least 1 / P_pp


@dataclass(frozen=True, eq=False)
class LowRankKronPrecision(Precision):
    """P = Σ over tensors of s (S U Λ Uᵀ S + D), plus diag(δ), block-diagonal."""

    parts: tuple[TensorCurvature, ...]  # Unit curvature of every tensor, for weights with a mean of 1
    weights: Tensor  # Scale of every curvature term, `[E]`; s is their mean
    prior: GaussianPrior  # δ
    pairs: EigenvaluePairs | None = None  # D of all tensors for log determinants, where no hyper-parameter changes it

    @property
    def _weight(self) -> Tensor:
        return mean_weight(self.weights)

    @property
    def _rest(self) -> Tensor:
        """D of all tensors, `[P]`."""
        return torch.cat([part.rest for part in self.parts])

    def logdet_ratio(self) -> Tensor:
        ratios = self._weight / self.prior.precision
        if not self.prior.is_constant_per_tensor:
            return (ratios * self._rest).log1p().sum() + log_det_inside(self.parts, self.prior.layout.split(ratios))
        inside = log_det_inside(self.parts, ratios.expand(len(self.parts)).split(1))
        if self.pairs is not None:
            return self.pairs.log_det_ratio(self._weight, self.prior.precision) + inside
        sizes = (self.prior.layout.n_params,) if self.prior.is_scalar else self.prior.layout.sizes
        return log_det_ratio(self._rest, ratios, sizes) + inside

    def quad(self, vectors: Tensor) -> Tensor:
        """By squares of few coordinates, half the work of a product."""
        wide = widened(vectors)
        total = wide.square() @ widened(self._weight * self._rest + self.prior.diagonal())
        for part, piece in zip(self.parts, wide.split([part.size for part in self.parts], -1), strict=True):
            total = total + self._weight * (part.columns.inside(piece * part.scaling).square() * part.values).sum(-1)
        return total.to(vectors.dtype)

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        pieces = widened(vectors).split([part.size for part in self.parts], -1)
        if exponent == 1:
            products = [self._curved(part, piece) for part, piece in zip(self.parts, pieces, strict=True)]
            return (torch.cat(products, -1) + widened(vectors) * self.prior.diagonal()).to(vectors.dtype)
        powers = [solved.power(piece, exponent) for solved, piece in zip(self._solved, pieces, strict=True)]
        return torch.cat(powers, -1).to(vectors.dtype)

    def _curved(self, part: TensorCurvature, vectors: Tensor) -> Tensor:
        """S (S U Λ Uᵀ S + D) v of vectors `[..., p]`, float64."""
        inside = part.columns.inside(vectors * part.scaling) * part.values
        return self._weight * (part.columns.combined(inside) * part.scaling + vectors * part.rest)

    def to_dense(self) -> Tensor:
        blocks = [self._dense_block(part) for part in self.parts]
        dense = torch.block_diag(*blocks) + torch.diag(self._weight * self._rest + self.prior.diagonal())
        return dense.to(self.prior.precision.dtype)

    def _dense_block(self, part: TensorCurvature) -> Tensor:
        eye = torch.eye(len(part.columns), dtype=wide_dtype(part.rest.device), device=part.rest.device)
        rows = part.columns.combined(eye) * part.scaling
        return self._weight * (rows.T * part.values) @ rows

    @cached_property
    def _solved(self) -> tuple[_SolvedTensor, ...]:
        return tuple(self._solve(part, delta) for part, delta in zip(self.parts, self.prior.per_block(), strict=True))

    def _solve(self, part: TensorCurvature, delta: Tensor) -> _SolvedTensor:
        inverse = (1 / (widened(self._weight) * widened(part.rest) + widened(delta))).expand(part.size)
        roots = (widened(self._weight) * part.values).sqrt()
        if not len(roots):
            return _SolvedTensor(part, inverse, roots, inverse.new_zeros(0, 0))
        gram = part.columns.gram(widened(part.scaling).square() * inverse)
        return _SolvedTensor(part, inverse, roots, _cholesky(roots.unsqueeze(1) * gram * roots))

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        if form == "joint":
            wide = wide_dtype(self.prior.precision.device)
            pairs = zip(self._solved, jacobian.blocks, strict=True)
            joint = total(solved.reduced(block.cast(wide), wide, form)[0] for solved, block in pairs)
            return joint.to(jacobian.summed_in(self.prior.precision.dtype))
        dtype = jacobian.summed_in(self.prior.precision.dtype)
        blocks = tuple(block.cast(dtype) for block in jacobian.blocks) if jacobian.wide else jacobian.blocks
        pairs = list(zip(self._solved, blocks, strict=True))
        values, cancels = zip(*(part.reduced(block, dtype, form) for part, block in pairs), strict=True)
        asked = [answer for answer in cancels if answer is not None]
        if not asked or not is_true(torch.stack(asked).any()):  # one question for all tensors, as a rule
            return total(values)
        wide, again = wide_dtype(asked[0].device), list(values)
        for i, (part, block) in enumerate(pairs):
            if cancels[i] is not None and bool(cancels[i]):
                again[i] = part.reduced(block.cast(wide), wide, form)[0].to(dtype)
        return total(again)

    def diagonal_of_inverse(self) -> Tensor:
        return torch.cat([solved.diagonal() for solved in self._solved]).to(self.prior.precision.dtype)

    @property
    def public(self) -> LowRankKronPrecision:
        return self


# Options of low rank plus diagonal, and what a fit with them takes.


@dataclass(frozen=True)
class LowRankKronOptions:
    """Options of `hessian_structure="lowrank_kron"`.

    Attributes:
        rank: Columns kept of every tensor, k.
        oversampling: Vectors by which the search for eigenvectors is wider than k; a side of at most k + oversampling
            entries is decomposed exactly.
        seed: Of the random vectors.
        corrected: Whether columns are chosen and weighed by the exact diagonal of the curvature in the products of
            k + oversampling vectors of either side, in place of products of eigenvalues: a third reading of the data.

    Raises:
        InvalidArgument: A rank below 1, or an oversampling below 0.
    """

    rank: int = 10
    oversampling: int = 10
    seed: int = 0
    corrected: bool = False

    def __post_init__(self) -> None:
        check_counts(rank=self.rank)
        check_counts(0, oversampling=self.oversampling)

    @property
    def width(self) -> int:
        """Vectors of every side in the search."""
        return self.rank + self.oversampling

    @property
    def held(self) -> int:
        """Vectors held of every side."""
        return self.width if self.corrected else self.rank


def cost_of(profile: BatchProfile, options: LowRankKronOptions) -> Cost:
    """Memory of a fit, whose sums are in float64, and of predictions."""
    diag, sides, wide = DiagCurvature.cost(profile, None), SideCosts.from_profile(profile), DOUBLE // profile.itemsize
    sketch = 2 * sides.columns(options.width) * DOUBLE  # random vectors, and their products
    gradients = profile.n_data * profile.itemsize * widest_gradient(profile)
    candidates = profile.n_terms * _candidates(profile, options) if options.corrected else 0
    numbers = sides.columns(options.held) + sides.cores(options.held, profile.n_terms) + candidates
    fitted = wide * diag.fitted + numbers * DOUBLE
    return Cost(
        columns=True,
        fitted=fitted,
        running=max(wide * diag.running + 2 * sketch, fitted + candidates * DOUBLE),
        adding=max(wide * diag.adding + 2 * sketch, fitted + 4 * DOUBLE * (profile.n_params + candidates)),
        pieces=wide * diag.pieces + (0 if profile.is_head else 2 * profile.at_once * gradients),
        posterior=(6 * DOUBLE + 2 * profile.itemsize) * profile.n_params  # of a step; S and D beside it
        + sides.columns(options.rank) * DOUBLE
        + 3 * candidates * DOUBLE  # as they are ordered
        + sum(pair_bytes(min(options.rank, shape.size), shape) for shape in profile.tensors if shape.factored),
        projecting=2 * diag.projecting + 2 * options.rank * profile.n_data * profile.n_outputs * profile.itemsize,
    )


def _candidates(profile: BatchProfile, options: LowRankKronOptions) -> int:
    """Products of the vectors of both sides of every tensor, of an embedding those of every row."""
    return sum(
        _vectors(shape, options) * (shape.n_inputs if shape.indexed else min(shape.n_inputs, options.width))
        for shape in profile.tensors
        if shape.factored
    )


def _vectors(shape: TensorShape, options: LowRankKronOptions) -> int:
    """Vectors of the output side, of all groups."""
    return shape.groups * min(shape.n_outputs, options.width)


@dataclass(frozen=True, eq=False)
class LowRankKronCurvature(Curvature):
    """S U Λ Uᵀ S + D for every tensor with Kronecker factors; the exact diagonal of every other.

    Under a vector noise the terms share U, the eigenvectors of their sum; Λ_e, the diagonal and S are of the weighted
    sum, so that the diagonal is exact at all noises. Of a subnetwork the columns are restricted to its entries.

    The sum of two fits has the sum of both diagonals, exactly; the sides of both are stacked and truncated again, and
    of both corrected curvatures the diagonal in the products of the new sides is kept.
    """

    diagonal: Tensor  # The exact diagonal, `[E, P]`
    blocks: tuple[KronBlock, ...]  # What the sides mean, one per tensor
    sides: dict[str, FactorSide]  # Low-rank sides by key
    factors: dict[str, Tensor]  # Counts of the rows of embeddings, and numbers of positions, by key
    rank: int  # k
    # Corrected eigenvalues of every tensor's candidates, `[E, G, r_in, r_out]`, none of a tensor without factors;
    # None where eigenvalues are products
    corrected: tuple[Tensor, ...] | None = None
    name = "lowrank_kron"
    options = LowRankKronOptions
    n_passes = 2
    is_wide = True

    def units(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        return linked([block.reads for block in self.blocks])

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        return _ProbePass(engine, options)

    @classmethod
    def cost(cls, profile: BatchProfile, options: Any) -> Cost:
        return cost_of(profile, options)

    def __add__(self, other: Curvature) -> LowRankKronCurvature:
        if not isinstance(other, LowRankKronCurvature):
            return NotImplemented
        rank = max(self.rank, other.rank)
        parts = KronParts(self.factors, self.blocks) + KronParts(other.factors, other.blocks)
        pairs = {key: (self.sides.get(key), other.sides.get(key)) for key in {**self.sides, **other.sides}}
        sides = {key: side for key, pair in pairs.items() if (side := _added(*pair)) is not None}
        both = LowRankKronCurvature(self.diagonal + other.diagonal, parts.blocks, sides, dict(parts.factors), rank)
        mine, theirs = self._carried(both), other._carried(both)
        if mine is None and theirs is None:
            return both
        if mine is None or theirs is None:
            raise InvalidArgument(
                "a curvature with corrected eigenvalues and one without are not added; fit both with the same "
                "structure_kwargs={'corrected': …}, or all data at once with override=True."
            )
        return replace(both, corrected=tuple(_sum(a, b) for a, b in zip(mine, theirs, strict=True)))

    @property
    def grids(self) -> tuple[TensorCandidates, ...]:
        """The candidates of every tensor."""
        return tuple(
            TensorCandidates(self._candidates(block) if block.kind == "kron" else None) for block in self.blocks
        )

    def _candidates(self, block: KronBlock) -> ProductBasis:
        output, key = self.sides[block.output].basis, block.input
        if key is not None and key in self.sides:
            inputs, n_inputs = DenseBasis(self.sides[key].basis), self.sides[key].basis.shape[1]
        else:  # all rows of a table, and of a bias
            inputs, n_inputs = None, 1 if key is None else len(self.factors[key])
        pair, widths = (DenseBasis(output), inputs), (output.shape[1], n_inputs)
        (left, right), (rows, columns) = (pair[::-1], widths[::-1]) if block.input_first else (pair, widths)
        return ProductBasis(left, right, (len(output), rows, columns), not block.input_first)

    def _carried(self, to: LowRankKronCurvature) -> tuple[Tensor, ...] | None:
        """The corrected eigenvalues in the candidates of another curvature."""
        if self.corrected is None:
            return None
        every = zip(self.grids, self.corrected, to.grids, strict=True)
        return tuple(grid.carried(table, other) for grid, table, other in every)

    def scaled(self, factor: float) -> LowRankKronCurvature:
        """As of `kron`: both sides and the number of positions are sums over data."""
        sides = {key: replace(side, cores=factor * side.cores) for key, side in self.sides.items()}
        factors = {key: factor * value for key, value in self.factors.items()}
        corrected = None if self.corrected is None else tuple(factor * table for table in self.corrected)
        return replace(self, diagonal=factor * self.diagonal, sides=sides, factors=factors, corrected=corrected)

    def shown(self, dtype: torch.dtype) -> LowRankKronCurvature:
        return self

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> LowRankKronPrecision:
        if options.get("damping"):
            raise InvalidArgument(
                "damping=True with hessian_structure='lowrank_kron': a low-rank part and a diagonal are no product of "
                "two factors that could be dampened; use damping=False, or hessian_structure='kron'."
            )
        rest = self._rest(weights.dtype) if self.n_terms == 1 and not self.diagonal.requires_grad else None
        return LowRankKronPrecision(self.parts(weights), weights, prior, rest)

    @keeps_last
    def _rest(self, dtype: torch.dtype) -> EigenvaluePairs:
        """D of all tensors, of which no terms are weighted, in the dtype of a posterior."""
        return EigenvaluePairs(partial(self._rests, dtype), tuple(block.size for block in self.blocks))

    def _rests(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([part.rest for part in self.parts(self.diagonal.new_ones(1, dtype=dtype))])

    def parts(self, weights: Tensor) -> tuple[TensorCurvature, ...]:
        """S, U, Λ and D of every tensor, for weights with a mean of 1: once per fit, unless terms are weighted."""
        return self._parts(torch.ones_like(weights) if self.n_terms == 1 else weights / weights.mean())

    @keeps_last
    def _parts(self, weights: Tensor) -> tuple[TensorCurvature, ...]:
        sizes = [block.size for block in self.blocks]
        diagonals = (widened(weights) @ widened(self.diagonal)).split(sizes)
        return tuple(
            TensorCurvature.from_columns(columns, diagonal, weights, weights.dtype, self.diagonal.dtype)
            for columns, diagonal in zip(self.columns, diagonals, strict=True)
        )

    @cached_property
    def columns(self) -> tuple[Columns, ...]:
        """U and Λ of every tensor, in float64; no columns where it has no factors."""
        with kept_for_later():
            if self.corrected is None:
                return tuple(self._columns(block, None) for block in self.blocks)
            return tuple(self._columns(*pair) for pair in zip(self.blocks, self.corrected, strict=True))

    def _columns(self, block: KronBlock, corrected: Tensor | None) -> Columns:
        if block.kind != "kron":
            return kronecker_eigenvectors.none(block.size, widened(self.diagonal))
        output, key = self.sides[block.output], block.input
        inputs = None if key is None else self.sides[key] if key in self.sides else self.factors[key]
        if corrected is not None:
            return corrected_columns_of(block, output, inputs, corrected, self.rank)
        # A bias has no input side, and no mean of it.
        positions = 1.0 if key is None else KronParts(self.factors, self.blocks).positions(block)
        return columns_of(block, output, inputs, positions, self.rank)

    def state(self) -> dict[str, Any]:
        """As it was before there were corrected eigenvalues, where there are none."""
        state = super().state()
        return state if self.corrected is not None else {k: part for k, part in state.items() if k != "corrected"}

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        del dtype  # its sums may be wider
        require_blocks(self.blocks, layout)
        if self.rank < 1:
            raise StateError(f"H has the rank {self.rank}; it must be 1 at least.")
        nested.require_sizes("the diagonal of H", self.diagonal, None, layout.n_params)
        for key, side in self.sides.items():
            groups, _, rank = (*side.basis.shape, 0, 0, 0)[:3]
            nested.require_sizes(f"the basis {key!r}", side.basis, groups, None, rank)
            nested.require_unit(f"the vectors {key!r}", side.basis, 1)
            nested.require_sizes(f"the core {key!r}", side.cores, None, groups, rank, rank)
        for block, name in zip(self.blocks, layout.names, strict=True):
            if block.kind == "kron":
                block.require_entries(self._n_product(block, name), name)
        if self.corrected is not None:
            for grid, table in zip(self.grids, self.corrected, strict=True):
                nested.require_sizes(
                    "the corrected eigenvalues", table, None, *grid.table(table.new_zeros(1, grid.size)).shape[1:]
                )

    def _n_product(self, block: KronBlock, name: str) -> int:
        """Number of entries of the product of the sides of a block."""
        given = {**self.sides, **self.factors}
        missing = [key for key in block.reads if key not in given]
        if missing or block.output not in self.sides:
            raise StateError(f"the block of {name!r} reads the sides {list(block.reads)}; H has {list(given)}.")
        groups, n_outputs, _ = self.sides[block.output].basis.shape
        block.require_positions(self.factors, name)
        if block.input is None:
            return groups * n_outputs
        if block.input in self.sides:
            own, n_inputs, _ = self.sides[block.input].basis.shape
            return max(groups, own) * n_outputs * n_inputs
        nested.require_sizes(f"the counts of {name!r}", self.factors[block.input], None)
        return groups * n_outputs * len(self.factors[block.input])

    def forms(self) -> tuple[str, ...]:
        kind = "Kronecker columns" if self.corrected is None else "corrected Kronecker columns"
        return tuple(_form(block, columns, kind) for block, columns in zip(self.blocks, self.columns, strict=True))


def _form(block: KronBlock, columns: Columns, kind: str) -> str:
    if block.kind == UNUSED:
        return "zero"
    return f"{len(columns)} {kind} and the exact diagonal" if len(columns) else "exact diagonal"


def _added(a: FactorSide | None, b: FactorSide | None) -> FactorSide | None:
    if a is None or b is None:
        return b if a is None else a
    return a.added(b)


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tables, of which a tensor that one set of data does not need has none."""
    if not a.numel() or not b.numel():
        return a if a.numel() else b
    return a + b


class _ProbePass(DataPass):
    """Products of the factors with a probe.

    A first reading takes random vectors, and sums the exact diagonal; a second one the ranges that these showed, in
    which the eigenvectors are found.
    """

    def __init__(
        self,
        engine: CurvatureEngine,
        options: LowRankKronOptions,
        ranges: Ranges | None = None,
        diagonal: Tensor | None = None,
    ) -> None:
        self.engine = engine
        self.chosen = options
        self.ranges = ranges  # None in the first reading
        self.probe: Probe = ranges or GaussianProbes(options.width, options.seed, engine.problem.device)
        self.diagonal = diagonal  # The exact diagonal, or its sum so far
        self.products: KronParts | None = None

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        # D is what the diagonal leaves of the low rank: both are known to the rounding of float64.
        sides, exact = KronSink(self.probe), DiagSink(dtype=wide_dtype(self.engine.problem.device))
        summary = self.engine.accumulate(x, y, PairOfSinks(sides, exact) if self.ranges is None else sides)
        sketch = KronSketch(sides.result(), exact.values if self.ranges is None else None)
        require_finite(nested.is_finite(sketch))
        if sketch.diagonal is not None:
            self.diagonal = sketch.diagonal if self.diagonal is None else self.diagonal + sketch.diagonal
        self.products = sketch.parts if self.products is None else self.products + sketch.parts
        return summary

    def sums(self) -> dict[str, Tensor]:
        products, diagonal = self._read()
        return {**products.factors, **({"diagonal": diagonal} if self.ranges is None else {})}

    def form(self) -> Any:
        return nested.form_of(nested.state_of(KronSketch(*self._read())))

    def make_room(self, form: Any) -> None:
        zeros = nested.from_state(KronSketch, nested.zeros_of(form, self.engine.problem.device))
        self.products = zeros.parts if self.products is None else self.products + zeros.parts
        if self.diagonal is None:
            self.diagonal = zeros.diagonal

    def _read(self) -> tuple[KronParts, Tensor]:
        return require_read(self.products), require_read(self.diagonal)

    def finish(self) -> Curvature | DataPass:
        parts, diagonal = self._read()
        products = {key: product for key, product in parts.factors.items() if product.ndim >= 3}
        if self.ranges is None:
            return _ProbePass(self.engine, self.chosen, Ranges.from_products(products), diagonal)
        bases = {key: self.ranges(key, *product.shape[-3:-1]) for key, product in products.items()}
        sides = {
            key: FactorSide.from_products(bases[key], product, self.chosen.held) for key, product in products.items()
        }
        factors = {key: product for key, product in parts.factors.items() if key not in products}
        curvature = LowRankKronCurvature(diagonal, parts.blocks, sides, factors, self.chosen.rank)
        return _ExactDiagonal(self.engine, curvature) if self.chosen.corrected else curvature


class _ExactDiagonal(Correction):
    """The third reading: the exact diagonal in the candidates."""

    def __init__(self, engine: CurvatureEngine, curvature: LowRankKronCurvature) -> None:
        super().__init__(engine, curvature.grids)
        self.curvature = curvature  # That of the first two readings

    def finish(self) -> Curvature:
        every = self.curvature.grids
        values = self.read().split([grid.size for grid in every], 1)
        tables = tuple(grid.table(part) for grid, part in zip(every, values, strict=True))
        return replace(self.curvature, corrected=tables)
