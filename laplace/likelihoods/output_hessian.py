"""The second derivative of a likelihood with respect to the outputs, in a form that is cheap to contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from laplace.core import eigen, nested
from laplace.core.cached import cached_property
from laplace.core.checks import all_finite, require
from laplace.core.precision_policy import widened
from laplace.errors import CurvatureError


@dataclass(frozen=True, eq=False)
class OutputHessian:
    """Hessian of the unit negative log likelihood with respect to the outputs, one per datum.

    `Λ_b = diag(diag_b) − vec_b vec_bᵀ` (softmax: both are the probabilities), or `dense_b` where a
    likelihood has no such form. Kept in this form because a root `[K, B, C]` costs B·C² numbers and the
    last layer needs only sums of it.

    Attributes:
        diag: `[B, C]`, the diagonal part.
        vec: `[B, C]` or None, the subtracted rank-one part, with Σ_c vec_c² / diag_c ≤ 1 (Λ is then positive
            semi-definite; softmax attains 1).
        dense: `[B, C, C]` or None; if given it is the whole of Λ, and `diag`, its diagonal, is for reading only.
        sums_to_zero: True if `vec` is `diag` and adds up to 1 or 0, as of softmax, which does not see a shift of all
            outputs: Λ 1 = 0, and the rank is C − 1. Sums of Λ then hold that to the last digit, where rounding would
            compete with a small prior precision. It is true of one tensor as `diag` and `vec` only: with other parts
            (`dataclasses.replace` in a likelihood that is derived from softmax) it becomes False.
        weights: w, `[B]`, where rows sum to zero and data are weighted: Λ_b is w_b times what the other parts say; None
            for ones. Of other forms `scaled` multiplies the parts.
    """

    diag: Tensor
    vec: Tensor | None = None
    dense: Tensor | None = None
    sums_to_zero: bool = False
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        if self.vec is not self.diag or self.dense is not None:
            object.__setattr__(self, "sums_to_zero", False)
            if self.weights is not None:  # of parts that were put in the place of softmax's
                scaled = replace(self, weights=None).scaled(self.weights)
                for name in ("diag", "vec", "dense", "weights"):
                    object.__setattr__(self, name, getattr(scaled, name))

    @property
    def n_columns(self) -> int:
        """K, columns of `root`."""
        return columns_of(self.diag.shape[1], sums_to_zero=self.sums_to_zero)

    @property
    def is_diagonal(self) -> bool:
        """True if no likelihood of this form has entries beside the diagonal."""
        return self.dense is None and self.vec is None

    def to(self, dtype: torch.dtype) -> OutputHessian:
        """The same in another dtype."""
        diag = self.diag.to(dtype)
        vec = diag if self.vec is self.diag else None if self.vec is None else self.vec.to(dtype)
        dense, weights = (None if part is None else part.to(dtype) for part in (self.dense, self.weights))
        return replace(self, diag=diag, vec=vec, dense=dense, weights=weights)

    def wide(self) -> OutputHessian:
        """The same in float64, as its sums are."""
        diag, vec = self._parts
        dense, weights = (None if part is None else widened(part) for part in (self.dense, self.weights))
        wide = replace(self, diag=diag, vec=vec, dense=dense, weights=weights)
        vars(wide)["_parts"] = diag, vec  # which add up already
        return wide

    def state(self) -> dict[str, Any]:
        """Tensors and flags, from which it is made again."""
        weights = {} if self.weights is None else {"weights": self.weights}
        vec = None if self.sums_to_zero else self.vec
        return {"diag": self.diag, "dense": self.dense, "vec": vec, "sums_to_zero": self.sums_to_zero, **weights}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> OutputHessian:
        """That of a state."""
        softmax = state["sums_to_zero"]
        return nested.from_state(cls, {**state, "vec": state["diag" if softmax else "vec"]})

    def require_rows(self) -> None:
        """Refuses parts from a state that are of different numbers of data or outputs.

        Raises:
            StateError: They are.
        """
        rows, columns = (*self.diag.shape, 0, 0)[:2]
        sizes = {"diag": (rows, columns), "vec": (rows, columns), "dense": (rows, columns, columns), "weights": (rows,)}
        for name, shape in sizes.items():
            if getattr(self, name) is not None:
                nested.require_sizes(f"the part {name!r} of an output Hessian", getattr(self, name), *shape)

    def scaled(self, weights: Tensor | None) -> OutputHessian:
        """w_b Λ_b, for weights `[B]` that are at least 0; None for ones."""
        if weights is None:
            return self
        if self.sums_to_zero:  # of the probabilities themselves nothing is rounded
            return replace(self, weights=weights if self.weights is None else self.weights * weights)
        column = weights.to(self.diag).unsqueeze(1)
        vec = None if self.vec is None else column.sqrt() * self.vec
        dense = None if self.dense is None else column.unsqueeze(2) * self.dense
        return replace(self, diag=column * self.diag, vec=vec, dense=dense)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Entries Λ_rc `[B, n]`, float64, at rows and columns `[n]`; of a diagonal Λ none beside the diagonal."""
        if self.dense is not None:
            return widened(self.dense[:, rows, columns])
        diag = widened(self.diag).index_select(1, rows) * (rows == columns)
        if self.vec is None:
            return diag
        vec = widened(self.vec)
        return self._weighed(diag.addcmul_(vec.index_select(1, rows), vec.index_select(1, columns), value=-1))

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor | None]:
        """The diagonal and the rank-one part in float64, whose difference is known to as many digits as they are.

        Of a saturated row p − p² is 1 − p of its largest p, of which rounding p has left few digits: those of the
        others. Divided by their sum, a row adds up to 1 in float64, whichever its p were rounded.
        """
        diag = widened(self.diag)
        if not self.sums_to_zero:
            return diag, None if self.vec is None else widened(self.vec)
        diag = diag / diag.sum(1, keepdim=True).clamp(min=torch.finfo(diag.dtype).tiny)  # a row of zeros stays one
        return diag, diag

    def _weighed(self, values: Tensor) -> Tensor:
        """Values `[B, …]` of every datum times its weight."""
        if self.weights is None:
            return values
        return values * self.weights.to(values).view(-1, *(1,) * (values.ndim - 1))

    @cached_property
    def _largest(self) -> Tensor:
        """Index of the largest entry of every row, `[B, 1]`."""
        return self.diag.argmax(1, keepdim=True)

    def diagonal(self) -> Tensor:
        """Diagonals of Λ, `[B, C]`."""
        if self.dense is not None:
            return self.dense.diagonal(dim1=1, dim2=2)
        diag, vec = self._parts
        return self.diag if vec is None else self._weighed(torch.addcmul(diag, vec, vec, value=-1)).to(self.diag.dtype)

    def diagonal_in(self, basis: Tensor) -> Tensor:
        """Diagonals uᵀ Λ u of columns u of a basis `[C, K]`, `[B, K]`."""
        if self.dense is not None:
            return ((self.dense.to(basis) @ basis) * basis).sum(1)
        diag, vec = self._parts
        wide = basis.to(diag)
        values = diag @ wide.square()
        return (values if vec is None else self._weighed(values - (vec @ wide).square())).to(self.diag.dtype)

    def times(self, vectors: Tensor) -> Tensor:
        """Λ v of vectors `[..., B, C]`, in the same shape."""
        if self.dense is not None:
            return (self.dense @ vectors.unsqueeze(-1)).squeeze(-1)
        if self.sums_to_zero:  # Λ 1 = 0: of v less its entry at the largest p no term is left that would cancel
            at = self._largest.expand(*vectors.shape[:-1], 1)
            vectors = vectors - vectors.gather(-1, at)
            return self._weighed(self.diag) * (vectors - (self.diag * vectors).sum(-1, keepdim=True))
        product = self.diag * vectors
        if self.vec is None:
            return product
        return product - self.vec * (self.vec * vectors).sum(-1, keepdim=True)

    def total(self) -> Tensor:
        """Σ_b Λ_b, `[C, C]`, without the `[B, C, C]` tensor where Λ is structured."""
        if self.dense is not None:
            return self.dense.sum(0)
        diag, vec = self._parts
        if vec is None:
            return torch.diag(self._weighed(diag).sum(0)).to(self.diag.dtype)
        total = -(vec.T @ self._weighed(vec))
        total.diagonal().add_(self._weighed(diag).sum(0))
        return total.to(self.diag.dtype)

    def total_times(self, matrix: Tensor) -> Tensor:
        """Σ_b Λ_b M of M `[C, w]`, `[C, w]`, without Σ_b Λ_b where Λ is structured."""
        if self.dense is not None:
            return self.dense.sum(0) @ matrix
        diag, vec = self._parts
        wide = matrix.to(diag)
        product = self._weighed(diag).sum(0).unsqueeze(1) * wide
        return (product if vec is None else product - vec.T @ self._weighed(vec @ wide)).to(matrix.dtype)

    def matrix(self) -> Tensor:
        """Λ, `[B, C, C]`."""
        if self.dense is not None:
            return self.dense
        if self.vec is None:
            return torch.diag_embed(self.diag)
        beside = self._weighed(-self.vec.unsqueeze(2) * self.vec.unsqueeze(1))
        return beside.diagonal_scatter(self.diagonal(), dim1=1, dim2=2)

    def root(self, part: slice | None = None) -> Tensor:
        """Columns S_k with Σ_k S_k S_kᵀ = Λ, `[K, B, C]`: cotangents for K backward passes.

        With w = vec / √diag and q = |w|², S = diag(√diag) − vec wᵀ / (1 + √(1 − q)), K = C; of rows that sum to zero
        the Cholesky factor, whose last column is zero and left out, K = C − 1.

        Args:
            part: Which columns; None for all.

        Raises:
            CurvatureError: A dense Λ has a negative eigenvalue, so that no real root exists.
        """
        part = slice(None) if part is None else part
        if self.dense is not None:
            return _spectral_root(self.dense)[part]
        if self.sums_to_zero:
            root = self._multinomial_root(range(self.n_columns)[part])
            return root if self.weights is None else self.weights.to(root).sqrt().unsqueeze(1) * root
        scale = self.diag.sqrt()
        at = torch.arange(scale.shape[1], device=scale.device)[part]
        root = scale.new_zeros(len(at), *scale.shape)
        root[torch.arange(len(at), device=at.device), :, at] = scale.T[part]
        if self.vec is not None:
            ratio = self.vec / scale.clamp(min=_TINY)
            rest = 1 - ratio.square().sum(1, keepdim=True)
            # A rest within rounding of 0 is the softmax case; its square root would magnify the rounding.
            rest = torch.where(rest > 100 * torch.finfo(rest.dtype).eps, rest, 0.0)
            root = root - self.vec * (ratio / (1 + rest.sqrt())).T[part].unsqueeze(2)
        return root

    def _multinomial_root(self, at: range) -> Tensor:
        """Columns of the Cholesky factor of diag(p) − p pᵀ, `[len(at), B, C]`, consecutive ones."""
        diagonal, below = (part[:, at.start : at.stop] for part in self._multinomial_factor)
        root = (below.unsqueeze(2) * -self.diag.unsqueeze(1)).triu_(at.start + 1)  # [B, len(at), C]
        root.diagonal(at.start, 1, 2).copy_(diagonal)
        return root.transpose(0, 1).contiguous()

    @cached_property
    def _multinomial_factor(self) -> tuple[Tensor, Tensor]:
        """Parts of that factor, `[B, C]` each [Tanabe and Sagae, 1992, eq. 3].

        With q_k = Σ_{i>k} p_i, column k is √(p_k q_k / (p_k + q_k)), the diagonal, times 1 at k and −p_i / q_k below.
        Nothing cancels, so that every entry keeps its digits where p is saturated.
        """
        p = self.diag
        tiny = torch.finfo(p.dtype).tiny
        sums = functional.pad(p.flip(1).cumsum(1).flip(1), (0, 1))  # p_k + q_k, and q_k one further
        here, after = sums[:, :-1], sums[:, 1:]
        diagonal = p.sqrt() * (after / here.clamp(min=tiny)).sqrt()
        return diagonal, diagonal / after.clamp(min=tiny)


