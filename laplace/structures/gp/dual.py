"""The posterior of a linearised network seen from its data: kernels between M data instead of a P × P matrix.

With A = Sᵀ J, where S Sᵀ = Λ, the precision P = w Aᵀ A + D has the dual Gram matrix G = A D⁻¹ Aᵀ = U λ Uᵀ, and

    J* P⁻¹ J*ᵀ = (K** − V Vᵀ) + V (1 + w λ)⁻¹ Vᵀ,    V = K*M S U λ^(−½)

which is equation A.6 of Immer et al. (2021), K** − K*M (K_MM + Λ⁻¹)⁻¹ K_M*, in a form that needs no inverse of a
singular Λ or kernel: data without curvature, duplicates and dependent outputs drop out as zero eigenvalues. V holds the
coordinates of J* in the space that the data span; outside of it the prior stays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.inference import kept_for_later
from laplace.core.positions import require_none
from laplace.core.precision_policy import wide_dtype, widened
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.errors import InvalidData, UnsupportedError
from laplace.jacobian.blocks import CHUNK_BYTES
from laplace.jacobian.jacobian import Jacobian, Scales, kernel, kernel_at, kernel_diagonal
from laplace.structures import linalg
from laplace.structures.base import DataPass, require_finite
from laplace.structures.precision import Form, VariancesOverPriors

# Data as an approximation in function space sees them: Jacobians with outputs and targets, and the loss on the way.


HOLDS_INPUTS = "held with the inputs of the layers there, which in a first layer are data"
"""Text that `repr` says of a posterior whose states and pickles hold data: those that its kernels are between."""

POSITIONS = (
    "hessian_structure='gp', a posterior over functions,",
    "Posteriors over weights take them: hessian_structure='full', 'kron', 'diag', 'lowrank' or 'matrix_free'",
)
"""Text that refuses outputs with positions, and says what takes them."""


def jacobians(engine: CurvatureEngine, x: Inputs, *, create_graph: bool = False) -> Iterator[tuple[Jacobian, Tensor]]:
    """Jacobians and outputs `[b, C]` of consecutive parts of a batch, differentiable in x with `create_graph`."""
    for jacobian, f in engine.jacobian(x, create_graph=create_graph):
        require_none(jacobian.positions, *POSITIONS)
        yield jacobian, f


def observed(
    engine: CurvatureEngine, x: Inputs, y: Tensor, least: torch.dtype = torch.float32
) -> Iterator[tuple[Jacobian, Tensor, Tensor]]:
    """Jacobians, outputs `[b, C]` as constants in at least this precision, and checked targets of parts of a batch."""
    start = 0
    for jacobian, f in jacobians(engine, x):
        f = f.detach().to(torch.promote_types(f.dtype, least))
        yield jacobian, f, engine.checked(f, y[start : start + len(f)])
        start += len(f)


class ObservingPass(DataPass):
    """A reading that sums the loss of the data that it looks at: others, which choose data, do not know it."""

    def __init__(self, engine: CurvatureEngine) -> None:
        self.engine = engine  # Computes Jacobians
        self.losses: Tensor | None = None
        self.n_outputs = 0

    def observed(self, x: Inputs, y: Tensor) -> Iterator[tuple[Jacobian, Tensor, Tensor]]:
        """As the function of this name; the loss is counted."""
        for jacobian, f, targets in observed(self.engine, x, y):
            losses = self.engine.likelihood.loss_terms(f, targets).detach()
            require_finite(losses.isfinite())
            self.losses = losses if self.losses is None else self.losses + losses
            self.n_outputs = f.shape[1]
            yield jacobian, f, targets

    def counted(self, read: BatchSummary) -> BatchSummary:
        if self.losses is None:
            raise InvalidData("no batch was read.")
        return BatchSummary(self.losses, read.n_data, self.n_outputs)


def uncounted(y: Tensor, n_outputs: int = 0) -> BatchSummary:
    """Contribution of a batch whose loss is counted elsewhere: its number of data."""
    return BatchSummary(torch.zeros(1), len(y), n_outputs)


_DOUBLE = 8


class Span(ABC):
    """R rows A = Sᵀ J of kept Jacobians: what they span is where the posterior differs from the prior."""

    parts: tuple[Jacobian, ...]  # Jacobians of consecutive data

    @abstractmethod
    def gram(self, weights: Tensor | None, scales: Scales) -> Tensor:
        """G = A D⁻¹ Aᵀ, `[R, R]`, float64, differentiable in w (`[C]`, or `[1]` for all outputs) and D⁻¹ per tensor."""

    @abstractmethod
    def lift(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """S u of columns `[R, n]`, `[M·C, n]`, in their dtype."""

    @abstractmethod
    def lower(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """Sᵀ f of outputs `[n, M, C]`, `[n, R]`, in their dtype."""

    @cached_property
    def unit(self) -> Basis:
        """The basis at w = 1 and D = 1, of which every other scalar w and D is a rescaling."""
        return self.basis(None, None)

    def basis(self, weights: Tensor | None, scales: Scales) -> Basis:
        """Eigenvectors of G, without those of eigenvalues that are zero but for rounding."""
        with torch.no_grad(), kept_for_later():
            gram = self.gram(weights, scales)
            values, vectors = linalg.eigh(0.5 * (gram + gram.T))
            floor = len(values) * torch.finfo(values.dtype).eps * values.amax() if len(values) else 0.0
            significant = values > floor
            values, vectors = values[significant], vectors[:, significant]
            return Basis(self.parts, values, vectors, self.lift(vectors / values.sqrt(), weights), scales)


@dataclass(frozen=True, eq=False)
class Dual(Span):
    """Kept Jacobians and roots of the output Hessians of M data."""

    parts: tuple[Jacobian, ...]  # Jacobians of consecutive data, with C cotangents
    roots: Tensor  # S of every datum, Λ = S Sᵀ, `[M, C, K]`

    def output(self, c: int) -> Dual:
        """One output by itself: its Jacobian, and the diagonal entry of Λ."""
        picks = tuple(part.select_outputs(one_output(part, c)) for part in self.parts)
        diagonal = self.roots[:, c].square().sum(1).sqrt()
        return Dual(picks, diagonal.view(-1, 1, 1))

    @cached_property
    def kernel(self) -> Tensor:
        """K_MM = J Jᵀ, `[M, C, M, C]`, float64."""
        return _symmetric(self.parts)

    @cached_property
    def kernels(self) -> tuple[Tensor, ...]:
        """The share of every tensor in it: what a prior per tensor weighs anew."""
        count = len(self.parts[0].blocks)
        return tuple(_symmetric([Jacobian((part.blocks[i],)) for part in self.parts]) for i in range(count))

    def kernel_under(self, scales: Scales) -> Tensor:
        """K_MM under a prior variance per tensor, `[M, C, M, C]`, float64, differentiable in it."""
        if scales is None:
            return self.kernel
        zero = torch.zeros((), dtype=wide_dtype(self.roots.device), device=self.roots.device)
        return sum((widened(s).reshape(()) * k for s, k in zip(scales, self.kernels, strict=True)), zero)

    def gram(self, weights: Tensor | None, scales: Scales) -> Tensor:
        with kept_for_later():
            roots = self._weighted(weights)
            half = torch.einsum("mcnd,ndl->mcnl", self.kernel_under(scales), roots)
            return torch.einsum("mck,mcnl->mknl", roots, half).reshape(roots.shape[0] * roots.shape[2], -1)

    def _weighted(self, weights: Tensor | None) -> Tensor:
        roots = widened(self.roots)
        return roots if weights is None else widened(weights).sqrt().view(1, -1, 1) * roots

    def lift(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        roots = self._weighted(weights).to(rows)
        inner = rows.view(roots.shape[0], roots.shape[2], -1)
        return torch.einsum("mck,mkr->mcr", roots, inner).flatten(0, 1)

    def lower(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        return torch.einsum("smc,mck->smk", outputs, self._weighted(weights).to(outputs)).flatten(1)


@dataclass(frozen=True, eq=False)
class Basis:
    """An orthonormal basis of what the data span."""

    parts: tuple[Jacobian, ...]  # The Jacobians of the data
    values: Tensor  # λ, `[r]`, float64
    vectors: Tensor  # U, `[R, r]`
    dual: Tensor  # S U λ^(−½), `[M·C, r]`: V = K*M `dual`
    scales: Scales  # Prior variance of every tensor in the kernel, or None for ones

    def coordinates(self, jacobian: Jacobian) -> Tensor:
        """V, `[B, C, r]`, by rows of K*M that fit a chunk."""
        per_datum = _DOUBLE * jacobian.n_cotangents * len(self.dual)
        step = max(1, CHUNK_BYTES // per_datum)
        rows = [self._rows(jacobian.at(slice(i, i + step))) for i in range(0, jacobian.n_data, step)]
        return torch.cat(rows)

    def _rows(self, jacobian: Jacobian) -> Tensor:
        product, start = 0.0, 0
        for part in self.parts:
            stop = start + part.n_data * part.n_cotangents
            cross = kernel(jacobian, part, self.scales)
            product = product + cross.flatten(2) @ self.dual[start:stop]
            start = stop
        return torch.as_tensor(product)

    def split(self, jacobian: Jacobian, form: Form) -> Projected:
        """The prior covariance in one of the forms, split into what the data span and the rest."""
        inside, whole = self.coordinates(jacobian), prior_covariance(jacobian, self.scales, form)
        if form == "diagonal":
            return Projected(inside, (whole - inside.square().sum(2)).clamp(min=0), self.values)
        inside = inside.flatten(0, 1) if form == "joint" else inside
        outside = whole - inside @ inside.mT
        return Projected(inside, 0.5 * (outside + outside.mT), self.values)


def prior_covariance(jacobian: Jacobian, scales: Scales, form: Form) -> Tensor:
    """J D⁻¹ Jᵀ in one of the forms, float64."""
    if form == "joint":
        n = jacobian.n_data * jacobian.n_cotangents
        return kernel(jacobian, jacobian, scales).reshape(n, n)
    return kernel_diagonal(jacobian, scales) if form == "diagonal" else kernel_at(jacobian, scales)


@dataclass(frozen=True, eq=False)
class Projected:
    """A prior covariance, split into what the data span and the rest."""

    inside: Tensor  # V, `[..., n, r]`
    outside: Tensor  # K** − V Vᵀ, `[..., n, n]`, or its diagonals `[..., n]`
    values: Tensor  # λ, `[r]`

    def at(self, weight: Tensor, prior: Tensor) -> Tensor:
        """The posterior covariance at a scalar w and δ, 0-dim each: `outside`/δ + V (δ + w λ)⁻¹ Vᵀ."""
        weight, prior = widened(weight), widened(prior)
        gain = 1 / (prior + weight * self.values)
        if self.outside.ndim < self.inside.ndim:
            return self.outside / prior + self.inside.square() @ gain
        return self.outside / prior + (self.inside * gain) @ self.inside.mT


@dataclass(frozen=True, eq=False)
class ProjectedScan(VariancesOverPriors):
    """Functional variances at many scalar priors: kernels and coordinates once."""

    split: Callable[[Jacobian, Form], tuple[Projected, ...]]  # Of all outputs together, or of every output by itself
    weight: Tensor  # W, 0-dim, in the units of what is split
    factor: float  # What the prior precision is multiplied with
    dtype: torch.dtype  # Of what is returned
    together: bool = True  # Whether all outputs are one Gaussian process

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        parts = self.split(jacobian, "diagonal" if diagonal or not self.together else "full")
        dtype = self.dtype if diagonal or not self.together else jacobian.summed_in(self.dtype)

        def at(deltas: Tensor) -> Tensor:
            each = [[part.at(self.weight, self.factor * delta) for part in parts] for delta in deltas]
            variances = torch.stack([some[0] if self.together else torch.cat(some, 1) for some in each]).to(dtype)
            return variances if diagonal or self.together else torch.diag_embed(variances)

        return at


def each_output(jacobian: Jacobian) -> Iterator[Jacobian]:
    """The Jacobian of every output by itself, of Gaussian processes of their own."""
    if jacobian.outputs is not None:
        raise UnsupportedError(
            "outputs= with independent_outputs=True, where every output is a Gaussian process of its own: ask for all "
            "outputs, or use independent_outputs=False."
        )
    for c in range(jacobian.n_cotangents // jacobian.group_size):
        yield jacobian.select_outputs(one_output(jacobian, c))


def moved_by(jacobian: Jacobian, step: Tensor) -> Tensor:
    """J v of a step v `[P]`, or of one per output, `[C, P]`, where every output has weights of its own: `[B, C]`."""
    if step.ndim == 1:
        return jacobian.apply(step.unsqueeze(0))[0]
    pairs = zip(each_output(jacobian), step, strict=True)
    return torch.cat([one.apply(own.unsqueeze(0))[0] for one, own in pairs], 1)


def one_output(jacobian: Jacobian, c: int) -> Tensor:
    """The output c of every datum, `[B, 1]`, for `Jacobian.select_outputs`; of groups that of all of their rows."""
    device = jacobian.blocks[0].bound().device
    step = jacobian.n_cotangents // jacobian.group_size
    return torch.arange(c, jacobian.n_cotangents, step, device=device).expand(jacobian.n_data, -1)


def pulled(parts: Sequence[Jacobian], outputs: Tensor) -> Tensor:
    """Jᵀ u, `[P]`, of u `[M, C]` for the M data of all parts, in their dtype."""
    pairs = zip(parts, outputs.split([part.n_data for part in parts]), strict=True)
    rows = [torch.cat([block.pull(row.T.to(block.bound())) for block in part.blocks]) for part, row in pairs]
    return torch.stack(rows).sum(0)


def _symmetric(parts: tuple[Jacobian, ...] | list[Jacobian]) -> Tensor:
    """The kernel between all parts, `[M, C, M, C]`; each pair once."""
    with torch.no_grad(), kept_for_later():
        rows = [list(_row(parts, i)) for i in range(len(parts))]
        full = [
            [rows[i][j - i] if j >= i else rows[j][i - j].permute(2, 3, 0, 1) for j in range(len(parts))]
            for i in range(len(parts))
        ]
        return torch.cat([torch.cat(row, 2) for row in full])


def _row(parts: tuple[Jacobian, ...] | list[Jacobian], i: int) -> Iterator[Tensor]:
    for j in range(i, len(parts)):
        yield kernel(parts[i], parts[j])
