"""Eigendecompositions of Kronecker factors and dense blocks, and what follows from them for every weight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from laplace.core import linalg, nested
from laplace.core.cached import cached_property
from laplace.core.checks import together
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.linalg import without_rounding
from laplace.core.log_det import EigenvaluePairs, log_det_ratio
from laplace.core.orthogonal_basis import DenseBasis, OrthogonalBasis, ThinBasis
from laplace.core.pieces import operations_are_dear
from laplace.core.precision_policy import widened
from laplace.engines.kron_parts import KronBlock, KronParts, ThinFactor
from laplace.errors import StateError, UnsupportedError
from laplace.jacobian.blocks import Block, JoinedBlock, MappedBlock, ProductBasis
from laplace.jacobian.jacobian import Jacobian

if TYPE_CHECKING:
    from laplace.engines.engine import Groups

_AT_ONCE = 2**21
"""Bytes of float64 matrices that one call decomposes: of small ones a call takes as long as its work."""


@dataclass(frozen=True)
class FactorEigen:
    """U diag(λ) Uᵀ, in float64."""

    values: Tensor  # λ, `[G, n]`; zeros first, where the sum was of fewer rows
    basis: OrthogonalBasis | None  # U, or None for the identity

    @classmethod
    def of_thin(cls, factor: ThinFactor) -> FactorEigen:
        """That of eigenpairs of one matrix, whatever its leading dimensions."""
        pairs = eigenpairs(factor)
        values, vectors = widened(pairs.values).reshape(1, -1), widened(pairs.vectors).reshape(pairs.width, -1)
        with kept_for_later():
            return cls(functional.pad(values, (pairs.width - pairs.rank, 0)), ThinBasis.from_last_columns(vectors))

    def over(self, count: float) -> FactorEigen:
        """That of the factor divided by a number."""
        return FactorEigen(self.values / count, self.basis)


def grouped_by_shape(shapes: Mapping[str, torch.Size]) -> list[list[str]]:
    """Keys of matrices `[G, n, n]` in the order in which they are decomposed, those that one call takes together."""
    keys: dict[torch.Size, list[str]] = {}
    for key, shape in shapes.items():
        keys.setdefault(shape, []).append(key)
    counts = {shape: max(1, _AT_ONCE // (8 * max(1, shape.numel()))) for shape in keys}
    return [some[i : i + counts[shape]] for shape, some in keys.items() for i in range(0, len(some), counts[shape])]


def decomposed(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues `[G, n]` and eigenvectors of matrices `[G, n, n]` of one shape, by one call."""
    if len(matrices) == 1:
        return [linalg.eigh(matrices[0])]
    values, vectors = linalg.eigh(torch.stack(list(matrices)))
    # Copies: a part would hold all the others in memory and in files, also where a process keeps no more than its own.
    return [(one.clone(), its.clone()) for one, its in zip(values, vectors, strict=True)]


def input_eigen(
    parts: KronParts, block: KronBlock, output: FactorEigen, sides: Mapping[str, FactorEigen]
) -> FactorEigen:
    """The decomposition of the input side over its positions: of counts it is a diagonal, of a bias the number 1."""
    if block.input is None:
        return FactorEigen(output.values.new_ones(len(output.values), 1), None)
    known = sides.get(block.input)
    counted = FactorEigen(widened(parts.factors[block.input]).unsqueeze(0), None) if known is None else known
    return counted.over(parts.positions(block))


def eigenpairs(factor: ThinFactor) -> ThinFactor:
    """A thin factor by its eigenpairs; itself if it is held by them."""
    return factor if factor.orthonormal else ThinFactor(*linalg.thin_eigh(factor.rows))


def without_rows(parts: KronParts) -> KronParts:
    """The sums with the eigenpairs of every thin side in place of its rows."""
    # On a CPU what is not finite is refused before it takes longer than others; elsewhere all are read together.
    with together() if operations_are_dear(parts.like.device) else nullcontext():
        return replace(parts, thin={key: eigenpairs(side) for key, side in parts.thin.items()})


