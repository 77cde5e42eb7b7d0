"""Blocks of groups of rows: a group is one datum, whose outputs are those of all of its rows.

What a structure contracts datum by datum, J_b P⁻¹ J_bᵀ, is then the joint covariance within every group, and nothing
between groups is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.jacobian.blocks import Block
from laplace.jacobian.contractions import CHUNK_BYTES, ProductBasis, RankOne


@dataclass(frozen=True, eq=False)
class GroupedBlock(Block):
    """A block `[K, b·n, p]` of b·n rows as one of b groups, `[n·K, b, p]`: rows of a group major, cotangents minor.

    Attributes:
        whole: The block of the rows.
        group_size: n.
    """

    whole: Block
    group_size: int

    @property
    def size(self) -> int:
        return self.whole.size

    @property
    def n_cotangents(self) -> int:
        return self.group_size * self.whole.n_cotangents

    @property
    def n_data(self) -> int:
        return self.whole.n_data // self.group_size

    def _grouped(self, values: Tensor) -> Tensor:
        """Values `[K, b·n, …]` as `[n·K, b, …]`."""
        return values.unflatten(1, (-1, self.group_size)).movedim(2, 0).flatten(0, 1)

    def at(self, data: slice | Tensor) -> GroupedBlock:
        if isinstance(data, slice):
            start, stop, _ = data.indices(self.n_data)
            return replace(self, whole=self.whole.at(slice(start * self.group_size, stop * self.group_size)))
        rows = data.unsqueeze(1) * self.group_size + torch.arange(self.group_size, device=data.device)
        return replace(self, whole=self.whole.at(rows.flatten()))

    def cast(self, dtype: torch.dtype) -> GroupedBlock:
        return replace(self, whole=self.whole.cast(dtype))

    def in_basis(self, basis: ProductBasis) -> GroupedBlock:
        return replace(self, whole=self.whole.in_basis(basis))

    def kernel_by_factors(self, other: Block) -> Callable[[], Tensor] | None:
        kernel = self.whole.kernel_by_factors(other)
        return None if kernel is None else lambda: self._grouped(kernel())

    # Contractions: those of single rows are the rows' own.

    @property
    def contracts_factors(self) -> bool:
        return self.whole.rank_one() is not None

    def dense(self) -> Tensor:
        return self._grouped(self.whole.dense())

    def bound(self) -> Tensor:
        return self.whole.bound()

    def entries(self, index: Tensor) -> Tensor:
        return self._grouped(self.whole.entries(index))

    def apply(self, vectors: Tensor) -> Tensor:
        return self.whole.apply(vectors).unflatten(1, (-1, self.group_size)).flatten(2)

    def weighted_norms(self, weights: Tensor) -> Tensor:
        return self.whole.weighted_norms(weights).unflatten(0, (-1, self.group_size)).flatten(1)

    def weighted_gram(self, weights: Tensor) -> Tensor:
        """Gram within every group; of outer products Σ_o g_ko (Σ_i a_i w_oi a'_i) g'_lo, without dense pieces."""
        factors = self.whole.rank_one()
        if factors is None:
            return super().weighted_gram(weights)
        shape = (-1, factors.n_outputs) if factors.input_first else (factors.n_outputs, -1)
        matrix = weights.view(shape) if factors.input_first else weights.view(shape).T  # [I, O]
        per_group = 8 * self.group_size**2 * (sum(matrix.shape) + self.whole.n_cotangents * factors.n_outputs)
        step = max(1, CHUNK_BYTES // per_group) * self.group_size
        factors = factors.to(weights.dtype)
        parts = [self._gram(factors, matrix, slice(i, i + step)) for i in range(0, self.whole.n_data, step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gram(self, factors: RankOne, matrix: Tensor, rows: slice) -> Tensor:
        """The Gram of some of the groups, `[b, n·K, n·K]`, for weights `[I, O]`."""
        a = factors.a[rows].unflatten(0, (-1, self.group_size))
        between = (a.unsqueeze(2) * a.unsqueeze(1)) @ matrix  # [b, n, n, O]
        if factors.g is None:
            values = torch.diag_embed(between)  # an output of a head has weights of its own
        else:
            g = factors.g[:, rows].movedim(0, 1).unflatten(0, (-1, self.group_size))  # [b, n, K, O]
            values = (g.unsqueeze(2) * between.unsqueeze(3)) @ g.unsqueeze(1).mT  # [b, n, n, K, K]
        return values.transpose(2, 3).flatten(3).flatten(1, 2)
