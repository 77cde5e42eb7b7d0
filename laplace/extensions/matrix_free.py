"""The full curvature without its matrix: the data are held, and the network is asked for products H v = Σ Jᵀ Λ J v.

One reading of the data keeps every batch's inputs with the output Hessian Λ at the fit; where Kronecker factors are to
precondition (`krylov.py`), it sums those. No other part of the training set, and no matrix of P rows and
columns, is held. Where P is small the matrix is less work than its products, and is formed from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.arguments import check_counts
from laplace.core.batch import Inputs
from laplace.core.cached import Recent, cached_property
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.nested import entries, from_state, is_finite, require_sizes
from laplace.core.precision_policy import widened
from laplace.engines.cost import Cost
from laplace.engines.engine import MEMORY_BUDGET, BatchSummary, CurvatureEngine, LinearMap, OutputCurvature, detached
from laplace.engines.profile import BatchProfile
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidData, StateError, UnsupportedError, warn
from laplace.jacobian.jacobian import Jacobian
from laplace.large_structures import krylov
from laplace.large_structures.krylov import SolveReport, Tally, TraceLog, signs
from laplace.large_structures.low_rank import LowRankPrecision, Subspace
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.parametric import NamedPosterior
from laplace.structures.base import Curvature, DataPass, require_finite
from laplace.structures.full import FullCurvature
from laplace.structures.kron import KronCurvature
from laplace.structures.precision import Form, Precision, VariancesOverPriors

# Gradients that have no graph of their own, because what they are of was solved for without one.


def first_order(value: Tensor) -> Tensor:
    """A value as it is, which is differentiated once."""
    return _FirstOrder.apply(value)


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        del ctx
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True: answers of hessian_structure='matrix_free' are differentiated once, as the "
                "solutions they are made of have no graph; use hessian_structure='full' for second derivatives."
            )
        return gradients[0]


# Data that a posterior holds so that it can ask the network for products with their curvature, H = Σ Jᵀ Λ J.


@dataclass(frozen=True, eq=False)
class HeldBatch:
    """Inputs of one batch with the curvature of its loss in the outputs, at which nothing but J is asked for later."""

    x: Inputs  # Inputs
    output: OutputCurvature  # Λ
    count: float = 1.0  # How often every datum counts

    @classmethod
    def copied(cls, x: Inputs, output: OutputCurvature) -> HeldBatch:
        """A batch as it is held: a copy, which the loader cannot write to."""
        return cls(batches.copied(detached(x)), output)

    @property
    def hessian(self) -> OutputHessian:
        """Λ."""
        return self.output.hessian

    @property
    def shape(self) -> tuple[int, int]:
        """Rows B and outputs C."""
        rows, outputs = self.hessian.diag.shape
        return rows, outputs

    @property
    def n_columns(self) -> int:
        """K, columns of a root of Λ."""
        return self.shape[1] if self.hessian.dense is not None else self.hessian.n_columns

    def scaled(self, factor: float) -> HeldBatch:
        """The batch whose data count so many times as often."""
        return replace(self, count=factor * self.count)

    def weighted(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """diag(w) Λ f of outputs `[..., B, C]`, with w `[C]`, or `[1]` for all."""
        return self.count * weights.to(outputs) * self.hessian.times(outputs.to(self.hessian.diag)).to(outputs)

    def rooted(self, noise: Tensor, weights: Tensor) -> Tensor:
        """√W L ε of standard normal numbers `[S, K·B]` with L Lᵀ = Λ, `[S, B, C]`, by few columns of L at a time."""
        columns = noise.unflatten(1, (self.n_columns, -1))
        if self.hessian.dense is not None:
            total = torch.einsum("kbc,skb->sbc", self.hessian.root().to(noise), columns)
        else:
            total = noise.new_zeros(len(noise), *self.shape)
            step = max(1, _ROOT_NUMBERS // max(1, self.hessian.diag.numel()))
            for start in range(0, self.n_columns, step):
                part = slice(start, min(start + step, self.n_columns))
                total += torch.einsum("kbc,skb->sbc", self.hessian.root(part).to(noise), columns[:, part])
        return self.count**0.5 * weights.to(noise).sqrt() * total

    def state(self) -> dict[str, Any]:
        """Tensors and numbers."""
        return {
            "x": batches.plain(self.x), **self.hessian.state(), "n_positions": self.output.n_positions,
            "count": self.count,
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> HeldBatch:
        """The batch of a state."""
        hessian = OutputHessian.from_state(state)
        output = from_state(OutputCurvature, state | {"hessian": hessian})
        return from_state(cls, {"x": batches.from_plain(state["x"]), "output": output, "count": float(state["count"])})


_UNIT_VECTORS = 128
"""Unit vectors that are multiplied at once."""

_ROOT_NUMBERS = 2**22
"""Numbers of a root of Λ that are made at once."""


class DataProducts:
    """Products with J of all data that are held, by maps of every batch.

    Of a last layer the features are kept, of small networks the Jacobian multiplied out, as far as the budget reaches;
    a map that is not kept takes a forward and a backward pass for every block of vectors.
    """

    def __init__(self, engine: CurvatureEngine, data: Sequence[HeldBatch], kept_bytes: int) -> None:
        self.engine = engine  # Gives linear maps of batches at θ*
        self.data = tuple(data)  # Batches
        self.n_params = engine.problem.layout.n_params  # P
        self.like = self.data[0].hessian.diag  # A tensor of the dtype and on the device of products
        self._left = kept_bytes
        self._kept: dict[int, LinearMap] = {}

    def maps(self) -> Iterator[tuple[HeldBatch, LinearMap]]:
        """Every batch with its map."""
        for number, batch in enumerate(self.data):
            yield batch, self._kept[number] if number in self._kept else self._made(number, batch)

    def _made(self, number: int, batch: HeldBatch) -> LinearMap:
        rows, outputs = batch.shape
        itemsize = batch.hessian.diag.element_size()
        fits = batch.output.n_positions == 1 and rows * outputs * self.n_params * itemsize <= self._left
        linear = self.engine.linear_map(batch.x, multiplied_out=fits)
        if linear.is_lasting and linear.n_bytes <= self._left:
            self._left -= linear.n_bytes
            self._kept[number] = linear
        return linear

    def outputs(self, vectors: Tensor) -> list[Tensor]:
        """J v of vectors `[R, P]`, `[R, B, C]` of every batch."""
        with torch.no_grad():
            return [linear.push(vectors) for _, linear in self.maps()]

    def pulled(self, cotangents: Sequence[Tensor]) -> Tensor:
        """Σ Jᵀ u of u `[R, B, C]` for every batch, `[R, P]`."""
        return self._summed(cotangents[0], lambda number, batch, linear: cotangents[number])

    def curved(self, vectors: Tensor, weights: Tensor) -> Tensor:
        """Σ Jᵀ W Λ J v, `[R, P]`, of vectors `[R, P]` and w `[C]` or `[1]`."""
        return self._summed(vectors, lambda number, batch, linear: batch.weighted(linear.push(vectors), weights))

    def matrices(self, n_terms: int) -> Tensor:
        """H of every term, `[E, P, P]`, float64: the Jacobian of a batch by its products with unit vectors, squared."""
        with torch.no_grad():
            eye = torch.eye(self.n_params, dtype=self.like.dtype, device=self.like.device)
            total = widened(eye.new_zeros(n_terms, self.n_params, self.n_params))
            for batch, linear in self.maps():
                rows = widened(torch.cat([linear.push(part) for part in eye.split(_UNIT_VECTORS)]))  # [P, B, C]
                inner = batch.count * batch.hessian.to(rows.dtype).times(rows)
                total += (
                    torch.einsum("pbc,qbc->pq", inner, rows)
                    if n_terms == 1
                    else torch.einsum("pbc,qbc->cpq", inner, rows)
                )
            return 0.5 * (total + total.mT)

    def coloured(self, noise: Tensor, weights: Tensor) -> list[Tensor]:
        """√W L ε of standard normal numbers `[S, n_noise]`, `[S, B, C]` of every batch."""
        parts = noise.split([batch.shape[0] * batch.n_columns for batch in self.data], 1)
        return [batch.rooted(part, weights) for batch, part in zip(self.data, parts, strict=True)]

    @property
    def n_noise(self) -> int:
        """Numbers of a sample of the data's part."""
        return sum(batch.shape[0] * batch.n_columns for batch in self.data)

    def _summed(self, like: Tensor, cotangents: Callable[[int, HeldBatch, LinearMap], Tensor]) -> Tensor:
        """Σ Jᵀ u over batches, `[R, P]`; one map of a batch serves both directions."""
        with torch.no_grad():
            total = like.new_zeros(like.shape[0], self.n_params)
            for number, (batch, linear) in enumerate(self.maps()):
                linear.add_pull(cotangents(number, batch, linear), total)
            return total


