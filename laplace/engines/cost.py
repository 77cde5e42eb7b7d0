"""Cost of a structure in bytes, from what one batch showed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from laplace.engines.kron_parts import DENSE_BLOCK_LIMIT
from laplace.jacobian.blocks import TensorShape

if TYPE_CHECKING:
    from laplace.engines.profile import BatchProfile

DOUBLE = 8
"""Bytes of the float64 numbers in which factorisations are done."""


@dataclass(frozen=True)
class Cost:
    """Bytes of one structure on one kind of batch."""

    fitted: int  # Bytes of the fitted curvature
    running: int  # Bytes of sums that are held while a batch is read
    adding: int  # Bytes of sums when a batch is added, the graph being gone
    pieces: int = 0  # Bytes of what a fit multiplies out, contracts and drops
    posterior: int = 0  # Bytes that the first prediction makes and keeps, or passes through
    projecting: int = 0  # Bytes of what a prediction multiplies out or rotates, and drops
    vectors: int = 0  # With how many vectors the curvature is multiplied; 0 for sums of outer products
    columns: bool = False  # Whether it is of factors of outer products, which curvature known by products alone lacks
    # Whether it is an upper bound that the structure itself does not speak for; no fit is refused by it
    assumed: bool = False
    note: str = ""  # Words about the form that the structure takes for so many data

    def fit_bytes(self, profile: BatchProfile) -> int:
        """Peak of a fit above what was held before it."""
        reading = profile.product_bytes(self.vectors) if self.vectors else profile.batch_bytes
        return max(self.running + reading + self.pieces, self.adding, 0 if self.vectors else profile.proving_bytes)

    def predict_bytes(self, profile: BatchProfile) -> int:
        """Peak of the first prediction of a batch above what was held after the fit."""
        return max(self.posterior + profile.jacobian_bytes + self.projecting, profile.proving_bytes)


@dataclass(frozen=True)
class SideCost:
    """The matrices of one side of a Kronecker product, or an exact block."""

    groups: int  # Number of matrices
    width: int  # `n`
    rank: int  # Eigenpairs by which a sum of few rows is held; n for a matrix

    @property
    def squares(self) -> int:
        """Entries of the matrices."""
        return self.groups * self.width**2

    @property
    def is_thin(self) -> bool:
        """True if eigenpairs are held in place of the matrix."""
        return self.rank < self.width

    @property
    def basis(self) -> int:
        """Entries of the eigenbases as they are computed with."""
        return self.rank * (self.width + self.rank) if self.is_thin else self.squares


@dataclass(frozen=True)
class SideCosts:
    """The matrices of all Kronecker products, and the exact blocks beside them."""

    outputs: tuple[SideCost, ...]  # Every output side and dense block
    inputs: tuple[SideCost, ...]  # Every input side
    vectors: int  # Numbers of diagonals and counts

    @classmethod
    def from_profile(cls, profile: BatchProfile) -> SideCosts:
        """Those of a profile; a small tensor without factors has a dense block, a large one a diagonal."""
        outputs: list[SideCost] = []
        inputs: list[SideCost] = []
        vectors = 0
        for layer in profile.layout.layers:
            for position, tensor in enumerate(profile.tensors[i] for i in layer):
                if not tensor.factored:
                    dense = tensor.size <= DENSE_BLOCK_LIMIT
                    outputs += [SideCost(1, tensor.size, tensor.size)] if dense else []
                    vectors += 0 if dense else tensor.size
                    continue
                if not (tensor.is_bias and position):  # which shares the output side of its weight
                    outputs.append(_output_side(profile, tensor))
                if tensor.indexed:
                    vectors += tensor.n_inputs
                elif not tensor.is_bias:
                    inputs.append(_side(profile, tensor.groups, tensor.n_inputs, tensor.positions))
        return cls(tuple(outputs), tuple(inputs), vectors)

    @property
    def _every(self) -> tuple[SideCost, ...]:
        return self.outputs + self.inputs

    def held(self, n_terms: int) -> int:
        """Bytes of all sums, in float64, those of the output sides once per term."""
        thin = sum(side.rank * (side.width + 1) for side in self._every if side.is_thin)
        outputs, inputs = (sum(s.squares for s in sides if not s.is_thin) for sides in (self.outputs, self.inputs))
        return DOUBLE * (thin + n_terms * (outputs + self.vectors) + inputs)

    @property
    def squares(self) -> int:
        """Entries of all eigenbases, by their vectors."""
        return sum(side.squares for side in self._every)

    @property
    def bases(self) -> int:
        """Entries of all eigenbases, in the form in which they are computed with."""
        return sum(side.basis for side in self._every)

    @property
    def largest(self) -> int:
        """Entries of the largest eigenbasis."""
        return max(side.basis for side in self._every)

    def columns(self, count: int) -> int:
        """Numbers of `count` vectors for every side."""
        return sum(side.groups * side.width * min(side.width, count) for side in self._every)

    def cores(self, count: int, n_terms: int) -> int:
        """Numbers of all sides within `count` vectors each, those of the output sides once per term."""
        outputs, inputs = (
            sum(s.groups * min(s.width, count) ** 2 for s in sides) for sides in (self.outputs, self.inputs)
        )
        return n_terms * outputs + inputs


def _output_side(profile: BatchProfile, tensor: TensorShape) -> SideCost:
    """An output side: that of a head is a sum of output Hessians, and terms that are kept apart are matrices."""
    if tensor.is_head or profile.n_terms > 1:
        return SideCost(tensor.groups, tensor.n_outputs, tensor.n_outputs)
    return _side(profile, tensor.groups, tensor.n_outputs, tensor.positions * profile.n_columns)


def _side(profile: BatchProfile, groups: int, width: int, rows: int) -> SideCost:
    return SideCost(groups, width, profile.rank(rows, width) if groups == 1 else width)


def widest_gradient(profile: BatchProfile) -> int:
    """Numbers of one datum's output gradients of the widest layer."""
    return max(tensor.positions * tensor.groups * tensor.n_outputs for tensor in profile.tensors)
