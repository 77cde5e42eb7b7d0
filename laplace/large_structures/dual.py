"""The posterior of a linearised network seen from its data: kernels between their rows instead of a P × P matrix.

With R rows A = Sᵀ J, where S Sᵀ = Λ, the precision P = w Aᵀ A + D has the dual Gram matrix G = w A D⁻¹ Aᵀ, and

    log det P − log det D = log det(I + G),    J* P⁻¹ J*ᵀ = K** − w J* D⁻¹ Aᵀ (I + G)⁻¹ A D⁻¹ J*ᵀ

which is the process of Immer et al. (2021), K** − K*M (K_MM + Λ⁻¹)⁻¹ K_M*, in a form that needs no inverse of a
singular Λ or kernel. Of many scalar priors at once one eigendecomposition A Aᵀ = U λ Uᵀ serves all:

    J* P⁻¹ J*ᵀ = (K** − V Vᵀ)/δ + V (δ + w λ)⁻¹ Vᵀ,    V = J* Aᵀ U λ^(−½)

V holds the coordinates of J* in the space that the data span; outside of it the prior stays. Data without curvature,
duplicates and dependent outputs drop out as zero eigenvalues.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from laplace.core import linalg
from laplace.core.cached import cached_property
from laplace.core.gaussian import centred_variance_of_independent
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.pieces import bytes_at_once
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import CurvatureError
from laplace.jacobian.blocks import CHUNK_BYTES, DenseBlock, total
from laplace.jacobian.jacobian import Jacobian, Scales, kernel, kernel_at, kernel_diagonal, one_output
from laplace.large_structures.woodbury import covariance_left, left_of, shrinkage, shrinkage_slope, whitened_power
from laplace.structures.precision import Form, Precision, VariancesOverPriors

# Rows of data, and what their kernels say.


_DOUBLE = 8


class Span(ABC):
    """R rows A = Sᵀ J of kept Jacobians: what they span is where the posterior differs from the prior."""

    parts: tuple[Jacobian, ...]  # Jacobians of consecutive data

    @abstractmethod
    def gram(self, weights: Tensor | None, scales: Scales) -> Tensor:
        """G = w A D⁻¹ Aᵀ, `[R, R]`, float64, differentiable in w (`[C]`, or `[1]` of all outputs) and D⁻¹."""

    @abstractmethod
    def lift(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """S u of columns `[R, n]`, `[M·C, n]`, in their dtype."""

    @abstractmethod
    def lower(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """Sᵀ f of outputs `[n, M·C]`, `[n, R]`, in their dtype."""

    def against(self, jacobian: Jacobian, weights: Tensor | None, scales: Scales) -> Tensor:
        """√w J D⁻¹ Aᵀ, `[B, C, R]`, float64, differentiable in w and D⁻¹."""
        kernels = torch.cat([kernel(jacobian, part, scales).flatten(2) for part in self.parts], 2)
        return self.lower(kernels.flatten(0, 1), weights).unflatten(0, kernels.shape[:2])

    def push(self, vectors: Tensor, weights: Tensor | None) -> Tensor:
        """A v of `[S, P]`, `[S, R]`, in their dtype."""
        outputs = [part.cast(vectors.dtype).apply(vectors).flatten(1) for part in self.parts]
        return self.lower(torch.cat(outputs, 1), weights)

    def pull(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Aᵀ u of `[S, R]`, `[S, P]`, in their dtype."""
        outputs = self.lift(rows.T, weights).T.split([part.n_data * part.n_cotangents for part in self.parts], 1)
        return total(
            part.cast(rows.dtype).combined(some.unflatten(1, (part.n_data, -1)))
            for part, some in zip(self.parts, outputs, strict=True)
        )

    @cached_property
    def unit_gram(self) -> Tensor:
        """G at w = 1 and D = 1."""
        with torch.no_grad(), kept_for_later():
            return self.gram(None, None)

    @cached_property
    def spectrum(self) -> Tensor:
        """Its eigenvalues: all that the evidence of a scalar prior needs."""
        return linalg.eigvalsh(self.unit_gram)

    @cached_property
    def unit(self) -> DataBasis:
        """The basis at w = 1 and D = 1, of which every other scalar w and D is a rescaling."""
        return self.basis(None, None)

    def basis(self, weights: Tensor | None, scales: Scales) -> DataBasis:
        """Eigenvectors of G, without those of eigenvalues that are zero but for rounding."""
        with torch.no_grad(), kept_for_later():
            is_unit = weights is None and scales is None
            gram = self.unit_gram if is_unit else self.gram(weights, scales)
            values, vectors = linalg.eigh(0.5 * (gram + gram.T))
            floor = len(values) * torch.finfo(values.dtype).eps * values.amax() if len(values) else 0.0
            significant = values > floor
            values, vectors = values[significant], vectors[:, significant]
            return DataBasis(self.parts, values, vectors, self.lift(vectors / values.sqrt(), weights), scales)


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
        return self._by_output(between(self.parts))

    @cached_property
    def kernels(self) -> tuple[Tensor, ...]:
        """The share of every tensor in it: what a prior per tensor weighs anew."""
        count = len(self.parts[0].blocks)
        alone = ([Jacobian((part.blocks[i],)) for part in self.parts] for i in range(count))
        return tuple(self._by_output(between(parts)) for parts in alone)

    def _by_output(self, values: Tensor) -> Tensor:
        return values.unflatten(1, self.roots.shape[:2]).unflatten(0, self.roots.shape[:2])

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
        roots = self._weighted(weights).to(outputs)
        return torch.einsum("smc,mck->smk", outputs.unflatten(1, roots.shape[:2]), roots).flatten(1)


