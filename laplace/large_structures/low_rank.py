"""Low-rank curvature: the dominant eigenpairs of the unit curvature, found by products with vectors alone.

H ≈ U diag(λ) Uᵀ comes from a seeded randomised subspace iteration (Halko et al., 2011) with a Rayleigh–Ritz
step, which reads the data several times and never holds a matrix of P rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import eigen, nested
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property, keeps_last
from laplace.core.checks import is_true
from laplace.core.gram import row_gram
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.linalg import bilinear, power_slope
from laplace.core.pieces import bytes_at_once
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import standard_normal
from laplace.engines.cost import DOUBLE, Cost
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.engines.profile import BatchProfile
from laplace.engines.sinks import ProductSink
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.jacobian.blocks import CHUNK_BYTES, total
from laplace.jacobian.jacobian import Jacobian
from laplace.large_structures import subspace
from laplace.large_structures.woodbury import CANCELLING, cancels
from laplace.structures.base import (
    Curvature,
    DataPass,
    SignedOptions,
    nonnegative,
    require_finite,
    require_read,
)
from laplace.structures.precision import (
    Form,
    Precision,
    VariancesOverPriors,
    one_by_one,
    require_positive,
    warn_if_rounded,
)

# P = Q C Qᵀ + diag(δ), exactly, by algebra on r × r matrices (Woodbury, 1950).
#
# With Ĝ = Qᵀ D⁻¹ Q = L Lᵀ and Lᵀ C L = W diag(θ) Wᵀ, the rows of Zᵀ = Wᵀ L⁻¹ Qᵀ D^(−1/2) are orthonormal and
#
#     P = D^(1/2) (I + Z diag(θ) Zᵀ) D^(1/2),
#
# so that log det P − log det D = Σ log(1 + θ), P⁻¹ = D^(−1/2) (I − Z diag(θ / (1 + θ)) Zᵀ) D^(−1/2), and P is positive
# definite just if every θ > −1. No sign of C is assumed.


_RELATIVE = "eigenvalue relative to the prior's"


@dataclass(frozen=True, eq=False)
class Subspace:
    """Curvature terms within one basis, and what does not depend on hyper-parameters."""

    basis: Tensor  # Qᵀ, orthonormal rows `[r, P]`
    cores: Tensor  # M, `[E, r, r]`, float64; of a single term diagonal

    @property
    def is_diagonal(self) -> bool:
        """True if the basis consists of eigenvectors whatever the weights."""
        return len(self.cores) == 1

    @property
    def is_orthonormal(self) -> bool:
        """True if the rows are orthonormal to the rounding of float64, and not of a narrower dtype that holds them."""
        return self.basis.dtype == wide_dtype(self.basis.device)

    def core(self, weights: Tensor) -> Tensor:
        """Σ_e w_e M_e, `[r, r]`, with the graph of the weights."""
        return torch.tensordot(widened(weights), self.cores, 1)

    def eigenvalues(self, weights: Tensor) -> Tensor:
        """Eigenvalues of the core, `[r]`, with the graph of the weights; without a graph they are kept."""
        return self.core(weights).diagonal() if self.is_diagonal else self._eigenvalues(weights)

    @keeps_last
    def _eigenvalues(self, weights: Tensor) -> Tensor:
        return eigen.eigvalsh(self.core(weights))

    def eigenpairs(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvectors `[P, r]` and eigenvalues `[r]` of Σ_e w_e H_e, in the dtype of the basis."""
        core = self.core(weights)
        if self.is_diagonal:
            return self.basis.T, core.diagonal().to(self.basis.dtype)
        values, vectors = eigen.eigh(core)
        basis = subspace.rotated(self.basis, vectors.detach().T.flip(0))
        return basis.T, values.flip(0).to(self.basis.dtype)

    def gram(self, prior: GaussianPrior) -> Tensor:
        """Qᵀ diag(δ)⁻¹ Q, `[r, r]`, float64, differentiable in δ."""
        delta = widened(prior.precision)
        if not prior.is_constant_per_tensor:
            return _InverseWeightedGram.apply(delta, self.basis)
        return torch.tensordot((1 / delta).expand(prior.layout.n_tensors), self._grams(prior.layout), 1)

    @keeps_last
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
    """P = Q (Σ_e w_e M_e) Qᵀ + diag(δ)."""

    subspace: Subspace  # Q and M
    weights: Tensor  # w, `[E]`
    prior: GaussianPrior  # δ
    signed: bool = False  # Whether negative eigenvalues of the curvature are meant; else they are rounding, and zero

    # Differentiable in weights and prior.

    def _thetas(self) -> Tensor:
        """θ, `[r]`, float64."""
        if self.prior.is_scalar:
            return self._checked(self.subspace.eigenvalues(self.weights) / widened(self.prior.precision))
        core, root = self.subspace.core(self.weights), torch.linalg.cholesky(self.subspace.gram(self.prior))
        return self._checked(eigen.eigvalsh(root.T @ core @ root))

    def _checked(self, thetas: Tensor) -> Tensor:
        if not self.signed:
            return thetas.clamp(min=0)
        require_positive(1 + thetas.detach(), _RELATIVE)
        return thetas

    def logdet_ratio(self) -> Tensor:
        return self._thetas().log1p().sum()

    def quad(self, vectors: Tensor) -> Tensor:
        inside = vectors.to(self.subspace.basis) @ self.subspace.basis.T
        core = self.subspace.core(self.weights).to(inside)
        total = vectors.square() @ self.prior.diagonal() + ((inside @ core) * inside).sum(-1)
        return total.to(vectors.dtype)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the posterior."""
        return self.prior.precision.dtype

    @property
    def public(self) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """`((U [P, r], λ [r]), δ [P])` with P = U diag(λ) Uᵀ + diag(δ)."""
        vectors, values = self.subspace.eigenpairs(self.weights)
        return (vectors.to(self._dtype), values.to(self._dtype)), self.prior.diagonal()

    # Predictions.

    @cached_property
    def _solved(self) -> _SolvedInside:
        """The inside of the subspace, with the graph that leads to weights and prior."""
        core, delta = self.subspace.core(self.weights), widened(self.prior.precision)
        if self.prior.is_scalar and self.subspace.is_orthonormal:
            inside = core / delta
            values, vectors = eigen.eigh(core.detach())
            values, rotation = values / delta.detach(), vectors.T * delta.sqrt()
        else:
            root = torch.linalg.cholesky(self.subspace.gram(self.prior))
            inside = root.T @ core @ root
            values, vectors = eigen.eigh(inside.detach())
            rotation = torch.linalg.solve_triangular(root, vectors.T, upper=False, left=False)
        return _SolvedInside(inside, self._checked(values), vectors, rotation)

    @cached_property
    def _deviations(self) -> Tensor:
        """δ^(−1/2), `[P]`, in the dtype of the basis."""
        return self.prior.diagonal().to(self.subspace.basis).rsqrt()

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        if form == "joint":
            return self._joint(jacobian)
        solved, diagonal = self._solved, form == "diagonal"
        wanted = jacobian.summed_in(self._dtype)
        dtype = wide_dtype(self._deviations.device) if self._cancels else wanted
        moments = _OutsideVariances.from_jacobian(
            jacobian, self.subspace.basis, solved.rotation, self._deviations.to(dtype), diagonal
        )
        return (moments.reduced(solved.thetas) + solved.moved(moments.z, diagonal=diagonal)).to(wanted)

    @cached_property
    def _cancels(self) -> bool:
        """True if rounding may take too large a share of a variance in the dtype of the posterior."""
        thetas, rounding = self._solved.thetas.detach(), torch.finfo(self._dtype).eps
        if not len(thetas) or not is_true(thetas.max() * rounding > CANCELLING):
            return False
        if not self.subspace.is_orthonormal:
            warn_if_rounded(thetas.max().item(), self.subspace.basis.dtype)
        return True

    def _joint(self, jacobian: Jacobian) -> Tensor:
        thetas, rotation = self._solved.thetas, self._solved.rotation
        rows = jacobian.dense().flatten(0, 1)
        inside = subspace.inner(rows, self.subspace.basis, self._deviations.square()) @ rotation.T
        total = row_gram(inside, 1 / (1 + thetas)) + self._solved.moved(inside, diagonal=False)
        for outside in _outside(rows, inside, self.subspace.basis, rotation, self._deviations):
            total = total + outside @ outside.T
        return total.to(jacobian.summed_in(self._dtype))

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        """P⁻¹ and its root by D^(−1/2) (I + Z ((1 + θ)^exponent − 1) Zᵀ)."""
        return self._power(vectors.to(self.subspace.basis), exponent).to(vectors.dtype)

    def _power(self, vectors: Tensor, exponent: float) -> Tensor:
        basis, deviations = self.subspace.basis, self._deviations
        if exponent == 1:
            core = self.subspace.core(self.weights).to(basis)
            return ((vectors @ basis.T) @ core) @ basis + vectors * self.prior.diagonal()
        shrinking = self._solved.shrinking(exponent).to(basis)
        if exponent == -0.5:
            removed = (((vectors * deviations) @ basis.T) @ shrinking) @ basis * deviations
            return (vectors - removed) * deviations
        variances = deviations.square()  # as a preconditioner of many vectors, by few passes over them
        scaled = vectors * variances
        return torch.addcmul(scaled, ((scaled @ basis.T) @ shrinking) @ basis, variances, value=-1)

    def diagonal_of_inverse(self) -> Tensor:
        thetas, rotation = self._solved.thetas, self._solved.rotation
        inverse = widened(self._deviations).square()
        share = subspace.quadratic_forms(self.subspace.basis, rotation.T @ rotation) * inverse  # Σ Z², at most 1
        inside = subspace.quadratic_forms(self.subspace.basis, self._solved.between(1 / (1 + thetas), -1))
        return (inverse * ((1 - share).clamp(min=0) + inside * inverse)).to(self._dtype)


@dataclass(frozen=True, eq=False)
class _SolvedInside:
    """The inside of the subspace, I + S with S = Lᵀ C L = W diag(θ) Wᵀ, float64; θ and W are constants."""

    inside: Tensor  # S, `[r, r]`, with the graph that leads to weights and prior
    thetas: Tensor  # θ, `[r]`
    vectors: Tensor  # W
    rotation: Tensor  # Wᵀ L⁻¹, `[r, r]`, with the graph that leads to the prior

    def slope(self, exponent: float) -> Tensor | None:
        """Wᵀ (I + S)^exponent W less what it is, `[r, r]`: zero, with its gradient; None where there is none."""
        return power_slope(self.inside, (1 + self.thetas, self.vectors), exponent)

    def shrinking(self, exponent: float) -> Tensor:
        """L⁻ᵀ (I − (I + S)^exponent) L⁻¹, `[r, r]`, with its graph."""
        return self.between(1 - (1 + self.thetas) ** exponent, exponent, -1)

    def between(self, values: Tensor, exponent: float, sign: float = 1) -> Tensor:
        """L⁻ᵀ W (diag(values) ± what (I + S)^exponent changes by) Wᵀ L⁻¹, `[r, r]`."""
        slope = self.slope(exponent)
        inner = torch.diag(values) if slope is None else torch.diag(values) + sign * slope
        return self.rotation.T @ inner @ self.rotation

    def moved(self, z: Tensor, *, diagonal: bool) -> Tensor | float:
        """Z (I + S)⁻¹ Zᵀ of coordinates `[..., n, r]` less what it is, `[..., n, n]` or its diagonals."""
        slope = self.slope(-1)
        return 0.0 if slope is None else bilinear(z, slope, diagonal=diagonal)


def _outside(rows: Tensor, z: Tensor, basis: Tensor, rotation: Tensor, deviations: Tensor) -> Iterator[Tensor]:
    """J D^(−1/2) (I − Z Zᵀ) of rows J `[n, P]`, some columns at a time, float64: before it is squared nothing cancels.

    Args:
        rows: J.
        z: J D^(−1/2) Z, `[n, r]`.
        basis: Qᵀ, `[r, P]`.
        rotation: Wᵀ L⁻¹, of which Zᵀ = Wᵀ L⁻¹ Qᵀ D^(−1/2).
        deviations: D^(−1/2), `[P]`.
    """
    for part, vectors, some in subspace.chunks(rows, basis, deviations.unsqueeze(0)):
        wide = widened(some)
        yield widened(part) * wide - z @ rotation @ (widened(vectors) * wide)


@dataclass(frozen=True, eq=False)
class _OutsideVariances:
    """What the prior leaves of variances outside of the subspace, and the outputs' coordinates in it."""

    prior: Tensor  # J D⁻¹ Jᵀ, `[B, C, C]`, or its diagonals `[B, C]`
    z: Tensor  # J D^(−1/2) Z, `[B, C, r]`
    exact: Callable[[], Tensor]  # J D^(−1/2) (I − Z Zᵀ) squared, as `prior`: without a difference, and by dense rows

    @classmethod
    def from_jacobian(
        cls, jacobian: Jacobian, basis: Tensor, rotation: Tensor, deviations: Tensor, diagonal: bool
    ) -> _OutsideVariances:
        """From the blocks of a Jacobian, in the dtype of the prior's deviations `[P]`."""
        sizes, dtype = [block.size for block in jacobian.blocks], deviations.dtype
        cast, rows, parts = jacobian.cast(dtype), basis.split(sizes, 1), deviations.square().split(sizes)
        prior = cast.sum_over_blocks(
            lambda i, block: block.weighted_norms(parts[i]) if diagonal else block.weighted_gram(parts[i])
        )
        if not len(basis):  # no curvature at all
            return cls(prior, prior.new_zeros(jacobian.n_data, jacobian.n_cotangents, 0), lambda: prior)
        inside = cast.sum_over_blocks(lambda i, block: block.apply(rows[i].to(dtype) * parts[i]))
        z = inside.permute(1, 2, 0) @ rotation.T.to(inside)

        def exact() -> Tensor:
            squares: list[Tensor] = []
            start = 0
            for piece in jacobian.pieces():
                own, start = z[start : start + len(piece)], start + len(piece)
                outside = _outside(piece.flatten(0, 1), widened(own.flatten(0, 1)), basis, rotation, deviations)
                parts = (part.unflatten(0, piece.shape[:2]) for part in outside)
                squares.append(total(part.square().sum(2) if diagonal else part @ part.mT for part in parts))
            return torch.cat(squares)

        return cls(prior, z, exact)

    def scaled(self, delta: Tensor) -> _OutsideVariances:
        """Those of another scalar prior, from those of δ = 1."""
        return _OutsideVariances(self.prior / delta, self.z / delta.sqrt(), lambda: self._exact / delta)

    @cached_property
    def _exact(self) -> Tensor:
        return self.exact()

    def reduced(self, thetas: Tensor) -> Tensor:
        """Variances under P: what is outside of the subspace, and z diag(1 / (1 + θ)) zᵀ."""
        diagonal = self.prior.ndim == 2
        left = 1 / (1 + thetas.to(self.z))
        taken, inside = (
            (self.z.square() * values).sum(2) if diagonal else (self.z * values) @ self.z.mT
            for values in (torch.ones_like(left), left)
        )
        total = self.prior - taken + inside
        return self._exact + inside if self._cancels(total) else total

    def _cancels(self, total: Tensor) -> bool:
        """True if of a variance in float64 rounding may be too large a share; of another dtype θ has told."""
        if self.prior.dtype != wide_dtype(self.prior.device) or not self.z.shape[2]:
            return False
        return is_true(cancels(self.prior, total, "diagonal" if total.ndim == 2 else "full"))


