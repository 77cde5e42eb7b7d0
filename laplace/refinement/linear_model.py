"""The linearised network as a convex model of its weights, with expectations under a Gaussian over the outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace.core.checks import same_count
from laplace.core.gaussian import covariance_root
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import check_generator, standard_normal
from laplace.engines.native.kinds import GGNEngine
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.large_structures.krylov import solve
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.posterior.posterior import Posterior
from laplace.refinement.result import Refinement
from laplace.structures.fit import Fit

if TYPE_CHECKING:
    from laplace.refinement.process import KernelData
    from laplace.refinement.weight_space import LinearData


_HERMITE = 32
_WIDE = 2.0
"""Standard deviation of an output up to which `_HERMITE` points, half of one from each other, are exact enough."""
_REACH = 8.0
_MOST = 513


@dataclass(frozen=True, eq=False)
class Smoothing:
    """Points of a standard normal with weights: the same for all data, so that results depend on no order.

    Where the likelihood acts on every output alone one dimension is enough: Gauss–Hermite points, or, for outputs with
    a large standard deviation, those of the trapezoidal rule at steps of one unit of f. With a sigmoid's poles at ±iπ
    its error is about exp(−2π²) (Trefethen and Weideman, 2014). Else pairs ε, −ε of random numbers, scaled to second
    moments of 1.

    Roots of covariances are standard deviations where the likelihood acts on every output alone.
    """

    points: Tensor  # `[S, 1]` (shared by the outputs) or `[S, C]`
    weights: Tensor  # `[S]`, sum 1
    independent: bool  # whether the likelihood acts on every output alone

    @classmethod
    def for_likelihood(
        cls,
        likelihood: Likelihood,
        n_outputs: int,
        n_samples: int,
        generator: torch.Generator | None,
        like: Tensor,
        widest: float = 1.0,
    ) -> Smoothing:
        """Points for a likelihood; `widest` is the largest standard deviation of an output that is to be expected."""
        if likelihood.independent_outputs:
            return cls(*_quadrature(widest, like.device), independent=True)
        source = generator or torch.Generator().manual_seed(0)
        half = standard_normal((-(-n_samples // 2), n_outputs), widened(like), source)
        if len(half) > n_outputs:  # unit second moments: expectations of quadratic functions are exact
            root = torch.linalg.cholesky(half.mT @ half / len(half))
            half = torch.linalg.solve_triangular(root, half.mT, upper=False).mT
        points = torch.cat([half, -half])
        return cls(points, points.new_full((len(points),), 1 / len(points)), independent=False)

    def root(self, covariance: Tensor) -> Tensor:
        """Factor that colours the points: standard deviations `[B, C]` of variances, or roots `[B, C, C]`."""
        return widened(covariance).clamp(min=0).sqrt() if self.independent else covariance_root(widened(covariance))

    def around(self, f: Tensor, root: Tensor | None) -> list[tuple[float, Tensor]]:
        """Weighted outputs `[B, C]` around f; f alone without a root."""
        if root is None:
            return [(1.0, f)]
        offsets = (
            self.points.unsqueeze(1) * root if self.independent else torch.einsum("bcd,sd->sbc", root, self.points)
        )
        return list(zip(self.weights.tolist(), f + offsets, strict=True))

    def losses(self, likelihood: Likelihood, f: Tensor, root: Tensor | None, y: Tensor) -> Tensor:
        """`Likelihood.loss_terms` at every point, `[S, 1]` or `[S, C]`."""
        return torch.stack([likelihood.loss_terms(h, y) for _, h in self.around(f, root)])

    def mean(self, values: Tensor) -> Tensor:
        """The expectation of values `[S, …]` at every point; of one point, that value."""
        return values[0] if len(values) == 1 else torch.tensordot(self.weights.to(values), values, 1)

    def standard_error(self, values: Tensor) -> float:
        """Standard error of the expectation of values `[S]`; 0 where points are no random ones.

        Pairs ε, −ε have one mean. Where the second moments of the points are those of a normal, the expectation of what
        is quadratic in ε has no error: what is left beside it counts. Too few points for that overstate the error.
        """
        if self.independent or len(values) == 1:
            return 0.0
        half = len(values) // 2
        pairs, points = 0.5 * (values[:half] + values[half:]), self.points[:half]
        row, column = torch.triu_indices(points.shape[1], points.shape[1], device=points.device)
        one = torch.ones_like(points[:, :1])
        for products in (points[:, row] * points[:, column], points.square(), points[:, :0]):
            known = torch.cat([one, products], 1)
            if half > 2 * known.shape[1]:
                break
        if half <= known.shape[1]:
            return math.inf
        basis = torch.linalg.qr(known).Q
        rest = pairs - basis @ (basis.T @ pairs)
        # What is left at far points, where products are large, was fitted most and would be largest (White, 1980; HC2).
        freedom = (1 - basis.square().sum(1)).clamp(min=torch.finfo(rest.dtype).eps)
        return float((rest.square() / freedom).sum().sqrt() / half)

    def gradient(self, likelihood: Likelihood, f: Tensor, root: Tensor | None, y: Tensor) -> Tensor:
        """E of `Likelihood.gradient`, `[B, C]`."""
        return torch.stack([w * likelihood.gradient(h, y) for w, h in self.around(f, root)]).sum(0)

    def hessian(self, likelihood: Likelihood, f: Tensor, root: Tensor | None, y: Tensor) -> OutputHessian:
        """E of `Likelihood.hessian`."""
        if root is None:
            return likelihood.hessian(f, y)
        if self.independent:
            parts = [w * likelihood.hessian(h, y).diagonal() for w, h in self.around(f, root)]
            return OutputHessian(torch.stack(parts).sum(0))
        dense = torch.zeros_like(root)
        for weight, h in self.around(f, root):
            # As squares: diag(p) − p pᵀ of a p close to 1 is rounding, and not even positive semi-definite.
            columns = likelihood.hessian(h, y).root()
            dense = dense + weight * torch.einsum("kbc,kbd->bcd", columns, columns)
        return OutputHessian(diag=dense.diagonal(dim1=1, dim2=2), dense=dense)


def _quadrature(widest: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points `[S, 1]` and weights `[S]` of a standard normal; above `widest` = 32 steps exceed one unit of f."""
    if widest <= _WIDE:
        nodes, masses = np.polynomial.hermite_e.hermegauss(_HERMITE)
        masses = masses / math.sqrt(2 * math.pi)
    else:
        count = min(_MOST, math.ceil(2 * _REACH * max(widest, 2 * _WIDE))) | 1
        nodes = np.linspace(-_REACH, _REACH, count)
        masses = np.exp(-(nodes**2) / 2)
        masses = masses / masses.sum()
    points = torch.as_tensor(nodes, dtype=wide_dtype(device), device=device).unsqueeze(1)
    return points, torch.as_tensor(masses, dtype=wide_dtype(device), device=device)


