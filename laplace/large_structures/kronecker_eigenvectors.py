"""Columns of a low-rank matrix that are Kronecker products of two short vectors, multiplied out a few at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace.core import linalg
from laplace.core.cached import cached_property
from laplace.core.inference import kept_for_later
from laplace.core.pieces import bytes_at_once, numbers_at_once
from laplace.core.precision_policy import wide_dtype, widened
from laplace.engines.kron_parts import KronBlock
from laplace.errors import InvalidData
from laplace.jacobian.blocks import CHUNK_BYTES, TensorShape, total

# Dominant eigenvectors of Kronecker factors known by their products alone (Halko et al., 2011).
#
# A factor A is multiplied with random vectors in a first reading of the data, Y = AΩ, and with an orthonormal basis Q
# of Y's range in a second one. Within the range of Q everything is then known: QᵀAQ, of width w instead of n.


class GaussianProbes:
    """Standard normal vectors [Halko et al., 2011, algorithm 4.1], or the identity where those would be no fewer."""

    def __init__(self, width: int, seed: int, device: torch.device) -> None:
        self.width = width  # Vectors per side, w
        self.seed = seed  # Of all draws; that of a side does not depend on which other sides there are
        self.device = device  # Where they are wanted, batch after batch; numbers do not depend on it
        self.drawn: dict[str, Tensor] = {}

    def __call__(self, key: str, groups: int, n: int) -> Tensor:
        if key not in self.drawn:
            self.drawn[key] = self._drawn(key, groups, n).to(self.device, wide_dtype(self.device))
        return self.drawn[key]

    def _drawn(self, key: str, groups: int, n: int) -> Tensor:
        if self.width >= n:
            return torch.eye(n, dtype=wide_dtype()).expand(groups, -1, -1)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {key}".encode()))
        return torch.randn(groups, n, self.width, dtype=wide_dtype(), generator=generator)


@dataclass(frozen=True, eq=False)
class Ranges:
    """A probe of orthonormal bases of the ranges of former products."""

    bases: dict[str, Tensor]  # Q by key, `[G, n, w]`

    @classmethod
    def from_products(cls, products: dict[str, Tensor]) -> Ranges:
        """The ranges of Y by key, `[G, n, w]` or `[E, G, n, w]`, of which the sum over E counts."""
        with kept_for_later():
            return cls({key: _orthonormal(value) for key, value in products.items()})

    def __call__(self, key: str, groups: int, n: int) -> Tensor:
        if key not in self.bases or self.bases[key].shape[:2] != (groups, n):
            raise InvalidData("the layers see other inputs than in the first reading; give the same data every time.")
        return self.bases[key]


def _orthonormal(products: Tensor) -> Tensor:
    """Q `[G, n, w]` in the dtype of the products; the identity where they span everything."""
    total = widened(products.sum(0) if products.ndim == 4 else products)
    groups, n, width = total.shape
    if width >= n:
        return torch.eye(n, dtype=products.dtype, device=products.device).expand(groups, -1, -1)
    return torch.linalg.qr(total)[0].to(products.dtype)


@dataclass(frozen=True, eq=False)
class FactorSide:
    """One side of Kronecker factors as U M_e Uᵀ, positive semi-definite, of low rank."""

    basis: Tensor  # U, orthonormal columns `[G, n, r]`: eigenvectors of the sum of the terms
    cores: Tensor  # M_e, `[E, G, r, r]`; E is 1 for an input side, which all terms share

    @property
    def values(self) -> Tensor:
        """Uᵀ A_e U of single eigenvectors, `[E, G, r]`, float64, without rounding below zero."""
        return widened(self.cores).diagonal(dim1=-2, dim2=-1).clamp(min=0)

    @classmethod
    def from_products(cls, basis: Tensor, products: Tensor, rank: int) -> FactorSide:
        """Dominant part within Q `[G, n, w]`, from A_e Q `[E, G, n, w]` [Halko et al., 2011, algorithm 5.3]."""
        products = products if products.ndim == 4 else products.unsqueeze(0)
        return cls._truncated(basis, widened(basis).mT @ widened(products), rank)

    def added(self, other: FactorSide) -> FactorSide:
        """The dominant part of the sum of two sides, of as many vectors as the wider one has."""
        rank = max(self.basis.shape[-1], other.basis.shape[-1])
        stacked, triangular = torch.linalg.qr(widened(torch.cat([self.basis, other.basis], -1)))
        mine, yours = triangular.split([self.basis.shape[-1], other.basis.shape[-1]], -1)
        cores = mine @ widened(self.cores) @ mine.mT + yours @ widened(other.cores) @ yours.mT
        return self._truncated(stacked.to(self.basis), cores, rank)

    @classmethod
    def _truncated(cls, basis: Tensor, cores: Tensor, rank: int) -> FactorSide:
        """The eigenvectors of Σ_e M_e with the largest eigenvalues; `cores` in float64."""
        cores = 0.5 * (cores + cores.mT)
        vectors = linalg.eigh(_without_ties(cores.sum(0), basis.dtype))[1].flip(-1)[..., :rank]  # the largest first
        return cls(basis @ vectors.to(basis), (vectors.mT @ cores @ vectors).to(basis))


def _without_ties(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices `[G, w, w]`, exact multiples of the identity where they are such but for the rounding of `dtype`.

    Where all outputs of a regression are alike every basis is one of eigenvectors: rounding must not choose it.
    """
    level = total.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    equal = level * torch.eye(total.shape[-1], dtype=total.dtype, device=total.device)
    apart = (total - equal).abs().amax((-2, -1), keepdim=True)
    return torch.where(apart <= linalg.rounding(dtype) * level, equal, total)


