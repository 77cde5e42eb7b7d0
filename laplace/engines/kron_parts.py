"""Sums of Kronecker factors, by key, and how the block of every parameter reads them; low-rank where rows are few."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from laplace.core import nested
from laplace.core.cached import cached_property
from laplace.core.gram import group_gram
from laplace.core.layout import Layout
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import InvalidData, StateError


@dataclass(frozen=True)
class ThinFactor:
    """V diag(λ) Vᵀ of fewer than n/2 columns; the eigenvalues of all other directions are exactly 0.

    While a fit reads its data the columns are the rows that are summed, whose products need not be formed. What is kept
    of them are the eigenpairs (`linalg.thin_eigh`), all of these in float64, as matrices are.
    """

    values: Tensor  # λ, `[..., r]`
    vectors: Tensor  # V, `[..., n, r]`; leading dimensions are 1
    orthonormal: bool = True  # True if these are eigenpairs, in ascending order

    def __len__(self) -> int:
        return len(self.values)

    def unsqueeze(self, dim: int) -> ThinFactor:
        """The factor with one more leading dimension."""
        return replace(self, values=self.values.unsqueeze(dim), vectors=self.vectors.unsqueeze(dim))

    @staticmethod
    def holds(rows: int, width: int) -> bool:
        """True if a sum over so many rows has this form; a sum over none is a matrix of zeros."""
        return 0 < 2 * rows < width

    @classmethod
    def of_rows(cls, rows: Tensor) -> ThinFactor:
        """Σ x xᵀ of the rows of `[..., R, n]`, which are copied."""
        vectors = rows.mT.to(wide_dtype(rows.device), copy=True)
        return cls(vectors.new_ones(vectors.shape[:-2] + vectors.shape[-1:]), vectors, orthonormal=False)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the matrix."""
        return self.vectors.ndim

    @property
    def rank(self) -> int:
        """Number of columns r."""
        return self.vectors.shape[-1]

    @property
    def width(self) -> int:
        """Width n of the matrix."""
        return self.vectors.shape[-2]

    @property
    def rows(self) -> Tensor:
        """√λ Vᵀ, `[..., r, n]`."""
        return (self.vectors * self.values.sqrt().unsqueeze(-2)).mT

    @property
    def trace(self) -> Tensor:
        """Trace of the matrix, `[...]`."""
        return (self.values * self.vectors.square().sum(-2)).sum(-1)

    def matrix(self) -> Tensor:
        """The matrix itself, `[..., n, n]`."""
        total = group_gram(self.rows.reshape(self.rank, 1, self.width))
        return total.view(*self.vectors.shape[:-1], self.width)

    def scaled(self, factor: float) -> ThinFactor:
        """A multiple of the factor."""
        return replace(self, values=factor * self.values)

    def joined(self, other: ThinFactor) -> ThinFactor:
        """The sum of two factors."""
        values = torch.cat([widened(self.values), widened(other.values)], -1)
        vectors = torch.cat([widened(self.vectors), widened(other.vectors)], -1)
        return ThinFactor(values, vectors, orthonormal=False)


Factor = Tensor | ThinFactor
"""A sum of outer products, as a matrix or of low rank."""


def dense(factor: Factor) -> Tensor:
    """The factor as a matrix."""
    return factor.matrix() if isinstance(factor, ThinFactor) else factor


def added(a: Factor, b: Factor) -> Factor:
    """The sum of two factors: low-rank as long as it has few enough columns, else a matrix."""
    if isinstance(a, ThinFactor) and isinstance(b, ThinFactor):
        both = a.joined(b)
        return both if ThinFactor.holds(both.rank, both.width) else both.matrix()
    return dense(a) + dense(b)


DENSE_BLOCK_LIMIT = 512
"""Largest tensor without Kronecker factors that gets an exact dense block; larger ones get an exact diagonal."""

ASSIGNED = "assigned "
"""Begins the keys of factors that a user assigned."""

UNUSED = "unused"
"""Kind of a block that no sample has used yet."""

KINDS = frozenset({"kron", "dense", "diag", UNUSED})
"""Kinds of blocks."""

Probe = Callable[[str, int, int], Tensor]
"""Maps key, number of groups G and width n of a side to the matrix that it is multiplied with, `[G, n, w]`."""


