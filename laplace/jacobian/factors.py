"""Blocks that hold factors: layers with shared weights, and embeddings.

J is a sum of outer products over the positions t that share the weight, Σ_t g[k, b, t] ⊗ a[b, t]; every method
contracts the two factors, and multiplies them out only in pieces where squares of the sum are needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.jacobian.blocks import CHUNK_BYTES, Block, total


@dataclass(frozen=True)
class OuterBlock(Block):
    """Σ_t g ⊗ a of a linear or convolutional weight, or Σ_t g of its bias.

    Attributes:
        a: Inputs `[B, T, G, I]` of the G groups, or None for a bias (all ones, I = 1).
        g: Output gradients `[K, B, T, G, O]`; of a head in a basis of its outputs its rows, `[K, 1, 1, 1, O]`.
        n_data: B.
        input_first: The tensor's layout is (G·I, O) instead of (G·O, I): transposed convolutions, products x W.
        unfolded: g are the layer's output gradients in patches, and not those of its bias: transposed convolutions.
        identity: g is the identity, in some basis: the layer's outputs are the network's.
        rotated: The basis is another one, or only some of its rows are treated.
    """

    a: Tensor | None
    g: Tensor
    n_data: int
    input_first: bool = False
    unfolded: bool = False
    identity: bool = False
    rotated: bool = False

    @property
    def is_bias(self) -> bool:
        """Whether there is no input side."""
        return self.a is None

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

    def cast(self, dtype: torch.dtype) -> OuterBlock:
        return replace(self, a=None if self.a is None else self.a.to(dtype), g=self.g.to(dtype))

    def dense(self) -> Tensor:
        g = self.g.expand(-1, self.n_data, -1, -1, -1) if self.identity else self.g
        if self.a is None:
            return g.sum(2).flatten(2)
        order = "kbgio" if self.input_first else "kbgoi"
        return torch.einsum(f"kbtgo,btgi->{order}", g, self.a).flatten(2)

    @property
    def multiplies_out(self) -> bool:
        return self.n_positions > 1

    def entries(self, index: Tensor) -> Tensor:
        if self.a is None or self.n_positions * len(index) > self.size:
            return super().entries(index)
        n_outputs = self.g.shape[4]
        if self.input_first:
            inputs, output = index // n_outputs, index % n_outputs
            outputs = inputs // self.n_inputs * n_outputs + output
        else:
            outputs = index // self.n_inputs
            inputs = outputs // n_outputs * self.n_inputs + index % self.n_inputs
        g, a = self.g.flatten(3), self.a.flatten(2)
        return total(g[:, :, t, outputs] * a[:, t, inputs] for t in range(self.n_positions))

    def bound(self) -> Tensor:
        return self.g.norm() * (self.n_positions**0.5 if self.a is None else self.a.norm())

    def pull(self, cotangents: Tensor) -> Tensor:
        if self.a is None or self.identity:
            return super().pull(cotangents)
        order = "gio" if self.input_first else "goi"
        return torch.einsum(f"kbtgo,btgi->{order}", self.g * cotangents[:, :, None, None, None], self.a).flatten()

    def project(self, output_basis: Tensor | None, input_basis: Tensor | None) -> OuterBlock:
        """The block in other bases: g U_g `[G, O, O']` and a U_a `[G, I, I']`; None leaves a side as it is."""
        a = self.a if self.a is None or input_basis is None else _rotate(self.a, input_basis)
        if output_basis is None:
            return replace(self, a=a)
        if self.identity and not self.rotated:
            return replace(self, a=a, g=output_basis[0][:, None, None, None, :], rotated=True)
        return replace(self, a=a, g=_rotate(self.g, output_basis), rotated=True)

    def restrict(self, rows: Tensor | None, cols: Tensor | None) -> OuterBlock:
        """The sub-matrix rows × columns of an ungrouped weight."""
        outputs, inputs = (cols, rows) if self.input_first else (rows, cols)
        g = self.g if outputs is None else self.g[..., outputs]
        a = self.a if inputs is None or self.a is None else self.a[..., inputs]
        return replace(self, a=a, g=g, rotated=self.rotated or outputs is not None)

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

    def sum_of_squares(self, *, apart: bool = False) -> Tensor:
        if self.n_positions > 1 or self.a is None:
            return self._squares_of_sums(apart=apart)
        order = "kgio" if self.input_first else "kgoi"
        g = self.g[:, :, 0].square()
        g = g if apart else g.sum(0, keepdim=True)
        return torch.einsum(f"kbgo,bgi->{order}", g.expand(-1, self.n_data, -1, -1), self.a[:, 0].square()).flatten(1)

    def _squares_of_sums(self, *, apart: bool) -> Tensor:
        """By dense pieces; of a large weight not even those of one datum hold all cotangents."""
        step = max(1, CHUNK_BYTES // (8 * self.size))
        if self.identity or self.n_cotangents <= step:
            return super().sum_of_squares(apart=apart)
        parts = [replace(self, g=g) for g in self.g.split(step)]
        if apart:
            return torch.cat([part.sum_of_squares(apart=True) for part in parts])
        return total(part.sum_of_squares() for part in parts)

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
        if self.identity and not self.rotated:
            return outputs.flatten(2)
        return torch.einsum("kbgo,sbgo->sbk", self.g[:, :, 0].expand(-1, self.n_data, -1, -1), outputs)

    def _applies_by_position(self, count: int) -> bool:
        """Whether Σ_t g·(a v) of S vectors is much less work than Σ_t g ⊗ a, as one product, and its products."""
        k, t, i = self.n_cotangents, self.n_positions, self.n_inputs
        return 2 * count * t * (i + k) < k * i * (t + count)

    def _by_position(self, steps: Tensor) -> Tensor:
        """Σ_t g·(a v), `[S, B, K]`, of vectors `[S, G, O, I]`: no dense piece is made."""
        per_datum = len(steps) * self.n_positions * self.groups * self.g.shape[4] * 8
        size = max(1, CHUNK_BYTES // per_datum)
        parts: list[Tensor] = []
        for start in range(0, self.n_data, size):
            part = self.rows(slice(start, start + size))
            outputs = torch.einsum("btgi,sgoi->sbtgo", part.a, steps)
            parts.append(torch.einsum("kbtgo,sbtgo->sbk", part.g, outputs))
        return torch.cat(parts, 1)

    def weighted_norms(self, weights: Tensor) -> Tensor:
        if self.n_positions > 1:
            return super().weighted_norms(weights)
        norms = torch.einsum("kbgo,bgo->bk", self.g[:, :, 0].square(), self._pulled(weights))
        return norms.expand(self.n_data, -1)

    def weighted_gram(self, weights: Tensor) -> Tensor:
        if self.n_positions > 1:
            return super().weighted_gram(weights)
        g = self.g[:, :, 0].flatten(2).transpose(0, 1).to(weights.dtype)
        gram = (g * self._pulled(weights.to(self.g.dtype)).flatten(1).unsqueeze(1)) @ g.transpose(1, 2)
        return gram.expand(self.n_data, -1, -1)


def _rotate(factor: Tensor, basis: Tensor) -> Tensor:
    """`[..., G, O] @ [G, O, O']`, as one flat matrix product where there is one group."""
    if basis.shape[0] == 1:
        return (factor.reshape(-1, basis.shape[1]) @ basis[0]).view(*factor.shape[:-1], -1)
    return torch.einsum("...go,gop->...gp", factor, basis)


@dataclass(frozen=True)
class IndexBlock(Block):
    """Rows of an embedding: a is one-hot and held as indices, never as `[B, T, V]`.

    Attributes:
        index: Row of each position `[B, T]`, −1 where it is none of the treated ones.
        g: Gradients of the embedded positions `[K, B, T, D]`.
        n_rows: V, the number of rows of the table.
        counted: Positions that reach the table at all, `[B, T]`: all but padding.
    """

    index: Tensor
    g: Tensor
    n_rows: int
    counted: Tensor

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
        return replace(self, index=self.index[index], g=self.g[:, index], counted=self.counted[index])

    def cast(self, dtype: torch.dtype) -> IndexBlock:
        return replace(self, g=self.g.to(dtype))

    def dense(self) -> Tensor:
        k, b, _, d = self.g.shape
        out = self.g.new_zeros(k, b, self.n_rows + 1, d)
        where = self.index.where(self.index >= 0, self.n_rows)
        out = out.scatter_add(2, where[None, :, :, None].expand(k, -1, -1, d), self.g)
        return out[:, :, : self.n_rows].flatten(2)

    @property
    def multiplies_out(self) -> bool:
        return False

    def entries(self, index: Tensor) -> Tensor:
        row, col = index // self.g.shape[3], index % self.g.shape[3]
        return total((self.index[:, t, None] == row) * self.g[:, :, t, col] for t in range(self.g.shape[2]))

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
        return replace(self, index=new[self.index], g=g, n_rows=len(rows))

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

    def sum_of_squares(self, *, apart: bool = False) -> Tensor:
        merged, _, row = self._merged()
        squares = merged.square() if apart else merged.square().sum(0, keepdim=True)
        return squares.new_zeros(len(squares), self.n_rows, squares.shape[2]).index_add(1, row, squares).flatten(1)

    def weighted_norms(self, weights: Tensor) -> Tensor:
        merged, datum, row = self._merged()
        norms = (merged.square() * weights.view(self.n_rows, -1)[row]).sum(2)
        return norms.new_zeros(self.n_data, norms.shape[0]).index_add(0, datum, norms.T)

    def weighted_gram(self, weights: Tensor) -> Tensor:
        merged, datum, row = self._merged()
        g = merged.transpose(0, 1).to(weights.dtype)
        grams = (g * weights.view(self.n_rows, 1, -1)[row]) @ g.transpose(1, 2)
        return grams.new_zeros(self.n_data, *grams.shape[1:]).index_add(0, datum, grams)

    def apply(self, vectors: Tensor) -> Tensor:
        merged, datum, row = self._merged()
        table = vectors.view(len(vectors), self.n_rows, -1)
        values = torch.einsum("kud,sud->suk", merged, table[:, row])
        return values.new_zeros(len(vectors), self.n_data, values.shape[2]).index_add(1, datum, values)
