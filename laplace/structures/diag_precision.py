"""A diagonal posterior precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laplace.core.gram import row_gram
from laplace.core.hyperparameters import GaussianPrior
from laplace.jacobian.jacobian import Jacobian
from laplace.structures import algebra
from laplace.structures.indefinite import require_positive
from laplace.structures.log_det import Pairs, log_det_ratio
from laplace.structures.precision import Precision

ENTRY = "entry"
"""What the eigenvalues of a diagonal matrix are called in messages."""


@dataclass(frozen=True, eq=False)
class DiagPrecision(Precision):
    """A diagonal posterior precision.

    Attributes:
        values: Diagonal of the unit curvature, `[P]`, of terms whose weights have a mean of 1.
        weights: Scale of every curvature term, `[E]`; s is their mean.
        prior: δ.
        signed: Whether negative entries of the curvature are meant.
        pairs: The same values for log determinants, where no hyper-parameter changes them.
    """

    values: Tensor
    weights: Tensor
    prior: GaussianPrior
    signed: bool = False
    pairs: Pairs | None = None

    @property
    def _scale(self) -> Tensor:
        return algebra.mean_weight(self.weights)

    @cached_property
    def diagonal(self) -> Tensor:
        """P, `[P]`."""
        return self._scale * self.values + self.prior.diagonal()

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
            return (self._scale * self.values / delta).log1p().sum()
        if self.pairs is not None:
            return self.pairs.log_det_ratio(self._scale, delta)
        sizes = (len(self.values),) if self.prior.is_scalar else self.prior.layout.sizes
        return log_det_ratio(self.values, self._scale / delta, sizes)

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
