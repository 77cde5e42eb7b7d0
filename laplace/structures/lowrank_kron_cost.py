"""Options of low rank plus diagonal, and what a fit with them takes."""

from __future__ import annotations

from dataclasses import dataclass

from laplace.core.argument_checks import check_counts
from laplace.engines.profile import BatchProfile
from laplace.jacobian.blocks import TensorShape
from laplace.structures.cost import DOUBLE, Cost, Sides, widest_gradient
from laplace.structures.diag import DiagCurvature
from laplace.structures.kronecker_eigenvectors import pair_bytes


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
    """Memory and work of a fit and of predictions."""
    diag, sides = DiagCurvature.cost(profile, None), Sides.of(profile)
    columns = 1 if profile.is_head else max(1, profile.n_columns)  # a head is summed without a root of Λ
    sketch = sides.columns(options.width) * (DOUBLE + profile.itemsize)  # random vectors, and their products
    gradients = profile.n_data * profile.itemsize * widest_gradient(profile)
    candidates = profile.n_terms * _candidates(profile, options) if options.corrected else 0
    numbers = sides.columns(options.held) + sides.cores(options.held, profile.n_terms) + candidates
    fitted = diag.fitted + numbers * profile.itemsize
    n_passes = 3 if options.corrected else 2
    projection = float(profile.n_data * columns * sides.columns(options.width))  # of factors, in every reading
    return Cost(
        fitted=fitted,
        running=max(diag.running + 2 * sketch, fitted + candidates * profile.itemsize),
        adding=max(diag.adding + 2 * sketch, fitted + 4 * DOUBLE * (profile.n_params + candidates)),
        pieces=diag.pieces + (0 if profile.is_head else 2 * profile.at_once * gradients),
        posterior=(6 * DOUBLE + 2 * profile.itemsize) * profile.n_params  # of a step; S and D beside it
        + sides.columns(options.rank) * DOUBLE
        + 3 * candidates * DOUBLE  # as they are ordered
        + sum(pair_bytes(min(options.rank, shape.size), shape) for shape in profile.tensors if shape.factored),
        projecting=2 * diag.projecting + 2 * options.rank * profile.n_data * profile.n_outputs * profile.itemsize,
        n_passes=n_passes,
        work=diag.work / n_passes + projection + (_summing(profile, options) / n_passes if options.corrected else 0.0),
        between=float(options.width**2 * sides.columns(1)),
    )


def _candidates(profile: BatchProfile, options: LowRankKronOptions) -> int:
    """Products of the vectors of both sides of every tensor, of an embedding those of every row."""
    return sum(
        _vectors(shape, options) * (shape.n_inputs if shape.indexed else min(shape.n_inputs, options.width))
        for shape in profile.tensors
        if shape.factored
    )


def _summing(profile: BatchProfile, options: LowRankKronOptions) -> float:
    """Multiplications per batch of squares of the Jacobian in the candidates."""
    per_column = sum(
        shape.positions * _vectors(shape, options) * (1 if shape.indexed else min(shape.n_inputs, options.width))
        for shape in profile.tensors
        if shape.factored
    )
    return float(profile.n_data * max(1, profile.n_columns) * per_column)


def _vectors(shape: TensorShape, options: LowRankKronOptions) -> int:
    """Vectors of the output side, of all groups."""
    return shape.groups * min(shape.n_outputs, options.width)