@dataclass(frozen=True, eq=False)
class KronParts:
    """Sums from which Kronecker-factored curvature is put together, additive over batches and shards.

    The block of a tensor, seen as a matrix (first dimension × the rest), is left ⊗ right / positions.
    """

    # Summed matrices by key: output sides `[E, G, O, O]` (E terms, one per output under a vector noise, else 1; G
    # groups), input sides `[G, I, I]` or counts `[V]`, dense blocks `[E, p, p]`, diagonals `[E, p]`, numbers of
    # positions `[]`. In float64; those of packages, of users and of older states are in the dtype that they came in.
    factors: Mapping[str, Tensor]
    blocks: tuple[KronBlock, ...]  # One per random parameter, in order
    # Sums of fewer rows than half of their width, by key
    thin: Mapping[str, ThinFactor] = field(default_factory=dict)

    @classmethod
    def made_of(cls, factors: Mapping[str, Factor], blocks: tuple[KronBlock, ...]) -> KronParts:
        """From factors of both forms."""
        matrices: dict[str, Tensor] = {}
        thin: dict[str, ThinFactor] = {}
        for key, factor in factors.items():
            if isinstance(factor, ThinFactor):
                thin[key] = factor
            else:
                matrices[key] = factor
        return cls(matrices, blocks, thin)

    @property
    def every(self) -> dict[str, Factor]:
        """All sums by key."""
        return {**self.factors, **self.thin}

    @property
    def like(self) -> Tensor:
        """A tensor of the sums' device, and of the dtype of one of them."""
        return self.factors.get(self.blocks[0].output, next(iter(self.factors.values())))

    @property
    def summed(self) -> torch.dtype | None:
        """The dtype of matrices that are narrower than float64; None without any."""
        wide = wide_dtype()
        narrow = (factor.dtype for factor in self.factors.values() if factor.ndim > 2 and factor.dtype != wide)
        return next(narrow, None)

    @property
    def n_terms(self) -> int:
        """Number of terms E that are kept apart."""
        key = self.blocks[0].output
        return len(self.thin[key] if key in self.thin else self.factors[key])

    def matrix(self, key: str) -> Tensor:
        """The sum under a key as a matrix."""
        return dense(self.thin[key] if key in self.thin else self.factors[key])

    def dense(self) -> KronParts:
        """The same with all sums as matrices."""
        return KronParts({**self.factors, **{key: self.matrix(key) for key in self.thin}}, self.blocks)

    @classmethod
    def from_factors(cls, kfacs: Sequence[Sequence[Tensor]], n_data: float, origin: str = "") -> KronParts:
        """Sums over the data from factors whose input sides are means.

        Factors of a tensor are `[left, right]`, or one of a bias or of an exact block; each is a matrix `[n, n]`, a
        diagonal `[n]` or one matrix per group `[G, n, n]`. Keys begin with `origin`, so that sums that mean something
        else are not added to these.
        """
        factors: dict[str, Tensor] = {}
        blocks: list[KronBlock] = []
        for i, sides in enumerate(kfacs):
            keys = f"{origin}out:{i}", f"{origin}in:{i}", f"{origin}positions:{i}"
            block, own = _of_sides([side.detach() for side in sides], n_data, keys)
            blocks.append(block)
            factors |= own
        return cls(factors, tuple(blocks))

    def positions(self, block: KronBlock) -> float:
        """Number of positions that share the weight; 1 without data. Discounted data may count less than 1."""
        return (self._counts[block.positions] or 1.0) if block.positions else 1.0

    @cached_property
    def _counts(self) -> dict[str, float]:
        keys = list(dict.fromkeys(block.positions for block in self.blocks if block.positions is not None))
        return dict(zip(keys, torch.stack([self.factors[key] for key in keys]).tolist(), strict=True)) if keys else {}

    def merged(self, other: KronParts) -> tuple[KronBlock, ...]:
        """The forms of the blocks of both sets of data."""
        return tuple(map(_either, self.blocks, other.blocks))

    def __add__(self, other: KronParts) -> KronParts:
        blocks, mine, theirs = self.merged(other), self.every, other.every
        read = dict.fromkeys(key for block in blocks for key in block.reads)
        both = [key for key in read if key in self.factors and key in other.factors]
        totals: dict[str, Factor] = {}
        if both:  # by one call
            sums = torch._foreach_add([self.factors[key] for key in both], [other.factors[key] for key in both])
            totals.update(zip(both, sums, strict=True))
        for key in read.keys() - totals.keys():
            if key in mine and key in theirs:
                totals[key] = added(mine[key], theirs[key])
            elif key in mine or key in theirs:
                totals[key] = mine[key] if key in mine else theirs[key]
        return KronParts.made_of({key: totals[key] for key in read if key in totals}, blocks)

    def scaled(self, factor: float) -> KronParts:
        """Sums of data with the weight `factor` each."""
        thin = {key: side.scaled(factor) for key, side in self.thin.items()}
        return KronParts({key: factor * value for key, value in self.factors.items()}, self.blocks, thin)

    def kfacs(self) -> list[list[Tensor]]:
        """Factors per tensor: `[left, right]` with left ⊗ right its block, `[left]` of a bias, or a dense block."""
        result: list[list[Tensor]] = []
        for block in self.blocks:
            output = self.matrix(block.output).sum(0)
            output = output[0] if block.kind == "kron" and len(output) == 1 else output
            if block.input is None:
                result.append([output])
                continue
            inputs = self.matrix(block.input) / self.positions(block)
            inputs = inputs[0] if inputs.ndim == 3 and len(inputs) == 1 else inputs
            result.append([inputs, output] if block.input_first else [output, inputs])
        return result

    def require_of(self, layout: Layout) -> None:
        """Refuses sums from a state that do not fit their blocks, or blocks that are not of these tensors.

        Raises:
            StateError: They do not; the message names the tensor.
        """
        require_blocks(self.blocks, layout)
        every = self.every
        for block, name in zip(self.blocks, layout.names, strict=True):
            missing = [key for key in block.reads if key not in every]
            if missing:
                raise StateError(f"the block of {name!r} reads the Kronecker factors {missing}, which H lacks.")
            if block.kind != "kron":
                square = (block.size,) * (2 if block.kind == "dense" else 1)
                nested.require_sizes(f"the block of {name!r}", every[block.output], None, *square)
                continue
            block.require_positions(self.factors, name)
            block.require_entries(math.prod(self.shape(block)), name)

    def shape(self, block: KronBlock) -> tuple[int, int, int]:
        """Groups, and widths of the left and the right side, of a block from a state with factors.

        Raises:
            StateError: A factor is no matrix.
        """
        every = self.every
        groups, n_output = _side_of(every[block.output], block.output)
        own, n_input = (1, 1) if block.input is None else _side_of(every[block.input], block.input)
        left, right = (n_input, n_output) if block.input_first else (n_output, n_input)
        return max(groups, own), left, right

    def shared(self, share: float, dtype: torch.dtype) -> list[list[Tensor]]:
        """Factors per tensor with input sides that are multiplied by a share of the data."""
        return [
            [(share * factor if len(sides) == 2 and (i == 0) is block.input_first else factor).to(dtype)
             for i, factor in enumerate(sides)]
            for block, sides in zip(self.blocks, self.kfacs(), strict=True)
        ]  # fmt: skip


