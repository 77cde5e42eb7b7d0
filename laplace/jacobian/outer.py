"""Blocks of factors Σ_t g ⊗ a over the positions t that share a tensor: linear layers and convolutions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from laplace.core.orthogonal_basis import OrthogonalBasis
from laplace.core.pieces import bytes_at_once
from laplace.core.precision_policy import widened
from laplace.jacobian.blocks import (
    CHUNK_BYTES,
    Block,
    PickedBlock,
    ProductBasis,
    RankOne,
    TensorShape,
    all_of,
    at_outputs,
    by_row,
    chunks,
    concatenated,
    entries_of,
    less_mean,
    sum_of_squares,
    total,
)
from laplace.jacobian.patches import Patches, as_tensor

if TYPE_CHECKING:
    from laplace.weights.problem import Selection

_DOUBLE = 8  # bytes of a number in float64
S = TypeVar("S")
F = TypeVar("F", bound="FactoredBlock")


class FactoredBlock(Block):
    """Σ_t g ⊗ a over T positions and in G groups, whose curvature has the Kronecker factors Σ g gᵀ and Σ a aᵀ."""

    g: Tensor  # Output gradients `[K, B, T, ..., O]`
    input_first: bool  # True if the tensor's first dimension is the input side

    @abstractmethod
    def with_factors(self: F, inputs: Callable[[Tensor], Tensor], g: Tensor) -> F:
        """The block with other output gradients, and a function of every tensor of the input side, `[B, T, ...]`."""

    @property
    @abstractmethod
    def gradients(self) -> Tensor:
        """Output gradients with their groups, `[K, B, T, G, O]`."""

    @property
    @abstractmethod
    def shares_outputs(self) -> bool:
        """True if g are the gradients of the layer's outputs, which weight and bias share."""

    @abstractmethod
    def output_rows(self, *, reduce: bool) -> Tensor:
        """Rows g of the output side, `[K, ..., G, O]`; with `reduce`, summed over the positions of a sample."""

    @abstractmethod
    def input_side(
        self, gram: Callable[[Tensor | Patches], S], weights: Tensor | None = None, *, reduce: bool
    ) -> S | Tensor | None:
        """Σ w a aᵀ by `gram` of rows `[..., G, I]` or patches; counts `[V]` if a is one-hot, None for a bias.

        With `reduce`, a is averaged over the positions of an input.
        """

    @abstractmethod
    def input_count(self, weights: Tensor | None = None, *, reduce: bool) -> Tensor:
        """Number of rows of the input side, 0-dim, weighted as their samples: positions, or with `reduce` samples."""

    @property
    def n_positions(self) -> int:
        """Number of positions T that share the tensor."""
        return self.gradients.shape[2]

    @property
    def groups(self) -> int:
        """Number of groups G with weights of their own."""
        return self.gradients.shape[3]

    @property
    def n_outputs(self) -> int:
        """Number of outputs O of a group."""
        return self.gradients.shape[4]

    @property
    @abstractmethod
    def n_inputs(self) -> int:
        """Number of inputs I of a group; 1 of a bias."""

    @property
    def dims(self) -> tuple[int, int, int]:
        n_cotangents, n_data, _, groups, n_outputs = self.gradients.shape
        return n_cotangents, n_data, groups * n_outputs * self.n_inputs

    # Without a look at the inputs:

    @property
    def n_cotangents(self) -> int:
        return self.g.shape[0]

    @property
    def n_data(self) -> int:
        return self.g.shape[1]

    @property
    def device(self) -> torch.device:
        return self.g.device

    def shape(self, inputs: Sequence[Tensor]) -> TensorShape:
        return TensorShape(
            self.size, factored=True, groups=self.groups, n_outputs=self.n_outputs, n_inputs=self.n_inputs,
            positions=self.n_positions,
        )  # fmt: skip

    @property
    def product(self) -> FactoredBlock:
        return self

    def at(self: F, data: slice | Tensor) -> F:
        return self.with_factors(lambda inputs: inputs[data], self.g[:, data])

    def select_outputs(self, outputs: Tensor) -> Block:
        return self.with_factors(lambda inputs: inputs, at_outputs(self.g, outputs))

    def centred(self) -> Block:
        return self.with_factors(lambda inputs: inputs, less_mean(self.g))

    def join(self, others: Sequence[Block]) -> Block:
        alike = all_of(type(self), others)
        if alike is None:
            return super().join(others)
        return self.with_factors(lambda inputs: inputs, torch.cat([self.g, *(other.g for other in alike)]))

    def fold_positions(self, n_positions: int) -> Block | None:
        if self.n_positions != n_positions:
            return None
        return self.with_factors(lambda inputs: inputs.flatten(0, 1).unsqueeze(1), self.g.flatten(1, 2).unsqueeze(2))

    def fold_cotangents(self, n_positions: int) -> Block:
        return self.with_factors(lambda inputs: inputs.repeat_interleave(n_positions, 0), by_row(self.g, n_positions))

    def cast(self, dtype: torch.dtype) -> Block:
        return self.with_factors(lambda inputs: inputs.to(dtype) if inputs.is_floating_point() else inputs,
                                 self.g.to(dtype))  # fmt: skip

    def detached(self) -> Block:
        return self.with_factors(lambda inputs: inputs.detach().clone(), self.g.detach().clone())


