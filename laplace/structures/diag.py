"""Diagonal curvature."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.gram import row_gram
from laplace.core.layout import Layout
from laplace.core.prior import GaussianPrior
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.engines.profile import BatchProfile
from laplace.jacobian.jacobian import Jacobian
from laplace.structures import algebra
from laplace.structures.base import AdditiveCurvature, Curvature, Precision
from laplace.structures.cost import Cost, squares_of_sums
from laplace.structures.indefinite import SignedOptions, mended, require_positive
from laplace.structures.variances_over_priors import SpectralScan

_ENTRY = "entry"


@dataclass(frozen=True)
class DiagCurvature(AdditiveCurvature):
    """The diagonal of the unit curvature.

    Attributes:
        values: `[E, P]`.
    """

    values: Tensor
    name = "diag"
    options = SignedOptions

    @property
    def n_terms(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.values)

    @classmethod
    def from_batch(
        cls, engine: CurvatureEngine, x: Inputs, y: Tensor, former: Curvature | None = None
    ) -> tuple[BatchSummary, AdditiveCurvature]:
        summary, values = engine.diag(x, y)
        new = cls(values)
        return summary, former + new if isinstance(former, DiagCurvature) else new

    @classmethod
    def footprint(cls, survey: BatchProfile, options: Any) -> Cost:
        numbers = survey.n_params * survey.itemsize
        kept = survey.n_terms * numbers
        return Cost(
            kept=kept,
            running=2 * kept,
            adding=3 * kept,
            pieces=2 * survey.piece_bytes(survey.shared_sizes),
            posterior=4 * numbers,
            projecting=2 * survey.piece_bytes(survey.shared_sizes, survey.n_outputs),
            work=squares_of_sums(survey),
        )

    @classmethod
    def zeros(cls, prior: GaussianPrior) -> DiagCurvature:
        return cls(prior.precision.new_zeros(1, prior.layout.n_params))

    def __add__(self, other: Curvature) -> DiagCurvature:
        if not isinstance(other, DiagCurvature):
            return NotImplemented
        return DiagCurvature(self.values + other.values)

    def scaled(self, factor: float) -> DiagCurvature:
        return DiagCurvature(factor * self.values)

    def minus(self, removed: Curvature, *, signed: bool = False) -> DiagCurvature:
        if not isinstance(removed, DiagCurvature):
            raise algebra.other_structure(self.name, removed.name)
        return DiagCurvature(algebra.remaining_entries(self.values, removed.values, signed=signed))

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> DiagPrecision:
        mode = options.get("indefinite")
        return DiagPrecision(weights @ self._mended(mode), prior, signed=mode == "error")

    def _mended(self, mode: str | None) -> Tensor:
        return mended(self.values, mode) if mode in ("clamp", "abs") else self.values

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> SpectralScan:
        mode = options.get("indefinite")
        values = (weights @ self._mended(mode)).detach()

        def precisions(delta: Tensor) -> tuple[Tensor, ...]:
            return layout.split(require_positive(values + delta, _ENTRY) if mode == "error" else values + delta)

        return SpectralScan(lambda jacobian: jacobian, precisions)

    def is_finite(self) -> Tensor:
        return self.values.isfinite().all()

    def state(self) -> dict[str, Any]:
        return {"values": self.values}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> DiagCurvature:
        return cls(state["values"])

    def forms(self) -> tuple[str, ...]:
        return ()

    def public(self) -> Tensor:
        return self.values.sum(0)


@dataclass(frozen=True)
class DiagPrecision(Precision):
    """A diagonal posterior precision.

    Attributes:
        curvature: Diagonal of the scaled curvature, `[P]`.
        prior: δ.
        signed: Whether negative entries of the curvature are meant.
    """

    curvature: Tensor
    prior: GaussianPrior
    signed: bool = False

    @cached_property
    def diagonal(self) -> Tensor:
        """P, `[P]`."""
        return self.curvature + self.prior.diagonal()

    @cached_property
    def _variances(self) -> tuple[Tensor, ...]:
        return self.prior.layout.split(self.diagonal_of_inverse())

    def _positive(self) -> Tensor:
        """P, `[P]`, if it is positive."""
        return require_positive(self.diagonal, _ENTRY) if self.signed else self.diagonal

    def logdet(self) -> Tensor:
        return self._positive().log().sum()

    def logdet_ratio(self) -> Tensor:
        self._positive()
        ratio = self.curvature / (self.prior.precision if self.prior.is_scalar else self.prior.diagonal())
        return ratio.log1p().sum()

    def quad(self, vectors: Tensor) -> Tensor:
        return vectors.square() @ self.diagonal

    def product(self, vectors: Tensor) -> Tensor:
        return vectors.detach() * self.diagonal.detach()

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        return jacobian.sum_over_blocks(lambda i, block: block.weighted_gram(self._summed(jacobian, i)))

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        return jacobian.sum_over_blocks(lambda i, block: block.weighted_norms(self._variances[i]))

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        return jacobian.sum_over_blocks(lambda i, block: row_gram(block.by_output(), self._summed(jacobian, i)))

    def _summed(self, jacobian: Jacobian, i: int) -> Tensor:
        """Variances of a tensor in the dtype in which covariances are summed."""
        return self._variances[i].to(jacobian.summed_in(self._variances[i].dtype))

    def sample(self, noise: Tensor) -> Tensor:
        return noise * self.diagonal_of_inverse().sqrt()

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
