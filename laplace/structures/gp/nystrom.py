"""Curvature in the span of a few Jacobians: the Nyström approximation of the kernel (Deng et al., 2022, "ELLA").

Of M data one output each gives a row of J; the k leading eigenvectors of their kernel K = J Jᵀ = U Λ Uᵀ span the
directions V = Jᵀ U Λ^(−½) in weight space, orthonormal. The features of any datum are φ(x) = J(x) V, `[C, k]`, and all
data are seen through them: G = Σ_n φ_nᵀ Λ_n φ_n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace.core.arguments import check_counts
from laplace.core.batch import Inputs
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.precision_policy import wide_dtype, widened
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, UnsupportedError
from laplace.jacobian.jacobian import Jacobian, kernel
from laplace.structures import algebra, fields
from laplace.structures.base import Curvature, DataPass, require_finite, those_known
from laplace.structures.gp.dual import ObservingPass, Projected, jacobians, pulled, uncounted
from laplace.structures.gp.subset import Pool, make_score
from laplace.structures.powers import slopes
from laplace.structures.precision import Precision
from laplace.structures.variances_over_priors import VariancesOverPriors

# Posterior precisions in the span of a few directions.


def features(directions: Tensor, jacobian: Jacobian) -> Tensor:
    """J V of directions Vᵀ `[k, P]`, `[k, B, C]`, float64."""
    parts = directions.split([block.size for block in jacobian.blocks], 1)
    return jacobian.sum_over_blocks(lambda i, block: widened(block.apply(parts[i])))


@dataclass(frozen=True, eq=False)
class NystromPrecision(Precision):
    """P = V (Σ_e w_e G_e) Vᵀ + δ: its determinant and quadratic form are of all weights, its variance of the span.

    Attributes:
        directions: Vᵀ, `[k, P]`.
        gram: G, `[E, k, k]`.
        unit: Eigenvalues and eigenvectors of the sum of all terms.
        weights: w, `[E]`.
        prior: δ.
    """

    directions: Tensor
    gram: Tensor
    unit: tuple[Tensor, Tensor]
    weights: Tensor
    prior: GaussianPrior

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of Σ w G; of several terms constants."""
        if len(self.gram) == 1:
            return widened(self.weights[0]) * self.unit[0], self.unit[1]
        return algebra.eigh(torch.tensordot(widened(self.weights.detach()), self.gram, 1))

    def _slope(self, exponent: float) -> Tensor | None:
        """(Σ w G + δ)^exponent less what it is at these weights, in the eigenbasis: zero, with its gradient in w."""
        if len(self.gram) == 1 or not self.weights.requires_grad:
            return None
        values, vectors = self._spectrum
        total = torch.tensordot(widened(self.weights), self.gram, 1)
        drift = vectors.T @ (total - total.detach()) @ vectors
        return slopes(values + self._delta.detach(), exponent) * drift

    @property
    def _delta(self) -> Tensor:
        return self.prior.precision[0]

    def logdet_ratio(self) -> Tensor:
        if len(self.gram) == 1:
            return (self.weights * self.unit[0] / self._delta).log1p().sum()
        values = torch.linalg.eigvalsh(torch.tensordot(widened(self.weights), self.gram, 1))
        return (values.clamp(min=0) / self._delta).log1p().sum()

    def quad(self, vectors: Tensor) -> Tensor:
        inside = vectors @ self.directions.T
        gram = torch.tensordot(widened(self.weights), self.gram, 1).to(vectors)
        return ((inside @ gram) * inside).sum(-1) + self._delta * vectors.square().sum(-1)

    def _projected(self, jacobian: Jacobian) -> Tensor:
        """Features in the eigenbasis, `[B, C, k]`."""
        return features(self.directions, jacobian).permute(1, 2, 0) @ self._spectrum[1]

    def _at(self, inside: Tensor, outside: Tensor) -> Tensor:
        one = torch.ones((), dtype=wide_dtype(inside.device), device=inside.device)
        constant = Projected(inside, outside, self._spectrum[0]).at(one, self._delta)
        slope = self._slope(-1)
        if slope is None:
            return constant
        half = inside @ slope
        return constant + ((half * inside).sum(-1) if outside.ndim < inside.ndim else half @ inside.mT)

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        inside = self._projected(jacobian)
        variance = self._at(inside, inside.new_zeros(*inside.shape[:2], inside.shape[1]))
        return variance.to(jacobian.summed_in(self.directions.dtype))

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        inside = self._projected(jacobian)
        return self._at(inside, inside.new_zeros(inside.shape[:2])).to(self.directions.dtype)

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        inside = self._projected(jacobian).flatten(0, 1)
        covariance = self._at(inside, inside.new_zeros(len(inside), len(inside)))
        return covariance.to(jacobian.summed_in(self.directions.dtype))

    @property
    def _root(self) -> Tensor:
        """V E (λ + δ)^(−½), `[P, k]`."""
        values, vectors = self._spectrum
        scaled, slope = vectors * (values + self._delta).rsqrt(), self._slope(-0.5)
        scaled = scaled if slope is None else scaled + vectors @ slope
        return self.directions.T @ scaled.to(self.directions)

    @property
    def _rotated(self) -> Tensor:
        """V E, `[P, k]`."""
        return self.directions.T @ self._spectrum[1].to(self.directions)

    def sample(self, noise: Tensor) -> Tensor:
        return (noise @ self._rotated) @ self._root.T

    def diagonal_of_inverse(self) -> Tensor:
        return self._root.square().sum(1)

    def to_dense(self) -> Tensor:
        gram = torch.tensordot(widened(self.weights), self.gram, 1).to(self.directions)
        return self.directions.T @ gram @ self.directions + torch.diag(self.prior.diagonal())

    @property
    def covariance(self) -> Tensor:
        """Covariance within the span, `[P, P]`."""
        return self._root @ self._root.T

    @property
    def scale(self) -> Tensor:
        """The symmetric root of it, `[P, P]`."""
        return self._root @ self._rotated.T