_MERGED = 512
"""Rows up to which parts are put together, so that kernels between them are few."""


@dataclass(frozen=True, eq=False)
class WeightedRows(Span):
    """Rows of Jacobians that are weighted already, S = I."""

    parts: tuple[Jacobian, ...]  # Weighted Jacobians of consecutive data
    terms: Tensor | None = None  # Which of several terms every row belongs to, `[R]`; None of a single one

    @classmethod
    def from_jacobians(cls, parts: Sequence[tuple[Jacobian, int]], n_terms: int) -> WeightedRows:
        """From Jacobians with the term of the first cotangent; the others follow in turn."""
        groups: list[list[tuple[Jacobian, int]]] = []
        for part, first in parts:
            last = groups[-1] if groups else []
            rows = sum(one.n_data for one, _ in last) * part.n_cotangents
            if last and rows < _MERGED and (last[0][0].n_cotangents, last[0][1]) == (part.n_cotangents, first):
                last.append((part, first))
            else:
                groups.append([(part, first)])
        merged = [_of_more_data([part for part, _ in group]) for group in groups]
        if n_terms == 1:
            return cls(tuple(merged))
        device = merged[0].blocks[0].device
        turns = [
            ((group[0][1] + torch.arange(part.n_cotangents, device=device)) % n_terms).repeat(part.n_data)
            for part, group in zip(merged, groups, strict=True)
        ]
        return cls(tuple(merged), torch.cat(turns))

    @cached_property
    def kernel(self) -> Tensor:
        """A Aᵀ, `[R, R]`, float64."""
        return between(self.parts)

    @cached_property
    def kernels(self) -> tuple[Tensor, ...]:
        """The share of every tensor in it: what a prior per tensor weighs anew."""
        count = len(self.parts[0].blocks)
        return tuple(between([Jacobian((part.blocks[i],)) for part in self.parts]) for i in range(count))

    @cached_property
    def dense(self) -> WeightedRows:
        """The same multiplied out in float64, for priors that vary within a tensor: of them factors know no kernel."""
        with torch.no_grad(), kept_for_later():
            tensors = zip(*(part.blocks for part in self.parts), strict=True)
            blocks = (torch.cat([widened(block.by_output()) for block in some]) for some in tensors)
            return WeightedRows((Jacobian(tuple(DenseBlock(block.unsqueeze(0)) for block in blocks)),), self.terms)

    def gram(self, weights: Tensor | None, scales: Scales) -> Tensor:
        gram, roots = self._kernel_under(scales), self._roots_of(weights)
        return gram if roots is None else roots.unsqueeze(1) * gram * roots

    def _kernel_under(self, scales: Scales) -> Tensor:
        if scales is None:
            return self.kernel
        sizes = [block.size for block in self.parts[0].blocks]
        if _varies_within(scales) or len(sizes) * _n_rows(self.parts) > sum(sizes):
            entries = [widened(scale).expand(size) for scale, size in zip(scales, sizes, strict=True)]
            (whole,) = self.dense.parts
            return kernel(whole, whole, entries).flatten(2).flatten(0, 1)
        return total(widened(s).reshape(()) * part for s, part in zip(scales, self.kernels, strict=True))

    def against(self, jacobian: Jacobian, weights: Tensor | None, scales: Scales) -> Tensor:
        rows = self.dense if scales is not None and _varies_within(scales) else self
        return Span.against(rows, jacobian, weights, scales)

    def lift(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        roots = self._roots_of(weights)
        return rows if roots is None else roots.to(rows).unsqueeze(1) * rows

    def lower(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        roots = self._roots_of(weights)
        return outputs if roots is None else roots.to(outputs) * outputs

    def _roots_of(self, weights: Tensor | None) -> Tensor | None:
        """Roots of the weights of all rows, `[R]` or `[1]`."""
        if weights is None:
            return None
        return widened(weights if self.terms is None else weights[self.terms]).sqrt()


def _varies_within(scales: Sequence[Tensor]) -> bool:
    return any(scale.numel() > 1 for scale in scales)


def _n_rows(parts: Sequence[Jacobian]) -> int:
    return sum(part.n_data * part.n_cotangents for part in parts)


def _of_more_data(parts: Sequence[Jacobian]) -> Jacobian:
    """The Jacobian of the data of all parts."""
    if len(parts) == 1:
        return Jacobian(parts[0].blocks)
    return Jacobian(tuple(first.followed_by(rest) for first, *rest in zip(*(p.blocks for p in parts), strict=True)))


@dataclass(frozen=True, eq=False)
class DataBasis:
    """An orthonormal basis of what the data span."""

    parts: tuple[Jacobian, ...]  # The Jacobians of the data
    values: Tensor  # λ, `[r]`, float64
    vectors: Tensor  # U, `[R, r]`
    dual: Tensor  # S U λ^(−½), `[M·C, r]`: V = K*M `dual`
    scales: Scales  # Prior variance of every tensor in the kernel, or None for ones

    def coordinates(self, jacobian: Jacobian) -> Tensor:
        """V, `[B, C, r]`, by rows of K*M that fit a chunk."""
        per_datum = _DOUBLE * jacobian.n_cotangents * len(self.dual)
        step = max(1, bytes_at_once(CHUNK_BYTES, jacobian.device) // per_datum)
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

    def split(self, jacobian: Jacobian, form: Form) -> SplitPrior:
        """The prior covariance in one of the forms, split into what the data span and the rest."""
        inside, whole = self.coordinates(jacobian), prior_covariance(jacobian, self.scales, form)
        outside = covariance_left(whole, inside, form)
        return SplitPrior(inside.flatten(0, 1) if form == "joint" else inside, outside, self.values)


def prior_covariance(jacobian: Jacobian, scales: Scales, form: Form) -> Tensor:
    """J D⁻¹ Jᵀ in one of the forms, float64."""
    if form == "joint":
        n = jacobian.n_data * jacobian.n_cotangents
        return kernel(jacobian, jacobian, scales).reshape(n, n)
    return kernel_diagonal(jacobian, scales) if form == "diagonal" else kernel_at(jacobian, scales)


@dataclass(frozen=True, eq=False)
class SplitPrior:
    """A prior covariance, split into what the data span and the rest."""

    inside: Tensor  # V, `[..., n, r]`
    outside: Tensor  # K** − V Vᵀ, `[..., n, n]`, or its diagonals `[..., n]`
    values: Tensor  # λ, `[r]`

    def covariance_at(self, weight: Tensor, prior: Tensor) -> Tensor:
        """The posterior covariance at a scalar w and δ, 0-dim each: `outside`/δ + V (δ + w λ)⁻¹ Vᵀ."""
        weight, prior = widened(weight), widened(prior)
        gain = 1 / (prior + weight * self.values)
        if self.outside.ndim < self.inside.ndim:
            return self.outside / prior + self.inside.square() @ gain
        return self.outside / prior + (self.inside * gain) @ self.inside.mT


@dataclass(frozen=True, eq=False)
class ProjectedScan(VariancesOverPriors):
    """Functional variances at many scalar priors: kernels and coordinates once."""

    split: Callable[[Jacobian, Form], tuple[SplitPrior, ...]]  # Of all outputs together, or of every output by itself
    weight: Tensor  # `w`, 0-dim, in the units of what is split
    factor: float  # What the prior precision is multiplied with
    dtype: torch.dtype  # Of what is returned
    together: bool = True  # Whether all outputs are one Gaussian process

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        parts = self.split(jacobian, "diagonal" if diagonal or not self.together else "full")
        dtype = self.dtype if diagonal or not self.together else jacobian.summed_in(self.dtype)

        def at(deltas: Tensor) -> Tensor:
            each = [[part.covariance_at(self.weight, self.factor * delta) for part in parts] for delta in deltas]
            variances = torch.stack([some[0] if self.together else torch.cat(some, 1) for some in each]).to(dtype)
            return variances if diagonal or self.together else torch.diag_embed(variances)

        return at

    def centred_variances(self, jacobian: Jacobian) -> Callable[[Tensor], Tensor]:
        if self.together:
            return super().centred_variances(jacobian)
        at = self.variances(jacobian, diagonal=True)
        return lambda deltas: centred_variance_of_independent(at(deltas))


def pulled(parts: Sequence[Jacobian], outputs: Tensor) -> Tensor:
    """Jᵀ u, `[P]`, of u `[M, C]` for the M data of all parts, in their dtype."""
    pairs = zip(parts, outputs.split([part.n_data for part in parts]), strict=True)
    rows = [torch.cat([block.pull(row.T.to(block.bound())) for block in part.blocks]) for part, row in pairs]
    return torch.stack(rows).sum(0)


def between(parts: Sequence[Jacobian]) -> Tensor:
    """The kernel between all rows of all parts, `[R, R]`, float64; each pair of parts once."""
    with torch.no_grad(), kept_for_later():
        blocks: dict[tuple[int, int], Tensor] = {}
        for (i, one), (j, other) in combinations_with_replacement(enumerate(parts), 2):
            blocks[i, j] = kernel(one, other).flatten(2).flatten(0, 1)
            blocks[j, i] = blocks[i, j].T
        numbers = range(len(parts))
        values = torch.cat([torch.cat([blocks[i, j] for j in numbers], 1) for i in numbers])
        return 0.5 * (values + values.T)


# Posterior precisions of these data.


@dataclass(frozen=True, eq=False)
class DualPrecision(Precision):
    """P = w Aᵀ A + D."""

    duals: tuple[Span, ...]  # The data: of all outputs together, or of every output by itself
    weights: Tensor  # w, `[1]`, or `[C]` of every output
    prior: GaussianPrior  # D
    dtype: torch.dtype  # Of what is returned

    @property
    def is_scalar(self) -> bool:
        """True if P is a rescaling of what is known once per fit."""
        return self.prior.is_scalar and self.weights.numel() == 1

    @abstractmethod
    def weights_of(self, i: int) -> Tensor:
        """w of the outputs of a dual."""

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Prior variances of every tensor."""
        return tuple(1 / widened(delta) for delta in self.prior.per_block())

    def gram(self, i: int) -> Tensor:
        """G of a dual, `[R, R]`, float64, differentiable."""
        if self.is_scalar:
            return widened(self.weights) / widened(self.prior.precision) * self.duals[i].unit_gram
        if self.prior.is_scalar:
            return self.duals[i].gram(self.weights_of(i), None) / widened(self.prior.precision)
        return self.duals[i].gram(self.weights_of(i), self.scales)

    @cached_property
    def roots(self) -> tuple[Tensor, ...]:
        """Cholesky factors of I + G of every dual, `[R, R]`, float64, differentiable."""
        return tuple(self._root(self.gram(i)) for i in range(len(self.duals)))

    def _root(self, gram: Tensor) -> Tensor:
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        factor = linalg.cholesky(gram + eye)
        if factor is None:  # the prior is so weak that the rounding of G exceeds I
            rounding = len(gram) * torch.finfo(gram.dtype).eps * gram.detach().diagonal().amax()
            factor = linalg.cholesky(gram + (1 + rounding) * eye)
        if factor is None:
            raise CurvatureError(
                "the kernel between the data is not finite, or the prior precision is zero to rounding; give a larger "
                "prior precision, or look at the network's outputs."
            )
        return factor

    def logdet_ratio(self) -> Tensor:
        """Log det(I + G), differentiable: with a scalar prior O(R) after one eigendecomposition per fit."""
        if self.is_scalar:
            ratio = self.weights / self.prior.precision
            return total((ratio * dual.spectrum).log1p().sum() for dual in self.duals)
        return 2 * total(root.diagonal().log().sum() for root in self.roots)

    def covariance_of(self, i: int, jacobian: Jacobian, form: Form) -> Tensor:
        """J P⁻¹ Jᵀ of a dual in one of the forms, float64, differentiable."""
        if form == "joint":
            return self._covariance_of(i, jacobian, form)
        per_datum = _DOUBLE * jacobian.n_cotangents * max(1, len(self.roots[i]))
        step = max(1, bytes_at_once(CHUNK_BYTES, jacobian.device) // per_datum)
        pieces = [jacobian.at(slice(start, start + step)) for start in range(0, jacobian.n_data, step)]
        return torch.cat([self._covariance_of(i, piece, form) for piece in pieces])

    def _covariance_of(self, i: int, jacobian: Jacobian, form: Form) -> Tensor:
        """K** − W Wᵀ with W = √w J D⁻¹ Aᵀ (I + G)^(−½) [Linearization, eq. A.6]."""
        whole, root = prior_covariance(jacobian, self.scales, form), self.roots[i]
        rows = self.duals[i].against(jacobian, self.weights_of(i), self.scales)
        known = torch.linalg.solve_triangular(root.mT, rows.flatten(0, 1), upper=True, left=False)
        return covariance_left(whole, known.view_as(rows), form)

    @cached_property
    def bases(self) -> tuple[DataBasis, ...]:
        """Bases of the span of the data, in units in which `setting` are scalars."""
        if self.is_scalar:
            return tuple(dual.unit for dual in self.duals)
        scales = tuple(scale.detach() for scale in self.scales)
        return tuple(dual.basis(self.weights_of(i).detach(), scales) for i, dual in enumerate(self.duals))

    @property
    def setting(self) -> tuple[Tensor, Tensor]:
        """w and δ, 0-dim, in the units of `bases`."""
        if self.is_scalar:
            return self.weights[0], self.prior.precision[0]
        one = torch.ones((), dtype=wide_dtype(self.weights.device), device=self.weights.device)
        return one, one


_AT_ONCE = 64
"""Rows of A that are multiplied out at once."""


@dataclass(frozen=True, eq=False)
class JointPrecision(DualPrecision):
    """All outputs together: the posterior is one over weights, and everything of it can be asked for."""

    def weights_of(self, i: int) -> Tensor:
        return self.weights

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        return self.covariance_of(0, jacobian, form).to(jacobian.summed_in(self.dtype))

    # Weights: products with √w A and its transpose, block by block, in float64: what is left of the prior cancels.

    def quad(self, vectors: Tensor) -> Tensor:
        rows = widened(vectors.reshape(-1, vectors.shape[-1]))
        values = self.duals[0].push(rows, self.weights).square().sum(1) + rows.square() @ widened(self.prior.diagonal())
        return values.view(vectors.shape[:-1]).to(vectors.dtype)

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        """P⁻¹ and its root by (I + Bᵀ B)^exponent = I − Bᵀ g(I + G) B with B = √w A D^(−½)."""
        flat, dual = widened(vectors.reshape(-1, vectors.shape[-1])), self.duals[0]
        if not len(flat):
            return vectors.clone()
        if exponent == 1:
            product = dual.pull(dual.push(flat, self.weights), self.weights) + flat * self.prior.diagonal()
            return product.to(vectors.dtype).view(vectors.shape)
        deviations = widened(self.prior.diagonal()).rsqrt()

        def removed(white: Tensor) -> Tensor:
            rows = dual.push(deviations * white, self.weights)
            return deviations * dual.pull(self._shrunk(rows, exponent), self.weights)

        return whitened_power(flat, exponent, deviations, removed).to(vectors.dtype).view(vectors.shape)

    def _shrunk(self, rows: Tensor, exponent: float) -> Tensor:
        """Rows `[S, R]` times g(I + G), float64: that of the root is symmetric, whichever order the data have."""
        if exponent == -1:
            return torch.cholesky_solve(rows.T, self.roots[0]).T
        weight, prior = (widened(value) for value in self.setting)
        values, vectors = 1 + weight / prior * self.bases[0].values, self.bases[0].vectors
        shrunk = (rows @ vectors * shrinkage(values, exponent)) @ vectors.T
        follows = self.weights.requires_grad or self.prior.precision.requires_grad
        if self.is_scalar or not (torch.is_grad_enabled() and follows):
            return shrunk
        gram = self.gram(0)  # its null directions have a gradient, too
        with torch.no_grad():
            values, vectors = linalg.eigh(0.5 * (gram + gram.T))
        return shrunk + rows @ shrinkage_slope(gram, (1 + values, vectors), exponent)

    def diagonal_of_inverse(self) -> Tensor:
        variance, root = 1 / widened(self.prior.diagonal()), self.roots[0]
        removed = torch.zeros_like(variance)
        for some in torch.eye(len(root), dtype=root.dtype, device=root.device).split(_AT_ONCE, 1):
            rows = torch.linalg.solve_triangular(root.mT, some, upper=True).T  # of (I + G)^(−½)
            removed = removed + self.duals[0].pull(rows, self.weights).square().sum(0)
        return left_of(variance, variance.square() * removed).to(self.dtype)