_TINY = 1e-30


def columns_of(n_outputs: int, *, sums_to_zero: bool) -> int:
    """Columns of a root of C outputs: C, or C − 1 where rows sum to zero, but one at least."""
    return max(1, n_outputs - 1) if sums_to_zero else n_outputs


def _spectral_root(dense: Tensor) -> Tensor:
    """Eigenvectors times roots of eigenvalues, `[C, B, C]`, of a positive semi-definite `[B, C, C]`."""
    require(
        all_finite([dense]),
        lambda: CurvatureError(
            "the Hessian of the negative log likelihood is NaN or infinite: the network's outputs are far out; look at "
            "the inputs and at the network's weights."
        ),
    )
    values, vectors = eigen.eigh(widened(dense))
    tolerance = 100 * dense.shape[-1] * torch.finfo(dense.dtype).eps * values.abs().amax(1, keepdim=True)
    require(
        values >= -tolerance,
        lambda: CurvatureError(
            f"The Hessian of the negative log likelihood has a negative eigenvalue ({values.min().item():.3g}): it is "
            "not convex in the outputs. Return a Fisher matrix from `hessian`, or use the empirical Fisher."
        ),
    )
    return (vectors * values.clamp(min=0).sqrt().unsqueeze(1)).permute(2, 0, 1).to(dense)
