"""The head of a network trained anew on some of its data, with features that stay: a convex problem of few numbers.

With features φ (a 1 for the bias among them) and r, a bias that is not random, the data without those of a fold lead to

    W = argmin_W  Σ_b ℓ(y_b, W φ_b + r) + ½ λ ‖W‖².

There is one minimum. The search begins at the head as the user trained it, W*, and ends at the minimum, so that of the
fold's data nothing is left in W but what the features and λ know of them.

λ is what makes W* as nearly as possible stationary for all data: it minimises ‖g + λ W*‖², with g = Σ_b ∂ℓ_b/∂W at W*.
A training that converged under weight decay has g = −λ W*, and its weight decay is found. Of one that was stopped early
g is what still drives the weights apart, and a penalty takes the place of stopping (Bishop, 2006, section 5.5.2): loss
and ‖W‖ at the minimum for all data are about those of W*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laplace.likelihoods.base import Likelihood
from laplace.refinement.newton import minimise

_FLOOR = 1e-6
"""The smallest λ, as a share of the features' mean square sum: it makes the minimum unique where nothing else does."""

_NEGLIGIBLE = 1e-12
"""Share of the largest eigenvalue of a Gram below which a direction is rounding."""

_SURE = 1e-3
"""Weight of data that the network is sure of, as a share of the mean weight: their directions count as well."""


@dataclass(frozen=True, eq=False)
class Head:
    """A head on the features of data.

    Attributes:
        likelihood: p(y | f).
        features: φ, `[R, D]`, float64; of outputs with positions, R are rows, data × positions.
        offset: r, `[C]`, float64.
        y: Checked targets of the rows.
        weight: W*, `[C, D]`, float64.
    """

    likelihood: Likelihood
    features: Tensor
    offset: Tensor
    y: Tensor
    weight: Tensor

    @cached_property
    def ridge(self) -> float:
        """λ, of W* in the directions that the features have."""
        gradient = self.likelihood.gradient(self.features @ self.weight.T + self.offset, self.y).T @ self.features
        weight = self.weight @ self._basis[0]
        square = float(weight.square().sum())
        floor = _FLOOR * float(self.features.square().sum()) / self.features.shape[1]
        return max(-float((gradient * self.weight).sum()) / square, floor) if square else floor

    def refit(self, rows: Tensor, *, tolerance: float = 1e-6, max_steps: int = 100, residual: float = 1e-2) -> Tensor:
        """W of some rows, `[C, D]`.

        Args:
            rows: Their indices.
            tolerance: Distance from the minimum at which it ends, in units of the curvature there: the square are nats.
            max_steps: Newton steps.
            residual: To which each of them is solved, relative to the gradient.
        """
        data = self._at(rows)
        # With fewer rows than features nothing but W* says anything of the other directions, in which W is zero.
        basis, sums = data._basis if len(rows) < self.features.shape[1] else self._basis
        sums = sums * (len(rows) / len(self.features)) if basis is self._basis[0] else sums
        of_outputs, turn = data._outputs
        diagonal = of_outputs.unsqueeze(1) * sums + self.ridge

        def precondition(vector: Tensor) -> Tensor:
            return (turn @ ((turn.T @ vector.view_as(diagonal)) / diagonal)).flatten()

        function = _Penalised(self.likelihood, data.features @ basis, data.offset, data.y, self.ridge)
        start = (self.weight @ basis).flatten()
        end = minimise(function, start, precondition, tolerance=tolerance, max_steps=max_steps, residual=residual)
        return end.at.view_as(diagonal) @ basis.T

    def _at(self, rows: Tensor) -> Head:
        return Head(self.likelihood, self.features[rows], self.offset, self.y[rows], self.weight)

    # The preconditioner, Σ_b Λ_b / Σ_b tr Λ_b ⊗ Σ_b tr Λ_b φ_b φ_bᵀ at W*.

    @cached_property
    def _basis(self) -> tuple[Tensor, Tensor]:
        """Eigenvectors of Σ_b tr(Λ_b) φ_b φ_bᵀ, `[D, r]`, and its eigenvalues, with r the number of rows at most."""
        scaled = self._weights.sqrt().unsqueeze(1) * self.features
        if len(scaled) >= scaled.shape[1]:
            values, vectors = torch.linalg.eigh(scaled.T @ scaled)
            return vectors, values.clamp(min=0)
        values, vectors = torch.linalg.eigh(scaled @ scaled.T)
        has_data = values > _NEGLIGIBLE * values[-1]
        return scaled.T @ (vectors[:, has_data] / values[has_data].sqrt()), values[has_data]

    @cached_property
    def _weights(self) -> Tensor:
        """The trace of Λ of every row, `[R]`, and a little for those that have none."""
        hessian = self.likelihood.hessian(self.features @ self.weight.T + self.offset, self.y)
        traces = hessian.diagonal().sum(1).clamp(min=0)
        return traces + (_SURE * traces.mean()).clamp(min=torch.finfo(traces.dtype).tiny ** 0.5)

    @cached_property
    def _outputs(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of Σ_b Λ_b / Σ_b tr Λ_b, `[C]`, and eigenvectors, `[C, C]`."""
        total = self.likelihood.hessian(self.features @ self.weight.T + self.offset, self.y).total()
        values, vectors = torch.linalg.eigh(total / total.trace().clamp(min=torch.finfo(total.dtype).tiny))
        return values.clamp(min=0), vectors


@dataclass(frozen=True, eq=False)
class _Penalised:
    """The penalised loss, of weights `[C·r]`; attributes as of `Head`, and λ."""

    likelihood: Likelihood
    features: Tensor
    offset: Tensor
    y: Tensor
    ridge: float

    def value(self, at: Tensor) -> float:
        return float(self.likelihood.loss(self._outputs(at), self.y) + 0.5 * self.ridge * (at @ at))

    def gradient(self, at: Tensor) -> Tensor:
        return self._pulled(self.likelihood.gradient(self._outputs(at), self.y)) + self.ridge * at

    def hessian_at(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        hessian = self.likelihood.hessian(self._outputs(at), self.y)
        return lambda vector: self._pulled(hessian.times(self._pushed(vector))) + self.ridge * vector

    def _outputs(self, at: Tensor) -> Tensor:
        return self._pushed(at) + self.offset

    def _pushed(self, at: Tensor) -> Tensor:
        return (at.view(-1, self.features.shape[1]) @ self.features.T).T

    def _pulled(self, cotangents: Tensor) -> Tensor:
        return (cotangents.T @ self.features).flatten()
