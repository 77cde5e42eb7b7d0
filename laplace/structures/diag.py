"""Diagonal curvature."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core import linalg, nested
from laplace.core.batch import Inputs
from laplace.core.cached import Recent, cached_property
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.log_det import EigenvaluePairs, log_det_ratio
from laplace.engines.cost import Cost
from laplace.engines.sinks import DiagSink
from laplace.jacobian.jacobian import Jacobian
from laplace.structures.base import AdditiveCurvature, Curvature, SignedOptions, nonnegative, other_structure
from laplace.structures.precision import Form, Precision, SpectralScan, mean_weight, require_positive, weighted

if TYPE_CHECKING:
    from laplace.engines.engine import BatchSummary, CurvatureEngine
    from laplace.engines.profile import BatchProfile

ENTRY = "entry"
"""What the eigenvalues of a diagonal matrix are called in messages."""


@dataclass(frozen=True, eq=False)
class DiagCurvature(AdditiveCurvature):
    """The diagonal of the unit curvature."""

    values: Tensor  # `[E, P]`
    name = "diag"
    options = SignedOptions
    by_layer = True

    def units(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        return tuple((i,) for i in range(layout.n_tensors))

    @property
    def n_terms(self) -> int:
        return len(self.values)

    @classmethod
    def from_batch(cls, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, DiagCurvature]:
        summary, values = engine.diag(x, y)
        return summary, cls(values)

    def with_batch(self, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, DiagCurvature]:
        """The batch is added to the sum in place, so that no second one is held."""
        return engine.accumulate(x, y, DiagSink(values=self.values)), self

    @classmethod
    def cost(cls, profile: BatchProfile, options: Any) -> Cost:
        numbers = profile.n_params * profile.itemsize
        fitted = profile.n_terms * numbers
        return Cost(
            fitted=fitted,
            running=fitted + profile.n_terms * max(tensor.size for tensor in profile.tensors) * profile.itemsize,
            adding=fitted,
            pieces=2 * profile.piece_bytes(profile.shared_sizes),
            posterior=4 * numbers,
            projecting=2 * profile.piece_bytes(profile.shared_sizes, profile.n_outputs),
        )

    def __add__(self, other: Curvature) -> DiagCurvature:
        if not isinstance(other, DiagCurvature):
            return NotImplemented
        return DiagCurvature(self.values + other.values)

    def scaled(self, factor: float) -> DiagCurvature:
        return DiagCurvature(factor * self.values)

    def minus(self, removed: Curvature, *, signed: bool = False, terms: torch.dtype | None = None) -> DiagCurvature:
        if not isinstance(removed, DiagCurvature):
            raise other_structure(self.name, removed.name)
        return DiagCurvature(linalg.remaining_entries(self.values, removed.values, signed=signed, terms=terms))

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> DiagPrecision:
        mode = options.get("indefinite")
        pairs = None
        if self.n_terms == 1 and not self.values.requires_grad:
            pairs = self._pairs(mode, lambda: EigenvaluePairs(partial(self._weighted, None, mode), prior.layout.sizes))
        return DiagPrecision(self._weighted(weights, mode), weights, prior, signed=mode == "error", pairs=pairs)

    @cached_property
    def _pairs(self) -> Recent[EigenvaluePairs]:
        return Recent()

    def _weighted(self, weights: Tensor | None, mode: str | None) -> Tensor:
        """The diagonal of terms whose weights are divided by their mean, `[P]`; of one term without any."""
        values = self._mended(mode)
        return values[0] if weights is None or len(values) == 1 else weights / weights.mean() @ values

    def _mended(self, mode: str | None) -> Tensor:
        return nonnegative(self.values, mode) if mode in ("clamp", "abs") else self.values

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> SpectralScan:
        mode = options.get("indefinite")
        values = (weights @ self._mended(mode)).detach()

        def precisions(delta: Tensor) -> tuple[Tensor, ...]:
            return layout.split(require_positive(values + delta, ENTRY) if mode == "error" else values + delta)

        return SpectralScan(lambda jacobian, _: jacobian, precisions)

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        nested.require_sizes("H", self.values, None, layout.n_params, dtype=dtype)

    def public(self) -> Tensor:
        return self.values.sum(0)


@dataclass(frozen=True, eq=False)
class DiagPrecision(Precision):
    """A diagonal posterior precision."""

    values: Tensor  # Diagonal of the unit curvature, `[P]`, of terms whose weights have a mean of 1
    weights: Tensor  # Scale of every curvature term, `[E]`; s is their mean
    prior: GaussianPrior  # δ
    signed: bool = False  # Whether negative entries of the curvature are meant
    pairs: EigenvaluePairs | None = None  # The same values for log determinants, where no hyper-parameter changes them

    @property
    def _weight(self) -> Tensor:
        return mean_weight(self.weights)

    @cached_property
    def diagonal(self) -> Tensor:
        """P, `[P]`."""
        return self._weight * self.values + self.prior.diagonal()

    @cached_property
    def _variances(self) -> tuple[Tensor, ...]:
        return self.prior.layout.split(self.diagonal_of_inverse())

    def _positive(self) -> Tensor:
        """P, `[P]`, if it is positive."""
        return require_positive(self.diagonal, ENTRY) if self.signed else self.diagonal

    def logdet(self) -> Tensor:
        return self._positive().log().sum()

    def logdet_ratio(self) -> Tensor:
        if self.signed:
            self._positive()
        delta = self.prior.precision
        if not self.prior.is_constant_per_tensor:
            return (self._weight * self.values / delta).log1p().sum()
        if self.pairs is not None:
            return self.pairs.log_det_ratio(self._weight, delta)
        sizes = (len(self.values),) if self.prior.is_scalar else self.prior.layout.sizes
        return log_det_ratio(self.values, self._weight / delta, sizes)

    def quad(self, vectors: Tensor) -> Tensor:
        return vectors.square() @ self.diagonal

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        if exponent == 1:
            return vectors * self.diagonal
        variances = self.diagonal_of_inverse()
        return vectors * (variances if exponent == -1 else variances.sqrt())

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        wide = jacobian.wide
        return jacobian.sum_over_blocks(lambda i, block: weighted(block, self._variances[i], form, wide=wide))

    def diagonal_of_inverse(self) -> Tensor:
        return 1 / self._positive()

    def to_dense(self) -> Tensor:
        return torch.diag(self.diagonal)

    @property
    def public(self) -> Tensor:
        return self.diagonal

    @property
    def covariance(self) -> Tensor:
        return torch.diag(self.diagonal_of_inverse())

    @property
    def scale(self) -> Tensor:
        return self.diagonal_of_inverse().sqrt()