def unpicked(block: Block) -> Block:
    """The block without selections of single entries."""
    return unpicked(block.whole) if isinstance(block, PickedBlock) else block


def kernel_by_grams(
    x: FactoredBlock, y: FactoredBlock, input_products: Callable[[slice, slice], Tensor]
) -> Callable[[], Tensor]:
    """Σ_g Σ_tt' (a·a')(g·g') of two blocks of one tensor, `[K, B, L, M]`, float64, in chunks of their data.

    `input_products` gives a · a' of slices of the data of both, `[G, b, T, m, T']`.
    """

    def products(i: slice, j: slice) -> Tensor:
        inputs = input_products(i, j)
        outputs = torch.einsum("kbtgo,lmsgo->gkbtlms", widened(x.gradients[:, i]), widened(y.gradients[:, j]))
        if x.n_positions == y.n_positions == 1:
            return (outputs[:, :, :, 0, :, :, 0] * inputs[:, None, :, 0, None, :, 0]).sum(0)
        return torch.einsum("gkbtlms,gbtms->kblm", outputs, inputs)

    def kernel() -> Tensor:
        return torch.cat([torch.cat([products(i, j) for j in _chunks(y, x)], 3) for i in _chunks(x, y)], 1)

    return kernel


def _chunks(x: FactoredBlock, y: FactoredBlock) -> Iterator[slice]:
    """Consecutive samples of x, so few that the Gram of output gradients with as many of y fits a chunk."""
    pairs = x.n_cotangents * y.n_cotangents * x.n_positions * y.n_positions * x.groups
    step = max(1, int((bytes_at_once(CHUNK_BYTES, x.device) / (_DOUBLE * pairs)) ** 0.5))
    for start in range(0, x.n_data, step):
        yield slice(start, start + step)


def flat_product(x: Tensor, y: Tensor) -> Tensor:
    """Scalar products of `[K, B, ...]` and `[L, M, ...]`, `[K, B, L, M]`."""
    return (x.flatten(0, 1).flatten(1) @ y.flatten(0, 1).flatten(1).T).view(*x.shape[:2], *y.shape[:2])


_KEPT_BELOW = 128
"""Output gradients of a sample, K · O, from which on patches may be unfolded anew for every product with them, which
takes longer; with fewer, several products share the unfolded patches."""


