"""Contractions of an array J `[K, B, p]`: by dense pieces, or by its factors where it is a sum of outer products."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from laplace.core.gram import row_gram
from laplace.core.orthogonal_basis import OrthogonalBasis
from laplace.jacobian.patches import Patches

CHUNK_BYTES = 32 * 2**20
"""Bytes of a dense per-layer piece [K, b, p] that is contracted and dropped as it is made."""


_SQUARED = 2**16
"""Numbers that are squared at once: fresh memory for more of them costs more than the squares."""
S = TypeVar("S")


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
        step = max(1, CHUNK_BYTES // max(1, per_datum))  # a tensor may be empty
        if 0 < self.n_data <= step:
            yield self.dense()
            return
        for start in range(0, self.n_data, step):
            yield self.at(slice(start, start + step)).dense()

    def add_squares(self, running: Tensor) -> None:
        """Adds Σ J² over data and cotangents to a running sum `[p]`, in place, so that no second one is held."""
        for piece in self.pieces():
            add_squared(running, piece.flatten(0, 1))

    def squares_apart(self) -> Tensor:
        """Σ J² over data, with the cotangents apart, `[K, p]`."""
        return total(piece.square().sum(1) for piece in self.pieces())

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

    def combined(self, weights: Tensor) -> Tensor:
        """Σ_kb w_sbk J_kb, `[S, p]`, for weights `[S, B, K]`: the transpose of `apply`."""
        starts, pieces = 0, []
        for piece in self.pieces():
            stop = starts + piece.shape[1]
            pieces.append(torch.einsum("kbp,sbk->sp", piece, weights[:, starts:stop]))
            starts = stop
        return total(pieces)

    def pull(self, cotangents: Tensor) -> Tensor:
        """Σ_kb c_kb J_kb, `[p]`, for scalars `[K, B]`."""
        result, start = cotangents.new_zeros(self.size), 0
        for piece in self.pieces():
            stop = start + piece.shape[1]
            result = result + torch.einsum("kbp,kb->p", piece, cotangents[:, start:stop])
            start = stop
        return result


def sum_of_squares(x: Tensor) -> Tensor:
    """Σ_k x_k² of `[K, ...]`, `[...]`; of a large array without a second one of its size."""
    if x.numel() <= _SQUARED:
        return x.square().sum(0)
    add_squared(total := x.new_zeros(x.shape[1:]), x)
    return total


def add_squared(running: Tensor, x: Tensor) -> None:
    """Adds Σ_k x_k² of `[K, ...]` to `[...]`; of a large array without a second one of its size."""
    step = max(1, _SQUARED // max(1, x[0].numel()))
    for part in x.split(step):
        if step > 1:
            running += part.square().sum(0)
        else:
            running.addcmul_(part[0], part[0])


def total(parts: Iterable[Tensor]) -> Tensor:
    """Sum of tensors."""
    return reduce(torch.add, parts)


class KroneckerFactored(Contractions):
    """A sum of outer products over T positions, Σ_t g ⊗ a, whose curvature has Kronecker factors Σ g gᵀ and Σ a aᵀ.

    Attributes:
        input_first: True if the tensor's first dimension is the input side.
    """

    input_first: bool

    @property
    @abstractmethod
    def shares_outputs(self) -> bool:
        """True if g are the gradients of the layer's outputs, which its other tensors share."""

    @abstractmethod
    def output_rows(self, *, reduce: bool) -> Tensor:
        """Rows g of the output side, `[K, ..., G, O]`; with `reduce`, summed over the positions of a datum."""

    @abstractmethod
    def input_side(
        self, gram: Callable[[Tensor | Patches], S], weights: Tensor | None = None, *, reduce: bool
    ) -> S | Tensor | None:
        """Input side Σ w a aᵀ, computed by `gram` from rows `[..., G, I]` or patches; counts `[V]` if a is one-hot.

        Args:
            gram: Computes Σ a aᵀ, in the caller's form, or its product with given vectors.
            weights: How often every datum counts, `[B]`; None for once.
            reduce: Average a over the positions of a datum.

        Returns:
            The input side, or None for a bias.
        """

    @abstractmethod
    def input_count(self, weights: Tensor | None = None, *, reduce: bool) -> Tensor:
        """Number of rows of the input side, each with its datum's weight, 0-dim: positions, or with `reduce` data."""


@dataclass(frozen=True, eq=False)
class RankOne:
    """Outer products g ⊗ a, one for every datum and cotangent.

    Attributes:
        g: `[K, B, O]`, or None for the identity, K = O.
        a: `[B, I]`.
        n_outputs: O.
        input_first: True if the product's first dimension is the input side.
    """

    g: Tensor | None
    a: Tensor
    n_outputs: int
    input_first: bool = False

    def to(self, dtype: torch.dtype) -> RankOne:
        """The same in another dtype."""
        return replace(self, g=None if self.g is None else self.g.to(dtype), a=self.a.to(dtype))

    def by_datum(self) -> Tensor:
        """g, `[B, K, O]`."""
        if self.g is not None:
            return self.g.transpose(0, 1)
        eye = torch.eye(self.n_outputs, dtype=self.a.dtype, device=self.a.device)
        return eye.expand(len(self.a), -1, -1)


