"""`Kron` and `KronDecomposed`: block-diagonal matrices of Kronecker factors, in the legacy interface.

A *factor* is a tensor whose number of dimensions says what it is: `[n]` the diagonal of a diagonal matrix, `[n, n]` a
matrix, `[G, n, n]` one matrix per group (block-diagonal over the groups). A *block* is a list of one factor F or of
two, F₁ ⊗ F₂, for row-major parameters; a factor without groups beside a grouped one is shared by the groups.
Vectors of a block have the shape `[M, G, n₁, n₂]`, with G = 1 and n₂ = 1 where there is nothing to number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from laplace.core import eigen
from laplace.core.cached import cached_property
from laplace.core.precision_policy import widened
from laplace.errors import CurvatureError, InvalidArgument

Scalar = float | Tensor
Block = Sequence[Tensor]
Blocks = Sequence[Block]
Shape = tuple[int, int, int]
Source = Blocks | Callable[[], Blocks]
"""Blocks, or what computes them when they are first read."""

_WIDE = 2048  # A zero factor wider than this is kept as a vector: as a matrix it may not fit in memory.


class Kron:
    """Curvature diag(block₁, block₂, …) with one block per parameter tensor, in the order of the parameters.

    Args:
        kfacs: Blocks of one factor F or two, F₁ ⊗ F₂. A factor is a matrix `[n, n]`, a vector `[n]` (diagonal, for
            example the counts of an embedding's rows) or `[G, n, n]`, one matrix per group.

    Raises:
        InvalidArgument: A block is none of these.
    """

    def __init__(self, kfacs: Blocks) -> None:
        for block in kfacs:
            block_shape(block)
        self.kfacs = _lists(kfacs)

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
        parameters, embeddings = list[Tensor](), set[int]()
        if isinstance(model, nn.Module):
            parameters += [p for p in model.parameters() if p.requires_grad]
            embeddings |= {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        else:
            parameters += model
        kfacs: list[list[Tensor]] = []
        for p in parameters:
            like = torch.empty(0, device=device or p.device, dtype=dtype or p.dtype)
            kfacs.append(zero_block(p.shape, like, is_table=id(p) in embeddings))
        return cls(kfacs)

    def __add__(self, other: Kron) -> Kron:
        """Factor-wise sum; a block of zeros gives way to one of another form.

        Raises:
            InvalidArgument: `other` is not a `Kron` of the same blocks.
        """
        if not isinstance(other, Kron):
            raise InvalidArgument(f"Kron can be added to Kron only, not to {type(other).__name__}.")
        if len(self) != len(other):
            raise InvalidArgument(f"Kron with {len(self)} blocks cannot be added to one with {len(other)}.")
        return Kron([_sum_of_blocks(*pair) for pair in zip(self.kfacs, other.kfacs, strict=True)])

    def __mul__(self, scalar: Scalar) -> Kron:
        """Scales each block by a non-negative scalar, spread evenly over its factors; differentiable in it.

        Raises:
            InvalidArgument: `scalar` is not a scalar, or negative.
        """
        return Kron(_scaled_blocks(self.kfacs, _checked_scale(scalar)))

    __radd__ = __add__
    __rmul__ = __mul__

    def __len__(self) -> int:
        return len(self.kfacs)

    def detach(self) -> Kron:
        """The same factors without a graph."""
        return Kron(_map_tensors(Tensor.detach, self.kfacs))

    def clone(self) -> Kron:
        """A copy that shares no tensor with this object; the graph leads on."""
        return Kron(_map_tensors(Tensor.clone, self.kfacs))

    def decompose(self, damping: bool = False) -> KronDecomposed:
        """Eigendecomposition of every factor, in float64 with negatives clamped.

        Args:
            damping: Whether precisions made from the result are damped, (F₁ + √δ I) ⊗ (F₂ + √δ I).

        Raises:
            CurvatureError: A factor is not finite.
        """
        pairs = [[eigh(factor) for factor in block] for block in self.kfacs]
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
        vectors = _split_by_blocks([block_shape(block) for block in self.kfacs], W)
        return _joined([_product(block, x) for block, x in zip(self.kfacs, vectors, strict=True)], W)

    def logdet(self) -> Tensor:
        """Log determinant, 0-dim: log det (F₁ ⊗ F₂) = n₂ log det F₁ + n₁ log det F₂, summed over groups."""
        return torch.stack([_logdet(block) for block in self.kfacs]).sum()

    def diag(self) -> Tensor:
        """Diagonal, `[P]`."""
        diagonals = [[f if f.ndim == 1 else f.diagonal(dim1=-2, dim2=-1) for f in block] for block in self.kfacs]
        return torch.cat([_outer(block).flatten() for block in diagonals])

    def to_matrix(self) -> Tensor:
        """The dense matrix, `[P, P]`, for tests and small networks."""
        return torch.block_diag(*map(dense, self.kfacs))

    def __repr__(self) -> str:
        return f"Kron(blocks={len(self)}, parameters={sum(math.prod(block_shape(block)) for block in self.kfacs)})"


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
        factors: Of the curvature of a fit: computes the factors F₁, F₂ of every block, when they are first read.

    Attributes:
        deltas: As given.
        damping: As given.
    """

    def __init__(
        self,
        eigenvectors: Source,
        eigenvalues: Source,
        deltas: Tensor | None = None,
        damping: bool = False,
        *,
        factors: Callable[[], Blocks] | None = None,
    ) -> None:
        self._sources: dict[str, Callable[[], Blocks]] = {} if factors is None else {"kfacs": factors}
        for name, source in (("eigenvectors", eigenvectors), ("eigenvalues", eigenvalues)):
            if callable(source):
                self._sources[name] = source
            else:
                setattr(self, name, _lists(source))
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

    @cached_property
    def kfacs(self) -> list[list[Tensor]]:
        """Of the curvature of a fit: factors F₁, F₂ of every block F₁ ⊗ F₂, one of a bias, and blocks without factors.

        Raises:
            AttributeError: The matrix is known by its eigenvalues alone, as that of a posterior.
        """
        if "kfacs" not in self._sources:
            raise AttributeError("this KronDecomposed has eigenvectors and eigenvalues, no factors; la.H has kfacs.")
        return _lists(self._sources["kfacs"]())

    @property
    def factors(self) -> Kron:
        """H by its factors, without an eigendecomposition."""
        return Kron(self.kfacs)

    def __getstate__(self) -> dict[str, Any]:
        """The values themselves: a copy does not carry what they would be computed from."""
        names = {"eigenvectors", "eigenvalues", *self._sources}
        return vars(self) | {name: getattr(self, name) for name in names} | {"_sources": {}}

    def __add__(self, deltas: Scalar) -> KronDecomposed:
        """Adds δ I to the blocks.

        Args:
            deltas: A real number, a 0-dim tensor, or a tensor `[1]` or `[L]` with one value per block.

        Raises:
            InvalidArgument: It is none of these. Factors, a `Kron`, have input sides that are means over the data: the
                sum of those of a fit and of other data would be twice a mean.
        """
        if isinstance(deltas, Kron):
            raise InvalidArgument(
                "a Kron was added to the curvature of a fit: input sides of Kronecker factors are means over the data, "
                "and do not add up. Use la.fit(loader, override=False); or sum all data by hand, la.start_fit() and "
                "la.H += la.curvature_of(x, y, n_data)[1] for every batch, with n_data the number of all of them."
            )
        if isinstance(deltas, Tensor):
            accepted = deltas.ndim == 0 or (deltas.ndim == 1 and len(deltas) in (1, len(self)))
            given = f"a tensor of shape {tuple(deltas.shape)}"
        else:
            accepted = isinstance(deltas, Real) and not isinstance(deltas, bool)
            given = f"{deltas!r}"
        if not accepted:
            raise InvalidArgument(
                f"{given} was added to KronDecomposed; accepted are a real number and tensors with 1 or {len(self)} "
                "elements, one per block."
            )
        total = self.deltas + (deltas if isinstance(deltas, Tensor) else float(deltas))
        return KronDecomposed(self.eigenvectors, self.eigenvalues, total, self.damping)

    def __mul__(self, scalar: Scalar) -> KronDecomposed:
        """The whole matrix, δ included, times a non-negative scalar; differentiable in it.

        Raises:
            InvalidArgument: `scalar` is not a scalar, or negative.
        """
        scale = _checked_scale(scalar)
        values = _scaled_blocks(self.eigenvalues, scale)
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
        vectors, values = _map_tensors(function, self.eigenvectors), _map_tensors(function, self.eigenvalues)
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
        vectors = _split_by_blocks(self.shapes, W)
        products = [
            _rotated(q, _rotated(q, x, transpose=True) * power)
            for x, q, power in zip(vectors, self.eigenvectors, powers, strict=True)
        ]
        return _joined(products, W)

    def inv_square_form(self, W: Tensor) -> Tensor:
        """W P⁻¹ Wᵀ for every input.

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
        vectors = _split_by_blocks(self.shapes, W)
        for x, q, spectrum in zip(vectors, self.eigenvectors, self.spectra(), strict=True):
            # Half of the inverse on either side keeps the result symmetric and positive semi-definite.
            half = (_rotated(q, x, transpose=True) * spectrum.rsqrt()).reshape(*W.shape[:2], -1)
            total = total + half @ half.mT
        return total

    def diag(self, exponent: float = 1) -> Tensor:
        """Diagonal of a power of the matrix, `[P]`: (Q₁² ⊗ Q₂²) λ, without the matrix."""
        parts = []
        for q, spectrum, shape in zip(self.eigenvectors, self.spectra(), self.shapes, strict=True):
            table = spectrum.pow(exponent).expand(shape).unsqueeze(0)
            parts.append(_rotated([vectors.square() for vectors in q], table).flatten())
        return torch.cat(parts)

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """A power of the matrix, dense `[P, P]`, for tests and small networks."""
        eye = torch.eye(sum(map(math.prod, self.shapes)), dtype=self.deltas.dtype, device=self.deltas.device)
        return self.bmm(eye, exponent)

    def __repr__(self) -> str:
        size = sum(map(math.prod, self.shapes))
        return f"KronDecomposed(blocks={len(self)}, parameters={size}, damping={self.damping})"

    @property
    def shapes(self) -> list[Shape]:
        """(G, n₁, n₂) of every block."""
        return [block_shape(block) for block in self.eigenvectors]

    def spectra(self) -> list[Tensor]:
        """Eigenvalues of the blocks with δ, each a table that broadcasts to `[G, n₁, n₂]`."""
        return [
            _outer([value + delta.sqrt() for value in values])
            if self.damping and len(values) == 2
            else _outer(values) + delta
            for values, delta in zip(self.eigenvalues, self.deltas.unbind(), strict=True)
        ]


# Blocks of factors.


def block_shape(block: Block) -> Shape:
    """(G, n₁, n₂) of a block.

    Raises:
        InvalidArgument: The block does not hold one or two factors of 1, 2 or 3 dimensions with equal groups.
    """
    groups = {factor.shape[0] for factor in block if factor.ndim == 3}
    square = all(
        factor.ndim in (1, 2, 3) and (factor.ndim == 1 or factor.shape[-1] == factor.shape[-2]) for factor in block
    )
    if len(block) not in (1, 2) or len(groups) > 1 or not square:
        shapes = [tuple(factor.shape) for factor in block]
        raise InvalidArgument(
            f"a block of Kronecker factors has shapes {shapes}; accepted are one or two factors [n], [n, n] or "
            "[G, n, n] with the same number of groups G."
        )
    last = block[1].shape[-1] if len(block) == 2 else 1
    return (groups.pop() if groups else 1), block[0].shape[-1], last


def zero_block(shape: Sequence[int], like: Tensor, *, is_table: bool = False) -> list[Tensor]:
    """Zero factors of a tensor: `[n, n]` of a vector, `[out, out]` and `[rest, rest]` of more dimensions.

    The first one of a table, and any that is too wide for a matrix, is a vector `[n]`.
    """
    out, *rest = shape or (1,)
    sizes = [out, math.prod(rest)] if rest else [out]
    is_vector = [n > _WIDE or (is_table and place == 0) for place, n in enumerate(sizes)]
    return [like.new_zeros(n if flat else (n, n)) for n, flat in zip(sizes, is_vector, strict=True)]


def dense(block: Block) -> Tensor:
    """The block as a matrix `[p, p]`."""
    shape = block_shape(block)
    size = math.prod(shape)
    eye = torch.eye(size, dtype=block[0].dtype, device=block[0].device)
    return _product(block, eye.view(size, *shape)).reshape(size, size).mT


def eigh(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, at least 0, and eigenvectors of a positive semi-definite factor, computed in float64.

    float32 turns the zero eigenvalues of a rank-deficient factor into negative ones of the size of eps·λ_max, and a
    small prior precision does not lift them; so the work is done in float64 and what is left below zero is clamped.

    Args:
        factor: `[n]`, `[n, n]` or `[G, n, n]`.

    Returns:
        Values `[n]` or `[G, n]` and vectors of the shape of `factor`, in its dtype (at least float32). The vectors of
        a diagonal factor are ones `[n]`, the diagonal of the identity.

    Raises:
        CurvatureError: The factor is not finite.
    """
    if not bool(torch.isfinite(factor).all()):
        raise CurvatureError(
            f"a curvature factor of shape {tuple(factor.shape)} holds NaN or infinite entries; it must be finite. "
            "Check the data and the network's outputs for NaN, or fit in a wider dtype."
        )
    dtype = torch.promote_types(factor.dtype, torch.float32)
    if factor.ndim == 1:
        return factor.to(dtype).clamp(min=0), torch.ones_like(factor, dtype=dtype)
    values, vectors = eigen.eigh(widened(factor))
    return values.clamp(min=0).to(dtype), vectors.to(dtype)


def is_scalar(value: object) -> TypeGuard[Scalar]:
    """True if `value` is a real number (not a bool) or a tensor with one element and at most one dimension."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.ndim <= 1
    return isinstance(value, Real) and not isinstance(value, bool)


def _checked_scale(value: object) -> Scalar:
    if not is_scalar(value):
        raise InvalidArgument(
            f"a curvature can be multiplied by a real number or a tensor with one element, not by {value!r}."
        )
    scalar = value.reshape(()) if isinstance(value, Tensor) else float(value)
    if not bool(scalar >= 0):
        raise InvalidArgument(f"a curvature is scaled by {value!r}; the factor must be at least 0.")
    return scalar


def _lists(blocks: Blocks) -> list[list[Tensor]]:
    return [list(block) for block in blocks]


def _map_tensors(function: Callable[[Tensor], Tensor], blocks: Blocks) -> list[list[Tensor]]:
    return [[function(tensor) for tensor in block] for block in blocks]


def _scaled_blocks(blocks: Blocks, scale: Scalar) -> list[list[Tensor]]:
    """Both factors of a block times √scale: their product is scaled, with the scale's graph."""
    return [[(scale if len(block) == 1 else scale ** (1.0 / len(block))) * part for part in block] for block in blocks]


def _sum_of_blocks(first: Block, second: Block) -> list[Tensor]:
    """Factor-wise sum of two blocks, or the other one where one is zero and has another form."""
    if [factor.shape for factor in first] != [factor.shape for factor in second]:
        for block, other in ((first, second), (second, first)):
            if not any(bool(factor.any()) for factor in block):
                return list(other)
    if len(first) != len(second):
        raise InvalidArgument(f"Kron with {len(first)} factors per block cannot be added to one with {len(second)}.")
    return [_sum_of_factors(a, b) for a, b in zip(first, second, strict=True)]


def _sum_of_factors(first: Tensor, second: Tensor) -> Tensor:
    """A vector if both are."""
    dims = {first.ndim, second.ndim}
    if first.shape[-1] != second.shape[-1] or dims == {2, 3} or (dims == {3} and first.shape != second.shape):
        raise InvalidArgument(
            f"Kronecker factors of shapes {tuple(first.shape)} and {tuple(second.shape)} cannot be added; "
            "accepted are factors of one size with equal groups."
        )
    if first.ndim == second.ndim:
        return first + second
    vector, matrix = (first, second) if first.ndim == 1 else (second, first)
    return matrix + torch.diag(vector)


def _logdet(block: Block) -> Tensor:
    groups, first, second = block_shape(block)
    total = torch.zeros((), dtype=block[0].dtype, device=block[0].device)
    for factor, repeat in zip(block, (second, first), strict=False):
        value = factor.log() if factor.ndim == 1 else torch.logdet(factor)
        total = total + value.sum() * (repeat if factor.ndim == 3 else repeat * groups)
    return total


def _outer(vectors: Sequence[Tensor]) -> Tensor:
    """Table v₁[i] v₂[j] of one or two vectors `[n]` or `[G, n]`, `[G, n₁, n₂]`; G and n₂ may be 1."""
    first, *rest = (vector if vector.ndim == 2 else vector.unsqueeze(0) for vector in vectors)
    table = first.unsqueeze(-1)
    return table * rest[0].unsqueeze(-2) if rest else table


# Products with vectors X, `[M, G, n₁, n₂]`.


def _split_by_blocks(shapes: Sequence[Shape], vectors: Tensor) -> list[Tensor]:
    sizes = [math.prod(shape) for shape in shapes]
    if vectors.ndim not in (1, 2, 3) or vectors.shape[-1] != sum(sizes):
        raise InvalidArgument(
            f"vectors of shape {tuple(vectors.shape)} were given; accepted are [P], [B, P] and [B, K, P] with "
            f"P = {sum(sizes)}, the number of parameters."
        )
    pieces = vectors.reshape(-1, vectors.shape[-1]).split(sizes, dim=1)
    return [piece.reshape(-1, *shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _joined(products: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([product.flatten(1) for product in products], dim=1).view(like.shape)


def _product(block: Block, x: Tensor) -> Tensor:
    """(F₁ ⊗ F₂) vec(X) = vec(F₁ X F₂ᵀ)."""
    first, *rest = block
    x = first.unsqueeze(-1) * x if first.ndim == 1 else first @ x
    return x if not rest else x * rest[0] if rest[0].ndim == 1 else x @ rest[0].mT


def _rotated(eigenvectors: Block, x: Tensor, *, transpose: bool = False) -> Tensor:
    """(Q₁ ⊗ Q₂) vec(X), or (Q₁ ⊗ Q₂)ᵀ vec(X); vectors of one dimension stand for the identity."""
    first, *rest = (q.mT if transpose and q.ndim > 1 else q for q in eigenvectors)
    if first.ndim > 1:
        x = first @ x
    return x @ rest[0].mT if rest and rest[0].ndim > 1 else x
