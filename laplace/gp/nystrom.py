"""Curvature in the span of a few Jacobians: the Nyström approximation of the kernel (Deng et al., 2022, "ELLA").

Of M data one output each gives a row of J; the k leading eigenvectors of their kernel K = J Jᵀ = U Λ Uᵀ span the
directions V = Jᵀ U Λ^(−½) in weight space, orthonormal. The features of any datum are φ(x) = J(x) V, `[C, k]`, and all
data are seen through them: G = Σ_n φ_nᵀ Λ_n φ_n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import eigen, linalg, nested
from laplace.core.arguments import check_counts
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.linalg import bilinear, power
from laplace.core.precision_policy import widened
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.errors import CurvatureError, InvalidArgument, UnsupportedError
from laplace.gp.reading import ObservingPass, jacobians, uncounted
from laplace.gp.subset import Pool, make_score
from laplace.jacobian.jacobian import Jacobian, kernel
from laplace.large_structures import subspace
from laplace.large_structures.dual import ProjectedScan, SplitPrior, pulled
from laplace.structures.base import Curvature, DataPass, require_finite, require_read
from laplace.structures.precision import Form, Precision

# Posterior precisions in the span of a few directions.


def features(directions: Tensor, jacobian: Jacobian) -> Tensor:
    """J V of directions Vᵀ `[k, P]`, `[k, B, C]`, float64."""
    parts = directions.split([block.size for block in jacobian.blocks], 1)
    return jacobian.sum_over_blocks(lambda i, block: widened(block.apply(parts[i])))


@dataclass(frozen=True, eq=False)
class NystromPrecision(Precision):
    """P = V (Σ_e w_e G_e) Vᵀ + δ: its determinant and quadratic form are of all weights, its variance of the span."""

    directions: Tensor  # Vᵀ, `[k, P]`
    gram: Tensor  # G, `[E, k, k]`
    unit: tuple[Tensor, Tensor]  # Eigenvalues and eigenvectors of the sum of all terms
    weights: Tensor  # w, `[E]`
    prior: GaussianPrior  # δ

    @cached_property
    def _core(self) -> Tensor:
        """Σ w G, `[k, k]`, float64."""
        return torch.tensordot(widened(self.weights), self.gram, 1)

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of Σ w G, constants."""
        if len(self.gram) == 1:
            return widened(self.weights[0].detach()) * self.unit[0], self.unit[1]
        return linalg.eigh(self._core)

    def _inside(self, exponent: float) -> Tensor:
        """(Σ w G + δ)^exponent, `[k, k]`, float64, with its graph."""
        (values, vectors), delta = self._eigen, widened(self._delta)
        moving = self._core + delta * torch.eye(len(values), dtype=values.dtype, device=values.device)
        return power(moving, (values + delta.detach(), vectors), exponent)

    @property
    def _delta(self) -> Tensor:
        return self.prior.precision[0]

    def logdet_ratio(self) -> Tensor:
        if len(self.gram) == 1:
            return (self.weights * self.unit[0] / self._delta).log1p().sum()
        return (eigen.eigvalsh(self._core).clamp(min=0) / self._delta).log1p().sum()

    def quad(self, vectors: Tensor) -> Tensor:
        inside = vectors @ self.directions.T
        return bilinear(inside.unsqueeze(-2), self._core, diagonal=True).squeeze(
            -1
        ) + self._delta * vectors.square().sum(-1)

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        """That of all weights for an exponent of 1; inverse and root are of the span, and zero outside of it."""
        inside = self._core if exponent == 1 else self._inside(exponent)
        curved = ((vectors @ self.directions.T) @ inside.to(vectors)) @ self.directions
        return curved + self._delta * vectors if exponent == 1 else curved

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        rows = features(self.directions, jacobian).permute(1, 2, 0)
        diagonal, dtype = form == "diagonal", self.directions.dtype
        variance = bilinear(rows.flatten(0, 1) if form == "joint" else rows, self._inside(-1), diagonal=diagonal)
        return variance.to(dtype if diagonal else jacobian.summed_in(dtype))

    def diagonal_of_inverse(self) -> Tensor:
        return subspace.quadratic_forms(self.directions, self._inside(-1)).to(self.directions.dtype)


