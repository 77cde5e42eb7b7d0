"""Posterior precisions in the span of a few directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laplace.core.hyperparameters import GaussianPrior
from laplace.core.precision_policy import wide_dtype, widened
from laplace.jacobian.jacobian import Jacobian
from laplace.structures import algebra
from laplace.structures.gp.dual import Projected
from laplace.structures.powers import slopes
from laplace.structures.precision import Precision
from laplace.structures.variances_over_priors import VariancesOverPriors


def features(directions: Tensor, jacobian: Jacobian) -> Tensor:
    """J V of directions Vᵀ `[k, P]`, `[k, B, C]`, float64."""
    parts = directions.split([block.size for block in jacobian.blocks], 1)
    return jacobian.sum_over_blocks(lambda i, block: widened(block.apply(parts[i])))


@dataclass(frozen=True, eq=False)
class NystromPrecision(Precision):
    """P = V (Σ_e w_e G_e) Vᵀ + δ: its determinant and quadratic form are of all weights, its variance of the span.

    Attributes:
        directions: Vᵀ, `[k, P]`.
        gram: G, `[E, k, k]`.
        unit: Eigenvalues and eigenvectors of the sum of all terms.
        weights: w, `[E]`.
        prior: δ.
    """

    directions: Tensor
    gram: Tensor
    unit: tuple[Tensor, Tensor]
    weights: Tensor
    prior: GaussianPrior

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of Σ w G; of several terms constants."""
        if len(self.gram) == 1:
            return widened(self.weights[0]) * self.unit[0], self.unit[1]
        return algebra.eigh(torch.tensordot(widened(self.weights.detach()), self.gram, 1))

    def _slope(self, exponent: float) -> Tensor | None:
        """(Σ w G + δ)^exponent less what it is at these weights, in the eigenbasis: zero, with its gradient in w."""
        if len(self.gram) == 1 or not self.weights.requires_grad:
            return None
        values, vectors = self._spectrum
        total = torch.tensordot(widened(self.weights), self.gram, 1)
        drift = vectors.T @ (total - total.detach()) @ vectors
        return slopes(values + self._delta.detach(), exponent) * drift

    @property
    def _delta(self) -> Tensor:
        return self.prior.precision[0]

    def logdet_ratio(self) -> Tensor:
        if len(self.gram) == 1:
            return (self.weights * self.unit[0] / self._delta).log1p().sum()
        values = torch.linalg.eigvalsh(torch.tensordot(widened(self.weights), self.gram, 1))
        return (values.clamp(min=0) / self._delta).log1p().sum()

    def quad(self, vectors: Tensor) -> Tensor:
        inside = vectors @ self.directions.T
        gram = torch.tensordot(widened(self.weights), self.gram, 1).to(vectors)
        return ((inside @ gram) * inside).sum(-1) + self._delta * vectors.square().sum(-1)

    def _projected(self, jacobian: Jacobian) -> Tensor:
        """Features in the eigenbasis, `[B, C, k]`."""
        return features(self.directions, jacobian).permute(1, 2, 0) @ self._spectrum[1]

    def _at(self, inside: Tensor, outside: Tensor) -> Tensor:
        one = torch.ones((), dtype=wide_dtype(inside.device), device=inside.device)
        constant = Projected(inside, outside, self._spectrum[0]).at(one, self._delta)
        slope = self._slope(-1)
        if slope is None:
            return constant
        half = inside @ slope
        return constant + ((half * inside).sum(-1) if outside.ndim < inside.ndim else half @ inside.mT)

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        inside = self._projected(jacobian)
        variance = self._at(inside, inside.new_zeros(*inside.shape[:2], inside.shape[1]))
        return variance.to(jacobian.summed_in(self.directions.dtype))

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        inside = self._projected(jacobian)
        return self._at(inside, inside.new_zeros(inside.shape[:2])).to(self.directions.dtype)

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        inside = self._projected(jacobian).flatten(0, 1)
        covariance = self._at(inside, inside.new_zeros(len(inside), len(inside)))
        return covariance.to(jacobian.summed_in(self.directions.dtype))

    @property
    def _root(self) -> Tensor:
        """V E (λ + δ)^(−½), `[P, k]`."""
        values, vectors = self._spectrum
        scaled, slope = vectors * (values + self._delta).rsqrt(), self._slope(-0.5)
        scaled = scaled if slope is None else scaled + vectors @ slope
        return self.directions.T @ scaled.to(self.directions)

    @property
    def _rotated(self) -> Tensor:
        """V E, `[P, k]`."""
        return self.directions.T @ self._spectrum[1].to(self.directions)

    def sample(self, noise: Tensor) -> Tensor:
        return (noise @ self._rotated) @ self._root.T

    def diagonal_of_inverse(self) -> Tensor:
        return self._root.square().sum(1)

    def to_dense(self) -> Tensor:
        gram = torch.tensordot(widened(self.weights), self.gram, 1).to(self.directions)
        return self.directions.T @ gram @ self.directions + torch.diag(self.prior.diagonal())

    @property
    def covariance(self) -> Tensor:
        """Covariance within the span, `[P, P]`."""
        return self._root @ self._root.T

    @property
    def scale(self) -> Tensor:
        """The symmetric root of it, `[P, P]`."""
        return self._root @ self._rotated.T


@dataclass(frozen=True, eq=False)
class NystromScan(VariancesOverPriors):
    """Functional variances at many scalar priors.

    Attributes:
        directions: Vᵀ, `[k, P]`.
        vectors: Eigenvectors of Σ w G.
        values: Its eigenvalues.
    """

    directions: Tensor
    vectors: Tensor
    values: Tensor

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        inside = features(self.directions, jacobian).permute(1, 2, 0) @ self.vectors
        shape = inside.shape[:2] if diagonal else (*inside.shape[:2], inside.shape[1])
        projected = Projected(inside, inside.new_zeros(shape), self.values)
        one = inside.new_ones(())
        dtype = self.directions.dtype if diagonal else jacobian.summed_in(self.directions.dtype)
        return lambda deltas: torch.stack([projected.at(one, delta) for delta in deltas]).to(dtype)