NO_SMOOTHING = Smoothing(torch.zeros(1, 1), torch.ones(1), independent=True)
"""The values themselves, without an expectation."""


# ----------------------------------------------------------------------------------------------------------------------
# The generalised linear model p(D | f_lin(x, θ)) p(θ) as a convex function of θ
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LinearModel:
    """−log p(D | f_lin) − log p(θ) up to constants, f_lin = f(x, θ*) + J (θ − θ*), as a function of θ − θ*, `[P]`.

    Its minimum is the mode [Linearization, appendix A.3.2, refinement]. With a covariance of the outputs the loss is
    its expectation under N(f_lin, V): the part of the evidence lower bound that depends on the mean.

    Its data are outputs where its parameters are zero, and products with J and Jᵀ. Numbers are float64.
    """

    data: LinearData | KernelData
    likelihood: Likelihood
    scale: Tensor  # 1/(σ²T), 0-dim or `[C]`
    prior_precision: Tensor  # δ, `[P]`
    offset: Tensor  # θ* − μ₀, `[P]`
    smoothing: Smoothing = NO_SMOOTHING
    roots: Sequence[Tensor] | None = None  # a root of V for every batch

    @property
    def n_outputs(self) -> int:
        """C."""
        return self.data.batches[0].f.shape[1]

    def _each(self, at: Tensor) -> list[tuple[Tensor, Tensor | None, Tensor]]:
        """Outputs of the linearised network, root and targets of every batch."""
        roots = [None] * len(self.data.batches) if self.roots is None else self.roots
        pushed = self.data.push(at)
        return [(b.f + s, root, b.y) for b, s, root in zip(self.data.batches, pushed, roots, strict=True)]

    def loss_terms(self, at: Tensor) -> Tensor:
        """Summed (expected) unit negative log likelihood, `[1]` or `[C]`."""
        return self.smoothing.mean(self.losses(at))

    def losses(self, at: Tensor) -> Tensor:
        """The same at every point of the expectation, `[S, 1]` or `[S, C]`."""
        return torch.stack([self.smoothing.losses(self.likelihood, *one) for one in self._each(at)]).sum(0)

    def value(self, at: Tensor) -> float:
        theta = self.offset + at
        return float((self.scale * self.loss_terms(at)).sum() + 0.5 * (self.prior_precision * theta) @ theta)

    def gradient(self, at: Tensor) -> Tensor:
        residuals = [self.scale * self.smoothing.gradient(self.likelihood, *one) for one in self._each(at)]
        return self.data.pull(residuals) + self.prior_precision * (self.offset + at)

    def hessians(self, at: Tensor) -> list[OutputHessian]:
        """(Expected) output Hessians of every batch."""
        return [self.smoothing.hessian(self.likelihood, *one) for one in self._each(at)]

    def hessian_at(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        """Products of its Hessian with vectors."""
        inner = self.hessians(at)
        return lambda v: self.data.curvature_product(inner, self.scale, v) + self.prior_precision * v


# ----------------------------------------------------------------------------------------------------------------------
# Minimisation of smooth convex functions by Newton steps, each found by preconditioned conjugate gradients
# ----------------------------------------------------------------------------------------------------------------------

_MAX_PRODUCTS = 500
_ARMIJO = 1e-4
_MAX_HALVINGS = 40


class Convex(Protocol):
    """A function of vectors `[P]` with a positive definite Hessian."""

    def value(self, at: Tensor) -> float | Tensor: ...
    def gradient(self, at: Tensor) -> Tensor: ...
    def hessian_at(self, at: Tensor) -> Callable[[Tensor], Tensor]: ...


@dataclass(frozen=True, eq=False)
class Minimum:
    """End of a minimisation.

    The distance √(gᵀ M g), with the gradient g there and the preconditioner M, is about how far the minimum is, in
    units of its own scale.
    """

    at: Tensor  # `[P]`
    values: tuple[float, ...]  # at the start and after every step
    distance: float
    converged: bool


def minimise(
    function: Convex,
    start: Tensor,
    precondition: Callable[[Tensor], Tensor],
    *,
    tolerance: float,
    max_steps: int,
    residual: float = 1e-2,
    progress_bar: bool = False,
) -> Minimum:
    """Newton's method with a line search; every step is solved to a residual that shrinks with the distance.

    Args:
        function: What is made small.
        start: `[P]`.
        precondition: An approximate inverse of the Hessian, symmetric and positive definite.
        tolerance: Largest `Minimum.distance` that counts as converged.
        max_steps: Newton steps.
        residual: Largest one, relative to the gradient, to which a step is solved.
        progress_bar: Show a progress bar.
    """
    at, first, gradient = start, function.value(start), function.gradient(start)
    value, square = _read(first, gradient @ precondition(gradient))
    values, distance = [value], _root(square)
    with tqdm(total=max_steps, desc="refine", disable=not progress_bar) as bar:
        for _ in range(max_steps):
            if distance <= tolerance:
                break
            relative = min(residual, max(0.1 * tolerance, distance))
            direction = solved(function.hessian_at(at), -gradient, precondition, relative)
            step = _backtracked(function, at, direction, values[-1], gradient @ direction)
            bar.update()
            if step is None:  # nothing is gained any more but rounding
                break
            at, value = step
            values.append(value)
            gradient = function.gradient(at)
            distance = _root(*_read(gradient @ precondition(gradient)))
    return Minimum(at, tuple(values), distance, distance <= tolerance)


def solved(
    product: Callable[[Tensor], Tensor], right: Tensor, precondition: Callable[[Tensor], Tensor], relative: float
) -> Tensor:
    """H⁻¹ r of r `[P]`, to a residual relative to r in the norm of the preconditioner."""
    most = min(_MAX_PRODUCTS, 2 * len(right) + 10)
    return solve(
        lambda rows: product(rows[0]).unsqueeze(0), right.unsqueeze(0), lambda rows: precondition(rows[0]).unsqueeze(0),
        relative=relative, max_iterations=most, verified=False,
    ).x[0]  # fmt: skip


def _root(square: float) -> float:
    return math.sqrt(max(0.0, square))


def _read(*numbers: float | Tensor) -> list[float]:
    """Numbers, those of a device by one transfer."""
    of_device = [widened(number) for number in numbers if isinstance(number, Tensor)]
    known = iter(torch.stack(of_device).tolist() if of_device else [])
    return [next(known) if isinstance(number, Tensor) else number for number in numbers]


def _backtracked(
    function: Convex, at: Tensor, direction: Tensor, value: float, along: Tensor
) -> tuple[Tensor, float] | None:
    """The first of the steps 1, ½, ¼, … that makes a function smaller, up to its rounding (Armijo, 1966).

    `along` is the slope in the direction, 0-dim.
    """
    rounding = 1e-14 * abs(value)
    step = 1.0
    for _ in range(_MAX_HALVINGS):
        new = at + step * direction
        reached, slope = _read(function.value(new), along)
        if reached <= value + _ARMIJO * step * slope + rounding:
            return new, reached
        step /= 2
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Common ground of all refinements: a linear model at the present hyper-parameters, Gaussians over its parameters
# ----------------------------------------------------------------------------------------------------------------------

S = TypeVar("S", bound="Covariance")


@dataclass(frozen=True)
class RefineOptions:
    """Options of a refinement, checked."""

    max_steps: int = 100  # Newton steps, or updates of a variational covariance
    tolerance: float | None = None  # None for what the precision of the numbers allows
    n_samples: int = 200  # points of the expectations of softmax likelihoods
    generator: torch.Generator | None = None
    progress_bar: bool = False

    def __post_init__(self) -> None:
        if self.max_steps < 1 or self.n_samples < 2:
            raise InvalidArgument(
                f"max_steps={self.max_steps} and n_samples={self.n_samples}; at least 1 and 2 are accepted."
            )
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise InvalidArgument(f"tolerance={self.tolerance}; it must lie in (0, 1).")
        check_generator(self.generator)


class Covariance(ABC):
    """Covariance S of a Gaussian over the n parameters of a linear model: S⁻¹ is a curvature plus the prior P₀."""

    @abstractmethod
    def solve(self, vector: Tensor) -> Tensor:
        """S v of a vector `[n]`, float64."""

    @abstractmethod
    def of_outputs(self, *, diagonal: bool) -> list[Tensor]:
        """Covariances J S Jᵀ of the outputs of every input, a tensor `[B, C, C]` per batch, or variances `[B, C]`."""

    @abstractmethod
    def divergence(self) -> float:
        """tr(P₀ S) − n + log det S⁻¹ − log det P₀: twice KL(q ‖ p), less the distance of the means."""


class Refiner(ABC, Generic[S]):
    """A linear model of the data of a fit at the present hyper-parameters, and how a posterior is made of its end."""

    model: LinearModel
    start: Tensor  # `[n]`, float64: parameters of a former refinement, or of the network

    def __init__(self, posterior: Posterior, options: RefineOptions) -> None:
        choices, engine = posterior.choices, posterior.engine
        split = posterior.map_fit.curvature.n_terms > 1
        if engine.split_outputs != split:  # a loaded or copied posterior has one that was made for predictions
            engine = choices.engine(posterior.weights, posterior.problem, split_outputs=split)
        if not isinstance(engine, GGNEngine):
            raise UnsupportedError(
                f"backend={choices.backend_cls.__name__} cannot refine: the curvature of the linearised network is a "
                "GGN at its own outputs; use backend=NativeGGN, the default."
            )
        if posterior.map_fit.is_weighed:
            raise UnsupportedError(
                "the fit has data with weights of their own (weight_fn=, dict_key_weight=), which a refinement does "
                "not support; for class weights use Categorical(class_weight=...), which it supports."
            )
        self.posterior = posterior
        self.engine: GGNEngine = engine
        self.options = options
        self.evidence = posterior.evidence
        scale = posterior.likelihood.curvature_scale(engine.kind, self.evidence.sigma_noise, self.evidence.temperature)
        self.scale = widened(scale.detach())

    def require_all(self, n_data: float) -> None:
        """Raises `InvalidData` where other data were read than those of the fit, by their number."""
        seen = self.posterior.map_fit.n_data
        if not same_count(n_data, seen):
            raise InvalidData(
                f"the loader gave {n_data:g} data, the fit has seen {seen:g}; a refinement replaces the fit "
                "and needs all of its data."
            )

    @property
    @abstractmethod
    def network_loss(self) -> Tensor:
        """Loss of the data at the network's own outputs, as `Likelihood.loss_terms`, `[1]` or `[C]`."""

    def require_same_loss(self) -> None:
        """The same by the loss of the data."""
        found, fitted = (
            float(widened(terms).sum()) for terms in (self.network_loss, self.posterior.map_fit.loss_terms)
        )
        if abs(found - fitted) > _SAME * max(abs(fitted), 1.0):
            raise InvalidData(
                f"the loss of these data is {found:.6g}, that of the fit was {fitted:.6g}: give the data of the fit, "
                "without random augmentation."
            )

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype in which outputs of the linear model are known."""

    @abstractmethod
    def covariance(self) -> S:
        """Covariance of the posterior as it is."""

    @abstractmethod
    def expected(self, model: LinearModel, at: Tensor) -> S:
        """Covariance with the (expected) curvature of a model at parameters `[n]`."""

    @abstractmethod
    def between(self, first: S, second: S, rate: float) -> S:
        """Covariance with the curvature (1 − ρ) H + ρ H′ of two, 0 < ρ < 1."""

    @abstractmethod
    def fit(self, covariance: S, at: Tensor) -> Fit:
        """The curvature of a covariance, in the posterior's structure, and the loss at parameters `[n]`."""

    @abstractmethod
    def mean(self, at: Tensor) -> Tensor:
        """θ̂ of parameters `[n]`, as `Refinement` holds it."""

    def minimum(self, model: LinearModel, start: Tensor, covariance: S, *, show: bool) -> Minimum:
        """The minimum of a model, searched from parameters `[n]`."""
        tolerance = self.options.tolerance or _TOLERANCE[self.dtype]
        return minimise(
            model, start, covariance.solve, tolerance=tolerance, max_steps=self.options.max_steps, progress_bar=show
        )

    def result(self, method: str, covariance: S, end: Minimum, standard_error: float = 0.0) -> Refinement:
        """The refinement at the end of a search."""
        return Refinement(
            method, self.mean(end.at), self.fit(covariance, end.at), len(end.values) - 1, end.converged, end.distance,
            end.values, standard_error,
        )  # fmt: skip


_SAME = 1e-3
"""Difference of two sums of losses, relative to them, that may be rounding of single precision."""

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""In posterior standard deviations: what products with a Jacobian of this precision can resolve."""

BOUND_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}
"""Change of a bound, relative to its size, that counts as none, of outputs that are known in this precision."""
