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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.layout import Layout
from laplace.core.precision_policy import widened
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.engines.kron_parts import UNUSED, KronBlock, KronParts, KronSketch, Probe
from laplace.engines.profile import BatchProfile
from laplace.engines.sinks import DiagSink, KronSink, PairOfSinks
from laplace.errors import InvalidArgument, InvalidData
from laplace.structures import fields, kronecker_eigenvectors
from laplace.structures.algebra import Recent
from laplace.structures.base import Curvature, DataPass, require_finite, those_known
from laplace.structures.corrected import Correction
from laplace.structures.cost import Cost
from laplace.structures.kronecker_eigenvectors import Columns, columns_of, corrected_columns_of
from laplace.structures.log_det import Pairs
from laplace.structures.low_rank_factors import Draws, Ranges, Side
from laplace.structures.lowrank_kron_cost import LowRankKronOptions, cost_of
from laplace.structures.lowrank_kron_grid import Grid, grids
from laplace.structures.lowrank_kron_part import Part
from laplace.structures.lowrank_kron_precision import LowRankKronPrecision
from laplace.structures.separation import Separation, first, in_order, linked


class LowRankKronSeparation(Separation["LowRankKronCurvature"]):
    """Units are tensors; weight and bias of a layer have an output side in common."""

    def units(self, curvature: LowRankKronCurvature, layout: Layout) -> tuple[tuple[int, ...], ...]:
        return linked([block.reads for block in curvature.blocks])

    def part(self, curvature: LowRankKronCurvature, tensors: Sequence[int], layout: Layout) -> LowRankKronCurvature:
        blocks = tuple(curvature.blocks[i] for i in tensors)
        keys = dict.fromkeys(key for block in blocks for key in block.reads)
        sides = {key: curvature.sides[key] for key in keys if key in curvature.sides}
        factors = {key: curvature.factors[key] for key in keys if key in curvature.factors}
        diagonal = layout.gathered(curvature.diagonal, tensors)
        corrected = None if curvature.corrected is None else tuple(curvature.corrected[i].clone() for i in tensors)
        return replace(curvature, diagonal=diagonal, blocks=blocks, sides=sides, factors=factors, corrected=corrected)

    def joined(self, parts: Mapping[tuple[int, ...], LowRankKronCurvature], layout: Layout) -> LowRankKronCurvature:
        every = parts.values()
        tables = {tensors: part.corrected for tensors, part in parts.items() if part.corrected is not None}
        return replace(
            first(parts),
            diagonal=layout.scattered({tensors: part.diagonal for tensors, part in parts.items()}),
            blocks=in_order({tensors: part.blocks for tensors, part in parts.items()}),
            sides={key: side for part in every for key, side in part.sides.items()},
            factors={key: factor for part in every for key, factor in part.factors.items()},
            corrected=in_order(tables) if tables else None,
        )


