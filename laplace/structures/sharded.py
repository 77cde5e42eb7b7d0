"""Curvature whose tensors are spread over processes: each of them holds, and factorises, its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import checks, nested
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.gaussian import Gaussian
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.layout import Layout
from laplace.core.nested import digest
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.processes import Processes
from laplace.engines.engine import CurvatureEngine
from laplace.errors import CurvatureError, ProcessError, UnsupportedError
from laplace.jacobian.jacobian import Jacobian
from laplace.structures.base import Curvature, DataPass, Separation, other_structure
from laplace.structures.precision import Form, Precision, VariancesOverPriors

# A precision of which every process of a group has the blocks of some tensors: what is asked of it adds up.
#
# Log determinants, squares and variances are sums over blocks, so that every process computes those of its own, and one
# `all_reduce` gives all of them the whole. Every query is collective: all processes ask the same, at the same inputs
# and hyper-parameters, which a digest says before; where one fails, or asks for something else, all of them raise.


_MATRIX = "the precision, the covariance or a root of it as a matrix"
_INSTEAD = "ask for la.posterior_variance, la.sample or la(x)"


def _refused(what: str, instead: str) -> UnsupportedError:
    """An error of what no process can compute from its tensors alone."""
    return UnsupportedError(
        f"{what} of a sharded posterior, of which every process stores some tensors only: {instead}; or fit with "
        "sharded=False."
    )


@dataclass(frozen=True, eq=False)
class SharePrecision(Precision):
    """One process's share: what it answers, added up over the processes, is what the whole precision would answer."""

    own: Precision | None  # P of this process's tensors; None if it has none, and a share of zero in all
    tensors: tuple[int, ...]  # Their indices
    prior: GaussianPrior  # N(μ₀, diag(δ)⁻¹) of all tensors

    def logdet_ratio(self) -> Tensor:
        return self.prior.precision.new_zeros(()) if self.own is None else self.own.logdet_ratio()

    def quad(self, vectors: Tensor) -> Tensor:
        if self.own is None:
            return vectors.new_zeros(vectors.shape[:-1])
        return self.own.quad(self.prior.layout.gathered(vectors, self.tensors))

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        if self.own is not None:
            blocks = tuple(jacobian.blocks[i] for i in self.tensors)
            return self.own.variance(replace(jacobian, blocks=blocks), form)
        b, c = jacobian.n_data, jacobian.n_cotangents
        shape = {"diagonal": (b, c), "full": (b, c, c), "joint": (b * c, b * c)}[form]
        like = self.prior.precision.detach()
        return like.new_zeros(shape, dtype=jacobian.summed_in(like.dtype))

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        return self._placed(vectors, lambda own, part: own.power(part, exponent))

    def diagonal_of_inverse(self) -> Tensor:
        like = self.prior.precision.detach()
        return self._placed(like.new_zeros(self.prior.layout.n_params), lambda own, _: own.diagonal_of_inverse())

    def _placed(self, vectors: Tensor, of: Callable[[Precision, Tensor], Tensor]) -> Tensor:
        """Vectors `[..., P]` with a function of their own entries in the place of these, and zeros elsewhere."""
        layout, total = self.prior.layout, torch.zeros_like(vectors)
        if self.own is not None:
            values = of(self.own, layout.gathered(vectors, self.tensors))
            for i, part in zip(self.tensors, layout.part(self.tensors).split(values), strict=True):
                total[..., layout.slices[i]] = part
        return total

    def to_dense(self) -> Tensor:
        raise _refused(_MATRIX, _INSTEAD)


@dataclass(frozen=True)
class _Query:
    """A process's account of a query, before answers are added."""

    asked: str  # Digest of what it asks: inputs and hyper-parameters
    shape: tuple[int, ...]  # Shape of its answer
    dtype: torch.dtype  # Its dtype
    undefined: str | None = None  # Why P is not positive definite, or None
    has_graph: bool = False  # Whether a derivative of the answer is wanted