# The eigenbasis of one block of a block-diagonal curvature, and what a prior looks like in it.


_SAME = 1e-9
"""Relative distance below which two eigenvalues count as one."""

PICKED_LIMIT = 8192
"""Largest selection of single entries of a Kronecker product that is factorised as a dense block."""


@dataclass(frozen=True, eq=False)
class BlockSpectrum:
    """A block U diag(λ) Uᵀ with U = I, dense, or left ⊗ right, in float64."""

    values: Tensor  # λ, `[p]`, in the order of the tensor's entries (of its rows × columns, for a product)
    left: OrthogonalBasis | None = None  # Basis of the first dimension, of width L, or None for the identity
    right: OrthogonalBasis | None = None  # Basis of the rest, of width R, or None for the identity
    shape: tuple[int, int, int] | None = None  # (G, L, R) of a product, or None
    basis: Tensor | None = None  # Dense basis `[p, p]`, or None
    # The block itself `[p, p]` where it is dense: a prior that varies within it is added exactly
    matrix: Tensor | None = None
    left_values: Tensor | None = None  # Eigenvalues of the left factor `[G, L]`, where there is one
    right_values: Tensor | None = None  # Eigenvalues of the right factor `[G, R]`
    output_first: bool = True  # The output side is the left one
    is_bias: bool = False  # The other factor is the number 1

    @property
    def size(self) -> int:
        """p, the entries of the block."""
        return self.values.numel()

    @property
    def is_rotated(self) -> bool:
        """True if the eigenbasis is not the identity."""
        return not (self.left is self.right is self.basis is None)

    def require_size(self, size: int, name: str, dtype: torch.dtype) -> None:
        """Refuses a basis from a state that is not one of so many entries of a tensor.

        Raises:
            StateError: It is not.
        """
        if self.basis is not None:
            nested.require_sizes(f"the eigenvectors of {name!r}", self.basis, size, size, dtype=dtype)
            nested.require_unit(f"the eigenvectors of {name!r}", self.basis, 0)
        elif self.shape is not None:
            groups, *widths = self.shape
            if groups * math.prod(widths) != size:
                raise StateError(f"the eigenbasis of {name!r} has the shape {self.shape}, the tensor {size} entries.")
            for side, width in zip((self.left, self.right), widths, strict=True):
                if side is not None:
                    nested.require_sizes(
                        f"the eigenvectors of {name!r}", side.matrix(), groups, width, width, dtype=dtype
                    )
                    nested.require_unit(f"the eigenvectors of {name!r}", side.matrix(), 1)

    def cast(self, dtype: torch.dtype) -> BlockSpectrum:
        """The bases in the dtype of Jacobians."""
        left, right = (None if side is None else side.to(dtype) for side in (self.left, self.right))
        basis = None if self.basis is None else self.basis.to(dtype)
        return BlockSpectrum(
            self.values, left, right, self.shape, basis, self.matrix, self.left_values, self.right_values,
            self.output_first, self.is_bias,
        )  # fmt: skip

    def rotate(self, vectors: Tensor, *, back: bool = False) -> Tensor:
        """Uᵀ v of vectors `[..., p]`, or U v."""
        if self.basis is not None:
            return vectors @ (self.basis.T if back else self.basis)
        return vectors if self._product is None else self._product.rotate(vectors, back=back)

    @cached_property
    def _product(self) -> ProductBasis | None:
        """The basis left ⊗ right of a product."""
        return None if self.shape is None else ProductBasis(self.left, self.right, self.shape, self.output_first)

    def project(self, block: Block) -> Block:
        """A Jacobian block in the eigenbasis, by its factors where it has them."""
        if self.basis is not None:
            return MappedBlock(block, self.rotate)
        return block if self._product is None else block.in_basis(self._product)

    def averages(self, dtype: torch.dtype) -> BlockSpectrum:
        """A block whose `rotate` takes a prior that varies to the eigenbasis of a product, by averages of entries."""
        left = _averages(self.left, self.left_values, dtype)
        return replace(self, left=left, right=_averages(self.right, self.right_values, dtype))

    def diagonal(self, values: Tensor) -> Tensor:
        """Diagonal of U diag(values) Uᵀ, `[p]`."""
        basis = None if self.basis is None else self.basis.square()
        squares = replace(self, left=_squares(self.left), right=_squares(self.right), basis=basis)
        return squares.rotate(values, back=True)

    @property
    def explicit(self) -> Tensor:
        """The eigenvalues without those that are known to be zero: a side was summed of fewer rows than its width."""
        if self.shape is None:
            return self.values
        bases = zip((self.left, self.right), self.shape[1:], strict=True)
        left, right = (0 if basis is None else n - basis.rank for basis, n in bases)
        return self.values.view(self.shape)[:, left:, right:].flatten()

    # Factors, one or two, of a block whose eigenvalues are their products.

    @property
    def factor_vectors(self) -> tuple[Tensor, ...]:
        """Eigenvectors of the factors: `[n, n]`, `[G, n, n]`, or ones `[n]` for the identity."""
        if self.basis is not None:
            return (self.basis,)
        if self.shape is None:
            return (torch.ones_like(self.values),)
        sides = zip((self.left, self.right), self.shape[1:], strict=True)
        left, right = (self.values.new_ones(n) if basis is None else _alone(basis.matrix()) for basis, n in sides)
        return (left if self.output_first else right,) if self.is_bias else (left, right)

    @property
    def factor_values(self) -> tuple[Tensor, ...]:
        """Eigenvalues of the factors, `[n]` or `[G, n]`."""
        if not self.is_bias and self.left_values is not None and self.right_values is not None:
            return _alone(self.left_values), _alone(self.right_values)
        return (_alone(self.values.view(self.shape[0], -1)) if self.shape is not None else self.values,)


