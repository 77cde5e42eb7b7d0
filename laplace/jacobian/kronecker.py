"""Kronecker products as blocks of factors see them: the factors of a curvature, and bases left ⊗ right."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.jacobian.contractions import Contractions


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
    def input_side(self, gram: Callable[[Tensor], Tensor], *, reduce: bool) -> Tensor | None:
        """Input side Σ a aᵀ, computed by `gram` from rows `[..., G, I]`; counts `[V]` if a is one-hot.

        Args:
            gram: Computes Σ a aᵀ, or its product with given vectors.
            reduce: Average a over the positions of a datum.

        Returns:
            The input side, or None for a bias.
        """

    @abstractmethod
    def input_count(self, *, reduce: bool) -> Tensor:
        """Number of rows of the input side, 0-dim: positions, or with `reduce` data."""


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class ProductBasis:
    """An orthogonal basis left ⊗ right of a tensor that is seen as a matrix: its first dimension × the rest.

    Attributes:
        left: Basis of the first dimension `[G, L, L]`, or None for the identity.
        right: Basis of the rest `[G, R, R]`, or None for the identity.
        shape: (G, L, R).
        output_first: True if the output side is the left one.
    """

    left: Tensor | None
    right: Tensor | None
    shape: tuple[int, int, int]
    output_first: bool = True

    @property
    def output(self) -> Tensor | None:
        """Basis of the output side."""
        return self.left if self.output_first else self.right

    @property
    def inputs(self) -> Tensor | None:
        """Basis of the input side."""
        return self.right if self.output_first else self.left

    def only(self, *, output: bool, inputs: bool) -> ProductBasis:
        """The basis with the identity on the sides that are not asked for."""
        left, right = (output, inputs) if self.output_first else (inputs, output)
        return ProductBasis(self.left if left else None, self.right if right else None, self.shape, self.output_first)

    def rotate(self, vectors: Tensor, *, back: bool = False) -> Tensor:
        """Uᵀ v of vectors `[..., p]`, or U v."""
        folded = vectors.unflatten(-1, self.shape)
        if self.left is not None:
            left = self.left.to(vectors)
            folded = _times(folded.transpose(-1, -2), left.transpose(1, 2) if back else left).transpose(-1, -2)
        if self.right is not None:
            right = self.right.to(vectors)
            folded = _times(folded, right.transpose(1, 2) if back else right)
        return folded.flatten(-3)


def rotated(factor: Tensor, basis: Tensor | None) -> Tensor:
    """`[..., G, O] @ [G, O, O']`, as one flat matrix product where there is one group; as it is without a basis."""
    if basis is None:
        return factor
    if basis.shape[0] == 1:
        return (factor.reshape(-1, basis.shape[1]) @ basis[0]).view(*factor.shape[:-1], -1)
    return torch.einsum("...go,gop->...gp", factor, basis)


def _times(folded: Tensor, basis: Tensor) -> Tensor:
    """`[..., G, m, n] @ [G, n, n]`, as one flat matrix product where there is one group."""
    return folded @ basis if len(basis) > 1 else folded @ basis[0]