@dataclass(frozen=True)
class KronBlock:
    """Form of the curvature of one tensor, by keys into `KronParts.factors`."""

    kind: str  # `"kron"`, `"dense"`, `"diag"`, or `"unused"`: zero, and added to any other kind
    size: int  # Number of random entries
    output: str  # Key of the output side, or of the dense or diagonal block
    input: str | None = None  # Key of the input side, or None (a bias: 1)
    positions: str | None = None  # Key of the number of positions
    # The first dimension of the tensor is the input side (embeddings, transposed convolutions)
    input_first: bool = False
    index: Tensor | None = None  # Random entries within the Kronecker product where they are not rows × columns

    def require_positions(self, factors: Mapping[str, Tensor], name: str) -> None:
        """Refuses a number of positions from a state that is no number, or is missing beside an input side.

        Raises:
            StateError: It is.
        """
        if self.input is not None or self.positions is not None:
            count = factors.get(self.positions or "")
            nested.require_sizes(f"the number of positions of {name!r}", count)
            if count is None or not count >= 0:
                raise StateError(f"the number of positions of {name!r} is negative; it was changed or damaged.")

    def require_entries(self, n_product: int, name: str) -> None:
        """Refuses the block of a tensor that has other entries than a product of sides with so many.

        Raises:
            StateError: It has.
        """
        if self.index is None:
            fits = self.size == n_product
        else:
            fits = tuple(self.index.shape) == (self.size,) and nested.are_indices(self.index, 0, n_product)
        if not fits:
            raise StateError(
                f"the Kronecker factors of {name!r} have {n_product} entries; its block has other {self.size}."
            )

    @property
    def reads(self) -> tuple[str, ...]:
        """Keys of the factors that the block reads."""
        inputs = () if self.input is None else (self.input,)
        return (self.output, *inputs) if self.positions is None else (self.output, *inputs, self.positions)