@dataclass(frozen=True)
class Spectra:
    """The eigendecompositions of all blocks, computed once per fit and shared by every precision."""

    blocks: tuple[BlockSpectrum, ...]  # One per tensor or group of tensors, in float64
    # The curvature's dtype: eigenvalues that were clamped in float64 lose nothing that a float32 evidence could
    # show
    dtype: torch.dtype
    # Indices of the tensors of every block, which follow each other; None for one tensor per block
    groups: Groups | None = None
    signed: bool = False  # Whether negative eigenvalues are meant; else there are none
    factored: bool = False  # Whether the eigenvalues of a product are the products of those of its factors
    summed: torch.dtype | None = None  # The dtype in which matrices were summed, if it is narrower than float64

    def __iter__(self) -> Iterator[BlockSpectrum]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, i: int) -> BlockSpectrum:
        return self.blocks[i]

    @cached_property
    def largest(self) -> Tensor:
        """The largest eigenvalue, 0-dim, at least 0; of what is rotated at all."""
        values = [block.values.detach().amax() for block in self.blocks if block.is_rotated and block.size]
        return torch.stack(values).amax().clamp(min=0) if values else self.blocks[0].values.new_zeros(())

    def regrouped(self, jacobian: Jacobian) -> Jacobian:
        """A Jacobian with one block for each block of the curvature."""
        if self.groups is None:
            return jacobian
        parts = (tuple(jacobian.blocks[i] for i in group) for group in self.groups)
        return replace(jacobian, blocks=tuple(part[0] if len(part) == 1 else JoinedBlock(part) for part in parts))

    def prior(self, i: int, precision: Tensor) -> Tensor:
        """A prior `[1]` or `[p]` in the eigenbasis of a block, `[1]` or `[p]`.

        A prior Δ that varies within a product is not diagonal there. Its diagonal diag(Uᵀ Δ U) is kept, averaged over
        directions whose eigenvalues agree on either side: which of these the solver chose makes no difference.
        """
        if precision.numel() == 1 or self.blocks[i].shape is None:
            return precision
        return self._averages[i].rotate(widened(precision))

    @cached_property
    def _averages(self) -> tuple[BlockSpectrum, ...]:
        with kept_for_later(), torch.enable_grad():
            return tuple(block.averages(self.dtype) for block in self.blocks)

    def project(self, jacobian: Jacobian, bases: Sequence[BlockSpectrum]) -> Jacobian:
        """A Jacobian in these bases, with one block for each."""
        blocks = self.regrouped(jacobian).blocks
        return Jacobian(tuple(basis.project(block) for basis, block in zip(bases, blocks, strict=True)))

    def priors(self, prior: GaussianPrior) -> tuple[Tensor, ...]:
        """δ of every block's entries: `[1]` where it is one number, else `[p]`."""
        if prior.is_scalar:
            return (prior.precision,) * len(self)
        sizes, per_tensor = prior.layout.sizes, prior.per_block()
        if self.groups is None:
            return per_tensor
        return tuple(
            per_tensor[group[0]] if len(group) == 1 else torch.cat([per_tensor[i].expand(sizes[i]) for i in group])
            for group in self.groups
        )

    def log_det_ratio(self, scale: Tensor, deltas: Tensor) -> Tensor:
        """Σ_i Σ_j log(1 + s λ_ij / δ_i), 0-dim, differentiable in both, in one pass over all eigenvalues."""
        if self._is_constant:
            return self._pairs.log_det_ratio(scale, deltas)
        return log_det_ratio(self._flat(), scale / deltas, (sum(self._sizes),) if deltas.numel() == 1 else self._sizes)

    @cached_property
    def _is_constant(self) -> bool:
        return not any(block.values.requires_grad for block in self.blocks)

    @cached_property
    def _pairs(self) -> EigenvaluePairs:
        return EigenvaluePairs(self._flat, self._sizes)

    def _flat(self) -> Tensor:
        """All eigenvalues that add to a log det ratio, at most P."""
        return torch.cat([spectrum.explicit for spectrum in self.blocks]).to(self.dtype)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Numbers of those of every block."""
        return tuple(len(spectrum.explicit) for spectrum in self.blocks)

    @cached_property
    def factor_vectors(self) -> tuple[tuple[Tensor, ...], ...]:
        """Copies of the eigenvectors of every block's factors, in the curvature's dtype, with their graph."""
        with kept_for_later(), torch.enable_grad():
            return tuple(
                tuple(vectors.to(self.dtype, copy=True) for vectors in block.factor_vectors) for block in self.blocks
            )


def _alone(sides: Tensor) -> Tensor:
    """Sides of every group `[G, ...]`, without that dimension where there is one."""
    return sides[0] if len(sides) == 1 else sides


def _squares(basis: OrthogonalBasis | None) -> DenseBasis | None:
    return None if basis is None else DenseBasis(basis.squares())


def _averages(basis: OrthogonalBasis | None, values: Tensor | None, dtype: torch.dtype) -> DenseBasis | None:
    """Column l holds the diagonal of k((F − λ_l) / τ) over its trace, for the Gaussian k and τ = √ε λ_max.

    A function of the factor F = U diag(λ) Uᵀ alone. Where λ_l is apart from the other eigenvalues it is u_l²; where
    several agree, in a null space above all, the mean of their squares, which no basis of theirs moves. √ε is between
    the rounding ε of eigenvalues that agree and the gaps at which eigenvectors are known to about √ε.
    """
    if basis is None or values is None:
        return None
    width = torch.finfo(dtype).eps ** 0.5 * values.amax(-1)[:, None, None].clamp(min=torch.finfo(values.dtype).tiny)
    near = torch.exp(-0.5 * ((values.unsqueeze(2) - values.unsqueeze(1)) / width).square())
    averages = basis.squares() @ near
    return DenseBasis(averages / averages.sum(-2, keepdim=True))


# How each kind of block is decomposed: a diagonal, a matrix, a product of factors, and a selection of its entries.


def diag_spectrum(values: Tensor) -> BlockSpectrum:
    """An exact diagonal block `[p]`."""
    return BlockSpectrum(values=values)


def dense_spectrum(matrix: Tensor, *, signed: torch.dtype | None = None) -> BlockSpectrum:
    """An exact dense block `[p, p]`; its eigenvalues follow the gradient of the matrix."""
    _, vectors = linalg.eigh(matrix, signed=signed is not None)
    values = _quadratic_forms(matrix, vectors)
    values = values.clamp(min=0) if signed is None else without_rounding(values, signed)
    return BlockSpectrum(values=values, basis=vectors, matrix=matrix)


def values_at(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Eigenvalues, none of which is negative, as uᵀ M u: with the right first derivative with respect to M.

    Differentiating an eigendecomposition is unstable where eigenvalues meet; dλ = uᵀ dM u is not, and sums
    of a function over the spectrum need no more.
    """
    return _quadratic_forms(matrix, vectors).clamp(min=0)