_BYTES = 8

_AT_ONCE = 2**16
"""Weights that are computed at once, so that they and what they are made of stay in the cache of one core."""

_FEW_BYTES = 2**20
"""Products of every two columns up to this size are kept, however small the tensor is."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Orthonormal columns u_k = left_k ⊗ right_k, and how much each weighs in every term."""

    left: Tensor  # `[K, M]`, M entries of the first dimension (of all groups: zero outside of a column's own)
    right: Tensor  # `[K, R]`
    values: Tensor  # λ_e, `[E, K]`, none of which is negative
    index: Tensor | None = None  # Random entries within the M · R, `[p]`, or None for all

    def __len__(self) -> int:
        return len(self.left)

    @property
    def size(self) -> int:
        """Number of random entries, p."""
        return self.left.shape[1] * self.right.shape[1] if self.index is None else len(self.index)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive entries of all columns, `[K, n]`, at most about `CHUNK_BYTES` at a time."""
        width = 1 if self.index is not None else self.right.shape[1]
        step = max(1, bytes_at_once(CHUNK_BYTES, self.left.device) // (_BYTES * max(1, len(self)) * width))
        for start in range(0, self.size // width, step):
            stop = min(start + step, self.size // width)
            yield slice(start * width, stop * width), self._entries(start, stop)

    def _entries(self, start: int, stop: int) -> Tensor:
        if self.index is not None:
            at = self.index[start:stop]
            return self.left[:, at // self.right.shape[1]] * self.right[:, at % self.right.shape[1]]
        return (self.left[:, start:stop, None] * self.right[:, None, :]).flatten(1)

    def rows(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """A few whole columns `[n, p]` at a time, at most about `CHUNK_BYTES`, but one."""
        step = max(1, bytes_at_once(CHUNK_BYTES, self.left.device) // (_BYTES * self.size))
        for start in range(0, len(self), step):
            some = slice(start, start + step)
            part = Columns(self.left[some].to(dtype), self.right[some].to(dtype), self.values[:, some], self.index)
            stop = self.size if self.index is not None else part.left.shape[1]
            yield some, part._entries(0, stop)

    def diagonal(self, weights: Tensor) -> Tensor:
        """Σ_k c_k u_k², `[p]`, for weights c `[K]`."""
        full = (weights.unsqueeze(1) * self.left.square()).T @ self.right.square()
        return full.flatten() if self.index is None else full.flatten()[self.index]

    def gram(self, weights: Tensor) -> Tensor:
        """Σ_p w_p u_p u_pᵀ over entries, `[..., K, K]`, for weights w `[..., p]`; differentiable in them.

        Of products, u_kp u_lp = (left_k left_l)(right_k right_l): two products with the weights as a matrix.
        """
        if self._pairs is None:
            return _WeightedGram.apply(weights, self)  # pyright: ignore[reportReturnType]
        rows = slice(0, self.left.shape[1])
        return self._pairs.entries(self._pairs.summed(weights.unflatten(-1, (rows.stop, -1)), rows))

    def gram_of(self, weights: Callable[[slice], Tensor]) -> Tensor:
        """The same for weights that are computed a few at a time, `[..., n]` of a slice, and stay in the cache."""
        pairs = self._pairs
        if pairs is None:
            return self.gram(weights(slice(0, self.size)))
        height, width = self.left.shape[1], self.right.shape[1]
        step = max(1, numbers_at_once(_AT_ONCE, self.left.device) // width)
        rows = (slice(start, min(start + step, height)) for start in range(0, height, step))
        return pairs.entries(
            total(
                pairs.summed(weights(slice(r.start * width, r.stop * width)).unflatten(-1, (-1, width)), r)
                for r in rows
            )
        )

    def forms(self, matrix: Tensor) -> Tensor:
        """Σ_kl u_k M_kl u_l at every entry, `[p]`, for M `[K, K]`."""
        parts = [((matrix @ piece) * piece).sum(0) for _, piece in self.pieces()]
        return torch.cat(parts) if parts else self.left.new_zeros(0)

    @cached_property
    def _pairs(self) -> _Pairs | None:
        """Products of factors of two columns; None where they are not kept, or entries are picked."""
        if self.index is not None or not _pair_bytes(len(self), self.left.shape[1], self.right.shape[1]):
            return None
        return _Pairs(*_products(self.left), *_products(self.right))

    def inside(self, vectors: Tensor) -> Tensor:
        """Σ_p u_p v_p of vectors `[..., p]`, `[..., K]`."""
        total = vectors.new_zeros(*vectors.shape[:-1], len(self))
        for at, piece in self.pieces():
            total = total + vectors[..., at] @ piece.T
        return total

    def combined(self, coordinates: Tensor) -> Tensor:
        """Σ_k c_k u_k of coordinates `[..., K]`, `[..., p]`."""
        return torch.cat([coordinates @ piece for _, piece in self.pieces()], -1)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Products of every two different factors of one side, and of the other; columns share few of them."""

    left: Tensor  # left_k left_l, `[n, M]`
    at_left: Tensor  # Which of them is that of two columns, `[K, K]`
    right: Tensor  # right_k right_l, `[m, R]`
    at_right: Tensor  # Likewise

    def summed(self, weights: Tensor, rows: slice) -> Tensor:
        """The share of some rows of the weights `[..., r, R]` in what `entries` takes; shares add up."""
        some = self.left[:, rows]
        return some @ (weights @ self.right.T) if self._right_first else some @ weights

    def entries(self, summed: Tensor) -> Tensor:
        """Σ_ij w_ij left_ki left_li right_kj right_lj, `[..., K, K]`."""
        products = summed if self._right_first else summed @ self.right.T
        return products[..., self.at_left, self.at_right]

    @property
    def _right_first(self) -> bool:
        """True if the right side has fewer products: those with all weights are the most of the work."""
        return len(self.right) <= len(self.left)


