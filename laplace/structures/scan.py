"""Many scalar priors at once: the Jacobian is rotated into the curvature's eigenbasis once, candidates only rescale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from laplace.curvature.jacobian import Jacobian


@dataclass(frozen=True)
class SpectralScan:
    """Functional variances of P(δ) = U (s λ + δ) Uᵀ for many δ.

    Attributes:
        project: The Jacobian in the eigenbasis.
        precisions: Eigenvalues of P per block at a scalar δ `[1]`, without gradient.
    """

    project: Callable[[Jacobian], Jacobian]
    precisions: Callable[[Tensor], tuple[Tensor, ...]]

    def variance(self, projected: Jacobian, precision: Tensor, *, diagonal: bool) -> Tensor:
        """J P(δ)⁻¹ Jᵀ per datum, `[B, C, C]`, or its diagonals `[B, C]`.

        Args:
            projected: What `project` gave.
            precision: δ, `[1]`.
            diagonal: Variances only.
        """
        values = self.precisions(precision)
        if diagonal:
            return projected.sum_over_blocks(lambda i, block: block.weighted_norms(1 / values[i]))
        return projected.sum_over_blocks(lambda i, block: block.weighted_gram(1 / values[i]))
