"""Products with a matrix by layers, without J: of a matrix the inputs are contracted first, then the outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace.jacobian.blocks import CHUNK_BYTES, Block, RankOne, total
from laplace.jacobian.packed import SymmetricForm, products, strips
from laplace.jacobian.pairs import Pairs, Part


class PairedMatrix:
    """A symmetric matrix S, pair by pair, and its products J_b S J_bᵀ; differentiable in both.

    Args:
        pairs: The parts of the blocks.
        matrix: S, `[P, P]`.
    """

    def __init__(self, pairs: Pairs, matrix: Tensor) -> None:
        self.pairs = pairs
        self.values = {(i, j): self._ordered(matrix, i, j) for i, j in pairs}

    def _ordered(self, matrix: Tensor, i: int, j: int) -> Tensor:
        """Values of a pair, `[I·I', O·O']`, of a layer with itself few numbers twice; of what is multiplied out S."""
        one, other = self.pairs.parts[i], self.pairs.parts[j]
        values = one.picked(other, matrix)
        if i != j:
            return values.flatten(2).flatten(0, 1)
        if not one.is_product:
            return values[0, 0].contiguous()
        return torch.cat([strip.weighed(values) for strip in strips(one.n_inputs)])

    def products(self, blocks: Sequence[Block], *, diagonal: bool = False) -> Tensor:
        """J_b S J_bᵀ `[B, K, K]`, or its diagonals `[B, K]`, in the dtype of S."""
        dtype = next(iter(self.values.values())).dtype
        parts: list[Tensor] = []
        for _, factors in self.pairs.factors(blocks, dtype):
            terms = (self._product(factors, i, j, diagonal=diagonal) for i, j in self.values)
            parts.append(total(terms))
        return torch.cat(parts)

    def _product(self, factors: Sequence[RankOne], i: int, j: int, *, diagonal: bool) -> Tensor:
        """The terms of two parts, `[b, K, K]` or `[b, K]`; of two different ones in either order."""
        one, other, values = factors[i], factors[j], self.values[i, j]
        if i == j and not self.pairs.parts[i].is_product:
            between = values
        elif i == j:
            strip_products = (strip.inputs(one.a) @ values[strip.at] for strip in strips(one.a.shape[1]))
            between = SymmetricForm(one.n_outputs).completed(total(strip_products))
        else:
            between = (products(one.a, other.a) @ values).unflatten(1, (one.n_outputs, -1))  # [b, O, O']
        left = between if one.g is None else one.by_datum() @ between
        if diagonal:
            own = left.diagonal(dim1=1, dim2=2) if other.g is None else (left * other.by_datum()).sum(2)
            return own if i == j else 2 * own
        product = left if other.g is None else left @ other.by_datum().mT
        return product if i == j else product + product.mT


def jacobian_product(pairs: Pairs, blocks: Sequence[Block], matrix: Tensor) -> Tensor:
    """J_b M of every datum, `[B, K, Q]`, for M `[P, Q]`: g_b (M a_b) of every layer, little more than B·P·Q products.

    Args:
        pairs: The parts of the blocks.
        blocks: J.
        matrix: M, in the dtype of the product.
    """
    result: list[Tensor] = []
    for _, factors in pairs.factors(blocks, matrix.dtype):
        widest = len(factors[0].a) * max(part.n_outputs for part in pairs.parts if part.is_product)
        columns = matrix.split(max(1, CHUNK_BYTES // (8 * widest)), 1)
        each = list(zip(pairs.parts, factors, strict=True))
        result.append(torch.cat([total(_times(part, own, some) for part, own in each) for some in columns], 2))
    return torch.cat(result)


def _times(part: Part, factors: RankOne, matrix: Tensor) -> Tensor:
    """The term of one part, `[b, K, q]`."""
    if not part.is_product:
        return factors.by_datum() @ torch.cat([matrix[entries] for entries in part.slices])
    terms: list[Tensor] = []
    for piece, entries, inputs, _ in part.pieces():
        terms.append(factors.a[:, inputs] @ piece.rows(matrix[entries]))
    outputs = total(terms).transpose(0, 1)  # [b, O, q]
    return outputs if factors.g is None else factors.by_datum() @ outputs
