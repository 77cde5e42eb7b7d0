"""Roots of covariances that rounding cannot turn, so that samples of equal seeds agree wherever they are drawn.

A covariance of outputs is Σ = M Mᵀ with M = J P^(−½), often singular: more outputs than weights, one input twice. Its
symmetric root |Mᵀ| moves by at most √2 times what M moves by (Araki and Yamagami, 1981), whatever the condition of Σ.
A Cholesky factor moves by the condition of M times that, eigenvectors times roots of eigenvalues by anything where
eigenvalues meet. Sums M Mᵀ are formed in float64: the root turns a relative error ε of Σ itself into √ε.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laplace.core.precision_policy import widened

_SCALES = 1e-7
"""Share of the mean variance that is added to the squares of the units, so that an output of noise alone is small."""

_FLAT = 1e-6
"""Eigenvalues of a root below which it has no derivative: twice the root of what float64 leaves of a zero."""


def scaled_root(covariance: Tensor) -> Tensor:
    """A root R with R Rᵀ = Σ of positive semi-definite `[..., n, n]`, in its dtype.

    R = D (D⁻¹ Σ D⁻¹)^½ with D² = diag Σ + 1e-7 · mean(diag Σ): each output is exact in units of its own standard
    deviation, unless that is far below the others. Always exists: negative eigenvalues count as zero. Any derivative
    exists; in directions without variance it is 0.

    Args:
        covariance: Finite; its symmetric part is used.
    """
    wide = widened(covariance)
    size = wide.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]  # in units of it nothing overflows
    size = size.where(size > 0, 1.0)
    wide = 0.5 * (wide / size) + 0.5 * (wide / size).mT
    variances = wide.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    squares = variances + _SCALES * variances.mean(-1, keepdim=True)
    varies = squares > 0
    units = squares.where(varies, 1.0).sqrt()
    root: Any = _SymmetricRoot.apply(wide / units.unsqueeze(-1) / units.unsqueeze(-2))
    return (size.sqrt() * units.unsqueeze(-1) * root).to(covariance.dtype)


class _SymmetricRoot(torch.autograd.Function):
    """A^½ by an eigendecomposition; its derivative X solves R X + X R = dA, which equal eigenvalues leave finite."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        roots = values.clamp(min=0).sqrt()
        root = (vectors * roots.unsqueeze(-2)) @ vectors.mT
        ctx.save_for_backward(root, roots, vectors)
        return root

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        root, roots, vectors = ctx.saved_tensors
        gradient = 0.5 * (gradients[0] + gradients[0].mT)
        return _Solution.apply(gradient, root, roots, vectors)  # pyright: ignore[reportReturnType]


class _Solution(torch.autograd.Function):
    """X with R X + X R = G, of symmetric matrices: X_ij = G_ij / (r_i + r_j) in the eigenbasis of R."""

    @staticmethod
    def forward(ctx: Any, right: Tensor, root: Tensor, roots: Tensor, vectors: Tensor) -> Tensor:
        sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
        # 1 / sums, but going to 0 where both eigenvalues do: there 1 / sums would be a quotient of roundings.
        inverse = sums / (sums.square() + _FLAT**2)
        solution = vectors @ (inverse * (vectors.mT @ right @ vectors)) @ vectors.mT
        ctx.save_for_backward(solution, root, roots, vectors)
        return solution

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        solution, root, roots, vectors = ctx.saved_tensors
        gradient = 0.5 * (gradients[0] + gradients[0].mT)
        right: Any = _Solution.apply(gradient, root, roots, vectors)
        return right, -(right @ solution + solution @ right), None, None
