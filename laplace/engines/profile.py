"""Shapes and memory of one batch, from which the cost of a fit is estimated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from laplace.core.layout import Layout
from laplace.core.pieces import bytes_at_once
from laplace.engines.cost import DOUBLE
from laplace.engines.kron_parts import ThinFactor
from laplace.jacobian.blocks import CHUNK_BYTES, TensorShape
from laplace.jacobian.full_sum import MatrixSum

_FEW = 2**20
"""Multiplications for a sample that take less time than the calls that they are made in."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BatchProfile:
    """Shapes and bytes of a batch; all bytes are those of the whole batch."""

    layout: Layout  # The random parameters
    tensors: tuple[TensorShape, ...]  # One per random parameter
    n_data: int  # B
    n_outputs: int  # C
    n_columns: int  # K, backward passes that the curvature takes; 0 if it is known by products alone
    n_terms: int  # E
    itemsize: int  # Bytes of a number of the curvature
    graph: int  # Bytes that a forward pass keeps for backward passes
    widest: int  # Bytes that the widest layer takes in and gives out
    gradients: int  # Bytes of the output gradients of one cotangent
    budget: int  # Bytes of output gradients held at once
    product_budget: int  # Bytes of the vectors that are multiplied at once
    loop: bool  # True if backward passes run one by one
    refused: bool = False  # True if this is more backward passes than a batch may take
    n_batches: int | None = None  # Batches that a fit reads, or None if their number is unknown
    inputs: int = 0  # Bytes of the inputs
    device: torch.device = _CPU  # Where the batch is computed

    @classmethod
    @lru_cache(maxsize=64)  # of one network they are all the same
    def least(
        cls, layout: Layout, *, n_columns: int, itemsize: int, product_budget: int, loop: bool, device: torch.device
    ) -> BatchProfile:
        """Lower bound of every batch's profile: the sizes of the tensors, and one sample with one output."""
        tensors = tuple(TensorShape(size, factored=True, is_bias=True) for size in layout.sizes)
        return cls(
            layout, tensors, n_data=1, n_outputs=1, n_columns=n_columns, n_terms=1, itemsize=itemsize, graph=0,
            widest=0, gradients=0, budget=1, product_budget=product_budget, loop=loop, device=device,
        )  # fmt: skip

    @property
    def n_params(self) -> int:
        """Number of parameters P."""
        return self.layout.n_params

    @property
    def is_head(self) -> bool:
        """True if every random parameter belongs to the head, which needs no backward pass."""
        return all(tensor.is_head for tensor in self.tensors)

    @property
    def at_once(self) -> int:
        """Cotangents whose gradients are held at once, at least 1."""
        per_column = 2 * (self.gradients + self.n_data * self.n_outputs * self.itemsize)
        return max(1, min(self.n_columns, self.budget // max(1, per_column)))

    @property
    def batch_bytes(self) -> int:
        """Bytes while a batch is contracted: graph, gradients (twice, to be stacked), and unfolded inputs."""
        return self._held(self.at_once)

    @property
    def jacobian_bytes(self) -> int:
        """Bytes while a batch is predicted: as `batch_bytes`, with one cotangent per output."""
        most = max(1, self.n_outputs)
        share = min(1.0, self.budget / max(1, 2 * self.gradients * most))  # the batch is split beyond the budget
        return int(share * self._held(most))

    @property
    def proving_bytes(self) -> int:
        """Bytes while rules are proved on a first batch: derivatives of all tensors, and copies of the largest."""
        sizes = [tensor.size for tensor in self.tensors]
        return self.widest + (sum(sizes) + 4 * max(sizes)) * self.itemsize

    def _held(self, at_once: int) -> int:
        cotangents = 2 * at_once * self.n_data * self.n_outputs * self.itemsize
        if self.is_head:  # no cotangents, but the outputs' Hessians
            return self.widest + 4 * self.n_data * self.n_outputs * self.itemsize
        copied = sum(tensor.copied for tensor in self.tensors)
        dense = sum(tensor.size for tensor in self.tensors if not tensor.factored) * self.n_data * self.itemsize
        copied += min(2 * at_once * dense, self.budget)
        return max(self.graph + 2 * at_once * self.gradients + copied + cotangents, self.widest)

    def multiplies_by_factors(self, n_vectors: int) -> bool:
        """True if products with vectors are cheaper by the factors of the Jacobian than by its graph.

        A graph is gone through four times for every vector. Factors take K backward passes for all of them, and then
        half as much as these for a vector, and its outputs once for every cotangent. Of small networks neither takes
        long, and factors are multiplied in float64, which a network's own graph is not.
        """
        if self.n_terms > 1 or self.refused or not all(tensor.is_plain for tensor in self.tensors):
            return False
        network = sum(tensor.multiplications for tensor in self.tensors)
        by_factors = self.n_columns * network + self._products(n_vectors)
        return by_factors < max(4 * n_vectors * network, _FEW)

    def _products(self, n_vectors: int) -> int:
        chunks = -(-self.n_columns // self.at_once)
        return chunks * sum(tensor.products(n_vectors, self.at_once) for tensor in self.tensors)

    def product_bytes(self, n_vectors: int) -> int:
        """Bytes while a batch is multiplied with vectors.

        A graph of gradients, and vectors within the budget; or what a batch takes that is contracted, and outputs of a
        layer for all vectors, a piece at a time.
        """
        if self.multiplies_by_factors(n_vectors):
            outputs = max(t.groups * t.n_outputs * t.positions for t in self.tensors) * self.itemsize
            piece = max(bytes_at_once(CHUNK_BYTES, self.device), n_vectors * outputs)
            piece = min(piece, n_vectors * self.n_data * outputs)
            return max(self.batch_bytes + 2 * piece + self.piece_bytes(self.shared_sizes), self.proving_bytes)
        per_vector = 4 * (self.gradients + self.n_data * self.n_outputs * self.itemsize)
        rows = 2 * self.n_params * self.itemsize
        at_once = max(1, min(n_vectors, self.product_budget // (per_vector + rows)))
        return 2 * self.graph + (1 if self.loop else at_once) * per_vector + at_once * rows

    def piece_bytes(self, sizes: Sequence[int], together: int = 1) -> int:
        """Bytes of the largest dense piece `[k, b, p]` that is multiplied out of tensors of these sizes."""
        largest = max(sizes, default=0) * together * self.itemsize
        whole = largest * self.n_data * max(1, self.at_once // together)
        return max(min(whole, bytes_at_once(CHUNK_BYTES, self.device) * self.itemsize // 8), largest)

    @property
    def shared_sizes(self) -> list[int]:
        """Sizes of the tensors whose squares need dense pieces: without factors, or with several positions."""
        return [t.size for t in self.tensors if not t.is_head and (not t.factored or t.positions > 1)]

    def of_one_datum(self) -> BatchProfile:
        """The same with batches of one sample."""
        tensors = tuple(replace(tensor, copied=tensor.copied // self.n_data) for tensor in self.tensors)
        n_batches = None if self.n_batches is None else self.n_batches * self.n_data
        gradients = self.gradients // self.n_data
        return replace(self, n_data=1, gradients=gradients, tensors=tensors, n_batches=n_batches)

    def rank(self, rows: int, width: int) -> int:
        """Rank of a sum of outer products of width n with so many rows per sample; n if it is summed as a matrix."""
        if self.n_batches is None:
            return width
        rank = self.n_batches * self.n_data * rows
        return rank if ThinFactor.holds(rank, width) else width

    def head(self) -> BatchProfile | None:
        """The same batch where only the last layer is random; None where the profile saw no head."""
        heads = [i for i, tensor in enumerate(self.tensors) if tensor.is_head]
        if not heads:
            return None
        layout = Layout(tuple(self.layout.names[i] for i in heads), tuple(self.layout.sizes[i] for i in heads))
        return replace(self, layout=layout, tensors=tuple(self.tensors[i] for i in heads), graph=0, gradients=0)


@dataclass(frozen=True)
class MatrixCost:
    """Bytes of a sum of outer products of some tensors, `[E, p, p]`."""

    running: int  # Bytes of the sum while batches are read
    completing: int  # Bytes of the sum and the matrices that are made of it
    pieces: int  # Bytes of what is multiplied out and dropped

    @classmethod
    def from_profile(cls, profile: BatchProfile, shapes: Sequence[TensorShape]) -> MatrixCost:
        """That of tensors of these shapes."""
        size = sum(shape.size for shape in shapes)
        matrix, wide = profile.n_terms * size**2 * DOUBLE, DOUBLE // profile.itemsize
        pairs = MatrixSum.form(shapes, profile.at_once, profile.n_terms, profile.device)
        if pairs is None:
            pieces = (3 + (wide if wide > 1 else 0)) * profile.piece_bytes([size], profile.at_once)
            return cls(matrix, matrix, pieces)
        rows = profile.n_data
        if all(shape.is_head for shape in shapes):  # without cotangents, and of many data as they are
            rows *= max(shape.positions for shape in shapes)
        running, strips = pairs.n_numbers * DOUBLE, 2 * pairs.n_placed_at_once * DOUBLE
        pieces = 2 * pairs.numbers_at_once(profile.at_once, rows) * DOUBLE
        return cls(running, running + matrix + strips, pieces)