def _products(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Products of every two different factors of `[K, n]`, and which of them is that of two columns, `[K, K]`."""
    different, which = factors.unique(dim=0, return_inverse=True)
    one, other = torch.triu_indices(len(different), len(different), device=factors.device)
    at = one.new_empty(len(different), len(different))
    at[one, other] = at[other, one] = torch.arange(len(one), device=one.device)
    return different[one] * different[other], at[which][:, which]


def _pair_bytes(rank: int, rows: int, columns: int) -> int:
    """Bytes at most of the products of every two columns of a tensor; 0 where they are not kept.

    They are kept where they are few, or no more than the entries of the tensor: beside a narrow side, as an adapter
    has, the products of the wide one would be many times what all else takes.
    """
    size = _BYTES * (rank * (rank + 1) // 2) * (rows + columns)
    return size if size <= min(CHUNK_BYTES, max(_FEW_BYTES, _BYTES * rows * columns)) else 0


def pair_bytes(rank: int, shape: TensorShape) -> int:
    """Bytes of the products of every two of `rank` columns of a tensor, where they are kept."""
    return _pair_bytes(rank, shape.groups * shape.n_outputs, shape.n_inputs)


class _WeightedGram(torch.autograd.Function):
    """Σ_p w_p u_p u_pᵀ. Its gradient u_pᵀ g u_p is computed from the factors again: no `[K, p]` is kept for it."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, columns: Columns) -> Tensor:
        ctx.columns = columns
        total = weights.new_zeros(*weights.shape[:-1], len(columns), len(columns))
        for at, piece in columns.pieces():
            total += (piece * weights[..., at].unsqueeze(-2)) @ piece.T
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Forms.apply(gradients[0], ctx.columns), None  # pyright: ignore[reportReturnType]


class _Forms(torch.autograd.Function):
    """U_pᵀ M u_p at every entry, `[..., p]`, of M `[..., K, K]`; its gradient is a weighted Gram."""

    @staticmethod
    def forward(ctx: Any, matrices: Tensor, columns: Columns) -> Tensor:
        ctx.columns = columns
        flat = matrices.reshape(-1, *matrices.shape[-2:])
        forms = torch.stack([columns.forms(matrix) for matrix in flat])
        return forms.view(*matrices.shape[:-2], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _WeightedGram.apply(gradients[0], ctx.columns), None  # pyright: ignore[reportReturnType]


def none(size: int, like: Tensor) -> Columns:
    """No columns of `size` entries."""
    return Columns(like.new_zeros(0, size), like.new_zeros(0, 1), like.new_zeros(1, 0))


def columns_of(
    block: KronBlock, output: FactorSide, inputs: FactorSide | Tensor | None, positions: float, rank: int
) -> Columns:
    """The columns of a Kronecker-factored block with the largest eigenvalues, float64 [Redux, appendix B, columns].

    `inputs` are counts `[V]` of an embedding, and None of a bias.
    """
    rows, values = _input_values(inputs, output, rank)
    products = values.unsqueeze(3) * output.values.unsqueeze(2) / positions  # [E, G, r_in, r_out]
    return _largest(block, output, inputs, products, rank, rows)


def corrected_columns_of(
    block: KronBlock, output: FactorSide, inputs: FactorSide | Tensor | None, corrected: Tensor, rank: int
) -> Columns:
    """The columns with the largest corrected eigenvalues λ* `[E, G, r_in, r_out]` of all products, float64."""
    return _largest(block, output, inputs, widened(corrected).clamp(min=0), rank)


def _largest(
    block: KronBlock,
    output: FactorSide,
    inputs: FactorSide | Tensor | None,
    values: Tensor,
    rank: int,
    rows: Tensor | None = None,
) -> Columns:
    """The columns with the largest values `[E, G, r_in, r_out]`, with some `rows` of a table, or all of it."""
    totals, dtype = values.sum(0), output.basis.dtype
    order = _first_of(totals.flatten(), rank, linalg.rounding(dtype))
    floor = totals.max() * torch.finfo(dtype).eps
    order = order[totals.flatten()[order] > floor]  # what is less is rounding
    group, i, j = order // totals[0].numel(), order // totals.shape[2] % totals.shape[1], order % totals.shape[2]
    at = i if rows is None else rows[i]
    sides = _input_vectors(inputs, group, at).to(values), widened(output.basis).mT[group, j]
    left, right = sides if block.input_first else sides[::-1]
    groups = torch.nn.functional.one_hot(group, len(totals)).to(left)
    left = (groups.unsqueeze(2) * left.unsqueeze(1)).flatten(1)
    return Columns(left, right, values.flatten(1)[:, order], block.index)


def _first_of(values: Tensor, count: int, rounding: float) -> Tensor:
    """Indices of the largest of non-negative values `[n]`; of those that equal the last but for rounding the first.

    The outputs of a regression all have the same eigenvalues: rounding must not decide which of them have a column.
    """
    last = values.topk(min(count, len(values))).values[-1:]
    level = (values >= (1 - rounding) * last).int() + (values > (1 + rounding) * last)
    return level.argsort(descending=True, stable=True)[:count]


def _input_values(inputs: FactorSide | Tensor | None, output: FactorSide, rank: int) -> tuple[Tensor | None, Tensor]:
    """Eigenvalues `[1, G, r]` of the input side; of counts the largest, with their rows `[r]`."""
    if inputs is None:
        return None, output.basis.new_ones(1, len(output.basis), 1, dtype=wide_dtype(output.basis.device))
    if isinstance(inputs, FactorSide):
        return None, inputs.values
    counts = widened(inputs)
    rows = counts.argsort(descending=True, stable=True)[:rank]
    return rows, counts[rows].reshape(1, 1, -1)


def _input_vectors(inputs: FactorSide | Tensor | None, group: Tensor, at: Tensor) -> Tensor:
    """Vectors `[K, n]` of the input side: of a group, and by their number in it."""
    if inputs is None:
        return torch.ones_like(at).unsqueeze(1)
    if isinstance(inputs, FactorSide):
        return widened(inputs.basis).mT[group, at]
    return torch.nn.functional.one_hot(at, len(inputs))