@dataclass(frozen=True, eq=False)
class NystromScan(VariancesOverPriors):
    """Functional variances at many scalar priors.

    Attributes:
        directions: Vᵀ, `[k, P]`.
        vectors: Eigenvectors of Σ w G.
        values: Its eigenvalues.
    """

    directions: Tensor
    vectors: Tensor
    values: Tensor

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        inside = features(self.directions, jacobian).permute(1, 2, 0) @ self.vectors
        shape = inside.shape[:2] if diagonal else (*inside.shape[:2], inside.shape[1])
        projected = Projected(inside, inside.new_zeros(shape), self.values)
        one = inside.new_ones(())
        dtype = self.directions.dtype if diagonal else jacobian.summed_in(self.directions.dtype)
        return lambda deltas: torch.stack([projected.at(one, delta) for delta in deltas]).to(dtype)


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
    """Observer of the second reading.

    Attributes:
        record: Called with the engine, the curvature and the number of data so far, always at the end.
        every: Batches between calls before that; None for the end alone.
    """

    record: Callable[[CurvatureEngine, NystromCurvature, int], None]
    every: int | None = None

    def is_due(self, n_batches: int) -> bool:
        """True if a call follows this many batches, before the end."""
        return self.every is not None and n_batches % self.every == 0


@dataclass(frozen=True, eq=False)
class NystromCurvature(Curvature):
    """G in the span of V; outside of it there is neither curvature nor variance.

    Attributes:
        directions: Vᵀ, orthonormal rows, `[k, P]`.
        gram: G, `[E, k, k]`, float64.
    """

    directions: Tensor
    gram: Tensor
    name = "gp"
    holds_every_input = False
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
        return algebra.eigh(self.gram.sum(0))

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

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> NystromScan:
        values, vectors = algebra.eigh(torch.tensordot(weights.to(self.gram), self.gram, 1))
        return NystromScan(self.directions, vectors, values)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> NystromCurvature:
        return fields.from_state(cls, state | {"gram": widened(state["gram"])})

    def public(self) -> Tensor:
        """G, `[k, k]`."""
        return self.gram.sum(0).to(self.directions.dtype)


class DirectionPass(DataPass):
    """First reading: picks M data, and finds the directions that one output of each span.

    Args:
        engine: Computes Jacobians.
        options: How many.
        watch: Observer of the second reading, or None.
    """

    def __init__(self, engine: CurvatureEngine, options: NystromOptions, watch: Watch | None = None) -> None:
        self.engine = engine
        self.options = options
        self.watch = watch
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
    """The `count` leading directions of rows of J, `[k, P]`, orthonormal.

    Raises:
        InvalidArgument: The rows span fewer.
    """
    gram = torch.cat([torch.cat([kernel(a, b)[:, 0, :, 0] for b in parts], 1) for a in parts])
    values, vectors = algebra.eigh(0.5 * (gram + gram.T))
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
    """Second reading: sums G over all data.

    Args:
        engine: Computes Jacobians.
        directions: Vᵀ, `[k, P]`.
        watch: Observer of this reading, or None.
    """

    def __init__(self, engine: CurvatureEngine, directions: Tensor, watch: Watch | None) -> None:
        super().__init__(engine)
        self.directions = directions
        self.watch = watch
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

    def sums(self) -> dict[str, Tensor]:
        return those_known(losses=self.losses, gram=self.gram)

    def finish(self) -> NystromCurvature:
        curvature = self._curvature()
        if self.watch is not None and not self.watch.is_due(self.batches):
            self.watch.record(self.engine, curvature, self.seen)
        return curvature

    def _curvature(self) -> NystromCurvature:
        if self.gram is None:
            raise InvalidData("no batch was read.")
        gram = self.gram if self.gram.ndim == 3 else self.gram.unsqueeze(0)
        return NystromCurvature(self.directions, 0.5 * (gram + gram.mT))
