"""Many scalar priors at once: what does not depend on the prior is computed once, candidates only rescale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.precision_policy import widened
from laplace.jacobian.jacobian import Jacobian
from laplace.structures.precision import Precision


class VariancesOverPriors(ABC):
    """Functional variances of P(δ) for many scalar δ."""

    @abstractmethod
    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        """J P(δ)⁻¹ Jᵀ per datum as a function of n priors δ `[n]`, `[n, B, C, C]` or `[n, B, C]`, without gradient.

        Pieces of the Jacobian that are computed when they are asked for are so once for all n.
        """


def one_by_one(at: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of n priors `[n]` from one of a single prior `[1]`."""
    return lambda deltas: torch.stack([at(delta) for delta in deltas.split(1)])


@dataclass(frozen=True)
class SpectralScan(VariancesOverPriors):
    """Functional variances of P(δ) = U (s λ + δ) Uᵀ: the Jacobian is rotated into the eigenbasis once."""

    project: Callable[[Jacobian], Jacobian]  # The Jacobian in the eigenbasis
    # Eigenvalues of P per block at a scalar δ `[1]`, without gradient
    precisions: Callable[[Tensor], tuple[Tensor, ...]]

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        projected = self.project(jacobian)

        def at(precisions: Tensor) -> Tensor:
            values = [self.precisions(precision) for precision in precisions.split(1)]
            inverses = [1 / torch.stack(block) for block in zip(*values, strict=True)]
            if jacobian.wide and not diagonal:
                inverses = [widened(inverse) for inverse in inverses]
            if diagonal:
                return projected.sum_over_blocks(lambda i, block: block.weighted_norms_each(inverses[i]))
            return projected.sum_over_blocks(lambda i, block: block.weighted_gram_each(inverses[i]))

        return at


@dataclass(frozen=True)
class OneByOne(VariancesOverPriors):
    """Functional variances at many scalar priors, each by a precision of its own."""

    precision: Callable[[GaussianPrior], Precision]  # P at a prior
    layout: Layout  # The parameters

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        def at(delta: Tensor) -> Tensor:
            precision = self.precision(GaussianPrior(delta.detach(), delta.new_zeros(()), self.layout))
            return precision.variance(jacobian, "diagonal" if diagonal else "full")

        return one_by_one(at)
