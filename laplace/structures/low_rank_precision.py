"""P = Q C Qᵀ + diag(δ), exactly, by algebra on r × r matrices (Woodbury, 1950).

With Ĝ = Qᵀ D⁻¹ Q = L Lᵀ and Lᵀ C L = W diag(θ) Wᵀ, the rows of Zᵀ = Wᵀ L⁻¹ Qᵀ D^(−1/2) are orthonormal and

    P = D^(1/2) (I + Z diag(θ) Zᵀ) D^(1/2),

so that log det P − log det D = Σ log(1 + θ), P⁻¹ = D^(−1/2) (I − Z diag(θ / (1 + θ)) Zᵀ) D^(−1/2), and P is positive
definite just if every θ > −1. No sign of C is assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace.core.checks import is_true
from laplace.core.gram import row_gram
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.precision_policy import wide_dtype, widened
from laplace.jacobian.jacobian import Jacobian
from laplace.structures import subspace
from laplace.structures.algebra import Recent
from laplace.structures.indefinite import require_positive
from laplace.structures.powers import slopes
from laplace.structures.precision import Precision
from laplace.structures.variances_over_priors import VariancesOverPriors, one_by_one

_CANCELLING = 1e-3
"""Share of a variance that rounding may take before it is computed in float64."""

_RELATIVE = "eigenvalue relative to the prior's"


@dataclass(frozen=True, eq=False)
class Subspace:
    """Curvature terms within one basis, and what does not depend on hyper-parameters.

    Attributes:
        basis: Qᵀ, orthonormal rows `[r, P]`.
        cores: M, `[E, r, r]`, float64; of a single term diagonal.
    """

    basis: Tensor
    cores: Tensor

    @property
    def is_diagonal(self) -> bool:
        """True if the basis consists of eigenvectors whatever the weights."""
        return len(self.cores) == 1

    def core(self, weights: Tensor) -> Tensor:
        """Σ_e w_e M_e, `[r, r]`, with the graph of the weights."""
        return torch.tensordot(widened(weights), self.cores, 1)

    def eigenvalues(self, weights: Tensor) -> Tensor:
        """Eigenvalues of the core, `[r]`, with the graph of the weights; without a graph they are kept."""
        core = self.core(weights)
        if self.is_diagonal:
            return core.diagonal()
        return self._recent_values(weights, lambda: torch.linalg.eigvalsh(core))

    @cached_property
    def _recent_values(self) -> Recent[Tensor]:
        return Recent()

    def eigenpairs(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvectors `[P, r]` and eigenvalues `[r]` of Σ_e w_e H_e, in the dtype of the basis."""
        core = self.core(weights)
        if self.is_diagonal:
            return self.basis.T, core.diagonal().to(self.basis.dtype)
        values, vectors = torch.linalg.eigh(core)
        basis = subspace.rotated(self.basis, vectors.detach().T.flip(0))
        return basis.T, values.flip(0).to(self.basis.dtype)

    def gram(self, prior: GaussianPrior) -> Tensor:
        """Qᵀ diag(δ)⁻¹ Q, `[r, r]`, float64, differentiable in δ."""
        delta = widened(prior.precision)
        if not prior.is_constant_per_tensor:
            return _InverseWeightedGram.apply(delta, self.basis)
        grams = self._recent_grams(prior.layout, lambda: self._grams(prior.layout))
        return torch.tensordot((1 / delta).expand(prior.layout.n_tensors), grams, 1)

    @cached_property
    def _recent_grams(self) -> Recent[Tensor]:
        return Recent()

    def _grams(self, layout: Layout) -> Tensor:
        """Qᵀ Q of the rows of every tensor, `[n_tensors, r, r]`."""
        return torch.stack([subspace.inner(block, block) for block in layout.split(self.basis)])


