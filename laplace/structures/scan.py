"""Many scalar priors at once: what does not depend on the prior is computed once, candidates only rescale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from laplace.curvature.jacobian import Jacobian


class Scan(ABC):
    """Functional variances of P(δ) for many scalar δ."""

    @abstractmethod
    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        """J P(δ)⁻¹ Jᵀ per datum, `[B, C, C]`, or its diagonals `[B, C]`, as a function of δ `[1]`, without gradient.

        Args:
            jacobian: J.
            diagonal: Variances only.
        """


@dataclass(frozen=True)
class SpectralScan(Scan):
    """Functional variances of P(δ) = U (s λ + δ) Uᵀ: the Jacobian is rotated into the eigenbasis once.

    Attributes:
        project: The Jacobian in the eigenbasis.
        precisions: Eigenvalues of P per block at a scalar δ `[1]`, without gradient.
    """

    project: Callable[[Jacobian], Jacobian]
    precisions: Callable[[Tensor], tuple[Tensor, ...]]

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        projected = self.project(jacobian)

        def at(delta: Tensor) -> Tensor:
            values = self.precisions(delta)
            if diagonal:
                return projected.sum_over_blocks(lambda i, block: block.weighted_norms(1 / values[i]))
            return projected.sum_over_blocks(lambda i, block: block.weighted_gram(1 / values[i]))

        return at
