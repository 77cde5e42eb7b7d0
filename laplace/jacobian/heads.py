"""The block of a layer whose outputs are the network's: J = I ⊗ φ, of which the identity is never built."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.jacobian.blocks import Block
from laplace.jacobian.factors import OuterBlock


@dataclass(frozen=True)
class HeadBlock(Block):
    """∂f_k / ∂W_cd = δ_kc φ_d of a weight `(C, D)`, or of a bias, with φ = 1 and D = 1.

    Attributes:
        features: φ, `[B, D]`; ones `[B, 1]` of a bias.
        n_outputs: C.
        is_bias: Whether the tensor is a bias.
    """

    features: Tensor
    n_outputs: int
    is_bias: bool = False

    @classmethod
    def of(cls, block: OuterBlock, n_outputs: int) -> HeadBlock:
        """From the block of the layer with any output gradients, which are not read."""
        if block.a is None:
            return cls(block.g.new_ones(block.n_data, 1), n_outputs, is_bias=True)
        return cls(block.a[:, 0, 0], n_outputs)

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.n_outputs * self.n_inputs

    @property
    def n_cotangents(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.n_outputs

    @property
    def n_data(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.features)

    @property
    def n_inputs(self) -> int:
        """D."""
        return self.features.shape[1]

    def multiplied(self) -> OuterBlock:
        """The same block with the identity as its output gradients, `[C, C]`."""
        return self._with_gradients(torch.eye(self.n_outputs, dtype=self.features.dtype, device=self.features.device))

    def _with_gradients(self, basis: Tensor, *, rotated: bool = False) -> OuterBlock:
        """Output gradients that are the rows of a basis `[C, K]`, for every datum."""
        a = None if self.is_bias else self.features[:, None, None]
        g = basis[:, None, None, None, :]
        return OuterBlock(a, g, self.n_data, identity=True, rotated=rotated)

    def dense(self) -> Tensor:
        return self.multiplied().dense()

    def rows(self, index: slice) -> HeadBlock:
        return replace(self, features=self.features[index])

    def counted(self, kept: Tensor) -> HeadBlock:
        """The block of the data `kept` alone, indices `[n]`."""
        return replace(self, features=self.features[kept])

    def at(self, outputs: Tensor) -> OuterBlock:
        """One output of every datum, `outputs` `[B]`: a block with one cotangent."""
        a = None if self.is_bias else self.features[:, None, None]
        g = torch.nn.functional.one_hot(outputs, self.n_outputs).to(self.features)
        return OuterBlock(a, g[None, :, None, None], self.n_data)

    def cast(self, dtype: torch.dtype) -> HeadBlock:
        return replace(self, features=self.features.to(dtype))

    @property
    def multiplies_out(self) -> bool:
        return False

    def entries(self, index: Tensor) -> Tensor:
        output, feature = index // self.n_inputs, index % self.n_inputs
        found = self.features.new_zeros(self.n_outputs, self.n_data, len(index))
        found[output, :, torch.arange(len(index), device=index.device)] = self.features[:, feature].T
        return found

    def bound(self) -> Tensor:
        return self.features.norm() * self.n_outputs**0.5

    def pull(self, cotangents: Tensor) -> Tensor:
        return (cotangents @ self.features).flatten()

    def project(self, output_basis: Tensor | None, input_basis: Tensor | None) -> HeadBlock | OuterBlock:
        """The block in other bases, `[1, C, C']` and `[1, D, D']`; None leaves a side as it is."""
        block = self if input_basis is None else replace(self, features=self.features @ input_basis[0])
        return block if output_basis is None else block._with_gradients(output_basis[0], rotated=True)

    # An output has weights of its own, and every contraction is a product with the features.

    def sum_of_squares(self, *, apart: bool = False) -> Tensor:
        squares = self.features.square().sum(0)
        if not apart:
            return squares.repeat(self.n_outputs).unsqueeze(0)
        found = squares.new_zeros(self.n_outputs, self.n_outputs, self.n_inputs)
        found.diagonal(dim1=0, dim2=1).copy_(squares.unsqueeze(1).expand(-1, self.n_outputs))
        return found.flatten(1)

    def apply(self, vectors: Tensor) -> Tensor:
        return self.features @ vectors.view(len(vectors), self.n_outputs, -1).mT

    def weighted_norms(self, weights: Tensor) -> Tensor:
        return self.features.square() @ weights.view(self.n_outputs, -1).T

    def weighted_gram(self, weights: Tensor) -> Tensor:
        return torch.diag_embed(self.weighted_norms(weights.to(self.features.dtype))).to(weights.dtype)


Head = HeadBlock | OuterBlock
"""The block of a head, in the network's outputs or in another basis of them."""
