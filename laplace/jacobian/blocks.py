"""Blocks of the factored Jacobian: one per tensor, closed under selections, folds and changes of basis.

For one tensor, K cotangents u_k and B data, a block stands for

    J[k, b, :] = ∂(u_kᵀ f_b) / ∂(entries of the tensor),    [K, B, p].

With one-hot cotangents it is the Jacobian of the network; with the columns of a root of the output
Hessian, J gives the generalised Gauss–Newton matrix as Σ_kb J Jᵀ; with the loss gradient, the empirical
Fisher. For a layer with inputs a and outputs z, J is a sum of outer products over the positions t that
share the weight, Σ_t g[k, b, t] ⊗ a[b, t], and every method contracts those two factors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from laplace.core import nested
from laplace.core.gaussian import centred, centred_variance
from laplace.core.gram import row_gram
from laplace.core.orthogonal_basis import OrthogonalBasis
from laplace.core.pieces import bytes_at_once, numbers_at_once
from laplace.errors import StateError

if TYPE_CHECKING:
    from laplace.jacobian.outer import FactoredBlock
    from laplace.weights.problem import Selection

# Contractions of an array J `[K, B, p]`: by dense pieces, or by its factors where it is a sum of outer products.


CHUNK_BYTES = 32 * 2**20
"""Bytes of a dense piece [K, b, p] of one tensor that a CPU computes, contracts and drops; see `core.pieces`."""


_SQUARED = 2**16
"""Numbers that are squared at once on a CPU: fresh memory for more of them costs more than the squares."""

_ENTRY_COST = 16
"""An entry that is gathered takes about as long as this many in a matrix product."""


def chunks(count: int, n_numbers: int, device: torch.device) -> Iterator[slice]:
    """Slices of `count` items, each with so many numbers in float64, of at most about `CHUNK_BYTES`."""
    step = max(1, bytes_at_once(CHUNK_BYTES, device) // max(1, 8 * n_numbers))  # a tensor may be empty
    for start in range(0, count, step):
        yield slice(start, start + step)


@dataclass(frozen=True, eq=False)
class RankOne:
    """Outer products g ⊗ a, one for every sample and cotangent."""

    g: Tensor | None  # `[K, B, O]`, or None for the identity, K = O
    a: Tensor  # `[B, I]`
    n_outputs: int  # O
    input_first: bool = False  # True if the product's first dimension is the input side

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
    """

    left: OrthogonalBasis | None  # Basis of the first dimension, of width L, or None for the identity
    right: OrthogonalBasis | None  # Basis of the rest, of width R, or None for the identity
    shape: tuple[int, int, int]  # (G, L, R)
    output_first: bool = True  # True if the output side is the left one

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
        """Splits the rotation in two: of the given sides first, then of the others."""
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
    """Sizes and form of the Jacobian of one random parameter."""

    size: int  # p, random entries
    factored: bool = False  # True if its Jacobian is a sum of outer products
    indexed: bool = False  # True if their input side is one-hot (embeddings), of `n_inputs` rows
    groups: int = 1  # G
    n_outputs: int = 1  # O of a group; p without factors
    n_inputs: int = 1  # I of a group; 1 for a bias and without factors
    positions: int = 1  # T, positions that share the tensor
    is_bias: bool = False  # True if there is no input side
    is_head: bool = False  # True if the layer's outputs are the network's
    copied: int = 0  # Bytes of inputs that are copied for the contraction (unfolded images), for the whole batch

    @property
    def is_outer_product(self) -> bool:
        """True if its Jacobian is one outer product for every sample, all of whose entries are random."""
        single = self.factored and not self.indexed and self.groups == self.positions == 1 < self.n_inputs
        return single and self.size == self.n_outputs * self.n_inputs

    @property
    def is_plain(self) -> bool:
        """True if its Jacobian is a sum of outer products, all of whose entries are random."""
        return self.factored and not self.indexed and self.size == self.groups * self.n_outputs * self.n_inputs

    @property
    def multiplications(self) -> int:
        """Multiplications that its layer takes for one sample."""
        return self.size * self.positions

    def products(self, n_vectors: int, n_cotangents: int) -> int:
        """Multiplications per sample of J v and Jᵀ w, by positions or by J multiplied out, whichever are fewer."""
        by_position = n_vectors * (self.multiplications + n_cotangents * self.groups * self.n_outputs * self.positions)
        multiplied_out = n_cotangents * (self.multiplications + n_vectors * self.size)
        return 2 * min(by_position, multiplied_out if self.positions > 1 else by_position)

    @property
    def input_side(self) -> int:
        """Entries of its input side, G·I², or I counts."""
        if self.is_bias:
            return 0
        return self.n_inputs if self.indexed else self.groups * self.n_inputs**2