@dataclass(frozen=True, eq=False)
class OuterBlock(FactoredBlock):
    """Σ_t g ⊗ a of a linear or convolutional weight, or Σ_t g of its bias."""

    # Inputs `[B, T, G, I]` of the G groups, or patches of that shape, or None for a bias (all ones, I = 1)
    a: Tensor | Patches | None
    g: Tensor  # Output gradients `[K, B, T, G, O]`
    # The tensor's layout is (G·I, O) instead of (G·O, I): transposed convolutions, products x W
    input_first: bool = False
    # g are the layer's output gradients in patches, and not those of its bias: transposed convolutions
    unfolded: bool = False
    counted: Tensor | None = None  # Positions that hold something, `[B, T]`; others hold zeros; None for all
    kind = "outer"

    # Sizes.

    @property
    def n_inputs(self) -> int:
        return 1 if self.a is None else self.a.shape[3]

    def shape(self, inputs: Sequence[Tensor]) -> TensorShape:
        a, copied = self.a, 0
        if isinstance(a, Patches):
            copied = a.n_bytes  # though not all are held at once
        elif a is not None and not any(a is x or a._base is x for x in inputs):
            copied = a.untyped_storage().nbytes()  # they are no view of the layer's
        return replace(super().shape(inputs), is_bias=a is None, copied=copied)

    # Inputs as a tensor: patches are unfolded.

    @property
    def inputs(self) -> Tensor | None:
        """All inputs `[B, T, G, I]`."""
        return None if self.a is None else as_tensor(self.a)

    def _unfolded(self) -> OuterBlock:
        return replace(self, a=self.inputs)

    def _parts(self) -> Iterator[OuterBlock]:
        """The block with unfolded inputs, in parts that fit a cache."""
        if isinstance(self.a, Patches):
            yield from (self.at(part)._unfolded() for part in self.a.slices())
        else:
            yield self

    # Other data, outputs and entries.

    def with_factors(self, inputs: Callable[[Tensor], Tensor], g: Tensor) -> OuterBlock:
        a = self.a.map(inputs) if isinstance(self.a, Patches) else None if self.a is None else inputs(self.a)
        return replace(self, a=a, g=g, counted=None if self.counted is None else inputs(self.counted))

    def at_places(self, present: Tensor) -> OuterBlock:
        return replace(self, counted=present.repeat_interleave(self.n_positions // present.shape[1], 1))

    def select_entries(self, selection: Selection, entries: Tensor) -> Block:
        if self.groups > 1:
            return super().select_entries(selection, entries)
        outputs, inputs = selection.rows, selection.cols
        if self.input_first:
            outputs, inputs = inputs, outputs
        g, a = self.g if outputs is None else entries_of(self.g, outputs), self.a
        if inputs is not None and self.inputs is not None:
            a = entries_of(self.inputs, inputs)
        part = replace(self, a=a, g=g)
        return part if selection.index is None else PickedBlock(part, selection.index)

    def add(self, others: Sequence[Block]) -> Block:
        uses = all_of(OuterBlock, (self, *others))
        if uses is None or len({(use.input_first, use.unfolded, use.a is None) for use in uses}) > 1:
            return super().add(others)
        inputs = [use.inputs for use in uses if use.inputs is not None]
        counted = [use._every() for use in uses] if any(use.counted is not None for use in uses) else None
        return replace(
            self, a=concatenated(inputs, 1) if inputs else None, g=concatenated([use.g for use in uses], 2),
            counted=None if counted is None else concatenated(counted, 1),
        )  # fmt: skip

    def followed_by(self, others: Sequence[Block]) -> Block:
        parts = all_of(OuterBlock, (self, *others))
        if parts is None or len({part._form for part in parts}) > 1:
            return super().followed_by(others)
        a, counted = self.a, [part.counted for part in parts if part.counted is not None]
        if isinstance(a, Patches):
            a = replace(a, images=torch.cat([part.a.images for part in parts if isinstance(part.a, Patches)]))
        elif a is not None:
            a = torch.cat([part.a for part in parts if isinstance(part.a, Tensor)])
        return replace(
            self, a=a, g=torch.cat([part.g for part in parts], 1), counted=torch.cat(counted) if counted else None
        )

    @property
    def _form(self) -> object:
        """What the blocks of other data share with this one, if they can follow it."""
        a = self.a
        patches = (a.kernel, a.stride, a.dilation, a.groups, a.images.shape[1:]) if isinstance(a, Patches) else None
        inputs = None if a is None or patches else a.shape[1:]
        return patches, inputs, self.g.shape[0], self.g.shape[2:], self.input_first, self.unfolded, self.counted is None

    def _every(self) -> Tensor:
        shape = self.n_data, self.n_positions
        return torch.ones(shape, dtype=torch.bool, device=self.g.device) if self.counted is None else self.counted

    def fold_positions(self, n_positions: int) -> Block | None:
        if self.unfolded or self.n_positions != n_positions:
            return None
        if isinstance(self.a, Patches):
            return self._unfolded().fold_positions(n_positions)
        return super().fold_positions(n_positions)

    # The same values in another form.

    def in_basis(self, basis: ProductBasis) -> Block:
        """Rotates each factor before or after the sum over T positions, whichever is less work."""
        if basis.output_first is self.input_first:
            return super().in_basis(basis)
        k, o, i = self.n_cotangents, self.n_outputs, self.n_inputs
        late_output, late_inputs = self._is_late(basis.output, o, k, k * i), self._is_late(basis.inputs, i, 1, k * o)
        now, later = basis.split(output=not late_output, inputs=not late_inputs)
        g = self.g if now.output is None else now.output.rotate(self.g)
        a = self.a if now.inputs is None or self.inputs is None else now.inputs.rotate(self.inputs)
        early = replace(self, a=a, g=g)
        if not late_output and not late_inputs:
            return early
        return Block.in_basis(early, later)

    def _is_late(self, basis: OrthogonalBasis | None, n: int, rows: int, sums: int) -> bool:
        """True if rotating a side after the sum over T positions, n to r entries, is less work than before it.

        Before, its rows take rows·T·n·r, and the sum sums·T·r; after, the sum takes sums·T·n, and rotating it sums·n·r.
        """
        if basis is None or self.n_positions == 1:
            return False
        r, t = basis.n_columns, self.n_positions
        return sums * n * (t + r) < t * r * (rows * n + sums)

    def state(self) -> dict[str, Any]:
        layout = {"input_first": self.input_first, "unfolded": self.unfolded}
        return {"kind": self.kind, "a": self.inputs, "g": self.g, **layout}

    # Factors.

    @property
    def gradients(self) -> Tensor:
        return self.g

    @property
    def shares_outputs(self) -> bool:
        return not self.unfolded

    def output_rows(self, *, reduce: bool) -> Tensor:
        return self.g.sum(2) if reduce else self.g

    def input_side(
        self, gram: Callable[[Tensor | Patches], S], weights: Tensor | None = None, *, reduce: bool
    ) -> S | None:
        a, counted = self.a, self.counted
        if weights is not None:
            roots = weights.sqrt()  # since rows enter by their squares
            a = self.with_factors(lambda rows: rows * roots.to(rows).view(-1, *(1,) * (rows.ndim - 1)), self.g).a
        if a is None:
            return None
        if reduce:
            a = as_tensor(a)
            if counted is None:
                a = a.mean(1, keepdim=True)  # [B, 1, G, I]
            else:
                a = a.sum(1, keepdim=True) / counted.sum(1).clamp(min=1).to(a).view(-1, 1, 1, 1)
        return gram(a)

    def input_count(self, weights: Tensor | None = None, *, reduce: bool) -> Tensor:
        if self.counted is not None:
            rows = (self.counted.any(1) if reduce else self.counted.sum(1)).to(self.g.dtype)
            return (rows if weights is None else rows * weights.to(rows)).sum()
        per_datum = 1 if reduce else self.n_positions
        return self.g.new_full((), self.n_data * per_datum) if weights is None else per_datum * weights.sum()

    def kernel_by_factors(self, other: Block) -> Callable[[], Tensor] | None:
        if not isinstance(other, OuterBlock) or not self._prefers_grams(other):
            return None
        a, other_a = self.inputs, other.inputs
        if a is None or other_a is None:
            return lambda: flat_product(widened(self.g).sum(2), widened(other.g).sum(2))

        def products(i: slice, j: slice) -> Tensor:
            return torch.einsum("btgi,msgi->gbtms", widened(a[i]), widened(other_a[j]))

        return kernel_by_grams(self, other, products)

    def _prefers_grams(self, other: OuterBlock) -> bool:
        """True if Grams of the factors are less work than the tensor's entries, I·O.

        Per pair of data and of outputs, Grams multiply T·T'·O gradients and T·T' products; per pair of data T·T'·I
        inputs.
        """
        if self.input_first != other.input_first:
            return False
        pairs = self.n_positions * other.n_positions
        shared = self.n_inputs / (self.n_cotangents * other.n_cotangents)
        return self.a is None or pairs == 1 or pairs * (self.n_outputs + 1 + shared) < self.n_inputs * self.n_outputs

    def rank_one(self) -> RankOne | None:
        if self.n_positions > 1 or self.groups > 1 or self.inputs is None:
            return None
        return RankOne(self.g[:, :, 0, 0], self.inputs[:, 0, 0], self.n_outputs, self.input_first)

    # Contractions. With one position, squares of the sum are products of squares and no dense piece is needed.

    @property
    def contracts_factors(self) -> bool:
        return self.n_positions == 1

    def dense(self) -> Tensor:
        if self.a is None:
            return (self.g[:, :, 0] if self.n_positions == 1 else self.g.sum(2)).flatten(2)
        if isinstance(self.a, Patches) and self.a.convolves(self.g):
            sums = self.a.outer_sums(self.g)
            return (sums.mT if self.input_first else sums).flatten(2)
        order = "kbgio" if self.input_first else "kbgoi"
        parts = [torch.einsum(f"kbtgo,btgi->{order}", part.g, part.inputs).flatten(2) for part in self._parts()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def bound(self) -> Tensor:
        if self.a is None:
            return self.g.norm() * self.n_positions**0.5
        norms = [part.inputs.norm() for part in self._parts() if part.inputs is not None]
        return self.g.norm() * torch.stack(norms).norm()

    def entries(self, index: Tensor) -> Tensor:
        inputs = self.inputs if self.n_positions * len(index) <= self.size else None
        if inputs is None:
            return super().entries(index)
        if self.input_first:
            columns, output = index // self.n_outputs, index % self.n_outputs
            outputs = columns // self.n_inputs * self.n_outputs + output
        else:
            outputs = index // self.n_inputs
            columns = outputs // self.n_outputs * self.n_inputs + index % self.n_inputs
        g, a = self.g.flatten(3), inputs.flatten(2)
        return total(g[:, :, t, outputs] * a[:, t, columns] for t in range(self.n_positions))

    def pull(self, cotangents: Tensor) -> Tensor:
        if self.a is None:
            return super().pull(cotangents)
        order = "gio" if self.input_first else "goi"
        weighted = replace(self, g=self.g * cotangents[:, :, None, None, None])
        return total(torch.einsum(f"kbtgo,btgi->{order}", part.g, part.inputs) for part in weighted._parts()).flatten()

    def add_squares(self, running: Tensor) -> None:
        if self.n_positions > 1:
            for part in self._for_squares():
                Block.add_squares(part, running)
            return
        g = sum_of_squares(self.g[:, :, 0])
        if self.inputs is None:
            running += g.sum(0).flatten()
            return
        squares = g.to(running), self.inputs[:, 0].square().to(running)
        left, right = reversed(squares) if self.input_first else squares  # [B, G, O] and [B, G, I]
        running.view(self.groups, left.shape[2], -1).baddbmm_(left.permute(1, 2, 0), right.transpose(0, 1))

    def squares_per_cotangent(self) -> Tensor:
        if self.n_positions > 1:
            return torch.cat([Block.squares_per_cotangent(part) for part in self._for_squares()])
        g = self.g[:, :, 0].square()
        if self.inputs is None:
            return g.sum(1).flatten(1)
        order = "kgio" if self.input_first else "kgoi"
        return torch.einsum(f"kbgo,bgi->{order}", g, self.inputs[:, 0].square()).flatten(1)

    def _for_squares(self) -> Iterator[OuterBlock]:
        """Blocks of some cotangents: for a large weight even the piece of one sample may be too large."""
        step = max(1, bytes_at_once(CHUNK_BYTES, self.device) // (8 * self.size))
        few = self.n_cotangents * self.n_outputs < _KEPT_BELOW
        unfolds = few and isinstance(self.a, Patches) and not self.a.convolves(self.g)
        block = self._unfolded() if unfolds else self
        for g in self.g.split(step):
            yield replace(block, g=g)

    def weighted_norms(self, weights: Tensor) -> Tensor:
        if self.n_positions > 1:
            return super().weighted_norms(weights)
        return torch.einsum("kbgo,bgo->bk", self.g[:, :, 0].square(), self._weighed_inputs(weights))

    def weighted_gram(self, weights: Tensor) -> Tensor:
        if self.n_positions > 1:
            return super().weighted_gram(weights)
        g = self.g[:, :, 0].flatten(2).transpose(0, 1).to(weights.dtype)
        return (g * self._weighed_inputs(weights.to(self.g.dtype)).flatten(1).unsqueeze(1)) @ g.transpose(1, 2)

    def _weighed_inputs(self, weights: Tensor) -> Tensor:
        """Σ_i a² w of an unshared weight, `[B, G, O]` (`[1, G, O]` for a bias): what is left to meet g²."""
        matrix = self._matrix(weights)
        if self.inputs is None:
            return matrix[None, ..., 0]
        return torch.einsum("bgi,goi->bgo", self.inputs[:, 0].square(), matrix)

    def _matrix(self, weights: Tensor) -> Tensor:
        shape = (self.groups, self.n_inputs, -1) if self.input_first else (self.groups, -1, self.n_inputs)
        matrix = weights.view(shape)
        return matrix.transpose(1, 2) if self.input_first else matrix

    def apply(self, vectors: Tensor) -> Tensor:
        shared = self.n_positions > 1
        if shared and (self.a is None or not self._applies_by_position(len(vectors))):
            return super().apply(vectors)
        steps = torch.stack([self._matrix(vector) for vector in vectors])  # [S, G, O, I]
        if shared:
            return self._by_position(steps)
        if self.inputs is None:
            outputs = steps[:, None, ..., 0].expand(-1, self.n_data, -1, -1)
        else:
            outputs = torch.einsum("bgi,sgoi->sbgo", self.inputs[:, 0], steps)
        return torch.einsum("kbgo,sbgo->sbk", self.g[:, :, 0], outputs)

    def combined(self, weights: Tensor) -> Tensor:
        shared = self.n_positions > 1
        if shared and (self.a is None or not self._applies_by_position(len(weights))):
            return super().combined(weights)
        if self.inputs is None:
            return torch.einsum("kbgo,sbk->sgo", self.g[:, :, 0], weights).flatten(1)
        order, parts = "gio" if self.input_first else "goi", []
        for data in chunks(self.n_data, len(weights) * self.n_positions * self.groups * self.n_outputs, self.device):
            part = self.at(data)
            outputs = torch.einsum("kbtgo,sbk->sbtgo", part.g, weights[:, data])
            parts.append(torch.einsum(f"sbtgo,btgi->s{order}", outputs, part.inputs))
        return total(parts).flatten(1)

    def _applies_by_position(self, count: int) -> bool:
        """True if Σ_t g·(a v) for S vectors is much less work than products with Σ_t g ⊗ a."""
        k, t, i = self.n_cotangents, self.n_positions, self.n_inputs
        return 2 * count * t * (i + k) < k * i * (t + count)

    def _by_position(self, steps: Tensor) -> Tensor:
        """Σ_t g·(a v), `[S, B, K]`, of vectors `[S, G, O, I]`: no dense piece is made."""
        parts: list[Tensor] = []
        for data in chunks(self.n_data, len(steps) * self.n_positions * self.groups * self.n_outputs, self.device):
            part = self.at(data)
            outputs = torch.einsum("btgi,sgoi->sbtgo", part.inputs, steps)
            parts.append(torch.einsum("kbtgo,sbtgo->sbk", part.g, outputs))
        return torch.cat(parts, 1)