@dataclass(frozen=True, eq=False)
class ShardedPrecision(Precision):
    """P, whose queries are sums over processes.

    The log determinant is differentiable in weights and prior, once; what else is asked has no derivative.
    """

    processes: Processes  # The group
    share: Callable[[Tensor, GaussianPrior], SharePrecision]  # This process's share at some weights and prior
    weights: Tensor  # Scale of every curvature term, `[E]`
    prior: GaussianPrior  # N(μ₀, diag(δ)⁻¹) of all tensors

    @cached_property
    def _mine(self) -> SharePrecision:
        return self.share(self.weights, self.prior)

    def logdet_ratio(self) -> Tensor:
        """With its slopes, which travel in the same sum: a backward pass is no collective call."""
        weights, delta = self.weights, self.prior.precision
        if not torch.is_grad_enabled() or not (weights.requires_grad or delta.requires_grad):
            return self._total("the evidence", (), lambda share: widened(share.logdet_ratio()))
        packed = self._total("the evidence and its gradient", (), lambda _: self._with_slopes())
        value, *slopes = packed.split([1, weights.numel(), delta.numel()])
        return _WithSlopes.apply(value, weights, slopes[0].view_as(weights), delta, slopes[1].view_as(delta))

    def _with_slopes(self) -> Tensor:
        """The share of the log determinant and of its derivatives in weights and prior, side by side, float64."""
        with torch.enable_grad():
            weights, delta = (value.detach().requires_grad_() for value in (self.weights, self.prior.precision))
            value = self.share(weights, replace(self.prior, precision=delta)).logdet_ratio()
            value = value + 0 * (weights.sum() + delta.sum())  # of a process without tensors there is no graph
            slopes = torch.autograd.grad(value, (weights, delta))
        return torch.cat([widened(part.detach()).reshape(-1) for part in (value, *slopes)])

    def quad(self, vectors: Tensor) -> Tensor:
        return self._total("densities", (vectors,), lambda share: share.quad(vectors))

    def summed(self, x: Inputs, of: Callable[[Precision], Gaussian]) -> Gaussian:
        gaussians: list[Gaussian] = []

        def covariance(share: Precision) -> Tensor:
            gaussians.append(of(share))
            return gaussians[0].covariance

        total = self._total("predictions", x, covariance)
        return replace(gaussians[0], covariance=total)

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        inputs = tuple(tensor for _, tensor in nested.named_tensors(jacobian))
        return self._total("variances", inputs, lambda share: share.variance(jacobian, form))

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        what = "samples" if exponent == -0.5 else "products"
        return self._total(what, (vectors,), lambda share: share.power(vectors, exponent))

    def diagonal_of_inverse(self) -> Tensor:
        return self._total("variances of the weights", (), lambda share: share.diagonal_of_inverse())

    def to_dense(self) -> Tensor:
        raise _refused(_MATRIX, _INSTEAD)

    @property
    def scale(self) -> Tensor:
        raise _refused(_MATRIX, _INSTEAD)

    @property
    def covariance(self) -> Tensor:
        raise _refused(_MATRIX, _INSTEAD)

    def _total(self, what: str, inputs: Inputs, of: Callable[[Precision], Tensor]) -> Tensor:
        """The sum of the answers of all processes: one exchange of words, then one sum."""
        answers: list[Tensor] = []

        def attempt() -> _Query:
            undefined = None
            try:
                with checks.together():  # those that fail must be known before the others are told
                    value = of(self._mine)
            except CurvatureError as error:
                value, undefined = self.weights.new_zeros(()), str(error)
            answers.append(value.detach().contiguous())
            asked = digest([*batches.tensors(inputs), self.weights, self.prior.precision])
            return _Query(f"{what} {asked}", tuple(value.shape), value.dtype, undefined, value.requires_grad)

        words = self.processes.gather_results(attempt)
        _compare(what, words)
        return self.processes.sum_(answers[0])


def _compare(what: str, words: list[_Query]) -> None:
    """Requires that all processes asked for the same, and found it."""
    for rank, word in enumerate(words):
        if word.asked != words[0].asked:
            raise ProcessError(
                f"rank {rank} of the group asks for {what} at other inputs or hyper-parameters than rank 0; all "
                "processes of a sharded posterior must be given the same x, seeds and hyper-parameters, in the same "
                "order of calls."
            )
    for rank, word in enumerate(words):
        if word.undefined is not None:
            raise CurvatureError(f"rank {rank} of the group: {word.undefined}")
    if any(word.has_graph for word in words):
        raise _refused(f"derivatives of {what}", "only the evidence has them; detach inputs and hyper-parameters")
    for rank, word in enumerate(words):
        if (word.shape, word.dtype) != (words[0].shape, words[0].dtype):
            raise ProcessError(f"rank {rank} of the group asks for {what} in another form than rank 0.")


class _WithSlopes(torch.autograd.Function):
    """A number with its derivatives, which are known."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weights: Tensor, of_weights: Tensor, delta: Tensor, of_delta: Tensor
    ) -> Tensor:
        ctx.save_for_backward(weights, of_weights.to(weights.dtype), delta, of_delta.to(delta.dtype))
        return value.reshape(()).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, of_weights, delta, of_delta = ctx.saved_tensors
        return None, gradient * _Slope.apply(of_weights, weights), None, gradient * _Slope.apply(of_delta, delta), None


class _Slope(torch.autograd.Function):
    """A derivative at a point, which has none itself: a second derivative would lack it in silence."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, point: Tensor) -> Tensor:
        return slope.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise _refused("second derivatives of the evidence", "it has first ones")