def _quadratic_forms(matrix: Tensor, vectors: Tensor) -> Tensor:
    return ((vectors.transpose(-1, -2) @ matrix) * vectors.transpose(-1, -2)).sum(-1)


def followed(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Eigenvectors with their first derivative, du_j = Σ_i u_i (u_iᵀ dM u_j) / (λ_j − λ_i).

    Directions whose eigenvalues agree to rounding turn into each other at no rate that could be known; they are
    kept. Only a prior that varies within a block sees eigenvectors at all.
    """
    if not matrix.requires_grad:
        return vectors
    rotated = vectors.transpose(-1, -2) @ matrix @ vectors
    values = rotated.detach().diagonal(dim1=-2, dim2=-1)
    gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
    apart = gaps.abs() > _SAME * values.abs().amax(-1, keepdim=True).unsqueeze(-1)
    rates = torch.where(apart, 1 / gaps.where(apart, torch.ones_like(gaps)), torch.zeros_like(gaps))
    return vectors + vectors @ (rates * (rotated - rotated.detach()))


def kron_spectrum(block: KronBlock, output: FactorEigen, inputs: FactorEigen) -> BlockSpectrum:
    """A Kronecker-factored block."""
    left, right = (inputs, output) if block.input_first else (output, inputs)
    is_bias = block.input is None
    products = output.values if is_bias else left.values.unsqueeze(2) * right.values.unsqueeze(1)
    return BlockSpectrum(
        values=products.flatten(),
        left=left.basis,
        right=right.basis,
        shape=(len(output.values), left.values.shape[1], right.values.shape[1]),
        left_values=left.values,
        right_values=right.values,
        output_first=not block.input_first,
        is_bias=is_bias,  # to which damping adds nothing but the prior
    )


def picked_matrix(output: Tensor, inputs: Tensor | None, index: Tensor, *, input_first: bool) -> Tensor:
    """The sub-block (left ⊗ right)[index, index], `[p, p]`: products of single entries of both sides."""
    if len(index) > PICKED_LIMIT:
        raise UnsupportedError(
            f"a Kronecker block of {len(index)} single entries would need a dense block above the limit of "
            f"{PICKED_LIMIT}; select whole rows × columns (modules, parameters) or use hessian_structure='diag'."
        )
    n_output, n_input = output.shape[1], 1 if inputs is None else inputs.shape[-1]
    n_left, n_right = (n_input, n_output) if input_first else (n_output, n_input)
    group, left, right = index // (n_left * n_right), index // n_right % n_left, index % n_right
    at_output, at_input = (right, left) if input_first else (left, right)
    matrix = _entries(output, group, at_output) * (group.unsqueeze(0) == group.unsqueeze(1))
    return matrix if inputs is None else matrix * _entries(inputs, group, at_input)


def _entries(factor: Tensor, group: Tensor, at: Tensor) -> Tensor:
    """Entries [at, at] `[p, p]` of the group's matrix `[G, n, n]`, or of a diagonal `[n]`."""
    if factor.ndim == 1:
        return factor[at] * (at.unsqueeze(0) == at.unsqueeze(1))
    return factor[group.unsqueeze(1), at.unsqueeze(1), at.unsqueeze(0)]