@dataclass(frozen=True, eq=False)
class ProductBasis:
    """An orthogonal basis left ⊗ right of a tensor that is seen as a matrix: its first dimension × the rest.

    Either side may be a basis of a subspace, so that there are fewer entries in the basis than in the tensor.

    Attributes:
        left: Basis of the first dimension, of width L, or None for the identity.
        right: Basis of the rest, of width R, or None for the identity.
        shape: (G, L, R).
        output_first: True if the output side is the left one.
    """

    left: OrthogonalBasis | None
    right: OrthogonalBasis | None
    shape: tuple[int, int, int]
    output_first: bool = True

    @property
    def output(self) -> OrthogonalBasis | None:
        """Basis of the output side."""
        return self.left if self.output_first else self.right

    @property
    def inputs(self) -> OrthogonalBasis | None:
        """Basis of the input side."""
        return self.right if self.output_first else self.left

    @property
    def size(self) -> int:
        """Number of entries in the basis."""
        return math.prod(self.shape_in_basis)

    @property
    def shape_in_basis(self) -> tuple[int, int, int]:
        """Number of groups, and of the vectors of both sides."""
        return self._shape_after(self.left, self.right)

    def split(self, *, output: bool, inputs: bool) -> tuple[ProductBasis, ProductBasis]:
        """The rotations of the sides that are asked for, and those of the others, which follow them."""
        left, right = (output, inputs) if self.output_first else (inputs, output)
        first = (self.left if left else None), (self.right if right else None)
        rest = (None if left else self.left), (None if right else self.right)
        later = replace(self, left=rest[0], right=rest[1], shape=self._shape_after(*first))
        return replace(self, left=first[0], right=first[1]), later

    def _shape_after(self, left: OrthogonalBasis | None, right: OrthogonalBasis | None) -> tuple[int, int, int]:
        groups, rows, columns = self.shape
        return groups, rows if left is None else left.n_columns, columns if right is None else right.n_columns

    def rotate(self, vectors: Tensor, *, back: bool = False) -> Tensor:
        """Uᵀ v of vectors `[..., p]`, or U v."""
        folded = vectors.reshape(*vectors.shape[:-1], *self.shape)
        if self.left is not None:
            folded = self.left.to(vectors.dtype).rotate_columns(folded, back=back)
        if self.right is not None:
            folded = self.right.to(vectors.dtype).rotate_folded(folded, back=back)
        return folded.flatten(-3)


@dataclass(frozen=True)
class TensorShape:
    """Sizes and form of the Jacobian of one random parameter.

    Attributes:
        size: p, random entries.
        factored: True if its Jacobian is a sum of outer products.
        indexed: True if their input side is one-hot (embeddings), of `n_inputs` rows.
        groups: G.
        n_outputs: O of a group; p without factors.
        n_inputs: I of a group; 1 for a bias and without factors.
        positions: T, positions that share the tensor.
        is_bias: True if there is no input side.
        is_head: True if the layer's outputs are the network's.
        copied: Bytes of inputs that are laid out anew for the contraction (unfolded images), for the whole batch.
    """

    size: int
    factored: bool = False
    indexed: bool = False
    groups: int = 1
    n_outputs: int = 1
    n_inputs: int = 1
    positions: int = 1
    is_bias: bool = False
    is_head: bool = False
    copied: int = 0

    @property
    def is_outer_product(self) -> bool:
        """True if its Jacobian is one outer product for every datum, all of whose entries are random."""
        single = self.factored and not self.indexed and self.groups == self.positions == 1 < self.n_inputs
        return single and self.size == self.n_outputs * self.n_inputs

    @property
    def is_plain(self) -> bool:
        """True if its Jacobian is a sum of outer products, all of whose entries are random."""
        return self.factored and not self.indexed and self.size == self.groups * self.n_outputs * self.n_inputs

    @property
    def multiplications(self) -> int:
        """Multiplications that its layer takes for one datum."""
        return self.size * self.positions

    def products(self, n_vectors: int, n_cotangents: int) -> int:
        """Multiplications per datum of J v and Jᵀ w, by positions or by J multiplied out, whichever are fewer."""
        by_position = n_vectors * (self.multiplications + n_cotangents * self.groups * self.n_outputs * self.positions)
        multiplied_out = n_cotangents * (self.multiplications + n_vectors * self.size)
        return 2 * min(by_position, multiplied_out if self.positions > 1 else by_position)

    @property
    def output_side(self) -> int:
        """Entries of the output side of a Kronecker product, G·O²."""
        return self.groups * self.n_outputs**2

    @property
    def input_side(self) -> int:
        """Entries of its input side, G·I², or I counts."""
        if self.is_bias:
            return 0
        return self.n_inputs if self.indexed else self.groups * self.n_inputs**2
