"""The factored Jacobian: blocks of factors that are contracted, and nearly never multiplied out.

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

CHUNK_BYTES = 32 * 2**20
"""Bytes of a dense per-layer piece [K, b, p] that is contracted and dropped as it is made."""


class Block(ABC):
    """Jacobian with respect to the treated entries of one tensor."""

    size: int
    n_cotangents: int
    n_data: int

    @abstractmethod
    def dense(self) -> Tensor:
        """`[K, B, p]`."""

    @abstractmethod
    def rows(self, index: slice) -> Block:
        """The block of a slice of the data."""

    def pieces(self) -> Iterator[Tensor]:
        """Dense pieces `[K, b, p]` over consecutive data, each at most about `CHUNK_BYTES`."""
        per_datum = self.n_cotangents * self.size * 8
        step = max(1, CHUNK_BYTES // per_datum)
        for start in range(0, self.n_data, step):
            yield self.rows(slice(start, start + step)).dense()

    def sum_of_squares(self) -> Tensor:
        """Σ_b J², per cotangent, `[K, p]`."""
        return _total(piece.square().sum(1) for piece in self.pieces())

    def weighted_norms(self, weights: Tensor) -> Tensor:
        """Σ_p J² w, `[B, K]`, for weights `[p]`."""
        return torch.cat([(piece.square() @ weights).T for piece in self.pieces()])

    def weighted_gram(self, weights: Tensor) -> Tensor:
        """Σ_p J_k w J_l, `[B, K, K]`, for weights `[p]`."""
        return torch.cat([_gram(piece.transpose(0, 1), weights) for piece in self.pieces()])

    def apply(self, vectors: Tensor) -> Tensor:
        """J v, `[S, B, K]`, for vectors `[S, p]`."""
        return torch.cat([torch.einsum("kbp,sp->sbk", piece, vectors) for piece in self.pieces()], 1)

    def pull(self, cotangents: Tensor) -> Tensor:
        """Σ_kb c_kb J_kb, `[p]`, for scalars `[K, B]`."""
        total, start = cotangents.new_zeros(self.size), 0
        for piece in self.pieces():
            stop = start + piece.shape[1]
            total = total + torch.einsum("kbp,kb->p", piece, cotangents[:, start:stop])
            start = stop
        return total

    @abstractmethod
    def bound(self) -> Tensor:
        """A cheap upper bound of the Frobenius norm of J, 0-dim: the scale against which errors are judged."""


def _total(parts: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def _gram(piece: Tensor, weights: Tensor) -> Tensor:
    """Σ_p J_k w J_l of a batch-first piece `[b, K, p]`."""
    return (piece * weights) @ piece.transpose(1, 2)


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


@dataclass(frozen=True)
class OuterBlock(Block):
    """Σ_t g ⊗ a of a linear or convolutional weight, or Σ_t g of its bias.

    Attributes:
        a: Inputs `[B, T, G, I]` of the G groups, or None for a bias (all ones, I = 1).
        g: Output gradients `[K, B, T, G, O]`; `[K, 1, 1, 1, K]`, an identity, for a head whose outputs are f.
        n_data: B.
        input_first: The tensor's layout is (G·I, O) instead of (G·O, I): transposed convolutions.
        identity: g is the identity: the layer's outputs are the network's.
    """

    a: Tensor | None
    g: Tensor
    n_data: int
    input_first: bool = False
    identity: bool = False

    @property
    def groups(self) -> int:
        """G, the number of groups with weights of their own."""
        return self.g.shape[3]

    @property
    def n_inputs(self) -> int:
        """I, inputs of a group."""
        return 1 if self.a is None else self.a.shape[3]

    @property
    def n_positions(self) -> int:
        """T, positions that share the weight."""
        return self.g.shape[2]

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.groups * self.g.shape[4] * self.n_inputs

    @property
    def n_cotangents(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.g.shape[0]

    def rows(self, index: slice) -> OuterBlock:
        a = None if self.a is None else self.a[index]
        count = len(range(*index.indices(self.n_data)))
        return replace(self, a=a, g=self.g if self.identity else self.g[:, index], n_data=count)

    def dense(self) -> Tensor:
        g = self.g.expand(-1, self.n_data, -1, -1, -1) if self.identity else self.g
        if self.a is None:
            return g.sum(2).flatten(2)
        order = "kbgio" if self.input_first else "kbgoi"
        return torch.einsum(f"kbtgo,btgi->{order}", g, self.a).flatten(2)

    def bound(self) -> Tensor:
        return self.g.norm() * (self.n_positions**0.5 if self.a is None else self.a.norm())

    def pull(self, cotangents: Tensor) -> Tensor:
        if self.a is None or self.identity:
            return super().pull(cotangents)
        order = "gio" if self.input_first else "goi"
        return torch.einsum(f"kbtgo,btgi->{order}", self.g * cotangents[:, :, None, None, None], self.a).flatten()

    def project(self, output_basis: Tensor, input_basis: Tensor | None) -> OuterBlock:
        """The block in other bases: g U_g `[G, O, O']` and a U_a `[G, I, I']` (None leaves a as it is)."""
        a = self.a if self.a is None or input_basis is None else _rotate(self.a, input_basis)
        return replace(self, a=a, g=_rotate(self.g, output_basis))

    def restrict(self, rows: Tensor | None, cols: Tensor | None) -> OuterBlock:
        """The sub-matrix rows × columns of an ungrouped weight."""
        outputs, inputs = (cols, rows) if self.input_first else (rows, cols)
        g = self.g if outputs is None else self.g[..., outputs]
        a = self.a if inputs is None or self.a is None else self.a[..., inputs]
        return replace(self, a=a, g=g)

    def _matrix(self, weights: Tensor) -> Tensor:
        """Weights `[p]` as `[G, O, I]`."""
        shape = (self.groups, self.n_inputs, -1) if self.input_first else (self.groups, -1, self.n_inputs)
        matrix = weights.view(shape)
        return matrix.transpose(1, 2) if self.input_first else matrix

    def _pulled(self, weights: Tensor) -> Tensor:
        """Σ_i a² w of an unshared weight, `[B, G, O]` (`[1, G, O]` for a bias): what is left to meet g²."""
        matrix = self._matrix(weights)
        if self.a is None:
            return matrix[None, ..., 0]
        return torch.einsum("bgi,goi->bgo", self.a[:, 0].square(), matrix)

    # With one position, squares of the sum are products of squares and no dense piece is needed.

    def sum_of_squares(self) -> Tensor:
        if self.n_positions > 1 or self.a is None:
            return super().sum_of_squares()
        order = "kgio" if self.input_first else "kgoi"
        g, a = self.g[:, :, 0].square(), self.a[:, 0].square()
        return torch.einsum(f"kbgo,bgi->{order}", g.expand(-1, self.n_data, -1, -1), a).flatten(1)

    def weighted_norms(self, weights: Tensor) -> Tensor:
        if self.n_positions > 1:
            return super().weighted_norms(weights)
        norms = torch.einsum("kbgo,bgo->bk", self.g[:, :, 0].square(), self._pulled(weights))
        return norms.expand(self.n_data, -1)

    def weighted_gram(self, weights: Tensor) -> Tensor:
        if self.n_positions > 1:
            return super().weighted_gram(weights)
        g = self.g[:, :, 0].flatten(2).transpose(0, 1)
        gram = (g * self._pulled(weights).flatten(1).unsqueeze(1)) @ g.transpose(1, 2)
        return gram.expand(self.n_data, -1, -1)


def _rotate(factor: Tensor, basis: Tensor) -> Tensor:
    """`[..., G, O] @ [G, O, O']`, as one matrix product where there is one group."""
    if basis.shape[0] == 1:
        return factor @ basis[0]
    return torch.einsum("...go,gop->...gp", factor, basis)


@dataclass(frozen=True)
class IndexBlock(Block):
    """Rows of an embedding: a is one-hot and held as indices, never as `[B, T, V]`.

    Attributes:
        index: Row of each position `[B, T]`, −1 where the row gets no gradient (padding).
        g: Gradients of the embedded positions `[K, B, T, D]`.
        n_rows: V, the number of rows of the table.
    """

    index: Tensor
    g: Tensor
    n_rows: int

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.n_rows * self.g.shape[3]

    @property
    def n_cotangents(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.g.shape[0]

    @property
    def n_data(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.g.shape[1]

    def rows(self, index: slice) -> Block:
        return replace(self, index=self.index[index], g=self.g[:, index])

    def dense(self) -> Tensor:
        k, b, _, d = self.g.shape
        out = self.g.new_zeros(k, b, self.n_rows + 1, d)
        where = self.index.where(self.index >= 0, self.n_rows)
        out = out.scatter_add(2, where[None, :, :, None].expand(k, -1, -1, d), self.g)
        return out[:, :, : self.n_rows].flatten(2)

    def bound(self) -> Tensor:
        return self.g.norm() * self.index.numel() ** 0.5

    def pull(self, cotangents: Tensor) -> Tensor:
        valid = self.index >= 0
        g = (self.g * cotangents[:, :, None, None]).sum(0)[valid]
        return g.new_zeros(self.n_rows, g.shape[1]).index_add(0, self.index[valid], g).flatten()

    def restrict(self, rows: Tensor | None, cols: Tensor | None) -> IndexBlock:
        """The sub-table rows × columns."""
        g = self.g if cols is None else self.g[..., cols]
        if rows is None:
            return replace(self, g=g)
        new = self.index.new_full((self.n_rows + 1,), -1)
        new[rows] = torch.arange(len(rows), device=new.device)
        return IndexBlock(index=new[self.index], g=g, n_rows=len(rows))

    def project(self, basis: Tensor) -> IndexBlock:
        """The block with gradients in another basis `[D, D]`."""
        return replace(self, g=self.g @ basis)

    def _merged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sums the positions of a datum that share a row: gradients `[K, U, D]`, their datum and row `[U]`."""
        datum = torch.arange(self.n_data, device=self.index.device).unsqueeze(1)
        valid = self.index >= 0
        keys, group = (datum * self.n_rows + self.index)[valid].unique(return_inverse=True)
        g = self.g[:, valid]
        merged = g.new_zeros(g.shape[0], len(keys), g.shape[2]).index_add(1, group, g)
        return merged, keys // self.n_rows, keys % self.n_rows

    def sum_of_squares(self) -> Tensor:
        merged, _, row = self._merged()
        k, _, d = merged.shape
        return merged.new_zeros(k, self.n_rows, d).index_add(1, row, merged.square()).flatten(1)

    def weighted_norms(self, weights: Tensor) -> Tensor:
        merged, datum, row = self._merged()
        norms = (merged.square() * weights.view(self.n_rows, -1)[row]).sum(2)
        return norms.new_zeros(self.n_data, norms.shape[0]).index_add(0, datum, norms.T)

    def weighted_gram(self, weights: Tensor) -> Tensor:
        merged, datum, row = self._merged()
        g = merged.transpose(0, 1)
        grams = (g * weights.view(self.n_rows, 1, -1)[row]) @ g.transpose(1, 2)
        return grams.new_zeros(self.n_data, *grams.shape[1:]).index_add(0, datum, grams)

    def apply(self, vectors: Tensor) -> Tensor:
        merged, datum, row = self._merged()
        table = vectors.view(len(vectors), self.n_rows, -1)
        values = torch.einsum("kud,sud->suk", merged, table[:, row])
        return values.new_zeros(len(vectors), self.n_data, values.shape[2]).index_add(1, datum, values)


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
        return _total(part.bound() for part in self.parts)

    def rows(self, index: slice) -> Block:
        return SumBlock(tuple(part.rows(index) for part in self.parts))


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

    def dense(self) -> Tensor:
        return torch.cat([piece[..., self.index] for piece in self.whole.pieces()], 1)

    def bound(self) -> Tensor:
        return self.whole.bound()

    def rows(self, index: slice) -> Block:
        return PickedBlock(self.whole.rows(index), self.index)

    def sum_of_squares(self) -> Tensor:
        return self.whole.sum_of_squares()[:, self.index]


