"""P = Σ_e w_e H_e + diag(δ) by products alone: what is asked of it is solved for, or estimated with its error.

Conjugate gradients with a preconditioner (`preconditioners.py`) give P⁻¹ b, to a residual that is an option. Of a
form x P⁻¹ yᵀ the error is of second order in it, for with X = P⁻¹ Y approximately X Yᵀ + Y Xᵀ − X P Xᵀ is stationary.
Samples are exact but for the residual (sample-then-optimise, Antorán et al., 2023, section 3.2): with θ₀ ~ N(0, D) and
ε ~ N(0, I),

    θ_s − θ* = P⁻¹ (Jᵀ √w L ε + θ₀),    L Lᵀ = Λ,

has covariance P⁻¹ (Jᵀ w Λ J + D) P⁻¹ = P⁻¹.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace.core import conjugate_gradients as cg
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.precision_policy import widened
from laplace.engines.engine import MEMORY_BUDGET
from laplace.errors import UnsupportedError
from laplace.jacobian.jacobian import Jacobian
from laplace.structures import preconditioners
from laplace.structures.first_order import first_order
from laplace.structures.full import FullCurvature, FullPrecision
from laplace.structures.held_data import DataProducts
from laplace.structures.kron import KronCurvature
from laplace.structures.log_det_quadrature import TraceLog, signs
from laplace.structures.low_rank_precision import Subspace
from laplace.structures.precision import Precision
from laplace.structures.solve_report import SolveReports, Tally

_HELD = 8
"""Numbers per parameter and right-hand side: six of the solver, the right-hand side's own and those of its form."""

_MATRICES = 6
"""Matrices `[P, P]` in float64 that a factorisation passes through."""

_ROWS_BYTES = 2**26
"""Bytes of vectors that a preconditioner passes through at once."""

_PARTS = 4
"""Parts of a block that it passes through one after the other, so that what it makes on the way is a part, too."""


@dataclass(frozen=True)
class SolveOptions:
    """Tolerances of iterative answers.

    Attributes:
        tolerance: Largest residual, relative to the right-hand side, in the norm of the preconditioner.
        max_iterations: Products of the curvature with blocks of vectors, for every block.
        n_probes: Probes of the log determinant.
        seed: Of the probes, and of the sketch.
        rank: Eigenpairs of the preconditioner's sketch.
    """

    tolerance: float
    max_iterations: int
    n_probes: int
    seed: int
    rank: int


@dataclass(frozen=True, eq=False)
class System:
    """Products with the data of a fit, its preconditioners, and the matrix where it is made: of all its precisions.

    Attributes:
        products: Products with J of all data.
        factors: Kronecker factors for a preconditioner; None for a sketch.
        options: Tolerances.
        n_terms: E.
        reports: What the last answers say of themselves.
    """

    products: DataProducts
    factors: KronCurvature | None
    options: SolveOptions
    n_terms: int
    reports: SolveReports = field(default_factory=SolveReports)

    def preconditioner(self, weights: Tensor, prior: GaussianPrior) -> Precision:
        """A precision close to that of all data."""
        if self.factors is not None:
            return self.factors.precision(weights, prior)
        return preconditioners.low_rank(self._sketch, weights, prior)

    @cached_property
    def _sketch(self) -> Subspace:
        return preconditioners.sketch(self.products, self.options.rank, self.options.seed)

    @cached_property
    def full(self) -> FullCurvature:
        """H itself, `[E, P, P]`, by its products with unit vectors.

        Raises:
            UnsupportedError: It would be too large.
        """
        n = self.products.n_params
        if _MATRICES * 8 * n**2 > MEMORY_BUDGET:
            raise UnsupportedError(
                f"hessian_structure='matrix_free' forms the matrix of {n:,} parameters for this, which would take "
                f"{_MATRICES * 8 * n**2 / 2**30:.3g} GiB, more than the memory budget of {MEMORY_BUDGET / 2**30:.3g} "
                "GiB. Ask for predictions, samples (la.sample), functional variances (la.functional_variance) or the "
                "evidence, which take products alone; or use hessian_structure='kron' or 'diag'."
            )
        with torch.inference_mode(False):
            return FullCurvature.of(self.products.matrices(self.n_terms))