@dataclass(frozen=True, eq=False)
class KronSketch:
    """Products of Kronecker factors with given matrices, which add over batches as the factors do."""

    # Output sides times their matrices `[E, G, O, w]`, input sides `[G, I, w]`, counts and numbers of positions
    # as they are; nothing of tensors without factors
    parts: KronParts
    diagonal: Tensor | None  # The exact diagonal of the curvature, `[E, P]`, or None where it was not asked for


def require_blocks(blocks: Sequence[KronBlock], layout: Layout) -> None:
    """Refuses blocks from a state that are not of these tensors.

    Raises:
        StateError: Their number, sizes or kinds are others.
    """
    sizes = tuple(block.size for block in blocks)
    if sizes != layout.sizes:
        raise StateError(f"H has blocks of {list(sizes)} entries; the random tensors have {list(layout.sizes)}.")
    unknown = {block.kind for block in blocks} - KINDS
    if unknown:
        raise StateError(f"H has blocks of the kinds {sorted(unknown)}; known are {sorted(KINDS)}.")


def _side_of(side: Factor, name: str) -> tuple[int, int]:
    """Numbers of groups and of entries of one side: of matrices `[…, G, n, n]`, thin ones, or counts `[V]`."""
    if isinstance(side, ThinFactor):
        nested.require_sizes(name, side.vectors, *(1,) * (side.ndim - 3), None, None, None)
        nested.require_sizes(name, side.values, *side.vectors.shape[:-2], side.rank)
        return side.vectors.shape[-3], side.width
    if side.ndim == 1:
        nested.require_sizes(name, side, None)
        return 1, len(side)
    nested.require_sizes(name, side, *(None,) * (2 if side.ndim == 4 else 1), None, side.shape[-1])
    return side.shape[-3], side.shape[-1]


def n_entries(sides: Sequence[Tensor]) -> int:
    """Number of entries of a tensor whose block has these factors."""
    groups = max(len(side) if side.ndim == 3 else 1 for side in sides)
    return groups * math.prod(side.shape[-1] for side in sides)


def _of_sides(
    sides: Sequence[Tensor], n_data: float, keys: tuple[str, str, str]
) -> tuple[KronBlock, dict[str, Tensor]]:
    """The block of a tensor and its sums, by the keys of its output side, its input side and its positions."""
    key, size = keys[0], n_entries(sides)
    if all(side.ndim == 1 for side in sides):
        diagonal = sides[0] if len(sides) == 1 else torch.outer(*sides).flatten()
        return KronBlock("diag", size, key), {key: diagonal.unsqueeze(0)}
    if len(sides) == 1:
        kind = "dense" if sides[0].ndim == 2 else "kron"  # one matrix, or one per group of a bias
        return KronBlock(kind, size, key), {key: sides[0].unsqueeze(0)}
    input_first = sides[0].ndim == 1  # the counts of an embedding's rows
    inputs, output = sides if input_first else reversed(sides)
    groups = max(len(side) if side.ndim == 3 else 1 for side in sides)
    terms = output if output.ndim == 3 else output.expand(groups, *output.shape)
    counted = torch.tensor(float(n_data), dtype=output.dtype, device=output.device)
    sums = (terms.unsqueeze(0), n_data * (inputs.unsqueeze(0) if inputs.ndim == 2 else inputs), counted)
    return KronBlock("kron", size, *keys, input_first), dict(zip(keys, sums, strict=True))


def _either(a: KronBlock, b: KronBlock) -> KronBlock:
    """The form of a block for two sets of data, one of which may not have used it."""
    if UNUSED in (a.kind, b.kind):
        return b if a.kind == UNUSED else a
    if a.reads != b.reads:
        if a.output.startswith(ASSIGNED) or b.output.startswith(ASSIGNED):
            raise InvalidData(
                "Kronecker factors that were assigned, or saved by laplace-torch, may be normalised in another way "
                "than those of a fit, and are not added to them; fit all data at once with override=True, or sum all "
                "of them by hand, la.start_fit() and la.H += la.curvature_of(x, y, n_data)[1] for every batch."
            )
        raise InvalidData(
            f"Kronecker factors of two sets of data do not match: different rules explained {a.output!r} and "
            f"{b.output!r}. Give batches of the same form, or use hessian_structure='diag', which has one form only."
        )
    return a
