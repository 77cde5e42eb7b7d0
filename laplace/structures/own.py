"""Curvature of classes that users write without a structure: it is added up, and they say what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laplace.core.hyperparameters import GaussianPrior
from laplace.engines.engine import CurvatureEngine
from laplace.errors import UnsupportedError
from laplace.jacobian.jacobian import Jacobian
from laplace.structures import algebra
from laplace.structures.base import Curvature, DataPass
from laplace.structures.by_hand import AnyByHand
from laplace.structures.precision import Precision


@dataclass(frozen=True, eq=False)
class OwnCurvature(Curvature):
    """The structure of classes that choose none.

    Attributes:
        values: H in whatever shape the class gives it.
    """

    values: Tensor

    name = "own"
    by_hand = AnyByHand()

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        raise UnsupportedError(
            "a class without a structure has no curvature that fit could sum; define curvature_of(x, y, n_data), or "
            "_curv_closure(X, y, N), or fit, or bind a structure: `structure = ...` (docs/add_a_structure.md)."
        )

    def __add__(self, other: Curvature) -> OwnCurvature:
        if not isinstance(other, OwnCurvature):
            return NotImplemented
        return OwnCurvature(self.values + other.values)

    def scaled(self, factor: float) -> OwnCurvature:
        return OwnCurvature(factor * self.values)

    def minus(self, removed: Curvature, *, signed: bool = False) -> OwnCurvature:
        if not isinstance(removed, OwnCurvature):
            raise algebra.other_structure(self.name, removed.name)
        return OwnCurvature(self.values - removed.values)

    @property
    def n_terms(self) -> int:
        return 1

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> OwnPrecision:
        return OwnPrecision(prior)

    def public(self) -> Tensor:
        return self.values


@dataclass(frozen=True)
class OwnPrecision(Precision):
    """The precision of a class without a structure: what that computes itself is never asked of this one.

    Attributes:
        prior: N(μ₀, diag(δ)⁻¹).
    """

    prior: GaussianPrior

    def logdet_ratio(self) -> Tensor:
        raise _unknown("log_det_posterior_precision")

    def quad(self, vectors: Tensor) -> Tensor:
        raise _unknown("square_norm")

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        raise _unknown("functional_variance")

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        raise _unknown("functional_variance")

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        raise _unknown("functional_covariance")

    def sample(self, noise: Tensor) -> Tensor:
        raise _unknown("sample")

    def diagonal_of_inverse(self) -> Tensor:
        raise _unknown("posterior_variance")

    def to_dense(self) -> Tensor:
        raise _unknown("posterior_precision")


def _unknown(name: str) -> UnsupportedError:
    remedy = "define posterior_precision, [P, P] or [P], from which the rest follows, or bind a structure"
    also = "" if name == "posterior_precision" else f"define {name}; or "
    return UnsupportedError(f"{name} is not known of a class without a structure; {also}{remedy}.")
