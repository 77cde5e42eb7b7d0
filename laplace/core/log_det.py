"""Log determinants relative to a prior, log det(s H + Δ) − log det Δ, from eigenvalues of H.

With c = s/δ the term of an eigenvalue h is log(1 + c h), and its slope in c is h / (1 + c h). Nothing cancels where
terms are small, and an eigenvalue of zero adds nothing: a null space may be left out. Logarithms are most of the work:
eigenvalues a, b ≥ 0 that are known for many priors share one,

    (1 + c a) (1 + c b) = 1 + c (a + b + c a b).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from laplace.core.cached import cached_property
from laplace.core.inference import kept_for_later
from laplace.core.layout import repeated
from laplace.core.pieces import numbers_at_once, operations_are_dear
from laplace.core.precision_policy import widened

_PIECE = 2**16
"""Terms that a CPU goes through at once, so that what is computed of them stays in the cache of one core."""


def log_det_ratio(values: Tensor, ratios: Tensor, sizes: Sequence[int]) -> Tensor:
    """Σ_i Σ_j log(1 + c_i h_ij), 0-dim, for n runs of h `[p]` with one c `[n]` each; differentiable in both."""
    return _summed(values, None, ratios, sizes)


def log_det_relative(values: Tensor, scale: Tensor, deltas: Tensor, sizes: Sequence[int]) -> Tensor:
    """Σ_i Σ_j log(1 + s h_ij / δ_i), 0-dim, of h `[p]`, s 0-dim and δ `[n]`; differentiable in all."""
    is_constant = not values.requires_grad and len(values) <= numbers_at_once(_PIECE, values.device)
    if is_constant and operations_are_dear(values.device):
        return _WithSlopes.apply(values, scale, deltas, sizes)[0]  # pyright: ignore[reportOptionalSubscript]
    return log_det_ratio(values, scale / deltas, sizes)


@dataclass(frozen=True, eq=False)
class EigenvaluePairs:
    """Eigenvalues of H two by two, for log determinants at many priors; one by one where some are negative."""

    values: Callable[[], Tensor]  # Computes them, `[p]`, without a graph
    sizes: tuple[int, ...]  # Lengths of their runs

    def log_det_ratio(self, scale: Tensor, deltas: Tensor) -> Tensor:
        """Σ_i Σ_j log(1 + s h_ij / δ_i), 0-dim, for δ of every run `[n]`, or of all `[1]`; differentiable in both."""
        is_one = deltas.numel() == 1
        if operations_are_dear(deltas.device):  # where logarithms cost less than to wait for the largest ratio
            return log_det_relative(self._values, scale, deltas, (sum(self.sizes),) if is_one else self.sizes)
        ratios, terms = scale / deltas, self._terms
        if (ratios if is_one else ratios.detach().amax()).item() <= terms.limit:
            return _summed(terms.first, terms.second, ratios, (len(terms.first),) if is_one else terms.sizes)
        return log_det_ratio(self.values(), ratios, (sum(self.sizes),) if is_one else self.sizes)

    @cached_property
    def _values(self) -> Tensor:
        with kept_for_later():
            return self.values()

    @cached_property
    def _terms(self) -> _Terms:
        with kept_for_later():
            values = self.values()
            numbers = torch.finfo(values.dtype)
            least, largest = (bound.item() for bound in values.aminmax()) if len(values) else (0.0, 0.0)
            if least < 0 or not largest <= numbers.max**0.5:
                return _Terms(values, None, math.inf, self.sizes)
            runs = [pad(run, (0, len(run) % 2)).view(2, -1) for run in values.split(list(self.sizes))]
            one, other = torch.cat(runs, 1)
            limit = min(numbers.eps / numbers.tiny**0.5, 0.5 * numbers.max**0.25 / max(largest, numbers.tiny))
            return _Terms(one + other, one * other, limit, tuple(run.shape[1] for run in runs))


@dataclass(frozen=True, eq=False)
class _Terms:
    """Eigenvalues a, b of which one logarithm is taken: a + b and a b; or a alone.

    Up to a limit of c no term leaves the range of numbers, nor does its square, by which second derivatives divide. No
    product that did, of a and b below √tiny, would change a sum by more than its rounding: c a is below c √tiny.
    """

    first: Tensor  # What c is multiplied with, `[q]`
    second: Tensor | None  # What c² is multiplied with, `[q]`, or None
    limit: float  # Largest c
    sizes: tuple[int, ...]  # Lengths of the runs; to the last of an odd number of eigenvalues a zero was added


def _summed(first: Tensor, second: Tensor | None, ratios: Tensor, sizes: Sequence[int]) -> Tensor:
    """Σ log(1 + c e₁ + c² e₂), 0-dim, of runs with a c each; differentiable in c, and in e₁ without e₂."""
    if len(first) <= numbers_at_once(_PIECE, first.device):
        c = ratios if len(sizes) == 1 else repeated(ratios, sizes)
        return (_divided(first, second, c) * c).log1p().sum()
    return _InPieces.apply(first, second, ratios, sizes)[0]  # pyright: ignore[reportOptionalSubscript]


def _divided(first: Tensor, second: Tensor | None, c: Tensor) -> Tensor:
    """`e₁ + c e₂`: what is added to 1, divided by c."""
    return first if second is None else torch.addcmul(first, second, c)


def _slope(first: Tensor, second: Tensor | None, c: Tensor) -> Tensor:
    """`e₁ + 2 c e₂`: the slope of what is added to 1."""
    return first if second is None else torch.addcmul(first, second, c, value=2)


def _runs(
    first: Tensor, second: Tensor | None, ratios: Tensor, sizes: Sequence[int]
) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """Every run with its ratio, `[1]`."""
    if len(sizes) == 1:
        return [(first, second, ratios)]
    lengths = list(sizes)
    others = [None] * len(lengths) if second is None else second.split(lengths)
    return list(zip(first.split(lengths), others, ratios.split(1), strict=True))


def _slopes(first: Tensor, second: Tensor | None, ratios: Tensor, sizes: Sequence[int]) -> Tensor:
    """Σ (e₁ + 2 c e₂) / (1 + c e₁ + c² e₂) of every run, `[n]`."""
    runs = _runs(first, second, ratios, sizes)
    return torch.stack([(_slope(a, b, c) / (1 + c * _divided(a, b, c))).sum() for a, b, c in runs])


class _WithSlopes(torch.autograd.Function):
    """Σ log(1 + s h / δ) with its slopes in δ, for devices on which every operation of a graph is a launch of its own.

    Where its gradient is to have a graph, that is the graph of `_slopes`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        values: Tensor, scale: Tensor, deltas: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        ratios = scale / deltas
        terms = values * (ratios if len(sizes) == 1 else repeated(ratios, sizes))
        falls = terms / torch.rsub(terms, -1)  # −t / (1 + t), the slope of log(1 + t) in log δ
        total = falls.sum() if len(sizes) == 1 else torch.stack([run.sum() for run in falls.split(list(sizes))])
        return terms.log1p().sum(), (total / deltas).to(deltas.dtype)  # of one δ without a conversion

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, scale, deltas, ctx.sizes = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, scale, deltas, output[1])
        ctx.save_for_forward(values, scale, deltas, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, scale, deltas, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():
            ratios = scale / deltas
            slopes = -_slopes(values, None, ratios, ctx.sizes) * ratios / deltas
        by_deltas = gradients[0] * slopes
        by_scale = -(by_deltas * deltas).sum().view_as(scale) / scale if ctx.needs_input_grad[1] else None
        return None, by_scale, by_deltas, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, scale, deltas, _ = ctx.saved_tensors
        ratios = scale / deltas
        slopes, value = -_slopes(values, None, ratios, ctx.sizes) * ratios, torch.zeros_like(scale)
        if tangents[1] is not None:
            value = value - slopes.sum() * tangents[1] / scale
        if tangents[2] is not None:
            value = value + (slopes * tangents[2] / deltas).sum()
        return value, None


class _InPieces(torch.autograd.Function):
    """The sum and its slopes in one pass, without temporaries of the size of all terms, and without a graph of them.

    Where its gradient is to have a graph, that is the graph of `_slopes`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        first: Tensor, second: Tensor | None, ratios: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        value = widened(first.new_zeros(()))
        slopes: list[Tensor] = []
        for one, other, ratio in _runs(first, second, ratios, sizes):
            slope = torch.zeros_like(value)
            step = numbers_at_once(_PIECE, one.device)
            for at in range(0, len(one), step):
                end = at + step
                a, b = one[at:end], None if other is None else other[at:end]
                divided = _divided(a, b, ratio)
                rising = _divided(divided, b, ratio)
                added = divided * ratio if b is None else divided.mul_(ratio)
                value = value + added.log1p().sum()
                slope = slope + (rising / added.add_(1)).sum()
            slopes.append(slope)
        return value, torch.stack(slopes).to(ratios.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        first, second, ratios, ctx.sizes = inputs
        ctx.save_for_backward(first, second, ratios, output[1])
        ctx.save_for_forward(first, second, ratios)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first, second, ratios, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():
            slopes = _slopes(first, second, ratios, ctx.sizes)
        by_values = gradients[0].to(first) * _by_values(first, ratios, ctx.sizes) if ctx.needs_input_grad[0] else None
        return by_values, None, gradients[0].to(slopes) * slopes, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first, second, ratios = ctx.saved_tensors
        value = widened(first.new_zeros(()))
        if tangents[0] is not None:
            value = value + (tangents[0] * _by_values(first, ratios, ctx.sizes)).sum()
        if tangents[2] is not None:
            value = value + (tangents[2] * _slopes(first, second, ratios, ctx.sizes)).sum()
        return value, None


def _by_values(values: Tensor, ratios: Tensor, sizes: Sequence[int]) -> Tensor:
    """`c_i / (1 + c_i h_ij)`, `[p]`."""
    return torch.cat([ratio / (1 + run * ratio) for run, _, ratio in _runs(values, None, ratios, sizes)])