@dataclass(frozen=True, eq=False)
class LowRankKronCurvature(Curvature):
    """S U Λ Uᵀ S + D for every tensor with Kronecker factors; the exact diagonal of every other.

    Under a vector noise the terms share U, the eigenvectors of their sum; Λ_e, the diagonal and S are of the weighted
    sum, so that the diagonal is exact at all noises. Of a subnetwork the columns are restricted to its entries.

    The sum of two fits has the sum of both diagonals, exactly; the sides of both are stacked and truncated again, and
    of both corrected curvatures the diagonal in the products of the new sides is kept.

    Attributes:
        diagonal: The exact diagonal, `[E, P]`.
        blocks: What the sides mean, one per tensor.
        sides: Low-rank sides by key.
        factors: Counts of the rows of embeddings, and numbers of positions, by key.
        rank: k.
        corrected: Corrected eigenvalues of every tensor's candidates, `[E, G, r_in, r_out]`, none of a tensor without
            factors; None where eigenvalues are products.
    """

    diagonal: Tensor
    blocks: tuple[KronBlock, ...]
    sides: dict[str, Side]
    factors: dict[str, Tensor]
    rank: int
    corrected: tuple[Tensor, ...] | None = None
    name = "lowrank_kron"
    needs_columns = True
    options = LowRankKronOptions
    separation = LowRankKronSeparation()
    n_passes = 2

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        return _Search(engine, options)

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
    def grids(self) -> tuple[Grid, ...]:
        """The candidates of every tensor."""
        return grids(self.blocks, self.sides, self.factors)

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

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> LowRankKronPrecision:
        if options.get("damping"):
            raise InvalidArgument(
                "damping=True with hessian_structure='lowrank_kron': a low-rank part and a diagonal are no product of "
                "two factors that could be dampened; use damping=False, or hessian_structure='kron'."
            )
        rest = self._rest if self.n_terms == 1 and not self.diagonal.requires_grad else None
        return LowRankKronPrecision(self.parts(weights), weights, prior, rest)

    @cached_property
    def _rest(self) -> Pairs:
        """D of all tensors, of which no terms are weighted."""
        return Pairs(self._rests, tuple(block.size for block in self.blocks))

    def _rests(self) -> Tensor:
        return torch.cat([part.rest for part in self.parts(self.diagonal.new_ones(1))])

    def parts(self, weights: Tensor) -> tuple[Part, ...]:
        """S, U, Λ and D of every tensor, for weights with a mean of 1: once per fit, unless terms are weighted."""
        ratios = torch.ones_like(self.diagonal[:, 0]) if self.n_terms == 1 else weights / weights.mean()
        return self._recent(ratios, lambda: self._parts(ratios))

    @cached_property
    def _recent(self) -> Recent[tuple[Part, ...]]:
        return Recent()

    def _parts(self, weights: Tensor) -> tuple[Part, ...]:
        sizes = [block.size for block in self.blocks]
        diagonals = (widened(weights) @ widened(self.diagonal)).split(sizes)
        dtype = self.diagonal.dtype
        return tuple(
            Part.of(columns, diagonal, weights, dtype)
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

    def forms(self) -> tuple[str, ...]:
        kind = "Kronecker columns" if self.corrected is None else "corrected Kronecker columns"
        return tuple(_form(block, columns, kind) for block, columns in zip(self.blocks, self.columns, strict=True))


def _form(block: KronBlock, columns: Columns, kind: str) -> str:
    if block.kind == UNUSED:
        return "zero"
    return f"{len(columns)} {kind} and the exact diagonal" if len(columns) else "exact diagonal"


def _added(a: Side | None, b: Side | None) -> Side | None:
    if a is None or b is None:
        return b if a is None else a
    return a.added(b)


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tables, of which a tensor that one set of data does not need has none."""
    if not a.numel() or not b.numel():
        return a if a.numel() else b
    return a + b


class _Products(DataPass):
    """A reading of the data: products of the factors with a probe, and the diagonal in the first one.

    Args:
        engine: Computes the numbers of a batch.
        options: Rank and seed.
        probe: What the factors are multiplied with.
        diagonal: Sum of the exact diagonal, or None if this reading is to find it.
    """

    def __init__(
        self, engine: CurvatureEngine, options: LowRankKronOptions, probe: Probe, diagonal: Tensor | None = None
    ) -> None:
        self.engine = engine
        self.chosen = options
        self.probe = probe
        self.sums_diagonal = diagonal is None
        self.diagonal = diagonal
        self.products: KronParts | None = None

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        sides, exact = KronSink(self.probe), DiagSink()
        summary = self.engine.accumulate(x, y, PairOfSinks(sides, exact) if self.sums_diagonal else sides)
        sketch = KronSketch(sides.result(), exact.values if self.sums_diagonal else None)
        require_finite(fields.is_finite(sketch))
        if sketch.diagonal is not None:
            self.diagonal = sketch.diagonal if self.diagonal is None else self.diagonal + sketch.diagonal
        self.products = sketch.parts if self.products is None else self.products + sketch.parts
        return summary

    def sums(self) -> dict[str, Tensor]:
        products, diagonal = self.read()
        return {**products.factors, **those_known(diagonal=diagonal if self.sums_diagonal else None)}

    def form(self) -> Any:
        products, diagonal = self.read()
        return fields.form_of(fields.state_of(KronSketch(products, diagonal)))

    def make_room(self, form: Any) -> None:
        zeros = fields.from_state(KronSketch, fields.zeros_of(form, self.engine.problem.device))
        self.products = zeros.parts if self.products is None else self.products + zeros.parts
        if self.diagonal is None:
            self.diagonal = zeros.diagonal

    def held(self) -> dict[str, Any]:
        """The sums of the batches so far, for states."""
        return {"products": fields.state_of(self.products), "diagonal": self.diagonal}

    def resumed(self, state: Mapping[str, Any]) -> DataPass:
        ranges = state.get("ranges")
        if "curvature" in state:
            return _Correction.of_state(self.engine, state)
        later = self if ranges is None else _Refinement(self.engine, self.chosen, Ranges(ranges), state["diagonal"])
        later.products, later.diagonal = fields.from_state(KronParts | None, state["products"]), state["diagonal"]
        return later

    def read(self) -> tuple[KronParts, Tensor]:
        """Products and diagonal of all data.

        Raises:
            InvalidData: There were none.
        """
        if self.products is None or self.diagonal is None:
            raise InvalidData("no batch was read.")
        return self.products, self.diagonal


class _Search(_Products):
    """The first reading: the exact diagonal, and where the dominant eigenvectors are."""

    def __init__(self, engine: CurvatureEngine, options: LowRankKronOptions) -> None:
        super().__init__(engine, options, Draws(options.width, options.seed, engine.problem.device))

    def state(self) -> dict[str, Any]:
        return self.held()

    def finish(self) -> DataPass:
        products, diagonal = self.read()
        ranges = Ranges.of({key: product for key, product in products.factors.items() if product.ndim >= 3})
        return _Refinement(self.engine, self.chosen, ranges, diagonal)


class _Refinement(_Products):
    """The second reading: eigenvectors within the ranges that were found.

    Args:
        engine: Computes the numbers of a batch.
        options: Rank and seed.
        ranges: Where the eigenvectors are.
        diagonal: The exact diagonal.
    """

    def __init__(
        self, engine: CurvatureEngine, options: LowRankKronOptions, ranges: Ranges, diagonal: Tensor | None
    ) -> None:
        super().__init__(engine, options, ranges, diagonal)
        self.ranges = ranges

    def state(self) -> dict[str, Any]:
        return {**self.held(), "ranges": self.ranges.bases}

    def finish(self) -> Curvature | DataPass:
        products, diagonal = self.read()
        sides: dict[str, Side] = {}
        factors: dict[str, Tensor] = {}
        for key, product in products.factors.items():
            if product.ndim < 3:
                factors[key] = product
            else:
                basis = self.probe(key, *product.shape[-3:-1])
                sides[key] = Side.of(basis, product, self.chosen.held)
        curvature = LowRankKronCurvature(diagonal, products.blocks, sides, factors, self.chosen.rank)
        return _Correction(self.engine, curvature) if self.chosen.corrected else curvature


class _Correction(Correction):
    """The third reading: the exact diagonal in the candidates.

    Args:
        engine: Computes the numbers of a batch.
        curvature: That of the first two readings.
        corrected: The sum so far.
    """

    def __init__(
        self, engine: CurvatureEngine, curvature: LowRankKronCurvature, corrected: Tensor | None = None
    ) -> None:
        super().__init__(engine, curvature.grids, corrected)
        self.curvature = curvature

    @classmethod
    def of_state(cls, engine: CurvatureEngine, state: Mapping[str, Any]) -> _Correction:
        """The pass of what `state` gave."""
        return cls(engine, LowRankKronCurvature.from_state(state["curvature"]), state["corrected"])

    def state(self) -> dict[str, Any]:
        return {"curvature": self.curvature.state(), "corrected": self.corrected}

    def finish(self) -> Curvature:
        every = self.curvature.grids
        values = self.read().split([grid.size for grid in every], 1)
        tables = tuple(grid.table(part) for grid, part in zip(every, values, strict=True))
        return replace(self.curvature, corrected=tables)