@dataclass(frozen=True, eq=False)
class LowRankScan(VariancesOverPriors):
    """Functional variances at many scalar priors: the coordinates are those of a unit prior, rescaled."""

    subspace: Subspace  # Q and M
    weights: Tensor  # w, `[E]`, without gradient
    signed: bool  # As in `LowRankPrecision`

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        values, vectors = eigen.eigh(self.subspace.core(self.weights))
        ones = values.new_ones(self.subspace.basis.shape[1])
        unit = _OutsideVariances.from_jacobian(jacobian, self.subspace.basis, vectors.T, ones, diagonal)
        dtype = self.weights.dtype

        def at(delta: Tensor) -> Tensor:
            delta = widened(delta)
            thetas = values / delta
            if self.signed:
                require_positive(1 + thetas, _RELATIVE)
            variances = unit.scaled(delta).reduced(thetas if self.signed else thetas.clamp(min=0))
            return variances.to(dtype if diagonal else jacobian.summed_in(dtype))

        return one_by_one(at)


_FIRST_RANK = 10
"""Rank that is tried first when a share of the trace is asked for."""

_SHARE_ROUNDING = 100
"""Units of rounding by which the eigenvalues may miss the share of the trace."""


@dataclass(frozen=True)
class LowRankOptions(SignedOptions):
    """Options of low-rank curvature.

    Attributes:
        rank: k, eigenpairs to keep: an int, or the share of the trace that they explain, a float in (0, 1].
        oversampling: Vectors that are carried besides the k.
        power_iterations: Products with H between the first one and the last. Each is one more reading of the data.
        seed: Of the random start; the global random state is left alone.

    Raises:
        InvalidArgument: A value out of range.
    """

    rank: int | float = 10
    oversampling: int = 10
    power_iterations: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.rank, int) and not isinstance(self.rank, bool)
        if not (whole and self.rank >= 1) and not (isinstance(self.rank, float) and 0 < self.rank <= 1):
            raise InvalidArgument(
                f"rank={self.rank!r}; accepted are an int of at least 1 (eigenpairs), or a float in (0, 1] (the share "
                "of the trace that they explain)."
            )
        for name in ("oversampling", "power_iterations"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InvalidArgument(f"{name}={value!r}; it must be an int of at least 0.")

    @property
    def is_share(self) -> bool:
        """True if `rank` is a share of the trace."""
        return isinstance(self.rank, float)


@dataclass(frozen=True, eq=False)
class LowRankCurvature(Curvature):
    """Dominant eigenpairs of the unit curvature [Redux, appendix B, low rank]: H_e = Q M_e Qᵀ, one Q for all terms.

    The basis is of float64, in which the products were formed; of products in the network's own dtype, by its graph or
    by another package, it is of that.

    A sum of two fits (other data, shards) is the sum of what they kept, cut to the larger rank that was asked for; what
    either had cut off before is lost. `residual` says what that may amount to.
    """

    basis: Tensor  # Qᵀ, `[r, P]`; of a single term its eigenvectors
    cores: Tensor  # M, `[E, r, r]`, float64; of a single term diagonal
    limit: int  # k, the largest rank of a term
    error: float = 0.0  # ‖H U − U Λ‖_F over terms, Euclidean
    tail: float = 0.0  # Largest eigenvalue that was seen and cut off, absolute  # pyright: ignore
    trace: Tensor | None = None  # Tr H of every term where it was measured, `[E]`, else None
    name = "lowrank"
    options = LowRankOptions
    n_passes = 2
    is_wide = True

    @property
    def n_terms(self) -> int:
        return len(self.cores)

    @property
    def rank(self) -> int:
        """Number of directions of all terms together, r."""
        return len(self.basis)

    @property
    def residual(self) -> float:
        """‖H U − U Λ‖ / ‖Λ‖ over the eigenpairs (Frobenius): measured after one fit, an upper estimate after sums."""
        size = self.cores.norm().item()
        return self.error / size if size else 0.0

    @property
    def note(self) -> str:
        share = ""
        if self.trace is not None and self.trace.sum() > 0:
            traces = self.cores.diagonal(dim1=1, dim2=2).sum()
            share = f", {traces / self.trace.sum().to(traces):.4f} of the trace"
        return f"rank {self.rank}{share}, relative residual {self.residual:.2g}, largest eigenvalue cut {self.tail:.2g}"

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: LowRankOptions) -> DataPass:
        """The first reading of the data.

        Raises:
            UnsupportedError: A share of the trace of an indefinite curvature.
        """
        if options.is_share and engine.kind == "hessian":
            raise UnsupportedError(
                f"rank={options.rank!r}, a share of the trace, with backend={engine.name}: positive and negative "
                "eigenvalues of the exact Hessian cancel in its trace. Give rank as an int, or use backend=NativeGGN."
            )
        wanted = _FIRST_RANK if options.is_share else int(options.rank)
        generator = torch.Generator().manual_seed(options.seed)
        return _BasisPass.starting(engine, options, generator, wanted + options.oversampling)

    @classmethod
    def cost(cls, profile: BatchProfile, options: Any) -> Cost:
        rank = _FIRST_RANK if options.is_share else int(options.rank)
        width = min(profile.n_params, rank + options.oversampling)
        row = profile.n_params * DOUBLE
        blocks = (1 + profile.n_terms) * width * row  # the basis and its products
        fitted = profile.n_terms * min(rank, width) * row
        return Cost(
            fitted=fitted,
            running=blocks,
            adding=blocks + fitted,
            pieces=min(2 * bytes_at_once(CHUNK_BYTES, profile.device), 2 * blocks),
            posterior=fitted + 4 * row,
            projecting=3 * profile.piece_bytes(profile.shared_sizes, profile.n_outputs),
            vectors=width * profile.n_terms,
        )

    @classmethod
    def joined(cls, terms: Sequence[tuple[Tensor, Tensor]], **facts: Any) -> LowRankCurvature:
        """From eigenpairs (Uᵀ `[k, P]`, λ `[k]`) of every term."""
        if len(terms) == 1:
            return cls(terms[0][0], torch.diag(terms[0][1]).unsqueeze(0), **facts)
        stacked = torch.cat([vectors for vectors, _ in terms])
        basis = _basis_of(stacked)
        parts = subspace.inner(stacked, basis).split([len(values) for _, values in terms])
        cores = [part.T @ (values.unsqueeze(1) * part) for part, (_, values) in zip(parts, terms, strict=True)]
        return cls(basis, torch.stack(cores), **facts)

    def __add__(self, other: Curvature) -> LowRankCurvature:
        if not isinstance(other, LowRankCurvature):
            return NotImplemented
        limit = max(self.limit, other.limit)
        basis = _basis_of(torch.cat([self.basis, other.basis]))
        cores = self._within(basis) + other._within(basis)
        terms: list[tuple[Tensor, Tensor]] = []
        cut = 0.0
        for values, vectors in zip(*eigen.eigh(cores), strict=True):
            order = values.abs().argsort(descending=True)
            first, rest = order[:limit], order[limit:]
            terms.append((subspace.rotated(basis, vectors[:, first].T), values[first]))
            cut = max(cut, values[rest].abs().max().item() if len(rest) else 0.0)
        lost = self.tail + other.tail  # of products with either H: nobody saw what it had cut off
        error = self.error + other.error + lost * math.sqrt(limit * self.n_terms)
        trace = None if self.trace is None or other.trace is None else self.trace + other.trace
        return self.joined(terms, limit=limit, error=error, tail=max(cut, lost), trace=trace)

    def scaled(self, factor: float) -> LowRankCurvature:
        trace = None if self.trace is None else factor * self.trace
        facts = {"error": factor * self.error, "tail": factor * self.tail, "trace": trace}
        return replace(self, cores=factor * self.cores, **facts)

    def _within(self, basis: Tensor) -> Tensor:
        """The cores in another basis that spans this one."""
        change = subspace.inner(self.basis, basis)
        return change.T @ self.cores @ change

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> LowRankPrecision:
        mode = options.get("indefinite")
        return LowRankPrecision(self._subspace(mode), weights, prior, signed=mode == "error")

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> LowRankScan:
        mode = options.get("indefinite")
        return LowRankScan(self._subspace(mode), weights.detach(), signed=mode == "error")

    @keeps_last
    def _subspace(self, mode: str | None) -> Subspace:
        """Basis and cores, without negative eigenvalues if so wished; kept, with what it computes for itself."""
        cores = self.cores
        if mode in ("clamp", "abs"):
            values, vectors = eigen.eigh(cores)
            cores = (vectors * nonnegative(values, mode).unsqueeze(1)) @ vectors.mT
        return Subspace(self.basis, widened(cores))

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LowRankCurvature:
        cores = widened(state["cores"])  # whatever dtype the posterior was moved to
        return nested.from_state(cls, state | {"cores": cores})

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        del dtype  # its sums may be wider
        nested.require_sizes("the basis of H", self.basis, None, layout.n_params)
        nested.require_sizes("the core of H", self.cores, None, self.rank, self.rank)
        nested.require_unit("the directions of H", self.basis, 1)
        if self.trace is not None:
            nested.require_sizes("the trace of H", self.trace, self.n_terms)

    def public(self) -> tuple[Tensor, Tensor]:
        """Eigenvectors U `[P, K]` and eigenvalues λ `[K]` of the sum of the terms."""
        ones = torch.ones(self.n_terms, dtype=wide_dtype(self.basis.device), device=self.basis.device)
        return self._subspace(None).eigenpairs(ones)