@dataclass(frozen=True)
class NystromOptions:
    """Options of the search for directions.

    Attributes:
        subsample_size: M, data whose Jacobians span them.
        n_eigenvalues: K, how many are kept.
        seed: Of the choice of data, and (plus 1) of their outputs.
        balanced: Whether the classes take turns in the choice.

    Raises:
        InvalidArgument: Not 0 < k ≤ M.
    """

    subsample_size: int
    n_eigenvalues: int
    seed: int = 1234
    balanced: bool = False

    def __post_init__(self) -> None:
        check_counts(subsample_size=self.subsample_size, n_eigenvalues=self.n_eigenvalues)
        if self.n_eigenvalues > self.subsample_size:
            raise InvalidArgument(
                f"n_eigenvalues={self.n_eigenvalues} exceeds subsample_size={self.subsample_size}: M data span at most "
                "M directions."
            )

    def at_most(self, n_data: int) -> NystromOptions:
        """The same for so many data: a subsample of more is all of them."""
        size = min(self.subsample_size, n_data)
        return replace(self, subsample_size=size, n_eigenvalues=min(self.n_eigenvalues, size))


@dataclass(frozen=True)
class Watch:
    """Observer of the second reading."""

    # Called with the engine, the curvature and the number of data so far, always at the end
    record: Callable[[CurvatureEngine, NystromCurvature, int], None]
    every: int | None = None  # Batches between calls before that; None for the end alone

    def is_due(self, n_batches: int) -> bool:
        """True if a call follows this many batches, before the end."""
        return self.every is not None and n_batches % self.every == 0