BLOCKS: dict[str, type[Block]] = {}
"""Blocks that states hold, by name."""


class Block(ABC):
    """Jacobian `[K, B, p]` with respect to the random entries of one tensor.

    A new block gives its sizes (`dims`), `dense` and `at`, and is right everywhere. Where factors are less work than
    dense values, it overrides the contractions, and what keeps the factors: selections, folds, states.
    """

    kind: ClassVar[str] = ""  # Its name among `BLOCKS`, if states hold its fields

    @property
    @abstractmethod
    def dims(self) -> tuple[int, int, int]:
        """K, B and p: the shape of `dense`."""

    @property
    def n_cotangents(self) -> int:
        """Number of cotangents K."""
        return self.dims[0]

    @property
    def n_data(self) -> int:
        """Number of data B."""
        return self.dims[1]

    @property
    def size(self) -> int:
        """Number of entries p."""
        return self.dims[2]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.bound().device

    @property
    def is_constant(self) -> bool:
        """True if it is known that every datum has the same Jacobian."""
        return False

    @abstractmethod
    def dense(self) -> Tensor:
        """`[K, B, p]`."""

    # Other data, outputs and entries.

    @abstractmethod
    def at(self, data: slice | Tensor) -> Block:
        """The block of some of the data: a slice, or indices `[n]`."""

    def select_outputs(self, outputs: Tensor) -> Block:
        """K cotangents of every sample, `outputs` `[B, K]`: a block `[K, B, p]`."""
        return DenseBlock(at_outputs(self.dense(), outputs))

    def centred(self) -> Block:
        """The block less its mean over cotangents: that of f − mean f."""
        return CentredBlock(self)

    def select_entries(self, selection: Selection, entries: Tensor) -> Block:
        """Some entries of the tensor: as rows × columns and an index, and the same as flat indices `[q]`."""
        return PickedBlock(self, entries)

    def join(self, others: Sequence[Block]) -> Block:
        """The block with the cotangents of other blocks `[K_i, B, p]` of the same tensor and samples appended."""
        return DenseBlock(torch.cat([self.dense(), *(other.dense() for other in others)]))

    def followed_by(self, others: Sequence[Block]) -> Block:
        """The block with the data of other blocks of the same tensor and as many cotangents appended."""
        return DenseBlock(torch.cat([self.dense(), *(other.dense() for other in others)], 1))

    def add(self, others: Sequence[Block]) -> Block:
        """The sum with blocks of other uses of the same tensor."""
        return SumBlock((self, *others))

    def at_places(self, present: Tensor) -> Block:
        """The block of a layer of whose positions some hold nothing but zeros: those that `present` `[B, T]` lacks."""
        del present
        return self

    # Outputs with positions.

    def fold_positions(self, n_positions: int) -> Block | None:
        """A block `[K, B, p]` of a layer with T positions as one of B·T data with one position each.

        That is the Jacobian of rows only where position t of the layer alone reaches row t. None where its positions
        cannot be told apart, or are not T.
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
        """The block as plain tensors of its own, without graphs."""
        return DenseBlock(self.dense().detach().clone())

    def state(self) -> dict[str, Any]:
        """A detached block as tensors, numbers and strings, its `kind` among `BLOCKS` among them."""
        if not self.kind:
            return DenseBlock(self.dense()).state()
        return {"kind": self.kind} | {name: getattr(self, name) for name in _arguments(type(self))}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Block:
        """The block of a state of this kind."""
        return nested.from_state(cls, state)  # older ones may hold others than its fields

    def has_valid_indices(self) -> bool:
        """True if indices of a block from a state are such of its table."""
        return True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__dict__.get("kind"):
            BLOCKS[cls.kind] = cls

    # What it is made of.

    @property
    def terms(self) -> tuple[Block, ...]:
        """Blocks that it is the sum of."""
        return (self,)

    @property
    def product(self) -> FactoredBlock | None:
        """The sum of outer products that it is, or selects entries of; None without factors."""
        return None

    @property
    def product_index(self) -> Tensor | None:
        """Indices `[p]` of its entries within `product`; None for all."""
        return None

    def rank_one(self) -> RankOne | None:
        """Its factors if it is one outer product for every sample and cotangent, else None."""
        return None

    def kernel_by_factors(self, other: Block) -> Callable[[], Tensor] | None:
        """Computes the kernel Σ_p J[k, b, p] J'[l, m, p], `[K, B, L, M]`, float64, by factors of both blocks.

        None where this block knows no way, or dense pieces are less work.
        """
        del other
        return None

    def shape(self, inputs: Sequence[Tensor]) -> TensorShape:
        """Sizes and form that work and memory depend on."""
        del inputs
        return TensorShape(self.size, n_outputs=self.size)

    # Contractions: by dense pieces, unless a block contracts its factors.

    @property
    def contracts_factors(self) -> bool:
        """True if contractions with weights need no dense pieces."""
        return False

    def bound(self) -> Tensor:
        """A cheap upper bound of the Frobenius norm of J, 0-dim: the scale for errors."""
        return self.dense().norm()

    def entries(self, index: Tensor) -> Tensor:
        """Columns of the dense array, `[K, B, len(index)]`."""
        return torch.cat([piece[..., index] for piece in self.pieces()], 1)

    def by_output(self) -> Tensor:
        """The dense array with a row for every sample and output, `[B·K, p]`."""
        return self.dense().transpose(0, 1).flatten(0, 1)

    def pieces(self) -> Iterator[Tensor]:
        """Dense pieces `[K, b, p]` over consecutive data, each at most about `CHUNK_BYTES`."""
        for data in chunks(self.n_data, self.n_cotangents * self.size, self.device):
            yield (self if data.stop - data.start >= self.n_data else self.at(data)).dense()

    def add_squares(self, running: Tensor) -> None:
        """Adds Σ J² over samples and cotangents to a running sum `[p]`, in place."""
        for piece in self.pieces():
            add_squared(running, piece.flatten(0, 1))

    def squares_per_cotangent(self) -> Tensor:
        """Σ J² over data, of every cotangent, `[K, p]`."""
        return total(piece.square().sum(1) for piece in self.pieces())

    def weighted_norms(self, weights: Tensor) -> Tensor:
        """Σ_p J² w, `[B, K]`, for weights `[p]`."""
        return torch.cat([(piece.square() @ weights).T for piece in self.pieces()])

    def weighted_gram(self, weights: Tensor) -> Tensor:
        """J diag(w) Jᵀ per sample, `[B, K, K]`, for weights w `[p]`, accumulated in their dtype."""
        return torch.cat([row_gram(piece.transpose(0, 1), weights) for piece in self.pieces()])

    def weighted_norms_each(self, weights: Tensor) -> Tensor:
        """`weighted_norms` for n weights `[n, p]`, `[n, B, K]`, with pieces computed once."""
        if self.contracts_factors:
            return torch.vmap(self.weighted_norms)(weights)
        return torch.cat([torch.einsum("kbp,np->nbk", piece.square(), weights) for piece in self.pieces()], 1)

    def weighted_gram_each(self, weights: Tensor) -> Tensor:
        """`weighted_gram` for n weights `[n, p]`, `[n, B, K, K]`, with pieces computed once."""
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
        start, pieces = 0, []
        for piece in self.pieces():
            stop = start + piece.shape[1]
            pieces.append(torch.einsum("kbp,sbk->sp", piece, weights[:, start:stop]))
            start = stop
        return total(pieces)

    def pull(self, cotangents: Tensor) -> Tensor:
        """Σ_kb c_kb J_kb, `[p]`, for scalars `[K, B]`."""
        result, start = cotangents.new_zeros(self.size), 0
        for piece in self.pieces():
            stop = start + piece.shape[1]
            result = result + torch.einsum("kbp,kb->p", piece, cotangents[:, start:stop])
            start = stop
        return result


def from_state(state: Mapping[str, Any]) -> Block:
    """The block of a state."""
    if state["kind"] not in BLOCKS:
        raise StateError(f"the state holds a block of kind {state['kind']!r}, known are {list(BLOCKS)}.")
    return BLOCKS[state["kind"]].from_state(state)


def _arguments(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.init]


B = TypeVar("B", bound=Block)


def all_of(kind: type[B], blocks: Sequence[Block]) -> list[B] | None:
    """The blocks if all are of one kind, else None."""
    alike = [block for block in blocks if isinstance(block, kind)]
    return alike if len(alike) == len(blocks) else None


@dataclass(frozen=True, eq=False)
class DenseBlock(Block):
    """A dense block: of small tensors, and parameters without a layer rule."""

    values: Tensor  # `[K, B, p]`
    kind = "dense"

    @property
    def dims(self) -> tuple[int, int, int]:
        n_cotangents, n_data, size = self.values.shape
        return n_cotangents, n_data, size

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dense(self) -> Tensor:
        return self.values

    def at(self, data: slice | Tensor) -> DenseBlock:
        return DenseBlock(self.values[:, data])

    def centred(self) -> DenseBlock:
        return DenseBlock(less_mean(self.values))

    def cast(self, dtype: torch.dtype) -> DenseBlock:
        return DenseBlock(self.values.to(dtype))


@dataclass(frozen=True)
class SumBlock(Block):
    """The block of a tensor that is used several times."""

    parts: tuple[Block, ...]
    kind = "sum"

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.parts[0].dims

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

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

    def centred(self) -> SumBlock:
        return self._each(lambda part: part.centred())

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
        return {"kind": self.kind, "parts": [part.state() for part in self.parts]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SumBlock:
        return cls(tuple(from_state(part) for part in state["parts"]))

    def has_valid_indices(self) -> bool:
        return all(part.has_valid_indices() for part in self.parts)

    def shape(self, inputs: Sequence[Tensor]) -> TensorShape:
        copied = sum(part.shape(inputs).copied for part in self.parts)
        return TensorShape(self.size, n_outputs=self.size, copied=copied)


@dataclass(frozen=True)
class _Wrapper(Block):
    """A block made of another one with the same cotangents and data."""

    whole: Block

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.whole.dims

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def bound(self) -> Tensor:
        return self.whole.bound()


@dataclass(frozen=True)
class MappedBlock(_Wrapper):
    """A block in another basis, where it has no factors to rotate."""

    rotate: Callable[[Tensor], Tensor]  # Maps `[..., p]` to `[..., q]`
    n_entries: int | None = None  # Q, at most p; None for p

    @property
    def dims(self) -> tuple[int, int, int]:
        n_cotangents, n_data, size = self.whole.dims
        return n_cotangents, n_data, size if self.n_entries is None else self.n_entries

    def dense(self) -> Tensor:
        return self.rotate(self.whole.dense())

    def pieces(self) -> Iterator[Tensor]:
        return (self.rotate(piece) for piece in self.whole.pieces())

    def at(self, data: slice | Tensor) -> MappedBlock:
        return replace(self, whole=self.whole.at(data))


@dataclass(frozen=True)
class CentredBlock(_Wrapper):
    """A block whose factors do not show the mean over cotangents that it is without: ΠJ, with Π = I − 11ᵀ/K."""

    def dense(self) -> Tensor:
        return less_mean(self.whole.dense())

    def pieces(self) -> Iterator[Tensor]:
        return (less_mean(piece) for piece in self.whole.pieces())

    def entries(self, index: Tensor) -> Tensor:
        return less_mean(self.whole.entries(index))

    def at(self, data: slice | Tensor) -> Block:
        return replace(self, whole=self.whole.at(data))

    def cast(self, dtype: torch.dtype) -> Block:
        return replace(self, whole=self.whole.cast(dtype))

    def in_basis(self, basis: ProductBasis) -> Block:
        return self.whole.in_basis(basis).centred()

    def kernel_by_factors(self, other: Block) -> Callable[[], Tensor] | None:
        kernel = self.whole.kernel_by_factors(other)
        return None if kernel is None else lambda: less_mean(kernel())

    @property
    def contracts_factors(self) -> bool:
        return self.whole.contracts_factors

    def apply(self, vectors: Tensor) -> Tensor:
        return centred(self.whole.apply(vectors))

    def weighted_norms(self, weights: Tensor) -> Tensor:
        if not self.contracts_factors:
            return super().weighted_norms(weights)
        return centred_variance(self.whole.weighted_gram(weights))


@dataclass(frozen=True, eq=False)
class PickedBlock(_Wrapper):
    """Single entries of another block (a selection that is not rows × columns)."""

    index: Tensor  # Which entries, `[p]`

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.whole.n_cotangents, self.whole.n_data, len(self.index)

    @property
    def gathers(self) -> bool:
        """True if gathering the few entries is cheaper than contracting the whole block with zeros elsewhere."""
        few = _ENTRY_COST * self.n_cotangents * self.size < self.whole.size
        return few or not self.whole.contracts_factors

    @property
    def product(self) -> FactoredBlock | None:
        return self.whole.product

    @property
    def product_index(self) -> Tensor | None:
        return self.index

    def dense(self) -> Tensor:
        return self.whole.entries(self.index)

    def at(self, data: slice | Tensor) -> PickedBlock:
        return PickedBlock(self.whole.at(data), self.index)

    def centred(self) -> PickedBlock:
        return PickedBlock(self.whole.centred(), self.index)

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

    def cast(self, dtype: torch.dtype) -> PickedBlock:
        return PickedBlock(self.whole.cast(dtype), self.index)

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

    def squares_per_cotangent(self) -> Tensor:
        return super().squares_per_cotangent() if self.gathers else self.whole.squares_per_cotangent()[:, self.index]

    def weighted_norms(self, weights: Tensor) -> Tensor:
        if self.gathers:
            return super().weighted_norms(weights)
        return self.whole.weighted_norms(self._spread(weights))

    def weighted_gram(self, weights: Tensor) -> Tensor:
        if self.gathers:
            return super().weighted_gram(weights)
        return self.whole.weighted_gram(self._spread(weights))


@dataclass(frozen=True)
class JoinedBlock(Block):
    """The tensors of one layer side by side, where they share a basis."""

    parts: tuple[Block, ...]  # A block of every tensor, in the order of their entries

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.parts[0].n_cotangents, self.parts[0].n_data, sum(part.size for part in self.parts)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts], 2)

    def bound(self) -> Tensor:
        return total(part.bound() for part in self.parts)

    def at(self, data: slice | Tensor) -> JoinedBlock:
        return JoinedBlock(tuple(part.at(data) for part in self.parts))


@dataclass(frozen=True, eq=False)
class LazyBlock(Block):
    """A dense block whose pieces are computed when they are needed."""

    compute: Callable[[slice], Tensor]  # Gives `[K, b, p]` of a slice of the data
    sizes: tuple[int, int]  # K and p
    span: tuple[int, int]  # First sample of this block, and the one after its last
    norm: Tensor  # The bound

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.sizes[0], self.span[1] - self.span[0], self.sizes[1]

    def dense(self) -> Tensor:
        return self.compute(slice(*self.span))

    def bound(self) -> Tensor:
        return self.norm

    def at(self, data: slice | Tensor) -> Block:
        if isinstance(data, Tensor):
            return DenseBlock(self.dense()[:, data])
        start, stop, _ = data.indices(self.n_data)
        return replace(self, span=(self.span[0] + start, self.span[0] + stop))

    def join(self, others: Sequence[Block]) -> LazyBlock:
        blocks = (self, *others)
        return LazyBlock(
            compute=lambda data: torch.cat([block.at(data).dense() for block in blocks]),
            sizes=(sum(block.n_cotangents for block in blocks), self.size),
            span=(0, self.n_data),
            norm=torch.stack([block.bound() for block in blocks]).norm(),
        )

    def fold_cotangents(self, n_positions: int) -> LazyBlock:
        def compute(rows: slice) -> Tensor:
            data = slice(rows.start // n_positions, -(-rows.stop // n_positions))
            skipped = rows.start % n_positions
            return by_row(self.at(data).dense(), n_positions)[:, skipped : skipped + rows.stop - rows.start]

        sizes = self.n_cotangents // n_positions, self.size
        return replace(self, compute=compute, sizes=sizes, span=(0, self.n_data * n_positions))


def less_mean(values: Tensor) -> Tensor:
    """Values `[K, …]` less their mean over K."""
    return values - values.mean(0)


def at_outputs(values: Tensor, outputs: Tensor) -> Tensor:
    """Entries `[K, B, …]` of `[C, B, …]` at outputs of every sample, `[B, K]`."""
    return values[outputs.T, torch.arange(len(outputs), device=outputs.device)]


def by_row(values: Tensor, n_positions: int) -> Tensor:
    """`[S·C, B, …]` as `[C, B·S, …]`."""
    return values.unflatten(0, (n_positions, -1)).movedim(0, 2).flatten(1, 2)


def concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat`, which on the meta device would import the compiler."""
    first = parts[0]
    if not first.is_meta:
        return torch.cat(list(parts), dim)
    return first.new_empty(*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :])


def entries_of(rows: Tensor, index: Tensor) -> Tensor:
    """Entries `[..., q]` of rows `[..., n]`, on the meta device by an operation that imports no compiler."""
    return rows.index_select(-1, index) if rows.is_meta else rows[..., index]


def sum_of_squares(x: Tensor) -> Tensor:
    """Σ_k x_k² of `[K, ...]`, without a second array of its size."""
    if x.numel() <= numbers_at_once(_SQUARED, x.device):
        return x.square().sum(0)
    add_squared(total := x.new_zeros(x.shape[1:]), x)
    return total


def add_squared(running: Tensor, x: Tensor) -> None:
    """Adds Σ_k x_k² of `[K, ...]` to `[...]`, without a second array of its size."""
    step = max(1, numbers_at_once(_SQUARED, x.device) // max(1, x[0].numel()))
    for part in x.split(step):
        if step > 1:
            running += part.square().sum(0)
        else:
            running.addcmul_(part[0], part[0])


def total(parts: Iterable[Tensor]) -> Tensor:
    """The sum of tensors."""
    return reduce(torch.add, parts)
