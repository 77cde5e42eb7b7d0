"""The posterior precision of a structure: what evidence, predictions and samples ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.gaussian import Gaussian
from laplace.core.hyperparameters import GaussianPrior
from laplace.jacobian.jacobian import Jacobian


class Precision(ABC):
    """Posterior precision P = s·H + diag(δ) of one structure; immutable.

    Queries that need a factorisation compute it once, with the graph that leads to the hyper-parameters where these
    require a gradient: all of them are differentiable, once. What is kept then belongs to that graph.

    Attributes:
        prior: N(μ₀, diag(δ)⁻¹).
    """

    prior: GaussianPrior

    # Evidence and density.

    @abstractmethod
    def logdet_ratio(self) -> Tensor:
        """Log det P − log det P₀, 0-dim: with a scalar prior Σ log(1 + sλ/δ), which cancels nothing."""

    def logdet(self) -> Tensor:
        """Log det P, 0-dim, differentiable in scale and prior."""
        return self.logdet_ratio() + self.prior.logdet()

    def slack(self) -> Tensor | float:
        """tr(P₀ P⁻¹) + tr(s·H P⁻¹) − dim θ, 0 for P = s·H + P₀: half of it a lower bound of the evidence lacks."""
        return 0.0

    @abstractmethod
    def quad(self, vectors: Tensor) -> Tensor:
        """vᵀ P v of vectors `[..., P]`, `[...]`."""

    def product(self, vectors: Tensor) -> Tensor:
        """P v of vectors `[..., P]`, same shape, without gradient: ∇ ½ vᵀ P v where a structure has no cheaper way."""
        with torch.enable_grad():
            leaf = vectors.detach().requires_grad_()
            return torch.autograd.grad(0.5 * self.quad(leaf).sum(), leaf)[0]

    def solve(self, vectors: Tensor) -> Tensor:
        """P⁻¹ v of vectors `[R, P]`, by the root that samples are drawn with; a constant."""
        with torch.enable_grad():
            noise = torch.zeros_like(vectors).requires_grad_()
            (coloured,) = torch.autograd.grad((self.sample(noise) * vectors).sum(), noise)
        with torch.no_grad():
            return self.sample(coloured)

    # Predictions.

    @abstractmethod
    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        """J_b P⁻¹ J_bᵀ, `[B, C, C]`, in float64 if `jacobian.wide`."""

    @abstractmethod
    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        """Its diagonals, `[B, C]`, at less cost; one that cancels is summed in float64 if `jacobian.wide`."""

    @abstractmethod
    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        """J P⁻¹ Jᵀ over all data, `[B·C, B·C]`, data major and outputs minor, in float64 if `jacobian.wide`."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """Zero-mean samples `[S, P]` from standard normal numbers `[S, P]`: linear in them, and differentiable."""

    def summed(self, x: Inputs, of: Callable[[Precision], Gaussian]) -> Gaussian:
        """A Gaussian over outputs that `of` makes of this precision.

        Where several processes have shares of it, `of` is called with the share of each, and the covariances are added.

        Args:
            x: Inputs, the same in all processes.
            of: Makes a Gaussian whose covariance is linear in P⁻¹.
        """
        del x
        return of(self)

    def n_noise(self, n_params: int) -> int:
        """Standard normal numbers that a sample of so many weights takes: as many, unless a structure needs more."""
        return n_params

    # Moments.

    @abstractmethod
    def diagonal_of_inverse(self) -> Tensor:
        """Marginal variances, `[P]`."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """P, `[P, P]`."""

    @property
    def public(self) -> Any:
        """P as users see it in `la.posterior_precision`."""
        return self.to_dense()

    @property
    def covariance(self) -> Tensor:
        """P⁻¹, `[P, P]`."""
        root = self.scale
        return root @ root.T

    @property
    def scale(self) -> Tensor:
        """A root L of P⁻¹ = L Lᵀ: lower-triangular `[P, P]`, symmetric, or standard deviations `[P]`.

        That of samples, unless a structure has another one.
        """
        like = self.prior.precision
        return self.sample(torch.eye(self.prior.layout.n_params, dtype=like.dtype, device=like.device)).T