@dataclass(frozen=True, eq=False)
class NystromCurvature(Curvature):
    """G in the span of V; outside of it there is neither curvature nor variance."""

    directions: Tensor  # Vᵀ, orthonormal rows, `[k, P]`
    gram: Tensor  # G, `[E, k, k]`, float64
    name = "gp"
    exact_ggn = True
    weighs_data = False
    options = NystromOptions
    n_passes = 2

    @property
    def n_terms(self) -> int:
        return len(self.gram)

    @property
    def note(self) -> str:
        return f"Nyström approximation with {len(self.directions)} directions"

    @cached_property
    def unit(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the sum of all terms."""
        return linalg.eigh(self.gram.sum(0))

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        return DirectionPass(engine, options)

    @classmethod
    def before_data(cls, prior: GaussianPrior) -> Precision:
        raise UnsupportedError(
            "a Nyström approximation has no density over weights before fit; call fit(train_loader)."
        )

    def __add__(self, other: Curvature) -> NystromCurvature:
        raise CurvatureError(
            "curvature in the span of other directions cannot be added; fit all data together with override=True."
        )

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> NystromPrecision:
        """The posterior in the span.

        Raises:
            UnsupportedError: More than one prior precision.
        """
        if not prior.is_scalar:
            raise UnsupportedError(
                "the Nyström approximation takes one prior precision: its directions are orthonormal under that alone. "
                "Use functional_approximation='sod' for one per tensor, or hessian_structure='full' or 'lowrank'."
            )
        return NystromPrecision(self.directions, self.gram, self.unit, weights, prior)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> ProjectedScan:
        values, vectors = linalg.eigh(torch.tensordot(weights.to(self.gram), self.gram, 1))

        def split(jacobian: Jacobian, form: Form) -> tuple[SplitPrior, ...]:
            inside = features(self.directions, jacobian).permute(1, 2, 0) @ vectors
            shape = inside.shape[:2] if form == "diagonal" else (*inside.shape[:2], inside.shape[1])
            return (SplitPrior(inside, inside.new_zeros(shape), values),)

        return ProjectedScan(split, values.new_ones(()), 1.0, self.directions.dtype)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> NystromCurvature:
        return nested.from_state(cls, state | {"gram": widened(state["gram"])})

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        nested.require_sizes("the directions of H", self.directions, None, layout.n_params, dtype=dtype)
        nested.require_unit("the directions of H", self.directions, 1)
        nested.require_sizes("the core of H", self.gram, None, len(self.directions), len(self.directions))

    def public(self) -> Tensor:
        """G, `[k, k]`."""
        return self.gram.sum(0).to(self.directions.dtype)


class DirectionPass(DataPass):
    """First reading: picks M data, and finds the directions that one output of each span."""

    def __init__(self, engine: CurvatureEngine, options: NystromOptions, watch: Watch | None = None) -> None:
        self.engine = engine  # Computes Jacobians
        self.options = options  # How many
        self.watch = watch  # Observer of the second reading, or None
        score = make_score("random", engine, torch.Generator().manual_seed(options.seed))
        self.pool = Pool(options.subsample_size, score, balanced=options.balanced)

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        if self.options.balanced and (y.ndim != 1 or y.is_floating_point()):
            raise InvalidArgument(
                f"balanced=True takes class labels, [B] integers; the targets have shape {list(y.shape)} and dtype "
                f"{y.dtype}. Leave it out."
            )
        self.pool.add(x, y)
        return uncounted(y)

    def finish(self) -> GramPass:
        directions = _directions(list(self._rows()), self.options.n_eigenvalues)
        return GramPass(self.engine, directions, self.watch)

    def _rows(self) -> Iterator[Jacobian]:
        """A row of the Jacobian per datum, of an output at random."""
        generator = torch.Generator().manual_seed(self.options.seed + 1)
        for rows in self.pool.chunks():
            for jacobian, f in jacobians(self.engine, rows.x):
                outputs = torch.randint(f.shape[1], (len(f),), generator=generator).to(f.device)
                yield jacobian.select_outputs(outputs.unsqueeze(1)).detached()


def _directions(parts: list[Jacobian], count: int) -> Tensor:
    """The `count` leading directions of rows of J, `[k, P]`, orthonormal."""
    gram = torch.cat([torch.cat([kernel(a, b)[:, 0, :, 0] for b in parts], 1) for a in parts])
    values, vectors = linalg.eigh(0.5 * (gram + gram.T))
    size = max(len(gram), sum(block.size for block in parts[0].blocks))
    spanned = int((values > size * torch.finfo(values.dtype).eps * values[-1]).sum())
    if count > spanned:
        raise InvalidArgument(
            f"n_eigenvalues={count}, but the Jacobians of the {len(gram)} data span {spanned} directions; give at most "
            "that, or a larger subsample_size."
        )
    weights = vectors[:, -count:] / values[-count:].sqrt()
    rows = torch.stack([pulled(parts, weight.unsqueeze(1)) for weight in weights.T])
    # Pulled in the model's dtype; the span is what counts, in any orthonormal basis.
    return torch.linalg.qr(widened(rows).T).Q.T.to(rows.dtype).contiguous()


class GramPass(ObservingPass):
    """Second reading: sums G over all data."""

    def __init__(self, engine: CurvatureEngine, directions: Tensor, watch: Watch | None) -> None:
        super().__init__(engine)
        self.directions = directions  # Vᵀ, `[k, P]`
        self.watch = watch  # Observer of this reading, or None
        self.batches = self.seen = 0
        self.gram: Tensor | None = None

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        for jacobian, f, targets in self.observed(x, y):
            phi = features(self.directions, jacobian)
            curved = self.engine.likelihood.hessian(widened(f), targets).times(phi)
            terms = "ckl" if self.engine.split_outputs else "kl"
            gram = torch.einsum(f"kbc,lbc->{terms}", phi, curved)
            require_finite(gram.isfinite())
            self.gram = gram if self.gram is None else self.gram + gram
        self.batches, self.seen = self.batches + 1, self.seen + len(y)
        if self.watch is not None and self.watch.is_due(self.batches):
            self.watch.record(self.engine, self._curvature(), self.seen)
        return uncounted(y, self.n_outputs)

    def finish(self) -> NystromCurvature:
        curvature = self._curvature()
        if self.watch is not None and not self.watch.is_due(self.batches):
            self.watch.record(self.engine, curvature, self.seen)
        return curvature

    def _curvature(self) -> NystromCurvature:
        gram = require_read(self.gram)
        gram = gram if gram.ndim == 3 else gram.unsqueeze(0)
        return NystromCurvature(self.directions, 0.5 * (gram + gram.mT))
