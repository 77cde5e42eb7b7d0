"""Structures of which little is written: what they do not have themselves follows from dense matrices.

A structure needs the curvature of a batch, addition, and `to_dense`. The rest is right by default, at the cost of the
full structure, and said to be slow; what a structure overrides is fast.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from laplace.core import linalg, nested
from laplace.core.cached import cached_property
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.layout import Layout
from laplace.engines.cost import DOUBLE, Cost
from laplace.engines.engine import MEMORY_BUDGET
from laplace.errors import SlowWarning, UnsupportedError, warn
from laplace.jacobian.jacobian import Jacobian
from laplace.structures.base import AdditiveCurvature, Curvature, SignedOptions, other_structure
from laplace.structures.full import FullCurvature
from laplace.structures.precision import Form, Precision, VariancesOverPriors

if TYPE_CHECKING:
    from laplace.engines.profile import BatchProfile

D = TypeVar("D", bound="DenseDefaults")

_MATRICES = 6
"""Matrices `[P, P]` in float64 that a factorisation passes through."""

_LINEAR = 1e-4
"""Relative error within which a sum of two curvatures is that of their matrices."""

_warned: set[type[Curvature]] = set()
"""Structures of which a warning said that they are slow."""


class DenseDefaults(Curvature):
    """Curvature of which only the matrix need be known, however often it reads the data.

    A subclass may override any of what follows, and return from `precision` a subclass of `PrecisionFromDense` that
    answers some queries itself.
    """

    options = SignedOptions

    @abstractmethod
    def to_dense(self) -> Tensor:
        """H of every term, symmetric, `[E, P, P]`, in the dtype in which batches were summed."""

    def require_dense(self, method: str, n_params: int, where: str | None = None) -> None:
        """Allows a method of the structure's to be answered from dense matrices, below the memory budget.

        Args:
            method: Its name.
            n_params: P.
            where: Where it would be written, for messages; None for the class of the curvature.

        Raises:
            UnsupportedError: The matrices would be too large.

        Warns:
            SlowWarning: Such an answer is slow; once for every structure.
        """
        size = _MATRICES * DOUBLE * n_params**2
        missing = f"hessian_structure={self.name!r} has no {method} of its own"
        remedy = f"Write {method} in {where or type(self).__name__}"
        if size > MEMORY_BUDGET:
            raise UnsupportedError(
                f"{missing}, and matrices of {n_params:,} parameters, from which it would follow, take "
                f"{size / 2**30:.3g} GiB, more than the memory budget of {MEMORY_BUDGET / 2**30:.3g} GiB. {remedy}, or "
                "choose fewer weights."
            )
        if type(self) not in _warned:
            _warned.add(type(self))
            warn(
                f"{missing}: it follows from dense matrices of {n_params:,} × {n_params:,} numbers, which is slow. "
                f"{remedy}. Further missing methods are not reported.",
                SlowWarning,
            )

    @cached_property
    def full(self) -> FullCurvature:
        """The same curvature as the full structure holds it; its factorisations are shared by all precisions."""
        with kept_for_later():
            return FullCurvature.from_matrix(self.to_dense())

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> Precision:
        return PrecisionFromDense(self, weights, prior, options)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> VariancesOverPriors:
        self.require_dense("scan", layout.n_params)
        return self.full.scan(weights.detach(), layout, **options)

    def scaled(self: D, factor: float) -> D:
        """Every number in the fields times the factor, where that scales the matrix."""
        matrix = self.to_dense()
        self.require_dense("scaled", matrix.shape[-1])
        result = nested.mapped(self, lambda tensor: factor * tensor)
        self._check_linear("scaled", result.to_dense() - factor * matrix, matrix)
        return result

    def minus(self: D, removed: Curvature, *, signed: bool = False, terms: torch.dtype | None = None) -> D:
        """The sum with the negative of what is removed, where that is the difference of the matrices."""
        if not isinstance(removed, DenseDefaults) or type(removed) is not type(self):
            raise other_structure(self.name, removed.name)
        matrix, other = self.to_dense(), removed.to_dense()
        self.require_dense("minus", matrix.shape[-1])
        linalg.remaining_matrix(matrix, other, signed=signed, terms=terms)  # refuses a difference that is indefinite
        result = self + nested.mapped(removed, lambda tensor: -tensor)
        self._check_linear("minus", result.to_dense() - (matrix - other), matrix)
        return result

    def _check_linear(self, method: str, error: Tensor, matrix: Tensor) -> None:
        if bool(error.abs().max() > _LINEAR * matrix.abs().max()):
            raise UnsupportedError(
                f"hessian_structure={self.name!r} has no {method} of its own, and its fields are no sums over data: "
                f"their multiples are not those of its matrix. Write {method} of {type(self).__name__}, or fit the "
                "data that you want to keep with override=True."
            )

    @classmethod
    def cost(cls, profile: BatchProfile, options: Any) -> Cost:
        """That of the full structure, which nothing here exceeds."""
        return replace(FullCurvature.matrix_cost(profile), assumed=True)


class CurvatureFromDense(AdditiveCurvature, DenseDefaults):
    """A structure from three things: the curvature of a batch, addition, and the matrix; what else it has is faster."""


@dataclass(frozen=True, eq=False)
class PrecisionFromDense(Precision):
    """P = Σ_e w_e H_e + diag(δ) of which a subclass answers some queries itself, and the full structure the others.

    Attributes:
        curvature: H.
        weights: w, `[E]`.
        prior: δ.
        options: As of `Curvature.precision`.
    """

    curvature: DenseDefaults
    weights: Tensor
    prior: GaussianPrior
    options: Mapping[str, Any] = field(default_factory=dict)

    def dense(self, method: str) -> Precision:
        """The dense matrix that answers a query instead."""
        own, structure = type(self), type(self.curvature).__name__
        subclass = f"a subclass of {own.__name__}, for {structure}.precision to return"
        where = subclass if own is PrecisionFromDense else own.__name__
        self.curvature.require_dense(method, self.prior.layout.n_params, where)
        return self._full

    @cached_property
    def _full(self) -> Precision:
        return self.curvature.full.precision(self.weights, self.prior, **self.options)

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        return self.dense("power").power(vectors, exponent)

    def logdet_ratio(self) -> Tensor:
        return self.dense("logdet_ratio").logdet_ratio()

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        return self.dense("variance").variance(jacobian, form)