# P = Σ_e w_e H_e + diag(δ) by products alone: what is asked of it is solved for, or estimated with its error.
#
# Conjugate gradients with a preconditioner (`krylov.py`) give P⁻¹ b, to a residual that is an option. Of a
# form x P⁻¹ yᵀ the error is of second order in it, for with X = P⁻¹ Y approximately X Yᵀ + Y Xᵀ − X P Xᵀ is stationary.
# Samples are exact but for the residual (sample-then-optimise, Antorán et al., 2023, section 3.2): with θ₀ ~ N(0, D)
# and ε ~ N(0, I),
#
#     θ_s − θ* = P⁻¹ (Jᵀ √w L ε + θ₀),    L Lᵀ = Λ,
#
# has covariance P⁻¹ (Jᵀ w Λ J + D) P⁻¹ = P⁻¹.


_HELD = 8
"""Numbers per parameter and right-hand side: six of the solver, the right-hand side's own and those of its form."""

_MATRICES = 6
"""Matrices `[P, P]` in float64 that a factorisation passes through."""

_ROWS_BYTES = 2**26
"""Bytes of vectors that a preconditioner passes through at once."""

_PARTS = 4
"""Parts of a block that it passes through one after the other, so that what it makes on the way is a part, too."""


@dataclass(frozen=True, eq=False)
class System:
    """Products with the data of a fit, its preconditioners, and the matrix where it is made: of all its precisions."""

    products: DataProducts  # Products with J of all data
    factors: KronCurvature | None  # Kronecker factors for a preconditioner; None for a sketch
    options: MatrixFreeOptions
    n_terms: int  # E
    reports: dict[str, SolveReport] = field(default_factory=dict)  # The last one of every question

    def preconditioner(self, weights: Tensor, prior: GaussianPrior) -> Precision:
        """A precision close to that of all data."""
        if self.factors is not None:
            return self.factors.precision(weights, prior)
        return LowRankPrecision(
            self._sketch, weights.mean().view(1), prior
        )  # several terms by the mean of their weights

    @cached_property
    def _sketch(self) -> Subspace:
        products, options = self.products, self.options
        one = products.like.new_ones(1)
        return krylov.sketch(
            lambda vectors: products.curved(vectors, one), products.n_params, products.like, options.rank, options.seed
        )

    @cached_property
    def full(self) -> FullCurvature:
        """H itself, `[E, P, P]`, by its products with unit vectors."""
        n = self.products.n_params
        if _MATRICES * 8 * n**2 > MEMORY_BUDGET:
            raise UnsupportedError(
                f"hessian_structure='matrix_free' forms the matrix of {n:,} parameters for this, which would take "
                f"{_MATRICES * 8 * n**2 / 2**30:.3g} GiB, more than the memory budget of {MEMORY_BUDGET / 2**30:.3g} "
                "GiB. Ask for predictions, samples (la.sample), functional variances (la.functional_variance) or the "
                "evidence, which take products alone; or use hessian_structure='kron' or 'diag'."
            )
        with torch.inference_mode(False):
            return FullCurvature.from_matrix(self.products.matrices(self.n_terms))


