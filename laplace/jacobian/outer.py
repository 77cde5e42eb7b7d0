"""Blocks of factors, sums of outer products Σ_t g ⊗ a over the positions t that share a tensor, as of linear layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.jacobian.blocks import BLOCKS, Block, PickedBlock, all_of, by_row, of_each
from laplace.jacobian.contractions import (
    CHUNK_BYTES,
    KroneckerFactored,
    ProductBasis,
    RankOne,
    TensorShape,
    squared,
    total,
)
from laplace.weights.problem import Selection

_DOUBLE = 8
"""Bytes of a number in float64."""


F = TypeVar("F", bound="FactoredBlock")
S = TypeVar("S")


class FactoredBlock(Block, KroneckerFactored):
    """A sum of outer products of output gradients and inputs, over T positions and in G groups.

    Attributes:
        g: Output gradients `[K, B, T, ..., O]`.
    """

    g: Tensor

    @abstractmethod
    def with_factors(self: F, inputs: Callable[[Tensor], Tensor], g: Tensor) -> F:
        """The block with other factors.

        Args:
            inputs: Maps every tensor of the input side, `[B, T, ...]`.
            g: Output gradients.
        """

    @property
    @abstractmethod
    def gradients(self) -> Tensor:
        """Output gradients with their groups, `[K, B, T, G, O]`."""

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
    def n_cotangents(self) -> int:
        return self.g.shape[0]

    @property
    def n_data(self) -> int:
        return self.g.shape[1]

    @property
    def product(self) -> KroneckerFactored:
        return self

    def at(self: F, data: slice | Tensor) -> F:
        return self.with_factors(lambda inputs: inputs[data], self.g[:, data])

    def select_outputs(self, outputs: Tensor) -> Block:
        return self.with_factors(lambda inputs: inputs, of_each(self.g, outputs))

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
        return self.with_factors(lambda inputs: inputs.detach().contiguous(), self.g.detach().contiguous())


def kernel_by_grams(
    x: FactoredBlock, y: FactoredBlock, input_products: Callable[[slice, slice], Tensor]
) -> Callable[[], Tensor]:
    """Σ_g Σ_tt' (a·a')(g·g') of two blocks of one tensor, `[K, B, L, M]`, float64, in chunks of their data.

    Args:
        x: A block of B data.
        y: A block of M data.
        input_products: Gives a · a' of slices of the data of both, `[G, b, T, m, T']`, float64.
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
    """Consecutive data of x, so few that the Gram of output gradients with as many of y fits a chunk."""
    pairs = x.n_cotangents * y.n_cotangents * x.n_positions * y.n_positions * x.groups
    step = max(1, int((CHUNK_BYTES / (_DOUBLE * pairs)) ** 0.5))
    for start in range(0, x.n_data, step):
        yield slice(start, start + step)


def flat_product(x: Tensor, y: Tensor) -> Tensor:
    """Scalar products of `[K, B, ...]` and `[L, M, ...]`, `[K, B, L, M]`."""
    return (x.flatten(0, 1).flatten(1) @ y.flatten(0, 1).flatten(1).T).view(*x.shape[:2], *y.shape[:2])


@dataclass(frozen=True, eq=False)
class OuterBlock(FactoredBlock):
    """Σ_t g ⊗ a of a linear or convolutional weight, or Σ_t g of its bias.

    Attributes:
        a: Inputs `[B, T, G, I]` of the G groups, or None for a bias (all ones, I = 1).
        g: Output gradients `[K, B, T, G, O]`.
        input_first: The tensor's layout is (G·I, O) instead of (G·O, I): transposed convolutions, products x W.
        unfolded: g are the layer's output gradients in patches, and not those of its bias: transposed convolutions.
    """

    a: Tensor | None
    g: Tensor
    input_first: bool = False
    unfolded: bool = False

    # Sizes.

    @property
    def n_inputs(self) -> int:
        """Number of inputs I of a group."""
        return 1 if self.a is None else self.a.shape[3]

    @property
    def size(self) -> int:
        return self.groups * self.n_outputs * self.n_inputs

    def shape(self, inputs: Sequence[Tensor]) -> TensorShape:
        a = self.a
        unfolded = 0 if a is None or any(a is x or a._base is x for x in inputs) else a.untyped_storage().nbytes()
        return TensorShape(
            self.size, factored=True, groups=self.groups, n_outputs=self.n_outputs, n_inputs=self.n_inputs,
            positions=self.n_positions, is_bias=a is None, copied=unfolded,
        )  # fmt: skip

    # Other data, outputs and entries.

    def with_factors(self, inputs: Callable[[Tensor], Tensor], g: Tensor) -> OuterBlock:
        return replace(self, a=None if self.a is None else inputs(self.a), g=g)

    def select_entries(self, selection: Selection, entries: Tensor) -> Block:
        if self.groups > 1:
            return super().select_entries(selection, entries)
        outputs, inputs = selection.rows, selection.cols
        if self.input_first:
            outputs, inputs = inputs, outputs
        g = self.g if outputs is None else self.g[..., outputs]
        part = self.with_factors(lambda a: a if inputs is None else a[..., inputs], g)
        return part if selection.index is None else PickedBlock(part, selection.index)

    def add(self, others: Sequence[Block]) -> Block:
        """The sum with other uses: as more positions where the layouts agree."""
        uses = all_of(OuterBlock, (self, *others))
        if uses is None or len({(use.input_first, use.unfolded, use.a is None) for use in uses}) > 1:
            return super().add(others)
        inputs = [use.a for use in uses if use.a is not None]
        return replace(self, a=torch.cat(inputs, 1) if inputs else None, g=torch.cat([use.g for use in uses], 2))

    def fold_positions(self, n_positions: int) -> Block | None:
        return None if self.unfolded else super().fold_positions(n_positions)

    # The same values in another form.

    def in_basis(self, basis: ProductBasis) -> Block:
        """Rotates each factor before or after the sum over T positions, whichever is less work.

        Before, g costs K·T·O² per datum and a T·I²; after, the sum `[K, O, I]` costs K·O²·I and K·O·I².
        """
        if basis.output_first is self.input_first:
            return super().in_basis(basis)
        late_output = 1 < self.n_positions > self.n_inputs and basis.output is not None
        late_inputs = 1 < self.n_positions > self.n_cotangents * self.n_outputs and basis.inputs is not None
        now = basis.only(output=not late_output, inputs=not late_inputs)
        g = self.g if now.output is None else now.output.rotate(self.g)
        early = self.with_factors(lambda a: a if now.inputs is None else now.inputs.rotate(a), g)
        if not late_output and not late_inputs:
            return early
        return Block.in_basis(early, basis.only(output=late_output, inputs=late_inputs))

    def state(self) -> dict[str, Any]:
        layout = {"input_first": self.input_first, "unfolded": self.unfolded}
        return {"kind": "outer", "a": self.a, "g": self.g, **layout}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> OuterBlock:
        return cls(state["a"], state["g"], input_first=state["input_first"], unfolded=state["unfolded"])

    # Factors.

    @property
    def gradients(self) -> Tensor:
        return self.g

    @property
    def shares_outputs(self) -> bool:
        return not self.unfolded

    def output_rows(self, *, reduce: bool) -> Tensor:
        return self.g.sum(2) if reduce else self.g

    def input_side(self, gram: Callable[[Tensor], S], *, reduce: bool) -> S | None:
        if self.a is None:
            return None
        return gram(self.a.mean(1, keepdim=True) if reduce else self.a)

    def input_count(self, *, reduce: bool) -> Tensor:
        return self.g.new_tensor(float(self.n_data * (1 if reduce else self.n_positions)))

    def kernel_by_factors(self, other: Block) -> Callable[[], Tensor] | None:
        if not isinstance(other, OuterBlock) or not self._prefers_grams(other):
            return None
        a, other_a = self.a, other.a
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
        if self.a is None or self.n_positions > 1 or self.groups > 1:
            return None
        return RankOne(self.g[:, :, 0, 0], self.a[:, 0, 0], self.n_outputs, self.input_first)

    # Contractions. With one position, squares of the sum are products of squares and no dense piece is needed.

    @property
    def contracts_factors(self) -> bool:
        return self.n_positions == 1

    def dense(self) -> Tensor:
        if self.a is None:
            return (self.g[:, :, 0] if self.n_positions == 1 else self.g.sum(2)).flatten(2)
        order = "kbgio" if self.input_first else "kbgoi"
        return torch.einsum(f"kbtgo,btgi->{order}", self.g, self.a).flatten(2)

    def bound(self) -> Tensor:
        return self.g.norm() * (self.n_positions**0.5 if self.a is None else self.a.norm())

    def entries(self, index: Tensor) -> Tensor:
        if self.a is None or self.n_positions * len(index) > self.size:
            return super().entries(index)
        if self.input_first:
            inputs, output = index // self.n_outputs, index % self.n_outputs
            outputs = inputs // self.n_inputs * self.n_outputs + output
        else:
            outputs = index // self.n_inputs
            inputs = outputs // self.n_outputs * self.n_inputs + index % self.n_inputs
        g, a = self.g.flatten(3), self.a.flatten(2)
        return total(g[:, :, t, outputs] * a[:, t, inputs] for t in range(self.n_positions))

    def pull(self, cotangents: Tensor) -> Tensor:
        if self.a is None:
            return super().pull(cotangents)
        order = "gio" if self.input_first else "goi"
        return torch.einsum(f"kbtgo,btgi->{order}", self.g * cotangents[:, :, None, None, None], self.a).flatten()

    def sum_of_squares(self, *, apart: bool = False) -> Tensor:
        if self.n_positions > 1:
            return self._squares_of_sums(apart=apart)
        g = self.g[:, :, 0].square() if apart else squared(self.g[:, :, 0])
        if self.a is None:
            return g.sum(1).flatten(1)
        order = "kgio" if self.input_first else "kgoi"
        return torch.einsum(f"kbgo,bgi->{order}", g, self.a[:, 0].square()).flatten(1)

    def _squares_of_sums(self, *, apart: bool) -> Tensor:
        """The sum by dense pieces; of a large weight not even those of one datum hold all cotangents."""
        step = max(1, CHUNK_BYTES // (8 * self.size))
        if self.n_cotangents <= step:
            return super().sum_of_squares(apart=apart)
        parts = [replace(self, g=g) for g in self.g.split(step)]
        if apart:
            return torch.cat([part.sum_of_squares(apart=True) for part in parts])
        return total(part.sum_of_squares() for part in parts)

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
        if self.a is None:
            return matrix[None, ..., 0]
        return torch.einsum("bgi,goi->bgo", self.a[:, 0].square(), matrix)

    def _matrix(self, weights: Tensor) -> Tensor:
        """Weights `[p]` as `[G, O, I]`."""
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
        if self.a is None:
            outputs = steps[:, None, ..., 0].expand(-1, self.n_data, -1, -1)
        else:
            outputs = torch.einsum("bgi,sgoi->sbgo", self.a[:, 0], steps)
        return torch.einsum("kbgo,sbgo->sbk", self.g[:, :, 0], outputs)

    def _applies_by_position(self, count: int) -> bool:
        """True if Σ_t g·(a v) of S vectors is much less work than Σ_t g ⊗ a, as one product, and its products."""
        k, t, i = self.n_cotangents, self.n_positions, self.n_inputs
        return 2 * count * t * (i + k) < k * i * (t + count)

    def _by_position(self, steps: Tensor) -> Tensor:
        """Σ_t g·(a v), `[S, B, K]`, of vectors `[S, G, O, I]`: no dense piece is made."""
        per_datum = len(steps) * self.n_positions * self.groups * self.n_outputs * 8
        size = max(1, CHUNK_BYTES // per_datum)
        parts: list[Tensor] = []
        for start in range(0, self.n_data, size):
            part = self.at(slice(start, start + size))
            outputs = torch.einsum("btgi,sgoi->sbtgo", part.a, steps)
            parts.append(torch.einsum("kbtgo,sbtgo->sbk", part.g, outputs))
        return torch.cat(parts, 1)


BLOCKS.register("outer")(OuterBlock)