@dataclass(frozen=True)
class Jacobian:
    """All blocks of a problem, in the order of its slots.

    Attributes:
        blocks: One per treated tensor.
    """

    blocks: tuple[Block, ...]

    @property
    def n_data(self) -> int:
        """B."""
        return self.blocks[0].n_data

    @property
    def n_cotangents(self) -> int:
        """K (= C for the Jacobian of the network)."""
        return self.blocks[0].n_cotangents

    @property
    def is_head(self) -> bool:
        """Whether every tensor belongs to a layer whose outputs are the network's: J = I ⊗ [φ, 1]."""
        return all(isinstance(block, OuterBlock) and block.identity for block in self.blocks)

    def head_features(self) -> tuple[Tensor, Tensor]:
        """Of a head: features φ `[B, D]` (a 1 for the bias) and the place of every (output, feature), `[C, D]`."""
        features: list[Tensor] = []
        places: list[Tensor] = []
        start = 0
        for block in self.blocks:
            if isinstance(block, OuterBlock):
                features.append(block.g.new_ones(block.n_data, 1) if block.a is None else block.a[:, 0, 0])
                entries = torch.arange(start, start + block.size, device=block.g.device)
                places.append(entries.view(-1, block.n_inputs))
            start += block.size
        return torch.cat(features, 1), torch.cat(places, 1)

    def dense(self) -> Tensor:
        """`[B, K, P]`, for whoever insists."""
        return torch.cat([block.dense() for block in self.blocks], 2).transpose(0, 1)

    def pieces(self) -> Iterator[Tensor]:
        """Dense pieces `[b, K, P]` over consecutive data, each at most about `CHUNK_BYTES`."""
        step = max(1, CHUNK_BYTES // (8 * self.n_cotangents * sum(block.size for block in self.blocks)))
        for start in range(0, self.n_data, step):
            yield self.rows(slice(start, start + step)).dense()

    def rows(self, index: slice) -> Jacobian:
        """The Jacobian of a slice of the data."""
        return Jacobian(tuple(block.rows(index) for block in self.blocks))

    def sum_over_blocks(self, function: Callable[[int, Block], Tensor]) -> Tensor:
        """Adds up what `function(position, block)` gives for every block."""
        return _total(function(i, block) for i, block in enumerate(self.blocks))

    @classmethod
    def from_dense(cls, values: Tensor, sizes: tuple[int, ...]) -> Jacobian:
        """Wraps a dense Jacobian `[B, C, P]`."""
        return cls(tuple(DenseBlock(part) for part in values.transpose(0, 1).split(list(sizes), 2)))
