"""Dominant eigenpairs of a symmetric operator that is known by its products alone (Halko et al., 2011, §4.5, §5.3).

Blocks of vectors are rows `[l, P]`, long and few. They are rotated in place, by chunks, with small matrices in float64,
so that a block is never copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core import eigen
from laplace.core.pieces import bytes_at_once
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import standard_normal

_CHUNK_BYTES = 2**22
"""Bytes of float64 that are worked on at once: they stay in a processor's cache."""

_PASSES = 5
"""Rotations after which rows are orthonormal; two or three do, more are for rows that are nearly dependent."""

_CLUSTER = 100
"""Units of rounding of the largest eigenvalue, per direction, by which equal eigenvalues may differ."""

_NOISE = 8
"""Rows up to so many units of rounding of the longest one are no directions of their own."""


def chunks(*blocks: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Columns of blocks `[·, P]` side by side, at most about `_CHUNK_BYTES` of float64 each."""
    step = max(1, bytes_at_once(_CHUNK_BYTES, blocks[0].device) // (8 * max(1, *(len(block) for block in blocks))))
    return zip(*(block.split(step, 1) for block in blocks), strict=True)


def inner(left: Tensor, right: Tensor, weights: Tensor | None = None) -> Tensor:
    """Inner products of rows `[l, P]` and `[m, P]`, with weights `[P]` if given: `[l, m]` in float64."""
    total = torch.zeros(len(left), len(right), dtype=wide_dtype(left.device), device=left.device)
    if weights is None:
        for a, b in chunks(left, right):
            a64 = widened(a)
            total += a64 @ (a64 if left is right else widened(b)).T
    else:
        for a, b, w in chunks(left, right, weights.unsqueeze(0)):
            total += (widened(a) * widened(w)) @ widened(b).T
    return total


def quadratic_forms(rows: Tensor, matrix: Tensor) -> Tensor:
    """q_pᵀ M q_p of every column q_p of rows `[l, P]`, `[P]` in float64."""
    parts = [((matrix @ widened(part)) * widened(part)).sum(0) for (part,) in chunks(rows)]
    return torch.cat(parts)


def rotate_(rows: Tensor, matrix: Tensor) -> None:
    """Replaces rows `[l, P]` by `matrix` `[l, l]` times them."""
    for (part,) in chunks(rows):
        part.copy_(matrix @ widened(part))


def rotated(rows: Tensor, matrix: Tensor) -> Tensor:
    """`matrix` `[m, l]` times rows `[l, P]`, in the dtype of the rows."""
    result = rows.new_empty(len(matrix), rows.shape[1])
    for source, target in chunks(rows, result):
        target.copy_(matrix @ widened(source))
    return result


def orthonormalise_(rows: Tensor) -> Tensor:
    """Makes rows `[l, P]` an orthonormal basis of their span, in place; rows beyond its dimension become zero.

    The rows are rotated by the eigenvectors of their Gram matrix and then scaled to unit length. Unlike Cholesky's
    factor, that exists for dependent rows. One rotation is as good as the condition of the Gram matrix, which it
    improves: it is repeated until the rows are orthonormal to rounding.
    """
    eps = torch.finfo(rows.dtype).eps
    for _ in range(_PASSES if len(rows) else 0):
        gram = inner(rows, rows)
        lengths = gram.diagonal().sqrt()
        independent = lengths > _NOISE * eps * lengths.max()
        scale = torch.where(independent, 1 / lengths.where(independent, 1.0), 0.0)
        gram = scale.unsqueeze(1) * gram * scale
        if (gram - torch.diag(independent.to(gram))).abs().max() <= _NOISE * eps:
            rows.mul_(scale.unsqueeze(1).to(rows))
            break
        vectors = eigen.eigh(gram)[1]
        rotate_(rows, vectors.T * scale)
    return rows


@dataclass(frozen=True, eq=False)
class RitzPairs:
    """Approximate eigenpairs, the largest absolute eigenvalue first."""

    vectors: Tensor  # U, orthonormal rows `[l, P]`
    values: Tensor  # λ, `[l]`, float64
    residuals: Tensor  # ‖H u − λ u‖ of every pair, `[l]`, float64


def rayleigh_ritz_(basis: Tensor, products: Tensor) -> RitzPairs:
    """Eigenpairs of H within the span of an orthonormal basis Q, from T = Qᵀ H Q [Halko et al., 2011, algorithm 5.3].

    They overwrite both. Q and H Q are rows `[l, P]`; zero rows of Q are passed over.
    """
    small = inner(basis, products)
    values, vectors = eigen.eigh(0.5 * (small + small.T))
    order = values.abs().argsort(descending=True)
    values, rotation = values[order], vectors[:, order].T
    squares = torch.zeros_like(values)
    for q, product in chunks(basis, products):
        u = rotation @ widened(q)
        squares += (rotation @ widened(product) - values.unsqueeze(1) * u).square().sum(1)
        q.copy_(u)
    return RitzPairs(basis, values, squares.sqrt())


def leading(pairs: RitzPairs, count: int, seed: int) -> Tensor:
    """The first eigenvectors `[count, P]`.

    Of several that share the eigenvalue at the cut, any choice is as good, and rounding would make it, so that it
    depended on the batches; it falls to those that fixed random vectors point to.
    """
    last, sizes = max(0, count - 1), pairs.values.abs()
    eps = torch.finfo(pairs.vectors.dtype).eps
    near = _CLUSTER * len(sizes) * eps * sizes.max(0, keepdim=True).values
    # Small eigenvalues are known better than to rounding of the largest: those that differ stay apart.
    near = torch.minimum(near, math.sqrt(eps) * sizes[last : last + 1])
    group = ((pairs.values - pairs.values[last : last + 1]).abs() <= near).nonzero().flatten()
    inside = int((group < count).sum())
    if inside == len(group):
        return pairs.vectors[:count].clone()
    generator = torch.Generator().manual_seed(seed)
    probes = standard_normal((inside, pairs.vectors.shape[1]), pairs.vectors, generator)
    chosen = torch.linalg.qr(inner(probes, pairs.vectors[group]).T)[0].T
    first = pairs.vectors[:count].clone()
    first[group[:inside]] = rotated(pairs.vectors[group], chosen)
    return first
