"""Block-diagonal curvature: the exact curvature of every layer, without what lies between layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core import linalg, nested
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property, keeps_last
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.precision_policy import widened
from laplace.engines.cost import DOUBLE, Cost
from laplace.engines.profile import MatrixCost
from laplace.engines.sinks import BlockSink, Groups
from laplace.errors import InvalidArgument, StateError
from laplace.jacobian.full_sum import MatrixSum
from laplace.structures.base import AdditiveCurvature, Curvature, SignedOptions, nonnegative, other_structure
from laplace.structures.kron import KronPrecision, spectral_scan
from laplace.structures.precision import SpectralScan
from laplace.structures.spectra import BlockSpectrum, Spectra, dense_spectrum

if TYPE_CHECKING:
    from laplace.engines.engine import BatchSummary, CurvatureEngine
    from laplace.engines.profile import BatchProfile


@dataclass(frozen=True)
class BlockOptions(SignedOptions):
    """Options of `hessian_structure="block"`.

    Attributes:
        max_block: Most random entries of one layer. A block of p entries takes 8 p² bytes in a fit, and 20 p²
            more and some 10 p³ operations for its eigendecomposition: 1.9 GB and about a minute at the default.
    """

    max_block: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_block < 1:
            raise InvalidArgument(f"max_block={self.max_block}; it must be at least 1, in entries of a layer.")


@dataclass(frozen=True)
class BlockCurvature(AdditiveCurvature):
    """The unit curvature of the tensors of every layer (all tensors that one module owns) as a matrix."""

    sums: tuple[MatrixSum, ...]  # Of every layer the sum over batches: `values` completes it
    groups: Groups  # Indices of the tensors of every layer
    signed: bool = False  # Whether negative eigenvalues are meant; else they are rounding, and zero
    name = "block"
    matrix_dims = 3
    options = BlockOptions
    is_wide = True

    @cached_property
    def values(self) -> tuple[Tensor, ...]:
        """H of every layer, `[E, p, p]`."""
        return tuple(block.complete() for block in self.sums)

    def units(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        return self.groups

    @property
    def n_terms(self) -> int:
        return self.sums[0].n_terms

    @classmethod
    def check(cls, layout: Layout, options: Any) -> None:
        for group in layout.layers:
            size, name = sum(layout.sizes[i] for i in group), layout.names[group[0]]
            if size > options.max_block:
                raise InvalidArgument(
                    f"hessian_structure='block': the layer {name.rpartition('.')[0]!r} has {size} random entries, "
                    f"more than max_block={options.max_block}; its block would take {28 * size**2 / 2**30:.3g} GiB, "
                    f"factorised. Pass structure_kwargs={{'max_block': {size}}} if the machine has that, or use "
                    "hessian_structure='kron' or 'diag', or fewer weights."
                )

    @classmethod
    def from_batch(cls, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, BlockCurvature]:
        layout = engine.problem.layout
        sums = tuple(MatrixSum(sum(layout.sizes[i] for i in group)) for group in layout.layers)
        return cls(sums, layout.layers).with_batch(engine, x, y)

    def with_batch(self, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, BlockCurvature]:
        """The batch is added to the sums in place, so that no second ones are held."""
        summary = engine.accumulate(x, y, BlockSink(self.groups, self.sums))
        return summary, BlockCurvature(self.sums, self.groups)

    @classmethod
    def cost(cls, profile: BatchProfile, options: Any) -> Cost:
        layers = [[profile.tensors[i] for i in layer] for layer in profile.layout.layers]
        sizes = [sum(shape.size for shape in layer) for layer in layers]
        sums = [MatrixCost.from_profile(profile, layer) for layer in layers]
        squares, largest = sum(size**2 for size in sizes), max(sizes)
        fitted = profile.n_terms * squares * (DOUBLE if profile.n_columns else profile.itemsize)
        running = sum(each.running for each in sums)
        return Cost(
            fitted=fitted,
            running=running if profile.n_columns else 2 * fitted,
            adding=sum(each.completing for each in sums),
            pieces=max(each.pieces for each in sums),
            posterior=(2 * DOUBLE + profile.itemsize) * squares + 4 * DOUBLE * largest**2,
            projecting=3 * profile.piece_bytes([largest], profile.n_outputs),
            vectors=0 if profile.n_columns else profile.n_params,
        )

    def __add__(self, other: Curvature) -> BlockCurvature:
        if not isinstance(other, BlockCurvature):
            return NotImplemented
        return _from_blocks((a + b for a, b in zip(self.values, other.values, strict=True)), self.groups)

    def scaled(self, factor: float) -> BlockCurvature:
        return _from_blocks((factor * block for block in self.values), self.groups)

    def minus(self, removed: Curvature, *, signed: bool = False, terms: torch.dtype | None = None) -> BlockCurvature:
        if not isinstance(removed, BlockCurvature):
            raise other_structure(self.name, removed.name)
        pairs = zip(self.values, removed.values, strict=True)
        return _from_blocks((linalg.remaining_matrix(a, b, signed=signed, terms=terms) for a, b in pairs), self.groups)

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> KronPrecision:
        return KronPrecision(self._indefinite(options.get("indefinite")).spectra(weights), weights, prior)

    def _indefinite(self, mode: str | None) -> BlockCurvature:
        """The blocks with what is done about negative eigenvalues; None where there can be none."""
        return self if mode is None else self._mended(mode)

    @keeps_last
    def _mended(self, mode: str) -> BlockCurvature:
        if mode == "error":
            return replace(self, signed=True)
        pairs = [linalg.eigh(block, signed=True) for block in self.values]
        blocks = [(u * nonnegative(values, mode).unsqueeze(1)) @ u.mT for values, u in pairs]
        return _from_blocks((block.to(self.values[0]) for block in blocks), self.groups)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> SpectralScan:
        weights = weights.detach()
        return spectral_scan(self._indefinite(options.get("indefinite")).spectra(weights), weights, layout)

    def spectra(self, weights: Tensor) -> Spectra:
        """Eigendecomposition of every block at these weights: once per fit, unless ratios of several terms change."""
        blocks = self._decomposed(None if self.n_terms == 1 else weights / weights.mean())
        return self._of_blocks((blocks, weights.dtype))

    @keeps_last
    def _of_blocks(self, key: tuple[tuple[BlockSpectrum, ...], torch.dtype]) -> Spectra:
        return Spectra(*key, self.groups, signed=self.signed)

    @keeps_last
    def _decomposed(self, weights: Tensor | None) -> tuple[BlockSpectrum, ...]:
        terms = (widened(block) for block in self.values)
        totals = (t[0] if weights is None else torch.tensordot(widened(weights), t, 1) for t in terms)
        signed = self.values[0].dtype if self.signed else None
        return tuple(dense_spectrum(total, signed=signed) for total in totals)

    def is_finite(self) -> Tensor:
        return torch.stack([block.is_finite() for block in self.sums]).all()

    def state(self) -> dict[str, Any]:
        return {"values": list(self.values), "groups": [list(group) for group in self.groups]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> BlockCurvature:
        return _from_blocks(state["values"], tuple(tuple(group) for group in state["groups"]))

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        if sorted(i for group in self.groups for i in group) != [*range(layout.n_tensors)]:
            raise StateError(f"H has blocks of the tensors {self.groups}; there are {layout.n_tensors}, each has one.")
        for values, group in zip(self.values, self.groups, strict=True):
            size = sum(layout.sizes[i] for i in group)
            nested.require_sizes("a block of H", values, None, size, size)

    def forms(self) -> tuple[str, ...]:
        return ("exact dense block of its layer",) * sum(len(group) for group in self.groups)

    def public(self) -> tuple[Tensor, ...]:
        return tuple(block.sum(0) for block in self.values)


def _from_blocks(values: Iterable[Tensor], groups: Groups) -> BlockCurvature:
    """The curvature with these matrices `[E, p, p]`, one for every layer."""
    return BlockCurvature(tuple(MatrixSum.from_matrices(block) for block in values), groups)