@dataclass(frozen=True, eq=False)
class ShardedCurvature(Curvature):
    """A block-diagonal curvature of which every process of a group holds the blocks of some tensors."""

    processes: Processes  # The group
    owners: tuple[int, ...]  # Rank of the process that holds a tensor, of every tensor
    layout: Layout  # All tensors
    own: Curvature | None  # The curvature of this process's tensors; None if it has none
    terms: int  # E
    name = "sharded"

    @classmethod
    def of(cls, curvature: Curvature, processes: Processes, layout: Layout) -> ShardedCurvature:
        """This process's part of a curvature that all processes have; what is left of it can be let go."""
        owners = placed(curvature, layout, processes.size)
        return cls(processes, owners, layout, None, curvature.n_terms).alike(curvature)

    def alike(self, curvature: Curvature) -> ShardedCurvature:
        """This process's part of another curvature of all tensors, with the same owners."""
        own = separation_of(curvature).part(curvature, self.tensors, self.layout) if self.tensors else None
        return replace(self, own=own, terms=curvature.n_terms)

    def holding(self, own: Curvature) -> ShardedCurvature:
        """The same with another curvature of this process's tensors."""
        return replace(self, own=own)

    @property
    def n_terms(self) -> int:
        return self.terms

    @property
    def tensors(self) -> tuple[int, ...]:
        """Indices of this process's tensors."""
        return tensors_of(self.owners, self.processes.rank)

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        raise UnsupportedError("a curvature is taken apart after a fit of its structure, la.fit(..., sharded=True).")

    def __add__(self, other: Curvature) -> ShardedCurvature:
        if not isinstance(other, ShardedCurvature):
            return NotImplemented
        if self.own is None or other.own is None:
            return self
        return replace(self, own=self.own + other.own)

    def scaled(self, factor: float) -> ShardedCurvature:
        return self if self.own is None else replace(self, own=self.own.scaled(factor))

    def minus(self, removed: Curvature, *, signed: bool = False, terms: torch.dtype | None = None) -> ShardedCurvature:
        if not isinstance(removed, ShardedCurvature):
            raise other_structure(self.name, removed.name)
        if self.own is None or removed.own is None:
            return self
        return replace(self, own=self.own.minus(removed.own, signed=signed, terms=terms))

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> ShardedPrecision:
        def share(weights: Tensor, prior: GaussianPrior) -> SharePrecision:
            tensors = self.tensors
            with kept_for_later():
                own = None if self.own is None else self.own.precision(weights, prior.part(tensors), **options)
            return SharePrecision(own, tensors, prior)

        return ShardedPrecision(self.processes, share, weights, prior)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> VariancesOverPriors:
        raise _refused("tuning on validation data", "tune by the evidence, method='marglik' or objective='evidence'")

    def state(self) -> dict[str, Any]:
        raise _refused("a state dict", "write it by laplace.checkpoint.save(la, path)")

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> ShardedCurvature:
        return replace(self, own=None if self.own is None else self.own.moved(device, dtype))

    @property
    def note(self) -> str:
        """Words about it in the `repr` of a posterior."""
        ranks, mine = self.processes.size, len(self.tensors)
        return f"sharded over {ranks} processes, of which this one holds {mine} of {len(self.owners)} tensors"

    def public(self) -> Any:
        raise _refused("la.H, or its factors", "write it by laplace.checkpoint.save, and load it in one process")


def separation_of(curvature: Curvature) -> Separation[Any]:
    """The way in which a curvature is taken apart."""
    if curvature.separation is None:
        raise UnsupportedError(f"curvature of structure {curvature.name!r} couples all tensors; it is not taken apart.")
    return curvature.separation


def tensors_of(owners: Sequence[int], rank: int) -> tuple[int, ...]:
    """Indices of the tensors that a process holds."""
    return tuple(i for i, owner in enumerate(owners) if owner == rank)


_EIGENVECTORS = 2
"""Copies of a factor's bytes that its eigenvectors take, in float64 and in the dtype of Jacobians."""

_EIGENVALUES = 3
"""Float64 numbers that are kept of every entry of a tensor: its eigenvalues, those of P and of the evidence."""


def placed(curvature: Curvature, layout: Layout, n_ranks: int) -> tuple[int, ...]:
    """Rank of every tensor: the largest units first, each to the process that holds least (greedy placement).

    By the bytes that factors, eigenvectors and eigenvalues take: of shapes alone, on which all processes agree.
    """
    separation = separation_of(curvature)
    owners, loads = [0] * layout.n_tensors, [0] * n_ranks
    sizes = {
        unit: _bytes(separation.part(curvature, unit, layout), layout.part(unit).n_params)
        for unit in separation.units(curvature, layout)
    }
    for unit in sorted(sizes, key=lambda unit: (-sizes[unit], unit)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[unit]
        for i in unit:
            owners[i] = rank
    return tuple(owners)


def _bytes(part: Curvature, n_params: int) -> int:
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in nested.named_tensors(part.state()))
    return (1 + _EIGENVECTORS) * size + _EIGENVALUES * wide_dtype().itemsize * n_params