@dataclass(frozen=True, eq=False)
class MatrixFreePrecision(Precision):
    """P known by its products, and by a preconditioner close to it."""

    system: System  # What does not depend on hyper-parameters
    weights: Tensor  # w, `[E]`
    prior: GaussianPrior  # δ

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

    def _in_parts(self, vectors: Tensor, function: krylov.Linear) -> Tensor:
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

    def _solved(self, right: Tensor, tally: Tally) -> list[krylov.Solution]:
        """Solutions of right-hand sides `[R, P]`, by blocks within the memory budget."""
        options = self.system.options
        limits: dict[str, Any] = {"relative": options.tolerance, "max_iterations": options.max_iterations}
        solutions: list[krylov.Solution] = []
        with torch.inference_mode(False), torch.no_grad():
            for part in right.detach().split(self._at_once()):
                solutions.append(krylov.solve(self._times, part, self._preconditioned, **limits))
                tally.add(len(part), solutions[-1].n_products, solutions[-1].relative)
        return solutions

    def _reported(self, tally: Tally, error: float | None = None) -> None:
        """Takes note of how an answer was found."""
        report = tally.report(self.system.options.tolerance, error)
        self.system.reports[report.question] = report
        if not report.converged:
            warn(
                f"{report!r}: the tolerance is {report.tolerance:.2g}. Raise max_iterations, or the tolerance, in "
                "structure_kwargs, give a larger prior precision, or a float64 model where rounding is in the way.",
                ApproximationWarning,
            )

    def _at_once(self, vectors_each: int = 1) -> int:
        """Right-hand sides, in groups of so many, that are solved together within the memory budget."""
        row = self.prior.layout.n_params * self.prior.precision.element_size()
        return max(1, MEMORY_BUDGET // (_HELD * row * vectors_each))

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        """Products and solutions are constants; samples are differentiable."""
        if exponent == -0.5:
            return self._sampled(vectors)
        if exponent == -1:
            return self._all_solved(vectors, "solutions")
        with torch.inference_mode(False), torch.no_grad():
            return self._times(vectors.detach().reshape(-1, vectors.shape[-1])).view_as(vectors)

    def _all_solved(self, right: Tensor, question: str) -> Tensor:
        if not len(right):
            return right.detach().clone()
        tally = Tally(question)
        solutions = self._solved(right, tally)
        self._reported(tally)
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
            estimate = TraceLog.from_solutions(solutions)
            self._reported(tally, float(estimate.standard_error))
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
        self._reported(tally)
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

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        dtype = self.prior.precision.dtype
        if form == "joint":
            tally = Tally("variances")
            total = self._inverse_form(jacobian.dense().flatten(0, 1).unsqueeze(0), tally)[0]
            self._reported(tally)
            return total.to(jacobian.summed_in(dtype))
        variance = torch.cat(list(self._forms(jacobian))).to(jacobian.summed_in(dtype))
        return variance if form == "full" else variance.diagonal(dim1=1, dim2=2).to(dtype)

    def _forms(self, jacobian: Jacobian) -> Iterator[Tensor]:
        """J_b P⁻¹ J_bᵀ, `[b, C, C]` of consecutive data, float64."""
        tally, step = Tally("variances"), self._at_once(jacobian.n_cotangents)
        for start in range(0, jacobian.n_data, step):
            yield self._inverse_form(jacobian.at(slice(start, start + step)).dense(), tally)
        self._reported(tally)

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

    def _sampled(self, noise: Tensor) -> Tensor:
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
    def _dense(self) -> Precision:
        return self.system.full.precision(self.weights, self.prior)

    def diagonal_of_inverse(self) -> Tensor:
        return self._dense.diagonal_of_inverse().to(self.prior.precision.dtype)

    def to_dense(self) -> Tensor:
        return self._dense.to_dense()

    @property
    def scale(self) -> Tensor:
        return self._dense.scale

    @property
    def covariance(self) -> Tensor:
        return self._dense.covariance


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


_DENSE = 1024
"""Weights up to which the matrix is less work than its products."""


@dataclass(frozen=True)
class MatrixFreeOptions:
    """Options of a curvature that is known by its products.

    Attributes:
        tolerance: Largest residual of a solution, relative to its right-hand side, in the norm of the preconditioner;
            a variance is then wrong by about its square, relatively.
        preconditioner: `"lowrank"`, a sketch of the dominant eigenpairs, or `"kron"`, Kronecker factors.
        rank: Eigenpairs of the sketch; 0 for the prior alone.
        max_iterations: Products of the curvature with a block of vectors; a solution that takes more is given with a
            warning.
        n_probes: Probes of the log determinant; its standard error falls with their root.
        seed: Of the probes and the sketch, which are the same for all hyper-parameters.
        dense_below: Weights up to which the matrix is formed, and everything is exact.
        kept_bytes: Bytes of features and Jacobians that are kept from one product to the next.

    Raises:
        InvalidArgument: A value out of range.
    """

    tolerance: float = 1e-3
    preconditioner: str = "lowrank"
    rank: int = 50
    max_iterations: int = 500
    n_probes: int = 16
    seed: int = 0
    dense_below: int = _DENSE
    kept_bytes: int = MEMORY_BUDGET

    def __post_init__(self) -> None:
        check_counts(max_iterations=self.max_iterations)
        check_counts(0, dense_below=self.dense_below, kept_bytes=self.kept_bytes, rank=self.rank)
        check_counts(2, n_probes=self.n_probes)
        if not 0 < self.tolerance < 1:
            raise InvalidArgument(f"tolerance={self.tolerance}; it must lie in (0, 1).")
        if self.preconditioner not in ("lowrank", "kron"):
            raise InvalidArgument(f"preconditioner={self.preconditioner!r}; accepted are 'lowrank' and 'kron'.")


@dataclass(frozen=True, eq=False)
class MatrixFreeCurvature(Curvature):
    """The full curvature by its products."""

    terms: int  # E
    factors: KronCurvature | None  # Kronecker factors of the same data, for a preconditioner; None for a sketch
    data: tuple[HeldBatch, ...]  # What products are formed from
    mean: Tensor  # θ*, at which, `[P]`
    chosen: MatrixFreeOptions  # Options
    name = "matrix_free"
    options = MatrixFreeOptions
    holds_inputs = True

    @property
    def n_terms(self) -> int:
        return self.terms

    @property
    def note(self) -> str:
        rows = sum(batch.shape[0] for batch in self.data)
        return (
            f"products with the full curvature to a residual of {self.chosen.tolerance:.2g}; held with the inputs of "
            f"{rows:,} data"
        )

    @property
    def reports(self) -> dict[str, SolveReport]:
        """The last report of every question that was asked; empty where the matrix was formed."""
        return {} if self._latest is None else dict(self._latest.reports)

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: MatrixFreeOptions) -> DataPass:
        return _Holding(engine, options)

    @classmethod
    def cost(cls, profile: BatchProfile, options: MatrixFreeOptions) -> Cost:
        row = profile.n_params * profile.itemsize
        outputs = profile.n_data * profile.n_outputs
        data = (profile.n_batches or 1) * (profile.inputs + outputs * profile.itemsize)
        maps = min(options.kept_bytes, (profile.n_batches or 1) * outputs * row)
        solving = min(MEMORY_BUDGET, 8 * outputs * row) + 3 * min(options.rank + 10, profile.n_params) * row
        kron = Cost(fitted=0, running=0, adding=0)
        if options.preconditioner == "kron":
            kron = KronCurvature.cost(profile, None)
        return replace(
            kron,
            columns=True,
            fitted=kron.fitted + data + row,
            running=kron.running + data,
            adding=kron.adding + data + row,
            posterior=kron.posterior + maps + solving,
            projecting=kron.projecting + 3 * profile.piece_bytes([profile.n_params], profile.n_outputs),
        )

    def __add__(self, other: Curvature) -> MatrixFreeCurvature:
        """Curvature of both sets of data."""
        if not isinstance(other, MatrixFreeCurvature):
            return NotImplemented
        if not torch.equal(self.mean, other.mean):
            raise UnsupportedError(
                "hessian_structure='matrix_free' asks the network for products, and its weights are no longer those of "
                "the former fit. Fit all data together with override=True, or use hessian_structure='kron', 'diag' or "
                "'full', whose curvature is stored."
            )
        factors = None if self.factors is None or other.factors is None else self.factors + other.factors
        return replace(self, factors=factors, data=(*self.data, *other.data))

    def scaled(self, factor: float) -> MatrixFreeCurvature:
        data = tuple(batch.scaled(factor) for batch in self.data)
        return replace(self, factors=None if self.factors is None else self.factors.scaled(factor), data=data)

    # The posterior.

    @classmethod
    def require_stored(cls, what: str) -> None:
        raise UnsupportedError(
            f"{what} with hessian_structure='matrix_free', which asks the network, with the weights of the fit, for "
            "products over all data; use 'kron', 'diag' or 'full', whose curvature is stored."
        )

    @classmethod
    def options_of_network(cls, engine: Callable[[], CurvatureEngine]) -> dict[str, Any]:
        return {"engine": engine()}

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> Precision:
        """The posterior precision.

        Args:
            weights: As of `Curvature.precision`.
            prior: As of `Curvature.precision`.
            **options: `engine`, of the network with the weights of the fit.

        Raises:
            UnsupportedError: There is no engine.
        """
        system = self._system(options.get("engine"))
        if self._is_small:
            return system.full.precision(weights, prior)
        return MatrixFreePrecision(system, weights, prior)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> VariancesOverPriors:
        if not self._is_small:
            return super().scan(weights, layout, **options)
        return self._system(options.get("engine")).full.scan(weights, layout)

    @property
    def _is_small(self) -> bool:
        return len(self.mean) <= self.chosen.dense_below

    def _system(self, engine: CurvatureEngine | None) -> System:
        if engine is None:
            raise UnsupportedError(
                "curvature of hessian_structure='matrix_free' is known only through products, which the network "
                "computes; take its precision from the posterior (la.posterior(), la.evidence())."
            )
        return self._recent(engine, lambda: self._made(engine))

    def _made(self, engine: CurvatureEngine) -> System:
        products = DataProducts(engine, self.data, self.chosen.kept_bytes)
        return System(products, self.factors, self.chosen, self.n_terms)

    @cached_property
    def _recent(self) -> Recent[System]:
        return Recent()

    @property
    def _latest(self) -> System | None:
        return self._recent.value

    # What is saved and shown.

    def state(self) -> dict[str, Any]:
        return {
            "terms": self.terms,
            "factors": None if self.factors is None else self.factors.state(),
            "data": [batch.state() for batch in self.data],
            "mean": self.mean,
            "chosen": entries(self.chosen),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> MatrixFreeCurvature:
        data = [HeldBatch.from_state(batch) for batch in state["data"]]
        factors = None if state["factors"] is None else KronCurvature.from_state(state["factors"])
        return from_state(cls, state | {"data": data, "factors": factors})

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        require_sizes("the mean of H", self.mean, layout.n_params, dtype=dtype)
        if self.factors is not None:
            self.factors.require_of(layout, dtype)
        if not self.data or self.terms < 1:
            raise StateError(f"H has {len(self.data)} batches and {self.terms} terms; it must have one at least.")
        for batch in self.data:
            batch.hessian.require_rows()
            if (
                not 0 <= batch.count < math.inf
                or batch.output.n_positions < 1
                or len(batch.hessian.diag) % batch.output.n_positions
            ):
                raise StateError(f"a batch of H counts {batch.count} times, at {batch.output.n_positions} positions.")

    def __getstate__(self) -> dict[str, Any]:
        """State that is copied and pickled: no network, and nothing that can be asked of it again."""
        return entries(self)


class _Holding(DataPass):
    """Holds what products take, and sums Kronecker factors where they are to precondition."""

    def __init__(self, engine: CurvatureEngine, options: MatrixFreeOptions) -> None:
        self.engine = engine  # Computes both
        self.options = options  # Of the structure
        self.factors: KronCurvature | None = None
        self.data: list[HeldBatch] = []

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        summary, output = self.engine.output_curvature(x, y)
        require_finite(is_finite(output.hessian))
        if self.options.preconditioner == "kron":
            self._add_factors(x, y)
        self.data.append(HeldBatch.copied(x, output))
        return summary

    def _add_factors(self, x: Inputs, y: Tensor) -> None:
        if self.factors is None:
            _, self.factors = KronCurvature.from_batch(self.engine, x, y)
        else:
            _, self.factors = self.factors.with_batch(self.engine, x, y)
        require_finite(self.factors.is_finite())

    def finish(self) -> MatrixFreeCurvature:
        if not self.data:
            raise InvalidData("no batch was read.")
        mean = self.engine.problem.mean()
        dtype = torch.promote_types(mean.dtype, torch.float32)
        n_terms = self.data[0].shape[1] if self.engine.split_outputs else 1
        factors = None if self.factors is None else self.factors.kept()
        return MatrixFreeCurvature(n_terms, factors, tuple(self.data), mean.to(dtype), self.options)


class MatrixFreePosterior(NamedPosterior):
    """What every posterior by matrix–vector products has."""

    @property
    def solve_reports(self) -> dict[str, SolveReport]:
        """Accuracy of the last iterative solves: their residuals, and the standard error of the log determinant.

        Keys are `"variances"`, `"samples"`, `"log determinant"` and `"solutions"`, as far as computed since the fit.
        Empty if the network is so small that the matrix was formed (`dense_below`): results are exact then.

        Raises:
            NotFittedError: Before `fit`.
        """
        curvature = self.fitted().curvature
        return curvature.reports if isinstance(curvature, MatrixFreeCurvature) else {}
