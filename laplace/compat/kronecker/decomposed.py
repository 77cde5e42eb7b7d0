"""`KronDecomposed`: Kronecker factors in their eigenbases, plus a multiple of the identity per block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from numbers import Real

import torch
from torch import Tensor

from laplace.compat.kronecker import factors
from laplace.compat.kronecker.blockwise import map_blocks, split_blocks
from laplace.compat.kronecker.scalars import Scalar, as_scalar, spread
from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument

Blocks = Sequence[Sequence[Tensor]]
Source = Blocks | Callable[[], Blocks]
"""Blocks, or what computes them when they are first read."""


class KronDecomposed:
    """A precision of blocks Q₁Q₂ (λ₁ ⊗ λ₂ + δ) Q₂ᵀQ₁ᵀ, one per parameter tensor.

    With `damping` a block of two factors is (F₁ + √δ I) ⊗ (F₂ + √δ I), with eigenvalues (λ₁ + √δ)(λ₂ + √δ), after
    Ritter et al., "A Scalable Laplace Approximation for Neural Networks" (2018); a single factor has no cross terms
    to damp and keeps λ + δ. Sums and products keep the flag.

    The attributes may be assigned, and so may the entries of the lists: what is computed next follows.

    Args:
        eigenvectors: Per block, vectors of each factor: `[n, n]`, `[G, n, n]`, or `[n]` for a diagonal factor,
            whose eigenbasis is the identity. Or a function that returns them, called when they are first read.
        eigenvalues: Per block, values of each factor: `[n]` or `[G, n]`; or such a function.
        deltas: What is added to each block, `[L]`; default zeros.
        damping: Whether blocks of two factors are damped.

    Attributes:
        deltas: As given.
        damping: As given.
    """

    def __init__(
        self, eigenvectors: Source, eigenvalues: Source, deltas: Tensor | None = None, damping: bool = False
    ) -> None:
        self._sources: dict[str, Callable[[], Blocks]] = {}
        if callable(eigenvectors):
            self._sources["eigenvectors"] = eigenvectors
        else:
            self.eigenvectors = _lists(eigenvectors)
        if callable(eigenvalues):
            self._sources["eigenvalues"] = eigenvalues
        else:
            self.eigenvalues = _lists(eigenvalues)
        if deltas is None:
            like = self.eigenvalues[0][0] if self.eigenvalues else torch.empty(0)
            deltas = torch.zeros(len(self.eigenvalues), dtype=like.dtype, device=like.device)
        self.deltas = deltas
        self.damping = damping

    @cached_property
    def eigenvectors(self) -> list[list[Tensor]]:
        """Vectors of each factor of each block."""
        return _lists(self._sources["eigenvectors"]())

    @cached_property
    def eigenvalues(self) -> list[list[Tensor]]:
        """Values of each factor of each block, without δ."""
        return _lists(self._sources["eigenvalues"]())

    def __getstate__(self) -> dict[str, object]:
        """The values themselves: a copy does not carry what they would be computed from."""
        read = {"eigenvectors": self.eigenvectors, "eigenvalues": self.eigenvalues, "_sources": {}}
        return vars(self) | read

    def __add__(self, deltas: Scalar) -> KronDecomposed:
        """Adds δ I to the blocks.

        Args:
            deltas: A real number, a 0-dim tensor, or a tensor `[1]` or `[L]` with one value per block.

        Raises:
            InvalidArgument: It is none of these.
        """
        total = self.deltas + self._checked_deltas(deltas)
        return KronDecomposed(self.eigenvectors, self.eigenvalues, total, self.damping)

    def __mul__(self, scalar: Scalar) -> KronDecomposed:
        """The whole matrix, δ included, times a non-negative scalar; differentiable in it.

        Raises:
            InvalidArgument: `scalar` is not a scalar, or negative.
        """
        scale = as_scalar(scalar)
        values = [[spread(scale, len(block)) * value for value in block] for block in self.eigenvalues]
        return KronDecomposed(self.eigenvectors, values, scale * self.deltas, self.damping)

    __radd__ = __add__
    __rmul__ = __mul__

    def __len__(self) -> int:
        return len(self.deltas)

    def detach(self) -> KronDecomposed:
        """The same values without a graph."""
        return self._mapped(Tensor.detach)

    def clone(self) -> KronDecomposed:
        """A copy that shares no tensor with this object; the graph leads on."""
        return self._mapped(Tensor.clone)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> KronDecomposed:
        vectors, values = (
            [[function(tensor) for tensor in block] for block in blocks]
            for blocks in (self.eigenvectors, self.eigenvalues)
        )
        return KronDecomposed(vectors, values, function(self.deltas), self.damping)

    def logdet(self) -> Tensor:
        """Log determinant Σ log(λ₁ ⊗ λ₂ + δ), or of the damped eigenvalues, summed in float64; 0-dim."""
        total = widened(self.deltas.new_zeros(()))
        for spectrum, shape in zip(self.spectra(), self.shapes, strict=True):
            # A factor shared by groups, or a table that broadcasts, stands for G·n₁·n₂ eigenvalues.
            total = total + widened(spectrum).log().expand(shape).sum()
        return total.to(self.deltas.dtype)

    def bmm(self, W: Tensor, exponent: float = -1) -> Tensor:
        """A power of the matrix times vectors.

        Args:
            W: `[P]`, `[B, P]` or `[B, K, P]`.
            exponent: The power; −1 solves, −½ maps unit noise to samples.

        Returns:
            The product, in the shape of `W`.

        Raises:
            InvalidArgument: The last dimension of `W` is not P.
        """
        powers = [spectrum.pow(exponent) for spectrum in self.spectra()]
        products = [_spectral(block, power) for block, power in zip(self.eigenvectors, powers, strict=True)]
        return map_blocks(products, self.shapes, W)

    def inv_square_form(self, W: Tensor) -> Tensor:
        """W P⁻¹ Wᵀ for every datum.

        Args:
            W: `[B, K, P]`.

        Returns:
            `[B, K, K]`, symmetric.

        Raises:
            InvalidArgument: `W` has another shape.
        """
        if W.ndim != 3:
            raise InvalidArgument(f"W has shape {tuple(W.shape)}; inv_square_form takes [B, K, P].")
        total = W.new_zeros(W.shape[0], W.shape[1], W.shape[1])
        slabs = split_blocks(self.shapes, W)
        for slab, block, spectrum in zip(slabs, self.eigenvectors, self.spectra(), strict=True):
            # Half of the inverse on either side keeps the result symmetric and positive semi-definite.
            half = (_rotate(block, slab) * spectrum.rsqrt()).reshape(*W.shape[:2], -1)
            total = total + half @ half.mT
        return total

    def diag(self, exponent: float = 1) -> Tensor:
        """Diagonal of a power of the matrix, `[P]`: (Q₁² ⊗ Q₂²) λ, without the matrix."""
        parts = []
        for block, spectrum, shape in zip(self.eigenvectors, self.spectra(), self.shapes, strict=True):
            table = spectrum.pow(exponent).expand(shape).unsqueeze(0)
            parts.append(_times([vectors.square() for vectors in block], table).flatten())
        return torch.cat(parts)

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """A power of the matrix, dense `[P, P]`, for tests and small networks."""
        size = sum(math.prod(shape) for shape in self.shapes)
        eye = torch.eye(size, dtype=self.deltas.dtype, device=self.deltas.device)
        return self.bmm(eye, exponent)

    def __repr__(self) -> str:
        size = sum(math.prod(shape) for shape in self.shapes)
        return f"KronDecomposed(blocks={len(self)}, parameters={size}, damping={self.damping})"

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(G, n₁, n₂) of every block."""
        return [factors.block_shape(block) for block in self.eigenvectors]

    def spectra(self) -> list[Tensor]:
        """Eigenvalues of the blocks with δ, each a table that broadcasts to `[G, n₁, n₂]`."""
        return [
            _spectrum(values, delta, self.damping)
            for values, delta in zip(self.eigenvalues, self.deltas.unbind(), strict=True)
        ]

    def _checked_deltas(self, deltas: Scalar) -> Scalar:
        if isinstance(deltas, Tensor):
            if deltas.ndim == 0 or (deltas.ndim == 1 and len(deltas) in (1, len(self))):
                return deltas
            given = f"a tensor of shape {tuple(deltas.shape)}"
        elif isinstance(deltas, Real) and not isinstance(deltas, bool):
            return float(deltas)
        else:
            given = f"{deltas!r}"
        raise InvalidArgument(
            f"{given} was added to KronDecomposed; accepted are a real number and tensors with 1 or {len(self)} "
            "elements, one per block."
        )


def _lists(blocks: Blocks) -> list[list[Tensor]]:
    return [list(block) for block in blocks]


def _spectrum(values: Sequence[Tensor], delta: Tensor, damping: bool) -> Tensor:
    if damping and len(values) == 2:
        return factors.outer([value + delta.sqrt() for value in values])
    return factors.outer(values) + delta


def _rotate(eigenvectors: Sequence[Tensor], slab: Tensor) -> Tensor:
    """Qᵀ x; a diagonal factor (vectors of one dimension) is in its eigenbasis already."""
    return _times([q if q.ndim == 1 else q.mT for q in eigenvectors], slab)


def _times(block: Sequence[Tensor], slab: Tensor) -> Tensor:
    """Product of a block with a slab that passes over the identities of diagonal factors."""
    if block[0].ndim > 1:
        slab = factors.left(block[0], slab)
    if len(block) == 2 and block[1].ndim > 1:
        slab = factors.right(block[1], slab)
    return slab


def _spectral(eigenvectors: Sequence[Tensor], power: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda slab: _times(eigenvectors, _rotate(eigenvectors, slab) * power)
