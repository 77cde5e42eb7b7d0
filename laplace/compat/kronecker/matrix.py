"""`Kron`: a block-diagonal curvature of Kronecker-factored blocks, in the legacy interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from laplace.compat.kronecker import factors
from laplace.compat.kronecker.blockwise import map_blocks
from laplace.compat.kronecker.decomposed import KronDecomposed
from laplace.compat.kronecker.scalars import Scalar, as_scalar, spread
from laplace.errors import InvalidArgument

_WIDE = 2048  # A zero factor wider than this is kept as a vector: as a matrix it may not fit in memory.


class Kron:
    """Curvature diag(block₁, block₂, …) with one block per parameter tensor, in the order of the parameters.

    Args:
        kfacs: Blocks of one factor F or two, F₁ ⊗ F₂. A factor is a matrix `[n, n]`, a vector `[n]` (diagonal, for
            example the counts of an embedding's rows) or `[G, n, n]`, one matrix per group.

    Raises:
        InvalidArgument: A block is none of these.
    """

    def __init__(self, kfacs: Sequence[Sequence[Tensor]]) -> None:
        for block in kfacs:
            factors.block_shape(block)
        self.kfacs: list[list[Tensor]] = [list(block) for block in kfacs]

    @classmethod
    def init_from_model(
        cls,
        model: nn.Module | Iterable[Tensor],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Kron:
        """Zero factors: `[P, P]` of a vector, `[out, out]` and `[rest, rest]` of more dimensions, `[1, 1]` of a scalar.

        The zero factor of an embedding's rows, and any zero factor too wide for a matrix, is a vector.

        Args:
            model: A module, whose trainable parameters are taken, or the parameters themselves.
            device: Where the factors live; default that of each parameter.
            dtype: Their dtype; default that of each parameter.
        """
        rows = _embedding_weights(model) if isinstance(model, nn.Module) else set()
        parameters = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else list(model)
        return cls([_zero_block(p, device, dtype, id(p) in rows) for p in parameters])

    def __add__(self, other: Kron) -> Kron:
        """Factor-wise sum; a block of zeros gives way to one of another form.

        Raises:
            InvalidArgument: `other` is not a `Kron` of the same blocks.
        """
        if not isinstance(other, Kron):
            raise InvalidArgument(f"Kron can be added to Kron only, not to {type(other).__name__}.")
        if len(self) != len(other):
            raise InvalidArgument(f"Kron with {len(self)} blocks cannot be added to one with {len(other)}.")
        return Kron([_sum(*pair) for pair in zip(self.kfacs, other.kfacs, strict=True)])

    def __mul__(self, scalar: Scalar) -> Kron:
        """Scales each block by a non-negative scalar, spread evenly over its factors; differentiable in it.

        Raises:
            InvalidArgument: `scalar` is not a scalar, or negative.
        """
        scale = as_scalar(scalar)
        return Kron([[spread(scale, len(block)) * factor for factor in block] for block in self.kfacs])

    __radd__ = __add__
    __rmul__ = __mul__

    def __len__(self) -> int:
        return len(self.kfacs)

    def decompose(self, damping: bool = False) -> KronDecomposed:
        """Eigendecomposition of every factor, in float64 with negatives clamped.

        Args:
            damping: Whether precisions made from the result are damped, (F₁ + √δ I) ⊗ (F₂ + √δ I).

        Raises:
            CurvatureError: A factor is not finite.
        """
        pairs = [[factors.eigh(factor) for factor in block] for block in self.kfacs]
        vectors = [[vector for _, vector in block] for block in pairs]
        values = [[value for value, _ in block] for block in pairs]
        return KronDecomposed(vectors, values, damping=damping)

    def bmm(self, W: Tensor, exponent: float = 1) -> Tensor:
        """Curvature times vectors.

        Args:
            W: `[P]`, `[B, P]` or `[B, K, P]`.
            exponent: 1 only; `decompose` first for other powers.

        Returns:
            The product, in the shape of `W`.

        Raises:
            InvalidArgument: The exponent is not 1, or the last dimension of `W` not P.
        """
        if exponent != 1:
            raise InvalidArgument(f"Kron.bmm takes exponent=1, not {exponent!r}; use Kron.decompose().bmm for powers.")
        products: list[Callable[[Tensor], Tensor]] = [_product(block) for block in self.kfacs]
        return map_blocks(products, [factors.block_shape(block) for block in self.kfacs], W)

    def logdet(self) -> Tensor:
        """Log determinant, 0-dim."""
        return torch.stack([factors.logdet(block) for block in self.kfacs]).sum()

    def diag(self) -> Tensor:
        """Diagonal, `[P]`."""
        tables = [factors.outer([factors.diagonal(factor) for factor in block]) for block in self.kfacs]
        return torch.cat([table.flatten() for table in tables])

    def to_matrix(self) -> Tensor:
        """The dense matrix, `[P, P]`, for tests and small networks."""
        return torch.block_diag(*(factors.dense(block) for block in self.kfacs))

    def __repr__(self) -> str:
        return f"Kron(blocks={len(self)}, parameters={sum(factors.block_size(block) for block in self.kfacs)})"


def _sum(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """Factor-wise sum of two blocks, or the other one where one is zero and has another form.

    Raises:
        InvalidArgument: They have other forms, and neither is zero.
    """
    if [factor.shape for factor in first] != [factor.shape for factor in second]:
        for block, other in ((first, second), (second, first)):
            if not any(bool(factor.any()) for factor in block):
                return list(other)
    if len(first) != len(second):
        raise InvalidArgument(f"Kron with {len(first)} factors per block cannot be added to one with {len(second)}.")
    return [factors.add(a, b) for a, b in zip(first, second, strict=True)]


def _product(block: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda slab: factors.multiply(block, slab)


def _embedding_weights(model: nn.Module) -> set[int]:
    """Identities of the weights whose rows are looked up: their first factor is diagonal."""
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def _zero_block(
    parameter: Tensor, device: torch.device | str | None, dtype: torch.dtype | None, by_rows: bool
) -> list[Tensor]:
    where = {"device": device or parameter.device, "dtype": dtype or parameter.dtype}
    out, *rest = parameter.shape or (1,)
    sizes = [out, math.prod(rest)] if rest else [out]
    vector = [size > _WIDE or (by_rows and position == 0) for position, size in enumerate(sizes)]
    return [torch.zeros(n if flat else (n, n), **where) for n, flat in zip(sizes, vector, strict=True)]
