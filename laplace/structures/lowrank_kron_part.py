"""Low rank plus diagonal curvature of one tensor, and the log determinant of what its low rank adds to a diagonal.

With c = s/δ and A = (I + c D)⁻¹ it is log det K of the small

    K = I + c Λ^½ Uᵀ S A S U Λ^½,    dK/dc = Λ^½ Uᵀ S A² S U Λ^½,    d log det K / dc = tr(K⁻¹ dK/dc).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from laplace.core.precision_policy import widened
from laplace.errors import CurvatureError
from laplace.structures import algebra
from laplace.structures.kronecker_eigenvectors import Columns

_ROUNDING = 32
"""A rest of the diagonal up to so many units of its rounding is zero."""


@dataclass(frozen=True, eq=False)
class Part:
    """Unit curvature S U Λ Uᵀ S + D of one tensor, differentiable in the weights of its terms.

    Attributes:
        columns: U.
        values: Λ, `[K]`, float64.
        scaling: S, `[p]`.
        rest: D, `[p]`.
    """

    columns: Columns
    values: Tensor
    scaling: Tensor
    rest: Tensor

    @classmethod
    def of(cls, columns: Columns, diagonal: Tensor, weights: Tensor, dtype: torch.dtype) -> Part:
        """From columns and the exact diagonal `[p]` of the weighted terms, in float64.

        Args:
            columns: U, with a Λ for every term.
            diagonal: H_pp.
            weights: Of the terms, `[E]`.
            dtype: The curvature's.
        """
        diagonal = diagonal.clamp(min=0)
        if not len(columns):
            return cls(columns, diagonal.new_zeros(0), torch.ones_like(diagonal).to(dtype), diagonal.to(dtype))
        values = widened(weights) @ columns.values
        lowrank = columns.diagonal(values)
        exceeds = lowrank > diagonal
        positive = exceeds & (diagonal > 0)
        ratio = torch.where(positive, diagonal, 1.0) / torch.where(positive, lowrank, 1.0)
        scaling = torch.where(exceeds & ~positive, 0.0, ratio.sqrt())
        rest = torch.where(exceeds, 0.0, diagonal - lowrank)
        rest = torch.where(rest > _ROUNDING * torch.finfo(dtype).eps * diagonal, rest, 0.0)
        return cls(columns, values, scaling.to(dtype), rest.to(dtype))

    @property
    def size(self) -> int:
        """Number of entries, p."""
        return len(self.rest)


def log_det_inside(parts: Sequence[Part], ratios: Sequence[Tensor]) -> Tensor:
    """Σ log det K over tensors, 0-dim, float64, differentiable in ratios and parts.

    Args:
        parts: The curvature of every tensor.
        ratios: C of every tensor, `[1]` or `[p]`.

    Raises:
        CurvatureError: The prior is so small that a K is singular by rounding.
    """
    pairs = [(part, widened(ratio)) for part, ratio in zip(parts, ratios, strict=True) if len(part.columns)]
    if not pairs:
        return widened(ratios[0].new_zeros(()))
    some, of = zip(*pairs, strict=True)
    if all(ratio.numel() == 1 for ratio in of) and not any(part.values.requires_grad for part in some):
        return _LogDetInside.apply(torch.cat(of), some)[0]  # pyright: ignore[reportOptionalSubscript]
    grams = [part.columns.gram((ratio * _damped(part, ratio)).unsqueeze(0)) for part, ratio in pairs]
    return _log_det(_cholesky(_inside(some, grams).squeeze(1)))


class _LogDetInside(torch.autograd.Function):
    """The sum and its slope in every ratio; where its gradient is to have a graph, that is the graph of the slopes."""

    @staticmethod
    def forward(ctx: Any, ratios: Tensor, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        ctx.parts = parts
        value, slopes = _value_and_slopes(ratios, parts)
        ctx.save_for_backward(ratios, slopes)
        ctx.mark_non_differentiable(slopes)
        return value, slopes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ratios, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():
            slopes = _value_and_slopes(ratios, ctx.parts)[1]
        return gradients[0] * slopes, None


def _value_and_slopes(ratios: Tensor, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Σ log det K, 0-dim, and d log det K / dc of every tensor, `[n]`, for c `[n]`."""
    grams = [part.columns.gram_of(partial(_weights, part, c)) for part, c in zip(parts, ratios.unbind(), strict=True)]
    inside, slopes = _inside(parts, grams).unbind(1)
    factor = _cholesky(ratios.view(-1, 1, 1) * inside)
    return _log_det(factor), (torch.cholesky_inverse(factor) * slopes).sum((1, 2))


def _weights(part: Part, ratio: Tensor, at: slice) -> Tensor:
    """S² A and S² A² of some entries of a tensor, `[2, n]`, for one c, float64.

    They are rounded to the curvature's dtype, as S and D are: log det K is moved by no more than that for a column.
    """
    rest, scaling = part.rest[at], part.scaling[at]
    damping = (1 + ratio.to(rest.dtype) * rest).reciprocal()
    weights = scaling.square() * damping
    return widened(torch.stack([weights, weights * damping]))


def _damped(part: Part, ratios: Tensor) -> Tensor:
    """S² A of the entries of a tensor, `[p]`, for c in as many dimensions, or one."""
    return widened(part.scaling).square() / (1 + ratios * widened(part.rest))


def _inside(parts: Sequence[Part], grams: Sequence[Tensor]) -> Tensor:
    """Λ^½ Uᵀ diag(w) U Λ^½ of every tensor, from its m Grams `[m, k, k]`, in one size by zeros, `[n, m, K, K]`."""
    rank = max(len(part.columns) for part in parts)
    roots = torch.stack([pad(part.values.sqrt(), (0, rank - len(part.values))) for part in parts])
    stacked = torch.stack([pad(gram, (0, rank - gram.shape[-1]) * 2) for gram in grams])
    return stacked * (roots.unsqueeze(2) * roots.unsqueeze(1)).unsqueeze(1)


def _log_det(factor: Tensor) -> Tensor:
    """Σ log det K, 0-dim, of Cholesky factors `[n, K, K]`."""
    return 2 * factor.diagonal(dim1=1, dim2=2).log().sum()


def _cholesky(inside: Tensor) -> Tensor:
    """Cholesky factors of K, of K − I `[n, K, K]`."""
    factor = algebra.cholesky(inside + torch.eye(inside.shape[-1], dtype=inside.dtype, device=inside.device))
    if factor is None:
        raise CurvatureError("the posterior precision is not positive definite; give a larger prior precision.")
    return factor
