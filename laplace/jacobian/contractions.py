"""Contractions of an array J `[K, B, p]`, right for every subclass: by dense pieces that are made and dropped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import reduce

import torch
from torch import Tensor

from laplace.core.gram import row_gram

CHUNK_BYTES = 32 * 2**20
"""Bytes of a dense per-layer piece [K, b, p] that is contracted and dropped as it is made."""


class Contractions(ABC):
    """An array J `[K, B, p]` and its contractions.

    Sizes, `dense` and `at` are abstract. All else follows from them by dense pieces; a subclass that holds factors
    contracts these instead.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of entries p."""

    @property
    @abstractmethod
    def n_cotangents(self) -> int:
        """Number of cotangents K."""

    @property
    @abstractmethod
    def n_data(self) -> int:
        """Number of data B."""

    @abstractmethod
    def dense(self) -> Tensor:
        """`[K, B, p]`."""

    @abstractmethod
    def at(self, data: slice | Tensor) -> Contractions:
        """The array of some of the data: a slice, or indices `[n]`."""

    @property
    def contracts_factors(self) -> bool:
        """True if contractions with weights take factors alone, and no dense pieces."""
        return False

    def bound(self) -> Tensor:
        """A cheap upper bound of the Frobenius norm of J, 0-dim: the scale against which errors are judged."""
        return self.dense().norm()

    def entries(self, index: Tensor) -> Tensor:
        """Columns of the dense array, `[K, B, len(index)]`."""
        return torch.cat([piece[..., index] for piece in self.pieces()], 1)

    def by_output(self) -> Tensor:
        """The dense array with a row for every datum and output, `[B·K, p]`."""
        return self.dense().transpose(0, 1).flatten(0, 1)

    def pieces(self) -> Iterator[Tensor]:
        """Dense pieces `[K, b, p]` over consecutive data, each at most about `CHUNK_BYTES`."""
        per_datum = self.n_cotangents * self.size * 8
        step = max(1, CHUNK_BYTES // per_datum)
        for start in range(0, self.n_data, step):
            yield self.at(slice(start, start + step)).dense()

    def sum_of_squares(self, *, apart: bool = False) -> Tensor:
        """Σ J² over data and cotangents, `[1, p]`, or over data with the cotangents `apart`, `[K, p]`."""
        if apart:
            return total(piece.square().sum(1) for piece in self.pieces())
        return total(piece.square().flatten(0, 1).sum(0, keepdim=True) for piece in self.pieces())

    def weighted_norms(self, weights: Tensor) -> Tensor:
        """Σ_p J² w, `[B, K]`, for weights `[p]`."""
        return torch.cat([(piece.square() @ weights).T for piece in self.pieces()])

    def weighted_gram(self, weights: Tensor) -> Tensor:
        """Σ_p J_k w J_l, `[B, K, K]`, for weights `[p]`, summed in their dtype: in float64 what is to be factored."""
        return torch.cat([row_gram(piece.transpose(0, 1), weights) for piece in self.pieces()])

    def weighted_norms_each(self, weights: Tensor) -> Tensor:
        """The norms of n weights `[n, p]`, `[n, B, K]`: pieces are made once for all."""
        if self.contracts_factors:
            return torch.vmap(self.weighted_norms)(weights)
        return torch.cat([torch.einsum("kbp,np->nbk", piece.square(), weights) for piece in self.pieces()], 1)

    def weighted_gram_each(self, weights: Tensor) -> Tensor:
        """The Grams of n weights `[n, p]`, `[n, B, K, K]`: pieces are made once for all."""
        if self.contracts_factors:
            return torch.vmap(self.weighted_gram)(weights)
        grams: list[Tensor] = []
        for piece in self.pieces():
            rows = piece.transpose(0, 1)  # [b, K, p]
            grams.append(torch.stack([row_gram(rows, weight) for weight in weights]))
        return torch.cat(grams, 1)

    def apply(self, vectors: Tensor) -> Tensor:
        """J v, `[S, B, K]`, for vectors `[S, p]`."""
        return torch.cat([torch.einsum("kbp,sp->sbk", piece, vectors) for piece in self.pieces()], 1)

    def pull(self, cotangents: Tensor) -> Tensor:
        """Σ_kb c_kb J_kb, `[p]`, for scalars `[K, B]`."""
        result, start = cotangents.new_zeros(self.size), 0
        for piece in self.pieces():
            stop = start + piece.shape[1]
            result = result + torch.einsum("kbp,kb->p", piece, cotangents[:, start:stop])
            start = stop
        return result


def total(parts: Iterable[Tensor]) -> Tensor:
    """Sum of tensors."""
    return reduce(torch.add, parts)
