"""Blocks of the factored Jacobian: what can be contracted, and the blocks that hold or compute dense values.

For one treated tensor, K cotangents u_k and B data, a block stands for

    J[k, b, :] = ∂(u_kᵀ f_b) / ∂(entries of the tensor),    [K, B, p].

With one-hot cotangents it is the Jacobian of the network; with the columns of a root of the output
Hessian, J gives the generalised Gauss–Newton matrix as Σ_kb J Jᵀ; with the loss gradient, the empirical
Fisher. For a layer with inputs a and outputs z, J is a sum of outer products over the positions t that
share the weight, Σ_t g[k, b, t] ⊗ a[b, t], and every method contracts those two factors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from laplace.core.gram import row_gram

_ENTRY_COST = 16
"""An entry that is gathered takes about as long as this many in a matrix product."""

CHUNK_BYTES = 32 * 2**20
"""Bytes of a dense per-layer piece [K, b, p] that is contracted and dropped as it is made."""


class Block(ABC):
    """Jacobian with respect to the treated entries of one tensor.

    Attributes:
        size: p, the number of treated entries.
        n_cotangents: K.
        n_data: B.
    """

    size: int
    n_cotangents: int
    n_data: int

    @abstractmethod
    def dense(self) -> Tensor:
        """`[K, B, p]`."""

    @abstractmethod
    def rows(self, index: slice) -> Block:
        """The block of a slice of the data."""

    @property
    def multiplies_out(self) -> bool:
        """Whether contractions with weights go through dense pieces, since the block has no factors for them."""
        return True

    def entries(self, index: Tensor) -> Tensor:
        """Columns of the dense block, `[K, B, len(index)]`."""
        return torch.cat([piece[..., index] for piece in self.pieces()], 1)

    def by_output(self) -> Tensor:
        """The dense block with a row for every datum and output, `[B·K, p]`."""
        return self.dense().expand(-1, self.n_data, -1).transpose(0, 1).flatten(0, 1)

    def pieces(self) -> Iterator[Tensor]:
        """Dense pieces `[K, b, p]` over consecutive data, each at most about `CHUNK_BYTES`."""
        per_datum = self.n_cotangents * self.size * 8
        step = max(1, CHUNK_BYTES // per_datum)
        for start in range(0, self.n_data, step):
            yield self.rows(slice(start, start + step)).dense()

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

    def apply(self, vectors: Tensor) -> Tensor:
        """J v, `[S, B, K]`, for vectors `[S, p]`."""
        return torch.cat([torch.einsum("kbp,sp->sbk", piece, vectors) for piece in self.pieces()], 1)

    def cast(self, dtype: torch.dtype) -> Block:
        """The block in another dtype."""
        return MappedBlock(self, lambda piece: piece.to(dtype))

    def pull(self, cotangents: Tensor) -> Tensor:
        """Σ_kb c_kb J_kb, `[p]`, for scalars `[K, B]`."""
        result, start = cotangents.new_zeros(self.size), 0
        for piece in self.pieces():
            stop = start + piece.shape[1]
            result = result + torch.einsum("kbp,kb->p", piece, cotangents[:, start:stop])
            start = stop
        return result

    @abstractmethod
    def bound(self) -> Tensor:
        """A cheap upper bound of the Frobenius norm of J, 0-dim: the scale against which errors are judged."""


def total(parts: Iterable[Tensor]) -> Tensor:
    """Sum of tensors."""
    return reduce(torch.add, parts)


@dataclass(frozen=True)
class DenseBlock(Block):
    """A block that is held multiplied out: small tensors, and parameters without a layer rule.

    Attributes:
        values: `[K, B, p]`.
    """

    values: Tensor

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.values.shape[2]

    @property
    def n_cotangents(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.values.shape[0]

    @property
    def n_data(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.values.shape[1]

    def dense(self) -> Tensor:
        return self.values

    def bound(self) -> Tensor:
        return self.values.norm()

    def rows(self, index: slice) -> Block:
        return DenseBlock(self.values[:, index])

    def cast(self, dtype: torch.dtype) -> Block:
        return DenseBlock(self.values.to(dtype))


@dataclass(frozen=True)
class LazyBlock(Block):
    """A dense block that is too large to hold: pieces are computed when they are asked for.

    Attributes:
        compute: Gives `[K, b, p]` of a slice of the data.
        size: p.
        n_cotangents: K.
        span: First and last + 1 datum of this block.
        norm: The bound.
    """

    compute: Callable[[slice], Tensor]
    size: int
    n_cotangents: int
    span: tuple[int, int]
    norm: Tensor

    @property
    def n_data(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.span[1] - self.span[0]

    def dense(self) -> Tensor:
        return self.compute(slice(*self.span))

    def bound(self) -> Tensor:
        return self.norm

    def rows(self, index: slice) -> Block:
        start, stop, _ = index.indices(self.n_data)
        return replace(self, span=(self.span[0] + start, self.span[0] + stop))


@dataclass(frozen=True)
class SumBlock(Block):
    """A tensor used several times: contributions of one datum add up before anything is squared."""

    parts: tuple[Block, ...]

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.parts[0].size

    @property
    def n_cotangents(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.parts[0].n_cotangents

    @property
    def n_data(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.parts[0].n_data

    def dense(self) -> Tensor:
        return reduce(torch.add, (part.dense() for part in self.parts))

    def bound(self) -> Tensor:
        return total(part.bound() for part in self.parts)

    def rows(self, index: slice) -> Block:
        return SumBlock(tuple(part.rows(index) for part in self.parts))

    def cast(self, dtype: torch.dtype) -> Block:
        return SumBlock(tuple(part.cast(dtype) for part in self.parts))

    def apply(self, vectors: Tensor) -> Tensor:
        return total(part.apply(vectors) for part in self.parts)


@dataclass(frozen=True)
class JoinedBlock(Block):
    """The tensors of one layer side by side, where they share a basis.

    Attributes:
        parts: A block of every tensor, in the order of their entries.
    """

    parts: tuple[Block, ...]

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sum(part.size for part in self.parts)

    @property
    def n_cotangents(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.parts[0].n_cotangents

    @property
    def n_data(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.parts[0].n_data

    def dense(self) -> Tensor:
        return torch.cat([part.dense().expand(-1, self.n_data, -1) for part in self.parts], 2)

    def bound(self) -> Tensor:
        return total(part.bound() for part in self.parts)

    def rows(self, index: slice) -> Block:
        return JoinedBlock(tuple(part.rows(index) for part in self.parts))


@dataclass(frozen=True)
class MappedBlock(Block):
    """A block in another basis, where it has no factors to rotate.

    Attributes:
        whole: The block.
        rotate: Maps `[..., p]` to `[..., p]`.
    """

    whole: Block
    rotate: Callable[[Tensor], Tensor]

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.whole.size

    @property
    def n_cotangents(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.whole.n_cotangents

    @property
    def n_data(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.whole.n_data

    def dense(self) -> Tensor:
        return self.rotate(self.whole.dense())

    def bound(self) -> Tensor:
        return self.whole.bound()

    def rows(self, index: slice) -> Block:
        return MappedBlock(self.whole.rows(index), self.rotate)


@dataclass(frozen=True)
class PickedBlock(Block):
    """Single entries of another block (a selection that is not rows × columns).

    Attributes:
        whole: The block they are entries of.
        index: Which entries, `[p]`.
    """

    whole: Block
    index: Tensor

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.index)

    @property
    def n_cotangents(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.whole.n_cotangents

    @property
    def n_data(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.whole.n_data

    @property
    def multiplies_out(self) -> bool:
        """True for few entries: their products cost less than contractions of the whole block with zeros elsewhere."""
        return self.whole.multiplies_out or _ENTRY_COST * self.n_cotangents * self.size < self.whole.size

    def dense(self) -> Tensor:
        return self.whole.entries(self.index)

    def bound(self) -> Tensor:
        return self.whole.bound()

    def rows(self, index: slice) -> Block:
        return PickedBlock(self.whole.rows(index), self.index)

    def _spread(self, weights: Tensor) -> Tensor:
        """Weights `[p]` of the entries as those of the whole block, zero elsewhere."""
        return weights.new_zeros(self.whole.size).index_copy(0, self.index, weights)

    def sum_of_squares(self, *, apart: bool = False) -> Tensor:
        if self.multiplies_out:
            return super().sum_of_squares(apart=apart)
        return self.whole.sum_of_squares(apart=apart)[:, self.index]

    def weighted_norms(self, weights: Tensor) -> Tensor:
        return (
            super().weighted_norms(weights) if self.multiplies_out else self.whole.weighted_norms(self._spread(weights))
        )

    def weighted_gram(self, weights: Tensor) -> Tensor:
        return (
            super().weighted_gram(weights) if self.multiplies_out else self.whole.weighted_gram(self._spread(weights))
        )