@dataclass(frozen=True, eq=False)
class MatrixFreePrecision(Precision):
    """P known by its products, and by a preconditioner close to it.

    Attributes:
        system: What does not depend on hyper-parameters.
        weights: w, `[E]`.
        prior: δ.
    """

    system: System
    weights: Tensor
    prior: GaussianPrior

    # Products and solutions, without a graph.

    @cached_property
    def _constant(self) -> tuple[Tensor, Tensor]:
        """Factor w of the outputs, `[E]`, and δ, `[P]`, without a graph."""
        return self.weights.detach(), self.prior.diagonal().detach()

    @cached_property
    def _preconditioner(self) -> Precision:
        prior = GaussianPrior(self.prior.precision.detach(), self.prior.mean.detach(), self.prior.layout)
        with torch.inference_mode(False), torch.no_grad():
            return self.system.preconditioner(self.weights.detach(), prior)

    def _preconditioned(self, vectors: Tensor) -> Tensor:
        """M v, a few vectors at a time."""
        return self._in_parts(vectors, self._preconditioner.solve)

    def _in_parts(self, vectors: Tensor, function: cg.Linear) -> Tensor:
        row = vectors.shape[1] * vectors.element_size()
        step = max(1, min(_ROWS_BYTES // row, -(-len(vectors) // _PARTS)))
        images = torch.empty_like(vectors)
        with torch.no_grad():
            for start in range(0, len(vectors), step):
                images[start : start + step] = function(vectors[start : start + step])
        return images

    def _times(self, vectors: Tensor) -> Tensor:
        weights, delta = self._constant
        return self.system.products.curved(vectors, weights).addcmul_(vectors, delta.to(vectors))

    def _solved(self, right: Tensor, tally: Tally) -> list[cg.Solution]:
        """Solutions of right-hand sides `[R, P]`, by blocks within the memory budget."""
        options = self.system.options
        limits: dict[str, Any] = {"relative": options.tolerance, "max_iterations": options.max_iterations}
        solutions: list[cg.Solution] = []
        with torch.inference_mode(False), torch.no_grad():
            for part in right.detach().split(self._at_once()):
                solutions.append(cg.solve(self._times, part, self._preconditioned, **limits))
                tally.add(len(part), solutions[-1].n_products, solutions[-1].relative)
        return solutions

    def _told(self, tally: Tally, error: float | None = None) -> None:
        """Takes note of how an answer was found."""
        self.system.reports.add(tally.report(self.system.options.tolerance, error))

    def _at_once(self, vectors_each: int = 1) -> int:
        """Right-hand sides, in groups of so many, that are solved together within the memory budget."""
        row = self.prior.layout.n_params * self.prior.precision.element_size()
        return max(1, MEMORY_BUDGET // (_HELD * row * vectors_each))

    def product(self, vectors: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return self._times(vectors.detach().reshape(-1, vectors.shape[-1])).view_as(vectors)

    def solve(self, vectors: Tensor) -> Tensor:
        return self._all_solved(vectors, "solutions")

    def _all_solved(self, right: Tensor, question: str) -> Tensor:
        if not len(right):
            return right.detach().clone()
        tally = Tally(question)
        solutions = self._solved(right, tally)
        self._told(tally)
        return torch.cat([solution.x for solution in solutions]) if len(solutions) > 1 else solutions[0].x

    # The graph that leads to weights and prior.

    @property
    def _follows(self) -> bool:
        """True if a hyper-parameter requires a gradient."""
        return torch.is_grad_enabled() and (self.weights.requires_grad or self.prior.precision.requires_grad)

    def _form(self, left: Tensor, right: Tensor, prior: GaussianPrior | None = None) -> Tensor:
        """X P Yᵀ of constants `[n, K, P]`, `[n, K, K]`, float64, with the graph of weights and prior."""
        shape, products = left.shape[:2], self.system.products
        pushed = [products.outputs(side.flatten(0, 1)) for side in (left, right)]
        delta = widened((self.prior if prior is None else prior).diagonal())
        total: Tensor | float = 0.0
        for batch, x, y in zip(products.data, *pushed, strict=True):
            x, y = (widened(part).unflatten(0, shape) for part in (x, batch.weighted(y, y.new_ones(1))))
            if len(self.weights) == 1:
                term = widened(self.weights) * torch.einsum("nkbc,nlbc->nkl", x, y)
            else:
                term = torch.einsum("nkbc,nlbc,c->nkl", x, y, widened(self.weights))
            total = total + term
        return total + torch.einsum("nkp,nlp,p->nkl", widened(left), widened(right), delta)

    # Evidence and density.

    @cached_property
    def _trace_log(self) -> tuple[TraceLog, Tensor, Tensor]:
        """The estimate, with u and y of every probe, `[n, P]`."""
        options, tally = self.system.options, Tally("log determinant")
        like = self.system.products.like
        with torch.inference_mode(False), torch.no_grad():
            probes = signs(options.n_probes, self.prior.layout.n_params, like, options.seed)
            images = self._in_parts(probes, self._preconditioner.sample)
            solutions = self._solved(self._in_parts(images, self._preconditioner.product), tally)
            estimate = TraceLog.of(solutions)
            self._told(tally, float(estimate.standard_error))
            return estimate, torch.cat([solution.x for solution in solutions]), images

    def logdet_ratio(self) -> Tensor:
        estimate, solutions, images = self._trace_log
        if not self._follows:
            return self._preconditioner.logdet_ratio() + estimate.value.to(self.weights.device)
        prior = self._estimated_prior
        close = self.system.preconditioner(self.weights, prior)
        slope = self._form(solutions.unsqueeze(1), images.unsqueeze(1), prior).mean() - close.quad(images).mean()
        if len(self._few):
            delta = widened(self.prior.diagonal())[self._few]
            slope = slope + (self._few_variances * delta - delta.log()).sum()
        slope = first_order(slope - slope.detach())
        return close.logdet_ratio() + estimate.value.to(self.weights.device) + slope

    @cached_property
    def _small(self) -> Tensor:
        """True of tensors with no more entries than there are probes, `[n_tensors]`: of those traces are exact.

        The estimate of the trace of one tensor's block has the noise of all others, in which a small one's drowns.
        With one prior precision for all, only the whole trace is asked for.
        """
        prior, most = self.prior, self.system.options.n_probes
        each = prior.is_constant_per_tensor and not prior.is_scalar
        flags = [each and size <= most for size in prior.layout.sizes]
        return torch.tensor(flags, device=prior.precision.device)

    @cached_property
    def _few(self) -> Tensor:
        """Their entries, `[n]`."""
        return self.prior.layout.repeat_per_tensor(self._small).nonzero().flatten()

    @cached_property
    def _few_variances(self) -> Tensor:
        """Their variances, `[n]`, float64."""
        tally, like = Tally("variances"), self.system.products.like
        parts: list[Tensor] = []
        with torch.no_grad():
            for entries in self._few.split(self._at_once()):
                rows = like.new_zeros(len(entries), 1, self.prior.layout.n_params)
                rows[torch.arange(len(entries)), 0, entries] = 1
                parts.append(self._inverse_form(rows, tally).flatten())
        self._told(tally)
        return torch.cat(parts)

    @property
    def _estimated_prior(self) -> GaussianPrior:
        """The prior, of which the tensors whose traces are exact are constants."""
        precision = self.prior.precision
        if not len(self._few):
            return self.prior
        return replace(self.prior, precision=torch.where(self._small, precision.detach(), precision))

    def quad(self, vectors: Tensor) -> Tensor:
        constant = vectors.detach().reshape(-1, vectors.shape[-1])
        product = self.product(constant).view_as(vectors)
        value = (product * (2 * vectors - vectors.detach())).sum(-1)  # its gradient in v is 2 P v
        if self._follows:
            own = self._form(constant.unsqueeze(1), constant.unsqueeze(1)).view(vectors.shape[:-1])
            value = value + (own - own.detach()).to(value)
        return first_order(value)

    # Predictions.

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        return torch.cat(list(self._forms(jacobian))).to(jacobian.summed_in(self.prior.precision.dtype))

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        variance = self.functional_variance(jacobian)
        return variance.diagonal(dim1=1, dim2=2).to(self.prior.precision.dtype)

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        rows = jacobian.dense().flatten(0, 1).unsqueeze(0)
        tally = Tally("variances")
        total = self._inverse_form(rows, tally)
        self._told(tally)
        return total[0].to(jacobian.summed_in(self.prior.precision.dtype))

    def _forms(self, jacobian: Jacobian) -> Iterator[Tensor]:
        """J_b P⁻¹ J_bᵀ, `[b, C, C]` of consecutive data, float64."""
        tally, step = Tally("variances"), self._at_once(jacobian.n_cotangents)
        for start in range(0, jacobian.n_data, step):
            yield self._inverse_form(jacobian.at(slice(start, start + step)).dense(), tally)
        self._told(tally)

    def _inverse_form(self, rows: Tensor, tally: Tally) -> Tensor:
        """Y P⁻¹ Yᵀ of rows `[n, K, P]`, `[n, K, K]`, float64, with the graph of rows, weights and prior."""
        like = self.system.products.like
        solutions = self._solved(rows.detach().flatten(0, 1).to(like), tally)
        x = torch.cat([solution.x for solution in solutions]).view(rows.shape)
        residual = torch.cat([solution.residual for solution in solutions if solution.residual is not None])
        wide, y = widened(x), widened(rows)
        half = y.detach() @ wide.mT + wide @ widened(residual.view(rows.shape)).mT  # Y Xᵀ + X (Y − P X)ᵀ
        total = 0.5 * (half + half.mT)
        if y.requires_grad:
            moved = (y - y.detach()) @ wide.mT
            total = total + moved + moved.mT
        if self._follows:
            own = self._form(x, x)
            total = total - (own - own.detach())
        return first_order(total)

    # Samples and moments.

    def n_noise(self, n_params: int) -> int:
        return n_params + self.system.products.n_noise

    def sample(self, noise: Tensor) -> Tensor:
        n, like = self.prior.layout.n_params, self.system.products.like
        white, colours = noise[:, :n].to(like), noise[:, n:].to(like)
        products = self.system.products
        right = (
            _Pulled.apply(products, *products.coloured(colours, self.weights)) + white * self.prior.diagonal().sqrt()
        )
        constant = self._all_solved(right, "samples")
        if not self._follows:
            return constant.to(noise.dtype)
        pushed = products.outputs(constant)
        drift = [batch.weighted(f, self.weights) for batch, f in zip(products.data, pushed, strict=True)]
        moved = right - _Pulled.apply(products, *drift) - self.prior.diagonal() * constant
        return first_order(_Moved.apply(constant, moved, self.solve)).to(noise.dtype)

    @property
    def _dense(self) -> FullPrecision:
        return self.system.full.precision(self.weights, self.prior)

    def diagonal_of_inverse(self) -> Tensor:
        return self._dense.diagonal_of_inverse().to(self.prior.precision.dtype)

    def to_dense(self) -> Tensor:
        return self._dense.to_dense()

    @property
    def scale(self) -> Tensor:
        return self._dense.scale


class _Moved(torch.autograd.Function):
    """A constant s, with the gradient of s + P⁻¹ v at v = 0 in value."""

    @staticmethod
    def forward(ctx: Any, constant: Tensor, moved: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        del moved
        ctx.solve = solve
        return constant.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.solve(gradients[0]), None


class _Pulled(torch.autograd.Function):
    """Σ Jᵀ u over batches, with its graph: the way back is J g."""

    @staticmethod
    def forward(ctx: Any, products: DataProducts, *cotangents: Tensor) -> Tensor:
        ctx.products = products
        return products.pulled(cotangents)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.products.outputs(gradients[0]))
