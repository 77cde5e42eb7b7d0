"""Kronecker-factored curvature: one product of two small matrices per weight, exact blocks where there is none.

The block of a tensor seen as a matrix (first dimension × the rest) is left ⊗ right / positions. Factors are
*sums* over data and positions, so that curvatures of batches, shards and later data simply add up; for a
linear layer left = Σ g gᵀ and right / positions is the mean of a aᵀ (Martens & Grosse, 2015; Ritter et al., 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.checks import all_finite
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.layout import Layout
from laplace.core.orthogonal_basis import DenseBasis
from laplace.core.precision_policy import widened
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.engines.kron_parts import UNUSED, KronBlock, KronParts
from laplace.engines.profile import BatchProfile
from laplace.structures import algebra, fields
from laplace.structures.additive import AdditiveCurvature
from laplace.structures.algebra import Decompositions, Recent, Size
from laplace.structures.base import Curvature
from laplace.structures.by_hand import KronByHand
from laplace.structures.cost import DOUBLE, Cost, Sides, widest_gradient
from laplace.structures.damping import Damping
from laplace.structures.eigenblocks import (
    BlockSpectrum,
    Spectra,
    dense_spectrum,
    diag_spectrum,
    followed,
    kron_spectrum,
    picked_matrix,
    values_at,
)
from laplace.structures.factor_eigen import FactorEigen, alike, decomposed, input_eigen, without_rows
from laplace.structures.kron_precision import KronPrecision, spectral_scan
from laplace.structures.separation import Separation, first, in_order, linked
from laplace.structures.variances_over_priors import SpectralScan

if TYPE_CHECKING:
    from laplace.structures.kron_public import DecomposedCurvature

_INPUT_DIMS = 3
"""Dimensions of input sides that are matrices, `[G, n, n]`; output sides have one more, of their terms."""


class KronSeparation(Separation["KronCurvature"]):
    """Units are tensors; weight and bias of a layer have an output side in common."""

    def units(self, curvature: KronCurvature, layout: Layout) -> tuple[tuple[int, ...], ...]:
        return linked([block.reads for block in curvature.parts.blocks])

    def part(self, curvature: KronCurvature, tensors: Sequence[int], layout: Layout) -> KronCurvature:
        return replace(curvature, parts=curvature.parts.part(tensors))

    def joined(self, parts: Mapping[tuple[int, ...], KronCurvature], layout: Layout) -> KronCurvature:
        blocks = in_order({tensors: part.parts.blocks for tensors, part in parts.items()})
        factors = {key: factor for part in parts.values() for key, factor in part.parts.every.items()}
        return replace(first(parts), parts=KronParts.made_of(factors, blocks))


@dataclass(frozen=True)
class KronCurvature(AdditiveCurvature):
    """Kronecker factors of every random parameter tensor.

    Attributes:
        parts: The factors.
    """

    parts: KronParts
    name = "kron"
    matrix_dims = _INPUT_DIMS
    by_hand = KronByHand()
    separation = KronSeparation()
    needs_columns = True
    is_variational = True
    exact_prior = False

    @property
    def n_terms(self) -> int:
        return self.parts.n_terms

    @classmethod
    def from_batch(cls, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, KronCurvature]:
        summary, parts = engine.kron(x, y)
        return summary, cls(parts)

    @classmethod
    def cost(cls, profile: BatchProfile, options: Any) -> Cost:
        sides = Sides.of(profile)
        fitted = sides.held(profile.n_terms, profile.itemsize)
        gradients = profile.n_data * profile.itemsize * widest_gradient(profile)
        return Cost(
            fitted=fitted,
            running=2 * fitted,
            adding=3 * fitted,
            pieces=2 * sides.largest * profile.itemsize + (0 if profile.is_head else profile.at_once * gradients),
            posterior=(DOUBLE + profile.itemsize) * sides.bases
            + 4 * DOUBLE * sides.largest
            + (DOUBLE + 3 * profile.itemsize) * profile.n_params,
            projecting=3 * profile.piece_bytes(profile.shared_sizes, profile.n_outputs)
            + 2 * profile.n_outputs * (profile.n_outputs * profile.itemsize if profile.is_head else gradients),
            work=sides.rows,
            solve=sides.solve,
        )

    def __add__(self, other: Curvature) -> KronCurvature:
        if not isinstance(other, KronCurvature):
            return NotImplemented
        return KronCurvature(self.parts + other.parts).kept()

    def with_batch(self, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, KronCurvature]:
        """Rows are added to rows: what is kept of them is found once, after the last batch."""
        summary, parts = engine.kron(x, y)
        return summary, KronCurvature(self.parts + parts)

    def is_finite(self) -> Tensor:
        """True, 0-dim, if all is finite; of sides that are known by rows, their squares in the dtype of matrices."""
        traces = [side.trace.to(self.parts.like.dtype) for side in self.parts.thin.values()]
        sums = [factor for factor in self.parts.factors.values() if factor.ndim]  # and no numbers of positions
        return all_finite([*sums, *traces])

    def kept(self, *, additive: bool = False) -> KronCurvature:
        """Eigenpairs in the place of rows, which a fit does not outlive; matrices, where sums are to add up."""
        return KronCurvature(self.parts.dense() if additive else without_rows(self.parts))

    def scaled(self, factor: float) -> KronCurvature:
        """Every factor is a sum over data, the number of positions too, and left ⊗ right / positions scales once."""
        return KronCurvature(self.parts.scaled(factor))

    def minus(self, removed: Curvature, *, signed: bool = False) -> KronCurvature:
        if not isinstance(removed, KronCurvature):
            raise algebra.other_structure(self.name, removed.name)
        mine, theirs = self.parts.dense().factors, removed.parts.dense().factors
        blocks = self.parts.merged(removed.parts)
        factors: dict[str, Tensor] = {}
        for key, is_matrix in (pair for block in blocks for pair in self._roles(block)):
            if key not in factors:
                remaining = algebra.remaining_matrix if is_matrix else algebra.remaining_entries
                factors[key] = remaining(*_both(mine.get(key), theirs.get(key)), signed=signed)
        return KronCurvature(KronParts(factors, blocks))

    def _roles(self, block: KronBlock) -> Iterator[tuple[str, bool]]:
        """Keys that a block reads, and whether each holds matrices `[..., n, n]` rather than independent entries."""
        every = self.parts.every
        yield block.output, block.kind in ("kron", "dense")
        if block.input is not None:
            yield block.input, block.input in every and every[block.input].ndim > 1
        if block.positions is not None:
            yield block.positions, False

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> KronPrecision:
        return KronPrecision(self.spectra(weights), weights, prior, damping=Damping.of(options))

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> SpectralScan:
        weights = weights.detach()
        return spectral_scan(self.spectra(weights), weights, layout, damping=Damping.of(options))

    def spectra(self, weights: Tensor) -> Spectra:
        """Eigendecomposition of every block at these weights: once per fit, unless ratios of several terms change."""
        ratios = None if self.n_terms == 1 else weights / weights.mean()
        return self._recent(ratios, lambda: self._spectra(ratios))

    @cached_property
    def _unit_spectra(self) -> Spectra:
        """Eigendecomposition of H itself, beside that of terms at the last weights."""
        ones = self.parts.like.new_ones(self.n_terms)
        with kept_for_later():
            return self.spectra(ones) if self.n_terms == 1 else self._spectra(ones)

    @cached_property
    def _recent(self) -> Recent[Spectra]:
        return Recent()

    def _spectra(self, weights: Tensor | None) -> Spectra:
        blocks: list[BlockSpectrum] = []
        with self._ahead.announced() as done:
            sides = self._sides(weights, done)
            for i, block in enumerate(self.parts.blocks):
                blocks.append(self._spectrum(block, weights, sides))
                done(len(self._together) + i)
        return Spectra(tuple(blocks), self.parts.like.dtype, factored=True)

    @cached_property
    def _ahead(self) -> Decompositions:
        """The eigendecompositions of sides, as many at once as `alike` says, and then of every exact block."""
        shapes = self._side_shapes
        steps: list[list[Size]] = [[(shapes[key][0], shapes[key][-1]) for key in keys] for keys in self._together]
        for block in self.parts.blocks:
            picked = [] if block.index is None else [(1, len(block.index))]
            steps.append([(1, block.size)] if block.kind == "dense" else picked)
        return Decompositions(steps)

    @cached_property
    def _together(self) -> list[list[str]]:
        """Keys of sides that are matrices, those that are decomposed by one call together."""
        return alike(self._side_shapes)

    @cached_property
    def _side_shapes(self) -> dict[str, torch.Size]:
        """Shapes `[G, n, n]` of sides that are matrices and are decomposed, each once."""
        factors = self.parts.factors
        keys = dict.fromkeys(key for block in self.parts.blocks for key in _sides_of(block))
        return {key: factors[key].shape[-3:] for key in keys if key in factors and factors[key].ndim >= _INPUT_DIMS}

    def _sides(self, weights: Tensor | None, done: Callable[[int], None]) -> dict[str, FactorEigen]:
        """The eigendecompositions of all sides but counts, by key.

        Args:
            weights: Of the terms; None of one.
            done: Told of every step of those that are matrices.
        """
        thin = self.parts.thin
        keys = dict.fromkeys(key for block in self.parts.blocks for key in _sides_of(block) if key in thin)
        sides = {key: FactorEigen.of_thin(thin[key]) for key in keys}
        for step, some in enumerate(self._together):
            totals = [self._side(key, weights) for key in some]
            for key, total, (values, vectors) in zip(some, totals, decomposed(totals), strict=True):
                if total.requires_grad:
                    values, vectors = values_at(total, vectors), followed(total, vectors)
                sides[key] = FactorEigen(values, DenseBasis(vectors))
            done(step)
        return sides

    def _side(self, key: str, weights: Tensor | None) -> Tensor:
        """A side `[G, n, n]`, of an output side the sum of its terms."""
        factor = self.parts.factors[key]
        if factor.ndim == _INPUT_DIMS:
            return factor if weights is None else widened(factor)
        return factor[0] if weights is None else self._total(key, weights)

    def decompose(self, **options: Any) -> None:
        if self._ahead.is_long and self.n_terms == 1:
            self.spectra(torch.ones(1))

    def _spectrum(self, block: KronBlock, weights: Tensor | None, sides: Mapping[str, FactorEigen]) -> BlockSpectrum:
        if block.kind in ("diag", UNUSED):
            return diag_spectrum(self._total(block.output, weights))
        if block.kind == "dense":
            return dense_spectrum(self._total(block.output, weights))
        if block.index is not None:
            return dense_spectrum(self._picked(block, block.index, self._total(block.output, weights)))
        output = sides[block.output]
        return kron_spectrum(block, output, input_eigen(self.parts, block, output, sides))

    def _total(self, key: str, weights: Tensor | None) -> Tensor:
        """The weighted sum of the terms of an output side, or of an exact block, float64."""
        terms = widened(self.parts.matrix(key))
        return terms[0] if weights is None else torch.tensordot(widened(weights), terms, 1)

    def _picked(self, block: KronBlock, index: Tensor, output: Tensor) -> Tensor:
        """Single entries of a product as a dense block."""
        inputs = None if block.input is None else widened(self.parts.matrix(block.input)) / self.parts.positions(block)
        return picked_matrix(output, inputs, index, input_first=block.input_first)

    @property
    def kfacs(self) -> list[list[Tensor]]:
        """Factors per tensor: `[left, right]` with left ⊗ right its block, `[left]` of a bias, or a dense block."""
        return self.parts.kfacs()

    def public(self) -> DecomposedCurvature:
        from laplace.structures.kron_public import DecomposedCurvature  # legacy values are imported when read

        return DecomposedCurvature(self.parts, lambda: self._unit_spectra)

    def state(self) -> dict[str, Any]:
        state = fields.state_of(without_rows(self.parts))
        return {name: part for name, part in state.items() if part or name != "thin"}  # as before there were any

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> KronCurvature:
        return cls(fields.from_state(KronParts, state))

    def forms(self) -> tuple[str, ...]:
        return tuple(_FORMS[block.kind] for block in self.parts.blocks)


_FORMS = {"kron": "Kronecker factors", "dense": "exact dense block", "diag": "exact diagonal", UNUSED: "zero"}


def _sides_of(block: KronBlock) -> tuple[str, ...]:
    """Keys of the sides whose eigenvectors are those of a block."""
    if block.kind != "kron" or block.index is not None:
        return ()
    return (block.output,) if block.input is None else (block.output, block.input)


def _both(a: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two factors, of which one set of data may not have needed its own: zeros in its place."""
    if a is None:
        return torch.zeros_like(b), b  # pyright: ignore[reportReturnType, reportArgumentType]
    return a, torch.zeros_like(a) if b is None else b
