"""The eigenbasis of one block of a block-diagonal curvature, and what a prior looks like in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.curvature.blocks import Block, MappedBlock
from laplace.curvature.factors import IndexBlock, OuterBlock
from laplace.curvature.interface import KronBlock
from laplace.errors import UnsupportedError
from laplace.structures import algebra

PICKED_LIMIT = 8192
"""Largest selection of single entries of a Kronecker product that is factorised as a dense block."""


@dataclass(frozen=True)
class BlockSpectrum:
    """A block U diag(λ) Uᵀ with U = I, dense, or left ⊗ right, in float64.

    Attributes:
        values: λ, `[p]`, in the order of the tensor's entries (of its rows × columns, for a product).
        left: Basis of the first dimension `[G, L, L]`, or None for the identity.
        right: Basis of the rest `[G, R, R]`, or None for the identity.
        shape: (G, L, R) of a product, or None.
        basis: Dense basis `[p, p]`, or None.
        matrix: The block itself `[p, p]` where it is dense: a prior that varies within it is added exactly.
        left_values: Eigenvalues of the left factor `[G, L]`, for damping.
        right_values: Eigenvalues of the right factor `[G, R]`.
        output_first: The output side is the left one.
    """

    values: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    shape: tuple[int, int, int] | None = None
    basis: Tensor | None = None
    matrix: Tensor | None = None
    left_values: Tensor | None = None
    right_values: Tensor | None = None
    output_first: bool = True

    @property
    def size(self) -> int:
        """P."""
        return self.values.numel()

    def cast(self, dtype: torch.dtype) -> BlockSpectrum:
        """The bases in the dtype of Jacobians."""
        parts = {name: getattr(self, name) for name in ("left", "right", "basis")}
        return replace(self, **{name: None if t is None else t.to(dtype) for name, t in parts.items()})

    def rotate(self, vectors: Tensor, *, back: bool = False) -> Tensor:
        """Uᵀ v of vectors `[..., p]`, or U v."""
        if self.basis is not None:
            return vectors @ (self.basis.T if back else self.basis)
        if self.shape is None:
            return vectors
        folded = vectors.unflatten(-1, self.shape)
        if self.left is not None:
            left = self.left.to(vectors)
            folded = (left if back else left.transpose(1, 2)) @ folded
        if self.right is not None:
            right = self.right.to(vectors)
            folded = folded @ (right.transpose(1, 2) if back else right)
        return folded.flatten(-3)

    def project(self, block: Block) -> Block:
        """A Jacobian block in the eigenbasis, by its factors where it has them."""
        if self.basis is None and self.shape is None:
            return block
        if isinstance(block, OuterBlock) and self.shape is not None:
            output, inputs = (self.left, self.right) if self.output_first else (self.right, self.left)
            if output is not None and block.input_first is not self.output_first:
                return block.project(output, inputs)
        if isinstance(block, IndexBlock) and self.right is not None and self.left is None:
            return block.project(self.right[0])
        return MappedBlock(block, self.rotate)

    def prior(self, precision: Tensor) -> Tensor:
        """A prior `[1]` or `[p]` in the eigenbasis, `[1]` or `[p]`.

        A prior that varies within the block is not diagonal there; its diagonal diag(Uᵀ Δ U) is kept, which is exact
        for a prior that is constant in the block and the closest one in Frobenius norm otherwise.
        """
        if precision.numel() == 1 or self.shape is None:
            return precision
        squares = replace(self, left=_square(self.left), right=_square(self.right))
        return squares.rotate(precision.double())

    def diagonal(self, values: Tensor) -> Tensor:
        """Diagonal of U diag(values) Uᵀ, `[p]`."""
        squares = replace(self, left=_square(self.left), right=_square(self.right), basis=_square(self.basis))
        return squares.rotate(values, back=True)


def _square(basis: Tensor | None) -> Tensor | None:
    return None if basis is None else basis.square()


def diag_spectrum(values: Tensor) -> BlockSpectrum:
    """An exact diagonal block `[p]`."""
    return BlockSpectrum(values=values)


def dense_spectrum(matrix: Tensor, values: Tensor, vectors: Tensor) -> BlockSpectrum:
    """An exact dense block `[p, p]` with its eigendecomposition; eigenvalues follow the matrix's gradient."""
    del values
    exact = ((vectors.T @ matrix) * vectors.T).sum(1).clamp(min=0)
    return BlockSpectrum(values=exact, basis=vectors, matrix=matrix)


def kron_spectrum(
    block: KronBlock, output: Tensor, eigen: tuple[Tensor, Tensor], inputs: Tensor | None, positions: float
) -> BlockSpectrum:
    """A Kronecker-factored block.

    Args:
        block: What the factors mean.
        output: Output side `[G, O, O]`.
        eigen: Its eigenvalues `[G, O]` and eigenvectors.
        inputs: Input side `[G, I, I]`, counts `[V]`, or None for a bias.
        positions: Number by which the input side is divided.
    """
    groups = len(output)
    other, basis = _input_eigen(inputs, positions, groups, output)
    values, vectors = eigen
    if block.input_first:
        left, right, left_values, right_values = basis, vectors, other, values
    else:
        left, right, left_values, right_values = vectors, basis, values, other
    spectrum = BlockSpectrum(
        values=(left_values.unsqueeze(2) * right_values.unsqueeze(1)).flatten(),
        left=left,
        right=right,
        shape=(groups, left_values.shape[1], right_values.shape[1]),
        left_values=left_values,
        right_values=right_values,
        output_first=not block.input_first,
    )
    return spectrum if block.index is None else _picked(spectrum, block.index)


def _input_eigen(inputs: Tensor | None, positions: float, groups: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues `[G, I]` and basis of the input side; counts and biases are diagonal already."""
    if inputs is None:
        return torch.ones(groups, 1, dtype=like.dtype, device=like.device), None
    if inputs.ndim == 1:
        return (inputs / positions).unsqueeze(0), None
    values, vectors = algebra.eigh(inputs)
    return values / positions, vectors


def _picked(spectrum: BlockSpectrum, index: Tensor) -> BlockSpectrum:
    """The sub-block (left ⊗ right)[index, index] as a dense block."""
    if len(index) > PICKED_LIMIT:
        raise UnsupportedError(
            f"a Kronecker block of {len(index)} single entries would need a dense block above the limit of "
            f"{PICKED_LIMIT}; select whole rows × columns (modules, parameters) or use hessian_structure='diag'."
        )
    shape = spectrum.shape or (1, 1, 1)
    group, left, right = _coordinates(index, shape)
    matrix = _side(spectrum.left, spectrum.left_values, group, left)
    matrix = matrix * _side(spectrum.right, spectrum.right_values, group, right)
    matrix = matrix * (group.unsqueeze(0) == group.unsqueeze(1))
    return dense_spectrum(matrix, *algebra.eigh(matrix))


def _coordinates(index: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Group, left and right coordinate of flat entries."""
    _, n_left, n_right = shape
    return index // (n_left * n_right), index // n_right % n_left, index % n_right


def _side(basis: Tensor | None, values: Tensor | None, group: Tensor, at: Tensor) -> Tensor:
    """Entries `[at, at]` of one side, `[p, p]`, for entries of the same group."""
    if values is None:
        return torch.ones(len(at), len(at), dtype=torch.float64, device=at.device)
    if basis is None:
        return values[group, at].unsqueeze(1) * (at.unsqueeze(0) == at.unsqueeze(1))
    roots = basis[group, at] * values[group].sqrt()
    return roots @ roots.T
