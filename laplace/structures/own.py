"""No structure: what a user's class has that computes its curvature and moments by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core.hyperparameters import GaussianPrior
from laplace.errors import UnsupportedError
from laplace.jacobian.jacobian import Jacobian
from laplace.structures.base import Curvature, DataPass, other_structure
from laplace.structures.precision import Form, Precision

if TYPE_CHECKING:
    from laplace.engines.engine import CurvatureEngine


@dataclass(frozen=True, eq=False)
class NoStructure(Curvature):
    """The structure of users' classes that choose none: H is added up, and they say what follows from it."""

    values: Tensor  # H in whatever shape the class gives it

    name = "own"

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        raise UnsupportedError(
            "a class without a structure has no curvature that fit could sum; define curvature_of(x, y, n_data), or "
            "_curv_closure(X, y, N), or fit, or bind a structure: `structure = ...` (docs/add_a_structure.md)."
        )

    def __add__(self, other: Curvature) -> NoStructure:
        if not isinstance(other, NoStructure):
            return NotImplemented
        return NoStructure(self.values + other.values)

    def scaled(self, factor: float) -> NoStructure:
        return NoStructure(factor * self.values)

    def minus(self, removed: Curvature, *, signed: bool = False, terms: torch.dtype | None = None) -> NoStructure:
        if not isinstance(removed, NoStructure):
            raise other_structure(self.name, removed.name)
        return NoStructure(self.values - removed.values)

    @property
    def n_terms(self) -> int:
        return 1

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> UndefinedPrecision:
        return UndefinedPrecision(prior)

    def public(self) -> Tensor:
        return self.values


def _undefined(name: str) -> Callable[..., Any]:
    remedy = "define posterior_precision, [P, P] or [P], from which the rest follows, or bind a structure"
    also = "" if name == "posterior_precision" else f"define {name}; or "

    def method(self: Precision, *given: Any) -> Any:
        raise UnsupportedError(f"{name} is not known of a class without a structure; {also}{remedy}.")

    return method


@dataclass(frozen=True)
class UndefinedPrecision(Precision):
    """The precision of a class without a structure: what the class computes itself is never asked of this one."""

    prior: GaussianPrior  # N(μ₀, diag(δ)⁻¹)

    logdet_ratio = _undefined("log_det_posterior_precision")
    quad = _undefined("square_norm")
    power = _undefined("posterior_precision")
    sample = _undefined("sample")

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        return _undefined("functional_covariance" if form == "joint" else "functional_variance")(self)

    diagonal_of_inverse = _undefined("posterior_variance")
    to_dense = _undefined("posterior_precision")