def _basis_of(rows: Tensor) -> Tensor:
    """Orthonormal rows with the span of rows `[K, P]`, which are left as they are."""
    basis = subspace.orthonormalise_(rows.clone())
    return basis[basis.square().sum(1) > 0]


class _BasisPass(DataPass):
    """One product H Q with all columns of the basis, summed over the data [Halko et al., 2011, algorithm 4.4]."""

    def __init__(
        self,
        engine: CurvatureEngine,
        options: LowRankOptions,
        generator: torch.Generator,
        basis: Tensor,
        left: int,
        trace: Tensor | None = None,
    ) -> None:
        self.engine = engine  # Computes the products of a batch
        self.options = options  # Rank and effort
        self.generator = generator  # Source of further random directions
        self.basis = basis  # Qᵀ, `[E or 1, l, P]`
        self.left = left  # Readings that follow before the eigenpairs are taken
        self.trace = trace  # Of every term, `[E]`, where an earlier reading measured it
        self.measures_trace = options.is_share and trace is None
        self.products: Tensor | None = None
        self.is_rounded = False  # Whether some of the products are of the network's own dtype

    @classmethod
    def starting(
        cls,
        engine: CurvatureEngine,
        options: LowRankOptions,
        generator: torch.Generator,
        width: int,
        known: Tensor | None = None,
        trace: Tensor | None = None,
    ) -> _BasisPass:
        """From random directions beside the known ones `[E, l, P]`; a block as wide as the space is the space."""
        n_params = engine.problem.layout.n_params
        device = engine.problem.device
        like = torch.zeros((), dtype=wide_dtype(device), device=device)
        if width >= n_params:
            basis = torch.eye(n_params, dtype=like.dtype, device=device).unsqueeze(0)
            return cls(engine, options, generator, basis, 0, trace)
        already = 0 if known is None else known.shape[1]
        basis = standard_normal((1, width - already, n_params), like, generator)
        if known is not None:
            basis = torch.cat([known, basis.expand(len(known), -1, -1)], 1)
        for rows in basis:
            subspace.orthonormalise_(rows)
        return cls(engine, options, generator, basis, options.power_iterations + 1, trace)

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        if self.measures_trace:
            self._add_trace(x, y)
        sink = ProductSink(self.basis, self.products)
        summary = self.engine.accumulate(x, y, sink)
        self.products, self.is_rounded = sink.products, self.is_rounded or sink.is_rounded
        require_finite(self.products.sum().isfinite())
        return summary

    def _add_trace(self, x: Inputs, y: Tensor) -> None:
        draws = self.engine.generator
        state = None if draws is None else draws.get_state()
        trace = widened(self.engine.diag(x, y)[1]).sum(1)
        self.trace = trace if self.trace is None else self.trace + trace
        if draws is not None and state is not None:
            draws.set_state(state)  # of sampled curvature the trace is that of the very same operator

    def sums(self) -> dict[str, Tensor]:
        sums = {"products": self.products, "trace": self.trace if self.measures_trace else None}
        return {name: tensor for name, tensor in sums.items() if tensor is not None}

    def make_room(self, form: Any) -> None:
        if self.products is None:
            zeros = nested.zeros_of(form, self.engine.problem.device)
            self.products, self.trace = zeros["products"], zeros.get("trace", self.trace)

    def finish(self) -> Curvature | DataPass:
        basis, products = self.basis, require_read(self.products)
        del self.basis, self.products  # the next reading holds its own
        if self.left == 0 and self.is_rounded:
            basis, products = basis.to(self.engine.dtype), products.to(self.engine.dtype)
        if self.left > 0:
            del basis
            for rows in products:
                subspace.orthonormalise_(rows)
            return _BasisPass(self.engine, self.options, self.generator, products, self.left - 1, self.trace)
        if len(basis) < len(products):
            basis = basis.expand(len(products), -1, -1).clone()
        pairs = [subspace.rayleigh_ritz_(q, product) for q, product in zip(basis, products, strict=True)]
        del products
        counts = [self._n_wanted(ritz, e) for e, ritz in enumerate(pairs)]
        if any(count is None for count in counts):
            width = 2 * basis.shape[1]
            return self.starting(self.engine, self.options, self.generator, width, basis, self.trace)
        return self._concluded(pairs, [count or 0 for count in counts])

    def _significant(self, pairs: subspace.RitzPairs) -> int:
        """Number of leading eigenvalues that are no rounding: of both signs for a Hessian, else positive."""
        values = pairs.values
        if not len(values):
            return 0
        sizes = values.abs() if self.engine.kind == "hessian" else values
        floor = len(values) * torch.finfo(pairs.vectors.dtype).eps * values.abs().max()
        return int((sizes > floor).cummin(0).values.sum())

    def _n_wanted(self, pairs: subspace.RitzPairs, term: int) -> int | None:
        """Number of eigenpairs of a term to keep, or None where the block must grow to reach the share."""
        significant = self._significant(pairs)
        if not self.options.is_share or self.trace is None:
            return min(significant, int(self.options.rank))
        rounding = _SHARE_ROUNDING * torch.finfo(pairs.vectors.dtype).eps
        goal = self.options.rank * (1 - rounding) * self.trace[term].to(pairs.values)
        count = int((pairs.values[:significant].cumsum(0) < goal).sum()) + 1
        exhausted = significant < len(pairs.values) or len(pairs.values) == pairs.vectors.shape[1]
        if count > len(pairs.values) - self.options.oversampling and not exhausted:
            return None
        return min(count, significant)

    def _concluded(self, pairs: Sequence[subspace.RitzPairs], counts: Sequence[int]) -> LowRankCurvature:
        terms, squares, tail = [], 0.0, 0.0
        for ritz, count in zip(pairs, counts, strict=True):
            terms.append((subspace.leading(ritz, count, self.options.seed), ritz.values[:count]))
            squares += ritz.residuals[:count].square().sum().item()
            rest = ritz.values[count : self._significant(ritz)]
            tail = max(tail, rest.abs().max().item() if len(rest) else 0.0)
        limit = max(counts) if self.options.is_share else int(self.options.rank)
        return LowRankCurvature.joined(terms, limit=limit, error=math.sqrt(squares), tail=tail, trace=self.trace)
