"""Refinement of a Gaussian process on a subset of the data, in function space (Immer et al., 2021, appendix A.3.2).

The prior over functions is the process's own, with the precision δ N/M (appendix A.2.2); its M data are all it sees:

    Ψ(f) = Σ_m log p(y_m | f_m) − ½ (f − m)ᵀ K⁻¹ (f − m),    m = f(X, θ*) + J (μ₀ − θ*),    K = J (δ N/M)⁻¹ Jᵀ.

Its mode is that of log p(D_M | f_lin) + log p(θ) over weights under that prior: θ̂ = μ₀ + (δ N/M)⁻¹ Jᵀ a, with the dual
a of f̂ = m + K a. With a process for every output each has its own dual, and its own weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import linalg
from laplace.core.batch import require_loader
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import InvalidData
from laplace.fitting.checks import NO_DATA
from laplace.fitting.fit import FitOptions, sum_data
from laplace.gp.subset import Subset, SubsetPass
from laplace.jacobian.jacobian import moved_by
from laplace.large_structures.dual import Dual, pulled
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.posterior.posterior import Posterior
from laplace.refinement.linear_model import Covariance, LinearModel, RefineOptions, Refiner, solved
from laplace.structures.fit import Fit

# Gaussian processes at M data as a linear model in as many coordinates as the data span.
#
# With K = U λ Uᵀ = L Lᵀ, L = U √λ, the process at the data is f = m + L z, z ~ N(0, I): a linear model with the
# features L, in which no step touches a weight of the network (Immer et al., 2021, appendix A.3.2). The mean elsewhere
# is m(x) + k(x, X) a with the dual a = U λ^(−½) z.


@dataclass(frozen=True, eq=False)
class Features:
    """Features of one Gaussian process over some of the outputs of M data."""

    root: Tensor  # L, `[M, C′, r]`, float64
    inverse: Tensor  # U λ^(−½), `[M, C′, r]`: duals from coordinates

    @classmethod
    def from_kernel(cls, kernel: Tensor) -> Features:
        """The features of K `[M, C′, M, C′]`, without directions that are zero but for rounding."""
        m, c = kernel.shape[:2]
        matrix = widened(kernel).reshape(m * c, m * c)
        values, vectors = linalg.eigh(0.5 * (matrix + matrix.T))
        nonzero = values > len(values) * torch.finfo(values.dtype).eps * values.amax().clamp(min=0)
        roots, vectors = values[nonzero].sqrt(), vectors[:, nonzero]
        return cls((vectors * roots).view(m, c, -1), (vectors / roots).view(m, c, -1))

    @property
    def width(self) -> int:
        return self.root.shape[1]

    @property
    def rank(self) -> int:
        return self.root.shape[2]


@dataclass(frozen=True, eq=False)
class KernelBatch:
    """The M data: prior mean of the outputs `[M, C]`, float64 [Linearization, eq. 14], and checked targets."""

    f: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class KernelData:
    """M data as Gaussian processes see them: one of all outputs together, or one of every output."""

    batch: KernelBatch
    features: tuple[Features, ...]  # of every process; their widths add up to C
    n_data: float  # M, as the likelihood counts them

    @property
    def n_observed(self) -> float:
        """Observed targets of every output: none are missing."""
        return self.n_data

    @property
    def batches(self) -> Sequence[KernelBatch]:
        """All data are one batch."""
        return (self.batch,)

    def split(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Coordinates `[n]` as those of every process."""
        return vector.split([part.rank for part in self.features])

    def split_outputs(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs `[M, C, …]` as those of every process, `[M, C′, …]`."""
        return outputs.split([part.width for part in self.features], 1)

    def push(self, vector: Tensor) -> list[Tensor]:
        """L z, `[M, C]`, of coordinates `[n]`."""
        return [torch.cat([part.root @ z for part, z in zip(self.features, self.split(vector), strict=True)], 1)]

    def pull(self, cotangents: Sequence[Tensor]) -> Tensor:
        """Lᵀ u, `[n]`, of u `[M, C]`."""
        pairs = zip(self.features, self.split_outputs(cotangents[0]), strict=True)
        return torch.cat([torch.einsum("mcr,mc->r", part.root, u) for part, u in pairs])

    def curvature_product(self, inner: Sequence[OutputHessian], scale: Tensor, vector: Tensor) -> Tensor:
        """Lᵀ (scale · Λ) L z, `[n]`."""
        return self.pull([scale * inner[0].times(self.push(vector)[0])])

    def duals(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Duals a of every process, `[M, C′]`, of coordinates `[n]`."""
        pairs = zip(self.features, self.split(vector), strict=True)
        return tuple(part.inverse @ z for part, z in pairs)


@dataclass(frozen=True, eq=False)
class KernelCovariance(Covariance):
    """Covariance of the coordinates, (I + Lᵀ W L)⁻¹ of every process; for one by itself W is the diagonal of Λ."""

    data: KernelData
    roots: Tensor  # S with S Sᵀ = Λ of every input, `[M, C, K]`, float64
    factors: tuple[Tensor, ...]  # Cholesky factor of I + Lᵀ W L of every process

    @classmethod
    def from_hessian(cls, data: KernelData, hessian: OutputHessian, scale: Tensor) -> KernelCovariance:
        """The covariance of a curvature W = scale Λ, with the scale 1/(σ²T), 0-dim or `[C]`."""
        roots = hessian.root().permute(1, 2, 0)
        weighted = scale.sqrt().expand(roots.shape[1]).view(-1, 1) * roots
        factors: list[Tensor] = []
        for part, root in zip(data.features, data.split_outputs(weighted), strict=True):
            if part.width == 1:  # one column says all of one output
                root = root.square().sum(2, keepdim=True).sqrt()
            rows = torch.einsum("mck,mcr->mkr", root, part.root).flatten(0, 1)
            identity = torch.eye(part.rank, dtype=rows.dtype, device=rows.device)
            factors.append(torch.linalg.cholesky(identity + rows.T @ rows))
        return cls(data, roots, tuple(factors))

    def solve(self, vector: Tensor) -> Tensor:
        pairs = zip(self.factors, self.data.split(vector), strict=True)
        return torch.cat([torch.cholesky_solve(z.unsqueeze(1), factor).squeeze(1) for factor, z in pairs])

    def of_outputs(self, *, diagonal: bool) -> list[Tensor]:
        blocks: list[Tensor] = []
        for part, factor in zip(self.data.features, self.factors, strict=True):
            rows = torch.linalg.solve_triangular(factor, part.root.flatten(0, 1).T, upper=False)
            each = rows.T.unflatten(0, (-1, part.width))
            blocks.append(each.square().sum(2) if diagonal or part.width == 1 else each @ each.mT)
        if len(blocks) == 1 and not diagonal and self.data.features[0].width > 1:
            return blocks
        variances = torch.cat(blocks, 1)
        return [variances if diagonal else torch.diag_embed(variances)]

    def divergence(self) -> float:
        total = 0.0
        for factor in self.factors:
            inverse = torch.cholesky_inverse(factor).diagonal()
            total += float(inverse.sum() - len(factor) + 2 * factor.diagonal().log().sum())
        return total


_START = 1e-8
"""Residual of the Newton step that a search begins with, relative to its gradient."""


class ProcessRefiner(Refiner[KernelCovariance]):
    """A Gaussian process as a linear model of its coordinates [Linearization, eq. A.5].

    The subset is chosen from the loader, which is read once, as `fit` does: one that shuffles gives another subset.
    """

    def __init__(self, posterior: Posterior, loader: Iterable[Any], options: RefineOptions) -> None:
        super().__init__(posterior, options)
        require_loader(loader, "loader")
        self.base, self.subset = self._read(loader)
        self.require_all(self.base.n_data)
        f = widened(self.subset.f)
        self.curvature = curvature = self.subset.curvature.cast(f.dtype)
        present = replace(self.evidence, fit=self.base).constant()
        self.prior = replace(present.prior, precision=curvature.prior_factor * present.prior.precision)
        features = tuple(Features.from_kernel(self._kernel(dual)) for dual in curvature.duals)
        away = self._pushed(widened(self.prior.mean) - widened(posterior.expansion_point))
        n_data = float(posterior.likelihood.count(f, self.subset.y))
        self.data = KernelData(KernelBatch(f + away, self.subset.y), features, n_data)
        zero = f.new_zeros(sum(part.rank for part in features))
        self.model = LinearModel(self.data, posterior.likelihood, self.scale, torch.ones_like(zero), zero)
        self.start = self._newton_step()

    def _read(self, loader: Iterable[Any]) -> tuple[Fit, Subset]:
        """The fit to a subset as large as that of the posterior, with what the network says of it."""
        posterior, choices = self.posterior, self.posterior.choices
        size = round(posterior.map_fit.curvature.share * posterior.map_fit.n_data)
        chosen = SubsetPass(self.engine, replace(choices.structure_options, n_subset=size))
        how = FitOptions(progress_bar=self.options.progress_bar, check_memory=False, first_pass=lambda engine: chosen)
        fit = sum_data(loader, self.engine, choices, how)
        if chosen.found is None:
            raise InvalidData(NO_DATA)
        return fit, chosen.found

    def _kernel(self, dual: Dual) -> Tensor:
        """K of a process, under its prior."""
        if self.prior.is_scalar:
            return dual.kernel / widened(self.prior.precision)
        return dual.kernel_under([1 / delta for delta in self.prior.per_block()])

    def _pushed(self, step: Tensor) -> Tensor:
        """J v of a step v `[P]`, or of a step per output `[C, P]`, `[M, C]`."""
        return torch.cat([moved_by(part, step) for part in self.curvature.dual.parts])

    def _newton_step(self) -> Tensor:
        """One Newton step from the outputs that the posterior has: from a mode, the mode."""
        step, f = self.posterior.refined_step, widened(self.subset.f)
        f = f if step is None else f + self._pushed(widened(step))
        likelihood, y = self.posterior.likelihood, self.subset.y
        hessian, away = likelihood.hessian(f, y), f - self.data.batch.f
        right = self.data.pull([self.scale * (hessian.times(away) - likelihood.gradient(f, y))])
        self._near = near = KernelCovariance.from_hessian(self.data, hessian, self.scale)

        return solved(lambda v: v + self.data.curvature_product([hessian], self.scale, v), right, near.solve, _START)

    @property
    def network_loss(self) -> Tensor:
        return self.base.loss_terms

    @property
    def dtype(self) -> torch.dtype:
        return wide_dtype(self.subset.f.device)

    def covariance(self) -> KernelCovariance:
        return self._near

    def expected(self, model: LinearModel, at: Tensor) -> KernelCovariance:
        return KernelCovariance.from_hessian(self.data, model.hessians(at)[0], self.scale)

    def between(self, first: KernelCovariance, second: KernelCovariance, rate: float) -> KernelCovariance:
        mixed = (1 - rate) * first.roots @ first.roots.mT + rate * second.roots @ second.roots.mT
        hessian = OutputHessian(mixed.diagonal(dim1=1, dim2=2), dense=mixed)
        return KernelCovariance.from_hessian(self.data, hessian, self.scale)

    def fit(self, covariance: KernelCovariance, at: Tensor) -> Fit:
        curvature = self.subset.curvature.with_roots(covariance.roots)
        losses = self.model.loss_terms(at).to(self.base.loss_terms)
        return replace(self.base, curvature=curvature, loss_terms=losses)

    def mean(self, at: Tensor) -> Tensor:
        centre, variance = self.posterior.expansion_point, 1 / widened(self.prior.diagonal())
        pairs = zip(self.curvature.duals, self.data.duals(at), strict=True)
        rows = [widened(self.prior.mean) + variance * pulled(dual.parts, a) for dual, a in pairs]
        return (torch.stack(rows) if self.curvature.independent else rows[0]).to(centre)
