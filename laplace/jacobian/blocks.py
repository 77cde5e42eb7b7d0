"""Blocks of the factored Jacobian: one per tensor, closed under selections, folds and changes of basis.

For one tensor, K cotangents u_k and B data, a block stands for

    J[k, b, :] = ∂(u_kᵀ f_b) / ∂(entries of the tensor),    [K, B, p].

With one-hot cotangents it is the Jacobian of the network; with the columns of a root of the output
Hessian, J gives the generalised Gauss–Newton matrix as Σ_kb J Jᵀ; with the loss gradient, the empirical
Fisher. For a layer with inputs a and outputs z, J is a sum of outer products over the positions t that
share the weight, Σ_t g[k, b, t] ⊗ a[b, t], and every method contracts those two factors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from laplace.core.registry import Registry
from laplace.errors import StateError
from laplace.jacobian.contractions import Contractions, KroneckerFactored, ProductBasis, RankOne, TensorShape, total
from laplace.jacobian.rows import by_row, of_each
from laplace.weights.problem import Selection

_ENTRY_COST = 16
"""An entry that is gathered takes about as long as this many in a matrix product."""


class Block(Contractions):
    """Jacobian `[K, B, p]` with respect to the random entries of one tensor.

    A new block gives its sizes, `dense` and `at`, and is right everywhere. Where factors are less work than dense
    values, it overrides the contractions, and what keeps the factors: selections, folds, states.
    """

    # Other data, outputs and entries.

    @abstractmethod
    def at(self, data: slice | Tensor) -> Block:
        """The block of some of the data: a slice, or indices `[n]`."""

    def select_outputs(self, outputs: Tensor) -> Block:
        """K cotangents of every datum, `outputs` `[B, K]`: a block `[K, B, p]`."""
        return DenseBlock(of_each(self.dense(), outputs))

    def select_entries(self, selection: Selection, entries: Tensor) -> Block:
        """Some entries of the tensor: as rows × columns and an index, and the same as flat indices `[q]`."""
        return PickedBlock(self, entries)

    def join(self, others: Sequence[Block]) -> Block:
        """The block with the cotangents of other blocks `[K_i, B, p]` of the same tensor and data appended."""
        return DenseBlock(torch.cat([self.dense(), *(other.dense() for other in others)]))

    def add(self, others: Sequence[Block]) -> Block:
        """The sum with other blocks of the same tensor, cotangents and data: its other uses in the network."""
        return SumBlock((self, *others))

    def at_places(self, present: Tensor) -> Block:
        """The block where some positions stand for none: those count nowhere; their factors are zero.

        Args:
            present: True at the others, `[B, T]`; the layer's own positions, as those of images, are within each.
        """
        del present
        return self

    # Outputs with positions.

    def fold_positions(self, n_positions: int) -> Block | None:
        """A block `[K, B, p]` of a layer with T positions as one of B·T data with one position each.

        That is the Jacobian of rows only where position t of the layer alone reaches row t.

        Returns:
            The block, or None where its positions cannot be told apart, or are not T.
        """
        del n_positions
        return None

    def fold_cotangents(self, n_positions: int) -> Block:
        """A block `[S·C, B, p]` of the cotangents of S positions as one of rows, `[C, B·S, p]`, data major."""
        return DenseBlock(by_row(self.dense(), n_positions))

    # The same values in another form.

    def cast(self, dtype: torch.dtype) -> Block:
        """The block in another dtype."""
        return MappedBlock(self, lambda piece: piece.to(dtype))

    def in_basis(self, basis: ProductBasis) -> Block:
        """The block in another basis of its entries."""
        return MappedBlock(self, basis.rotate, basis.size)

    def detached(self) -> Block:
        """The block as plain tensors, without graphs or references to a network."""
        return DenseBlock(self.dense().detach().contiguous())

    def state(self) -> dict[str, Any]:
        """A detached block as tensors, numbers and strings, its `kind` among `BLOCKS` among them."""
        return DenseBlock(self.dense()).state()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Block:
        """The block of a state of this kind."""
        return cls(**{name: value for name, value in state.items() if name != "kind"})

    # What it is made of.

    @property
    def terms(self) -> tuple[Block, ...]:
        """Blocks of which it is the sum."""
        return (self,)

    @property
    def product(self) -> KroneckerFactored | None:
        """The sum of outer products that it is, or is entries of; None without factors."""
        return None

    @property
    def product_index(self) -> Tensor | None:
        """Indices `[p]` of its entries within `product`; None for all."""
        return None

    def rank_one(self) -> RankOne | None:
        """Factors of a block that is one outer product for every datum and cotangent; None of any other."""
        return None

    def kernel_by_factors(self, other: Block) -> Callable[[], Tensor] | None:
        """The kernel Σ_p J[k, b, p] J'[l, m, p], `[K, B, L, M]`, float64, by factors of both blocks.

        Returns:
            Computes the kernel; None where this block knows no way, or dense pieces are less work.
        """
        del other
        return None

    def shape(self, inputs: Sequence[Tensor]) -> TensorShape:
        """Sizes and form that work and memory depend on.

        Args:
            inputs: Inputs of layers: factors that are views of them are no copies.
        """
        del inputs
        return TensorShape(self.size, n_outputs=self.size)


BLOCKS: Registry[type[Block]] = Registry("kind of block")
"""Blocks that states hold, by name."""


def from_state(state: Mapping[str, Any]) -> Block:
    """The block of a state.

    Raises:
        StateError: Its kind is unknown.
    """
    if state["kind"] not in BLOCKS:
        raise StateError(f"the state holds a block of kind {state['kind']!r}, known are {list(BLOCKS)}.")
    return BLOCKS[state["kind"]].from_state(state)


B = TypeVar("B", bound=Block)


def all_of(kind: type[B], blocks: Sequence[Block]) -> list[B] | None:
    """The blocks, if all are of one kind."""
    alike = [block for block in blocks if isinstance(block, kind)]
    return alike if len(alike) == len(blocks) else None


@dataclass(frozen=True, eq=False)
class DenseBlock(Block):
    """A block that is held multiplied out: small tensors, and parameters without a layer rule.

    Attributes:
        values: `[K, B, p]`.
    """

    values: Tensor

    @property
    def size(self) -> int:
        return self.values.shape[2]

    @property
    def n_cotangents(self) -> int:
        return self.values.shape[0]

    @property
    def n_data(self) -> int:
        return self.values.shape[1]

    def dense(self) -> Tensor:
        return self.values

    def at(self, data: slice | Tensor) -> DenseBlock:
        return DenseBlock(self.values[:, data])

    def cast(self, dtype: torch.dtype) -> DenseBlock:
        return DenseBlock(self.values.to(dtype))

    def state(self) -> dict[str, Any]:
        return {"kind": "dense", "values": self.values}


@dataclass(frozen=True)
class SumBlock(Block):
    """A tensor used several times: contributions of one datum add up before anything is squared."""

    parts: tuple[Block, ...]

    @property
    def size(self) -> int:
        return self.parts[0].size

    @property
    def n_cotangents(self) -> int:
        return self.parts[0].n_cotangents

    @property
    def n_data(self) -> int:
        return self.parts[0].n_data

    @property
    def terms(self) -> tuple[Block, ...]:
        return self.parts

    def _each(self, function: Callable[[Block], Block]) -> SumBlock:
        return SumBlock(tuple(function(part) for part in self.parts))

    def dense(self) -> Tensor:
        return total(part.dense() for part in self.parts)

    def bound(self) -> Tensor:
        return total(part.bound() for part in self.parts)

    def apply(self, vectors: Tensor) -> Tensor:
        return total(part.apply(vectors) for part in self.parts)

    def combined(self, weights: Tensor) -> Tensor:
        return total(part.combined(weights) for part in self.parts)

    def at(self, data: slice | Tensor) -> SumBlock:
        return self._each(lambda part: part.at(data))

    def select_outputs(self, outputs: Tensor) -> SumBlock:
        return self._each(lambda part: part.select_outputs(outputs))

    def select_entries(self, selection: Selection, entries: Tensor) -> SumBlock:
        return self._each(lambda part: part.select_entries(selection, entries))

    def join(self, others: Sequence[Block]) -> Block:
        alike = all_of(SumBlock, others)
        if alike is None:
            return super().join(others)
        parts = zip(self.parts, *(other.parts for other in alike), strict=True)
        return SumBlock(tuple(first.join(rest) for first, *rest in parts))

    def fold_cotangents(self, n_positions: int) -> SumBlock:
        return self._each(lambda part: part.fold_cotangents(n_positions))

    def cast(self, dtype: torch.dtype) -> SumBlock:
        return self._each(lambda part: part.cast(dtype))

    def detached(self) -> SumBlock:
        return self._each(lambda part: part.detached())

    def state(self) -> dict[str, Any]:
        return {"kind": "sum", "parts": [part.state() for part in self.parts]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SumBlock:
        return cls(tuple(from_state(part) for part in state["parts"]))

    def shape(self, inputs: Sequence[Tensor]) -> TensorShape:
        copied = sum(part.shape(inputs).copied for part in self.parts)
        return TensorShape(self.size, n_outputs=self.size, copied=copied)


@dataclass(frozen=True)
class _Wrapper(Block):
    """A block made of another one with the same cotangents and data."""

    whole: Block

    @property
    def n_cotangents(self) -> int:
        return self.whole.n_cotangents

    @property
    def n_data(self) -> int:
        return self.whole.n_data

    def bound(self) -> Tensor:
        return self.whole.bound()


@dataclass(frozen=True)
class MappedBlock(_Wrapper):
    """A block in another basis, where it has no factors to rotate.

    Attributes:
        whole: The block.
        rotate: Maps `[..., p]` to `[..., q]`.
        n_entries: Q, at most p; None for p.
    """

    rotate: Callable[[Tensor], Tensor]
    n_entries: int | None = None

    @property
    def size(self) -> int:
        return self.whole.size if self.n_entries is None else self.n_entries

    def dense(self) -> Tensor:
        return self.rotate(self.whole.dense())

    def pieces(self) -> Iterator[Tensor]:
        return (self.rotate(piece) for piece in self.whole.pieces())

    def at(self, data: slice | Tensor) -> MappedBlock:
        return replace(self, whole=self.whole.at(data))


@dataclass(frozen=True, eq=False)
class PickedBlock(_Wrapper):
    """Single entries of another block (a selection that is not rows × columns).

    Attributes:
        whole: The block they are entries of.
        index: Which entries, `[p]`.
    """

    index: Tensor

    @property
    def size(self) -> int:
        return len(self.index)

    @property
    def gathers(self) -> bool:
        """True for few entries: their products cost less than contractions of the whole block with zeros elsewhere."""
        few = _ENTRY_COST * self.n_cotangents * self.size < self.whole.size
        return few or not self.whole.contracts_factors

    @property
    def product(self) -> KroneckerFactored | None:
        return self.whole.product

    @property
    def product_index(self) -> Tensor | None:
        return self.index

    def dense(self) -> Tensor:
        return self.whole.entries(self.index)

    def at(self, data: slice | Tensor) -> PickedBlock:
        return PickedBlock(self.whole.at(data), self.index)

    def join(self, others: Sequence[Block]) -> Block:
        alike = all_of(PickedBlock, others)
        if alike is None:
            return super().join(others)
        return PickedBlock(self.whole.join([other.whole for other in alike]), self.index)

    def fold_positions(self, n_positions: int) -> PickedBlock | None:
        whole = self.whole.fold_positions(n_positions)
        return None if whole is None else PickedBlock(whole, self.index)

    def fold_cotangents(self, n_positions: int) -> PickedBlock:
        return PickedBlock(self.whole.fold_cotangents(n_positions), self.index)

    def shape(self, inputs: Sequence[Tensor]) -> TensorShape:
        shape = self.whole.shape(inputs)
        return replace(shape, size=self.size, n_outputs=shape.n_outputs if shape.factored else self.size)

    def _spread(self, weights: Tensor) -> Tensor:
        """Weights `[p]` of the entries as those of the whole block, zero elsewhere."""
        return weights.new_zeros(self.whole.size).index_copy(0, self.index, weights)

    def add_squares(self, running: Tensor) -> None:
        if self.gathers:
            super().add_squares(running)
        else:
            self.whole.add_squares(whole := running.new_zeros(self.whole.size))
            running += whole[self.index]

    def squares_apart(self) -> Tensor:
        return super().squares_apart() if self.gathers else self.whole.squares_apart()[:, self.index]

    def weighted_norms(self, weights: Tensor) -> Tensor:
        if self.gathers:
            return super().weighted_norms(weights)
        return self.whole.weighted_norms(self._spread(weights))

    def weighted_gram(self, weights: Tensor) -> Tensor:
        if self.gathers:
            return super().weighted_gram(weights)
        return self.whole.weighted_gram(self._spread(weights))


BLOCKS.register("dense")(DenseBlock)
BLOCKS.register("sum")(SumBlock)
