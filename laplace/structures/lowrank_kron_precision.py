"""P = s (S U Λ Uᵀ S + D) + diag(δ) per tensor, for any diagonal prior, by algebra on k × k matrices (Woodbury, 1950).

With B = s D + δ, V = √s S U √Λ and K = I + Vᵀ B⁻¹ V: log det P = log det B + log det K and

    P⁻¹ = B⁻¹ − B⁻¹ V K⁻¹ Vᵀ B⁻¹.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laplace.core.checks import is_true
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import CurvatureError
from laplace.jacobian.blocks import Block, total
from laplace.jacobian.jacobian import Jacobian
from laplace.structures import algebra
from laplace.structures.log_det import Pairs, log_det_ratio
from laplace.structures.lowrank_kron_part import Part, log_det_inside
from laplace.structures.powers import shrinking_slopes
from laplace.structures.precision import Precision

_CANCELLING = 1e-3
"""Share of a variance that rounding may take before it is computed in float64."""


@dataclass(frozen=True, eq=False)
class _Solved:
    """One tensor's P at fixed hyper-parameters, with the graph that leads to them, in float64.

    Attributes:
        part: Its curvature.
        inverse: B⁻¹, `[p]`.
        roots: √(s Λ), `[K]`.
        factor: Cholesky factor of K, `[K, K]`.
    """

    part: Part
    inverse: Tensor
    roots: Tensor
    factor: Tensor

    @cached_property
    def _weights(self) -> Tensor:
        """S B⁻¹, `[p]`: what the entries of U are multiplied with in B⁻¹ V."""
        return widened(self.part.scaling) * self.inverse

    def reduced(self, block: Block, dtype: torch.dtype, *, diagonal: bool) -> tuple[Tensor, Tensor | None]:
        """J P⁻¹ Jᵀ per datum, `[B, C, C]`, or its diagonals `[B, C]`, computed in `dtype`.

        The second term takes away what the first one has: True, 0-dim, is returned too where too little is left for
        `dtype`, and None where nothing is taken away.
        """
        inverse = self.inverse.to(dtype)
        first = block.weighted_norms(inverse) if diagonal else block.weighted_gram(inverse)
        if not len(self.roots):
            return first, None
        z = torch.linalg.solve_triangular(self.factor.to(dtype), self._applied(block, dtype).flatten(1), upper=False)
        z = z.unflatten(1, (block.n_data, -1))
        rest = first - (z.square().sum(0) if diagonal else torch.einsum("kbc,kbd->bcd", z, z))
        return rest, None if dtype == wide_dtype(first.device) else self._cancels(first, rest, diagonal=diagonal)

    def _cancels(self, first: Tensor, rest: Tensor, *, diagonal: bool) -> Tensor:
        before, after = (t.detach() if diagonal else t.detach().diagonal(dim1=1, dim2=2) for t in (first, rest))
        return (after * _CANCELLING < torch.finfo(rest.dtype).eps * before).any()

    def _applied(self, block: Block, dtype: torch.dtype) -> Tensor:
        """J B⁻¹ V, `[K, B, C]`."""
        weights, roots = self._weights.to(dtype), self.roots.to(dtype)
        rows = self.part.columns.rows(dtype)
        return torch.cat([block.apply(row * weights) * roots[some, None, None] for some, row in rows])

    def covariance(self, rows: Tensor) -> Tensor:
        """J P⁻¹ Jᵀ of rows `[n, p]`, `[n, n]`, float64."""
        rows = widened(rows)
        z = torch.linalg.solve_triangular(self.factor, self._inside(rows * self._weights).T, upper=False)
        return (rows * self.inverse) @ rows.T - z.T @ z

    def _inside(self, vectors: Tensor) -> Tensor:
        return self.part.columns.inside(vectors) * self.roots

    def sample(self, noise: Tensor) -> Tensor:
        """B^(−1/2) (I + W Wᵀ)^(−1/2) ε with W = B^(−1/2) V, of ε `[S, p]`."""
        deviations = self.inverse.sqrt()
        if not len(self.roots):
            return noise * deviations
        whiten = widened(self.part.scaling) * deviations
        core = self.factor @ self.factor.T
        values, vectors = algebra.eigh(core)
        values = values.clamp(min=1)
        roots = values.sqrt()  # K = I + WᵀW; 1 − 1/√K over K − 1 is 1 / (√K (1 + √K))
        shrunk = (vectors / (roots * (1 + roots))) @ vectors.T
        if core.requires_grad:
            drift = vectors.T @ (core - core.detach()) @ vectors
            shrunk = shrunk + vectors @ (shrinking_slopes(values) * drift) @ vectors.T
        inside = self._inside(noise * whiten) @ shrunk
        return (noise - self.part.columns.combined(inside * self.roots) * whiten) * deviations

    def diagonal(self) -> Tensor:
        """Diagonal of P⁻¹, `[p]`."""
        if not len(self.roots):
            return self.inverse
        whitened = torch.linalg.solve_triangular(self.factor, torch.diag(self.roots), upper=False)
        removed = self.part.columns.forms(whitened.T @ whitened) * self._weights.square()
        least = 1 / (1 / self.inverse + self.part.columns.diagonal(self.roots.square()) * self.part.scaling.square())
        return torch.maximum(self.inverse - removed, least)  # (P⁻¹)_pp is at least 1 / P_pp


@dataclass(frozen=True, eq=False)
class LowRankKronPrecision(Precision):
    """P = Σ over tensors of s (S U Λ Uᵀ S + D), plus diag(δ), block-diagonal.

    Attributes:
        parts: Unit curvature of every tensor, for weights with a mean of 1.
        weights: Scale of every curvature term, `[E]`; s is their mean.
        prior: δ.
        pairs: D of all tensors for log determinants, where no hyper-parameter changes it.
    """

    parts: tuple[Part, ...]
    weights: Tensor
    prior: GaussianPrior
    pairs: Pairs | None = None

    @property
    def _scale(self) -> Tensor:
        return algebra.mean_weight(self.weights)

    @property
    def _rest(self) -> Tensor:
        """D of all tensors, `[P]`."""
        return torch.cat([part.rest for part in self.parts])

    def logdet_ratio(self) -> Tensor:
        ratios = self._scale / self.prior.precision
        if not self.prior.is_constant_per_tensor:
            return (ratios * self._rest).log1p().sum() + log_det_inside(self.parts, self.prior.layout.split(ratios))
        inside = log_det_inside(self.parts, ratios.expand(len(self.parts)).split(1))
        if self.pairs is not None:
            return self.pairs.log_det_ratio(self._scale, self.prior.precision) + inside
        sizes = (self.prior.layout.n_params,) if self.prior.is_scalar else self.prior.layout.sizes
        return log_det_ratio(self._rest, ratios, sizes) + inside

    def _inverse(self, part: Part, delta: Tensor) -> Tensor:
        """B⁻¹, `[p]`, float64."""
        return 1 / (widened(self._scale) * widened(part.rest) + widened(delta))

    def _cholesky(self, part: Part, delta: Tensor) -> Tensor:
        """Cholesky factor of K = I + Vᵀ B⁻¹ V, `[K, K]`, float64.

        Raises:
            CurvatureError: The prior is so small that K is singular by rounding.
        """
        roots = (widened(self._scale) * part.values).sqrt()
        gram = part.columns.gram(widened(part.scaling).square() * self._inverse(part, delta))
        eye = torch.eye(len(roots), dtype=roots.dtype, device=roots.device)
        factor = algebra.cholesky(eye + roots.unsqueeze(1) * gram * roots)
        if factor is None:
            raise CurvatureError("the posterior precision is not positive definite; give a larger prior precision.")
        return factor

    def quad(self, vectors: Tensor) -> Tensor:
        wide = widened(vectors)
        total = wide.square() @ widened(self._scale * self._rest + self.prior.diagonal())
        for part, piece in zip(self.parts, wide.split([part.size for part in self.parts], -1), strict=True):
            inside = part.columns.inside(piece * part.scaling)
            total = total + self._scale * (inside.square() * part.values).sum(-1)
        return total.to(vectors.dtype)

    def to_dense(self) -> Tensor:
        blocks = [self._dense_block(part) for part in self.parts]
        dense = torch.block_diag(*blocks) + torch.diag(self._scale * self._rest + self.prior.diagonal())
        return dense.to(self.prior.precision.dtype)

    def _dense_block(self, part: Part) -> Tensor:
        eye = torch.eye(len(part.columns), dtype=wide_dtype(part.rest.device), device=part.rest.device)
        rows = part.columns.combined(eye) * part.scaling
        return self._scale * (rows.T * part.values) @ rows

    @cached_property
    def _solved(self) -> tuple[_Solved, ...]:
        solved: list[_Solved] = []
        for part, delta in zip(self.parts, self.prior.per_block(), strict=True):
            inverse = self._inverse(part, delta).expand(part.size)
            factor = self._cholesky(part, delta) if len(part.columns) else inverse.new_zeros(0, 0)
            solved.append(_Solved(part, inverse, (widened(self._scale) * part.values).sqrt(), factor))
        return tuple(solved)

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        return self._reduced(jacobian, diagonal=False)

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        return self._reduced(jacobian, diagonal=True)

    def _reduced(self, jacobian: Jacobian, *, diagonal: bool) -> Tensor:
        dtype = jacobian.summed_in(self.prior.precision.dtype)
        blocks = tuple(block.cast(dtype) for block in jacobian.blocks) if jacobian.wide else jacobian.blocks
        pairs = list(zip(self._solved, blocks, strict=True))
        reduced = [part.reduced(block, dtype, diagonal=diagonal) for part, block in pairs]
        flags = [cancels for _, cancels in reduced if cancels is not None]
        if not flags or not is_true(torch.stack(flags).any()):
            return total(values for values, _ in reduced)
        wide = wide_dtype(flags[0].device)
        return total(
            values
            if cancels is None or not bool(cancels)
            else part.reduced(block.cast(wide), wide, diagonal=diagonal)[0].to(dtype)
            for (part, block), (values, cancels) in zip(pairs, reduced, strict=True)
        )

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        rows = [block.dense().transpose(0, 1).flatten(0, 1) for block in jacobian.blocks]
        parts = [solved.covariance(part) for solved, part in zip(self._solved, rows, strict=True)]
        return torch.stack(parts).sum(0).to(jacobian.summed_in(self.prior.precision.dtype))

    def sample(self, noise: Tensor) -> Tensor:
        pieces = widened(noise).split([part.size for part in self.parts], -1)
        drawn = [solved.sample(piece) for solved, piece in zip(self._solved, pieces, strict=True)]
        return torch.cat(drawn, -1).to(noise.dtype)

    def diagonal_of_inverse(self) -> Tensor:
        return torch.cat([solved.diagonal() for solved in self._solved]).to(self.prior.precision.dtype)

    @property
    def public(self) -> LowRankKronPrecision:
        return self