class _InverseWeightedGram(torch.autograd.Function):
    """Σ_p q_p q_pᵀ / δ_p, whose gradient −q_pᵀ g q_p / δ_p² needs no copy of the basis."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, basis: Tensor) -> Tensor:
        ctx.save_for_backward(delta, basis)
        return subspace.inner(basis, basis, 1 / delta)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        delta, basis = ctx.saved_tensors
        return -subspace.quadratic_forms(basis, gradients[0]) / delta.square(), None


@dataclass(frozen=True, eq=False)
class LowRankPrecision(Precision):
    """P = Q (Σ_e w_e M_e) Qᵀ + diag(δ).

    Attributes:
        subspace: Q and M.
        weights: w, `[E]`.
        prior: δ.
        signed: Whether negative eigenvalues of the curvature are meant; else they are rounding, and zero.
    """

    subspace: Subspace
    weights: Tensor
    prior: GaussianPrior
    signed: bool = False

    # Differentiable in weights and prior.

    def _thetas(self) -> Tensor:
        """θ, `[r]`, float64.

        Raises:
            CurvatureError: P is not positive definite.
        """
        if self.prior.is_scalar:
            return self._checked(self.subspace.eigenvalues(self.weights) / widened(self.prior.precision))
        core, root = self.subspace.core(self.weights), torch.linalg.cholesky(self.subspace.gram(self.prior))
        return self._checked(torch.linalg.eigvalsh(root.T @ core @ root))

    def _checked(self, thetas: Tensor) -> Tensor:
        if not self.signed:
            return thetas.clamp(min=0)
        require_positive(1 + thetas.detach(), _RELATIVE)
        return thetas

    def logdet_ratio(self) -> Tensor:
        return self._thetas().log1p().sum()

    def quad(self, vectors: Tensor) -> Tensor:
        inside = vectors @ self.subspace.basis.T
        core = self.subspace.core(self.weights).to(inside)
        return vectors.square() @ self.prior.diagonal() + ((inside @ core) * inside).sum(-1)

    def to_dense(self) -> Tensor:
        basis = self.subspace.basis
        return basis.T @ self.subspace.core(self.weights).to(basis) @ basis + torch.diag(self.prior.diagonal())

    @property
    def public(self) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """`((U [P, r], λ [r]), δ [P])` with P = U diag(λ) Uᵀ + diag(δ)."""
        return self.subspace.eigenpairs(self.weights), self.prior.diagonal()

    # Predictions.

    @cached_property
    def _solved(self) -> _Solved:
        """The inside of the subspace, with the graph that leads to weights and prior."""
        core, delta = self.subspace.core(self.weights), widened(self.prior.precision)
        if self.prior.is_scalar:
            root, inside = None, core / delta
            values, vectors = torch.linalg.eigh(core.detach())
            values, rotation = values / delta.detach(), vectors.T * delta.sqrt()
        else:
            root = torch.linalg.cholesky(self.subspace.gram(self.prior))
            inside = root.T @ core @ root
            values, vectors = torch.linalg.eigh(inside.detach())
            rotation = torch.linalg.solve_triangular(root, vectors.T, upper=False, left=False)
        thetas = self._checked(values)
        return _Solved(thetas, rotation, vectors.T @ (inside - inside.detach()) @ vectors)

    @cached_property
    def _deviations(self) -> Tensor:
        """δ^(−1/2), `[P]`."""
        return self.prior.diagonal().rsqrt().to(self.subspace.basis)

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        return self._variance(jacobian, diagonal=False)

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        return self._variance(jacobian, diagonal=True)

    def _variance(self, jacobian: Jacobian, *, diagonal: bool) -> Tensor:
        solved = self._solved
        inverse = self._deviations.square()
        basis = self.subspace.basis
        wanted = jacobian.summed_in(basis.dtype)
        dtype = wide_dtype(basis.device) if self._cancels else wanted
        variances = tuple(part.to(dtype) for part in self.prior.layout.split(inverse))
        moments = _Moments.of(jacobian, basis, solved.rotation, variances, diagonal=diagonal)
        return (moments.reduced(solved.thetas) + solved.moved(moments.z, -1, diagonal=diagonal)).to(wanted)

    @cached_property
    def _cancels(self) -> bool:
        """True if rounding may take too large a share of a variance in the dtype of the basis."""
        thetas = self._solved.thetas.detach()
        return len(thetas) > 0 and is_true(thetas.max() * torch.finfo(self.subspace.basis.dtype).eps > _CANCELLING)

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        thetas, rotation = self._solved.thetas, self._solved.rotation
        rows = jacobian.dense().flatten(0, 1)
        inside = subspace.inner(rows, self.subspace.basis, self._deviations.square()) @ rotation.T
        total = row_gram(inside, 1 / (1 + thetas)) + self._solved.moved(inside, -1, diagonal=False)
        # What lies outside of the subspace is formed before it is squared, so that nothing cancels.
        for part, basis, deviations in subspace.chunks(rows, self.subspace.basis, self._deviations.unsqueeze(0)):
            wide = widened(deviations)
            outside = widened(part) * wide - inside @ rotation @ (widened(basis) * wide)
            total = total + outside @ outside.T
        return total.to(jacobian.summed_in(self.subspace.basis.dtype))

    def sample(self, noise: Tensor) -> Tensor:
        """D^(−1/2) (I + Z ((1 + θ)^(−1/2) − 1) Zᵀ) ε."""
        thetas, rotation = self._solved.thetas, self._solved.rotation
        shrunk = rotation.T @ (torch.diag((1 + thetas).rsqrt() - 1) + self._solved.slope(-0.5)) @ rotation
        basis, deviations = self.subspace.basis, self._deviations
        inside = (noise * deviations) @ basis.T
        return (noise + (inside @ shrunk.to(inside)) @ basis * deviations) * deviations

    def solve(self, vectors: Tensor) -> Tensor:
        with torch.no_grad():
            thetas, rotation = self._solved.thetas, self._solved.rotation
            shrunk = -(rotation.T * (thetas / (1 + thetas))) @ rotation
            basis, variances = self.subspace.basis, self._deviations.square()
            scaled = vectors * variances
            return ((scaled @ basis.T @ shrunk.to(scaled)) @ basis).mul_(variances).add_(scaled)

    def diagonal_of_inverse(self) -> Tensor:
        thetas, rotation = self._solved.thetas, self._solved.rotation
        inverse = widened(self._deviations).square()
        share = subspace.quadratic_forms(self.subspace.basis, rotation.T @ rotation) * inverse  # Σ Z², at most 1
        shrunk = rotation.T @ (torch.diag(1 / (1 + thetas)) + self._solved.slope(-1)) @ rotation
        inside = subspace.quadratic_forms(self.subspace.basis, shrunk)
        return (inverse * ((1 - share).clamp(min=0) + inside * inverse)).to(self.subspace.basis.dtype)


@dataclass(frozen=True, eq=False)
class _Solved:
    """The inside of the subspace, I + S with S = Lᵀ C L = W diag(θ) Wᵀ, float64.

    Eigenvectors have no derivative where eigenvalues meet: θ and W are constants, and what S does is a term of its own.

    Attributes:
        thetas: θ, `[r]`, a constant.
        rotation: Wᵀ L⁻¹, `[r, r]`, with the graph that leads to the prior.
        drift: Wᵀ (S − S*) W, `[r, r]`: zero, with the graph of S.
    """

    thetas: Tensor
    rotation: Tensor
    drift: Tensor

    def slope(self, exponent: float) -> Tensor | float:
        """Wᵀ ((I + S)^exponent − the same at S*) W to first order, `[r, r]`: zero, with its gradient."""
        return slopes(1 + self.thetas, exponent) * self.drift if self.drift.requires_grad else 0.0

    def moved(self, z: Tensor, exponent: float, *, diagonal: bool) -> Tensor | float:
        """The same between coordinates z `[..., n, r]`, `[..., n, n]` or its diagonals."""
        slope = self.slope(exponent)
        if not isinstance(slope, Tensor):
            return slope
        half = z @ slope.to(z)
        return (half * z).sum(-1) if diagonal else half @ z.mT


@dataclass(frozen=True, eq=False)
class _Moments:
    """Variances under the prior, and the outputs' coordinates in the subspace.

    Attributes:
        prior: J D⁻¹ Jᵀ, `[B, C, C]`, or its diagonals `[B, C]`.
        z: J D^(−1/2) Z, `[B, C, r]`.
    """

    prior: Tensor
    z: Tensor

    @classmethod
    def of(
        cls, jacobian: Jacobian, basis: Tensor, rotation: Tensor, variances: tuple[Tensor, ...], *, diagonal: bool
    ) -> _Moments:
        """From the blocks of a Jacobian, in the dtype of the prior's variances `[p]` of every tensor."""
        sizes = [block.size for block in jacobian.blocks]
        blocks = [block.cast(part.dtype) for block, part in zip(jacobian.blocks, variances, strict=True)]
        cast = Jacobian(tuple(blocks))
        rows = basis.split(sizes, 1)
        prior = cast.sum_over_blocks(
            lambda i, block: block.weighted_norms(variances[i]) if diagonal else block.weighted_gram(variances[i])
        )
        if not len(basis):  # no curvature at all
            return cls(prior, prior.new_zeros(jacobian.n_data, jacobian.n_cotangents, 0))
        inside = cast.sum_over_blocks(lambda i, block: block.apply(rows[i].to(variances[i]) * variances[i]))
        return cls(prior, inside.permute(1, 2, 0) @ rotation.T.to(inside))

    def reduced(self, thetas: Tensor) -> Tensor:
        """Variances under P: what the data took off is z diag(θ / (1 + θ)) zᵀ."""
        thetas = thetas.to(self.z)
        if self.prior.ndim == 2:
            squares = self.z.square()
            least = (squares / (1 + thetas)).sum(2)  # where rounding would leave less than the subspace's own part
            return torch.maximum(self.prior - (squares * (thetas / (1 + thetas))).sum(2), least)
        return self.prior - (self.z * (thetas / (1 + thetas))) @ self.z.mT


@dataclass(frozen=True, eq=False)
class LowRankScan(VariancesOverPriors):
    """Functional variances at many scalar priors: the coordinates are those of a unit prior, rescaled.

    Attributes:
        subspace: Q and M.
        weights: w, `[E]`, without gradient.
        signed: As in `LowRankPrecision`.
    """

    subspace: Subspace
    weights: Tensor
    signed: bool

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        values, vectors = torch.linalg.eigh(self.subspace.core(self.weights))
        ones = tuple(values.new_ones(block.size) for block in jacobian.blocks)
        unit = _Moments.of(jacobian, self.subspace.basis, vectors.T, ones, diagonal=diagonal)
        dtype = self.subspace.basis.dtype

        def at(delta: Tensor) -> Tensor:
            delta = widened(delta)
            thetas = values / delta
            if self.signed:
                require_positive(1 + thetas, _RELATIVE)
            moments = _Moments(unit.prior / delta, unit.z / delta.sqrt())
            variances = moments.reduced(thetas if self.signed else thetas.clamp(min=0))
            return variances.to(dtype if diagonal else jacobian.summed_in(dtype))

        return one_by_one(at)
