"""The posterior precision of a structure: what evidence, predictions and samples ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.gaussian import Gaussian
from laplace.core.gram import row_gram
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.precision_policy import widened
from laplace.jacobian.blocks import Block
from laplace.jacobian.jacobian import Jacobian

Form = Literal["diagonal", "full", "joint"]
"""Covariances between outputs: none `[B, C]`, those of a datum `[B, C, C]`, or of all data `[B·C, B·C]`, data major."""


class Precision(ABC):
    """Posterior precision P = s·H + diag(δ) of one structure; immutable.

    A structure defines `power`, `logdet_ratio` and `variance`. All other queries follow, and are overridden where a
    structure has a cheaper or more exact answer. What takes a factorisation computes it once, with the graph that leads
    to the hyper-parameters where these require a gradient: every query is differentiable once, except those that are
    said to be constants. What is kept then belongs to that graph.

    Attributes:
        prior: N(μ₀, diag(δ)⁻¹).
    """

    prior: GaussianPrior

    @abstractmethod
    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        """P^exponent v of vectors `[..., P]`.

        Args:
            vectors: v.
            exponent: 1 for P v, −1 for P⁻¹ v, −½ for L v with a root L Lᵀ = P⁻¹ of the structure's choice.
        """

    @abstractmethod
    def logdet_ratio(self) -> Tensor:
        """Log det P − log det P₀, 0-dim: with a scalar prior Σ log(1 + sλ/δ), which cancels nothing."""

    @abstractmethod
    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        """J P⁻¹ Jᵀ in one of the forms; covariances are summed in float64 if `jacobian.wide`."""

    # Evidence and density.

    def logdet(self) -> Tensor:
        """Log det P, 0-dim, differentiable in scale and prior."""
        return self.logdet_ratio() + self.prior.logdet()

    def slack(self) -> Tensor | float:
        """tr(P₀ P⁻¹) + tr(s·H P⁻¹) − dim θ, 0 for P = s·H + P₀: half of it a lower bound of the evidence lacks."""
        return 0.0

    def quad(self, vectors: Tensor) -> Tensor:
        """vᵀ P v of vectors `[..., P]`, `[...]`."""
        wide = widened(vectors)
        return (self.power(wide, 1) * wide).sum(-1).to(vectors.dtype)

    # Products, and samples.

    def product(self, vectors: Tensor) -> Tensor:
        """P v of vectors `[..., P]`; a constant."""
        with torch.no_grad():
            return self.power(vectors, 1)

    def solve(self, vectors: Tensor) -> Tensor:
        """P⁻¹ v of vectors `[R, P]`; a constant."""
        with torch.no_grad():
            return self.power(vectors, -1)

    def sample(self, noise: Tensor) -> Tensor:
        """Zero-mean samples `[S, P]` from standard normal numbers `[S, P]`: linear in them, and differentiable."""
        return self.power(noise, -0.5)

    def n_noise(self, n_params: int) -> int:
        """Standard normal numbers that a sample of so many weights takes: as many, unless a structure needs more."""
        return n_params

    def summed(self, x: Inputs, of: Callable[[Precision], Gaussian]) -> Gaussian:
        """A Gaussian over outputs that `of` makes of this precision.

        Where several processes have shares of it, `of` is called with the share of each, and the covariances are added.

        Args:
            x: Inputs, the same in all processes.
            of: Makes a Gaussian whose covariance is linear in P⁻¹.
        """
        del x
        return of(self)

    # Moments.

    def to_dense(self) -> Tensor:
        """P, `[P, P]`."""
        return self.power(self._identity, 1)

    @property
    def public(self) -> Any:
        """P as users see it in `la.posterior_precision`."""
        return self.to_dense()

    @property
    def scale(self) -> Tensor:
        """A root L of P⁻¹ = L Lᵀ: lower-triangular `[P, P]`, symmetric, or standard deviations `[P]`."""
        return self.power(self._identity, -0.5).T

    @property
    def covariance(self) -> Tensor:
        """P⁻¹, `[P, P]`."""
        return self.power(self._identity, -1)

    def diagonal_of_inverse(self) -> Tensor:
        """Marginal variances, `[P]`."""
        return self.scale.square().sum(1)

    @property
    def _identity(self) -> Tensor:
        like = self.prior.precision
        return torch.eye(self.prior.layout.n_params, dtype=like.dtype, device=like.device)


def weighted(block: Block, variances: Tensor, form: Form, *, wide: bool) -> Tensor:
    """J diag(v) Jᵀ of a block for v `[p]`; covariances are summed in float64 if `wide`."""
    if form == "diagonal":
        return block.weighted_norms(variances)
    variances = widened(variances) if wide else variances
    return block.weighted_gram(variances) if form == "full" else row_gram(block.by_output(), variances)
