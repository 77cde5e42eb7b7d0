"""Running sum of a full curvature over batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.checks import all_finite
from laplace.core.gram import add_gram, mirror
from laplace.jacobian.blocks import Block, TensorShape
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.jacobian import Jacobian
from laplace.jacobian.packed import Entries, SymmetricForm
from laplace.jacobian.pair_sum import PairSum
from laplace.jacobian.pairs import Pairs
from laplace.likelihoods.output_hessian import OutputHessian

_DATA = 16
"""Number of data for which the form of a sum is chosen, whatever the first batch: it may be a small one of many."""


@dataclass(eq=False)
class MatrixSum:
    """Σ J Jᵀ `[E, p, p]`, by pairs of layers where that is less work, and of what is multiplied out.

    Attributes:
        size: Number of entries p.
        values: `[E, p, p]` of what is multiplied out, of which the upper block triangle counts; None if there is none.
        paired: The sum by pairs of layers, or None.
        n_terms: Number of terms E that are kept apart.
    """

    size: int
    values: Tensor | None = None
    paired: PairSum | None = None
    n_terms: int = 1

    @classmethod
    def of(cls, values: Tensor) -> MatrixSum:
        """The sum of complete matrices `[E, p, p]`."""
        return cls(values.shape[-1], values, n_terms=len(values))

    def add(self, values: Tensor) -> None:
        """Adds matrices `[E, p, p]`."""
        self.upper(len(values), values).add_(values)

    def upper(self, n_terms: int, like: Tensor) -> Tensor:
        """The sum of what is multiplied out, `[E, p, p]`, to add to in place; the upper block triangle counts.

        Args:
            n_terms: E.
            like: Gives dtype and device.
        """
        if self.values is None:
            self.values, self.n_terms = like.new_zeros(n_terms, self.size, self.size), n_terms
        if self.values.dtype != like.dtype:  # a sum keeps what the wider of its terms holds
            self.values = self.values.to(torch.promote_types(self.values.dtype, like.dtype))
        return self.values

    def add_blocks(self, blocks: Sequence[Block], n_terms: int, first: int, like: Tensor) -> None:
        """Adds the outer products of weighted blocks that follow each other.

        Args:
            blocks: One of every tensor.
            n_terms: E: a term is an output, or holds all.
            first: Term of the first cotangent.
            like: Gives the device, and the dtype of products and sum.
        """
        if self.paired is None and self.values is None and n_terms == 1 and Pairs.are_less_work(blocks, _DATA):
            self.paired = PairSum.zeros(Pairs.of(blocks), like)
        if self.paired is not None and self.paired.pairs == Pairs.of(blocks):
            self.paired.add(blocks)
            return
        total = self.upper(n_terms, like)
        for piece in Jacobian(tuple(blocks)).pieces():
            piece = piece.to(total.dtype)
            if n_terms == 1:
                add_gram(total[0], piece.flatten(0, 1))
                continue
            for k in range(piece.shape[1]):
                add_gram(total[(first + k) % n_terms], piece[:, k])

    def add_head(self, blocks: Sequence[HeadBlock], hessian: OutputHessian, n_terms: int, like: Tensor) -> None:
        """Adds Σ_b J_bᵀ Λ_b J_b of the blocks of a head, without a root of Λ.

        Args:
            blocks: One of every tensor.
            hessian: Λ of the data; its diagonals alone count where terms are kept apart.
            n_terms: E: a term is an output, or holds all.
            like: Gives the device, and the dtype of products and sum.
        """
        form = SymmetricForm.of(hessian) if n_terms == 1 else SymmetricForm(n_terms, Entries.DIAGONAL)
        pairs = Pairs.of(blocks)
        if self.paired is not None and (self.paired.pairs, self.paired.forms) != (pairs, (form,)):
            self.complete()
        if self.paired is None:
            self.paired, self.n_terms = PairSum.zeros(pairs, like, form), n_terms
        self.paired.add_head(blocks, hessian)

    @staticmethod
    def form(shapes: Sequence[TensorShape], n_cotangents: int, n_terms: int) -> Pairs | None:
        """Pairs by which the outer products of tensors of these shapes are summed; None where they are not.

        Args:
            shapes: One of every tensor.
            n_cotangents: Number of cotangents that are added at once.
            n_terms: E.
        """
        is_head = all(shape.is_head for shape in shapes)
        return Pairs.of_shapes(shapes, n_cotangents, _DATA) if n_terms == 1 or is_head else None

    def complete(self) -> Tensor:
        """The matrices `[E, p, p]`; what was held by pairs is released."""
        if self.values is not None:
            mirror(self.values)
        if self.paired is not None:
            matrix = self.paired.dense(self.n_terms)
            self.values = matrix if self.values is None else matrix.add_(self.values)
            self.paired = None
        return self.upper(1, torch.empty(0))

    def is_finite(self) -> Tensor:
        """True, 0-dim, if all is finite, by entries that hold every square: a batch passes over no whole matrix."""
        own = [] if self.values is None else [self.values.diagonal(dim1=1, dim2=2)]
        if self.paired is not None:
            own += self.paired.squares()
        return all_finite(own)
