"""Sums Σ_b J_bᵀ J_b by pairs of layers, and Σ_b J_bᵀ Λ_b J_b of a head, without J or a root of Λ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from laplace.core.gram import add_gram, mirror
from laplace.jacobian.blocks import Block
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.packed import Strip, SymmetricForm, n_products, products, strips
from laplace.jacobian.pairs import Pairs, Part
from laplace.likelihoods.output_hessian import OutputHessian


@dataclass(eq=False)
class PairSum:
    """Running sum Σ_kb J Jᵀ over data and cotangents, pair by pair.

    Attributes:
        pairs: The parts of the blocks that are added.
        forms: Of every part, in which form the outputs of its pair with itself are held.
        sums: Of every pair, outputs × inputs: `[O·O', I·I']`; of a layer with itself few numbers twice, one strip of
            inputs after the other, `[numbers]`; of what is multiplied out with itself `[O, O]`, of which the upper
            block triangle counts.
    """

    pairs: Pairs
    forms: tuple[SymmetricForm, ...]
    sums: dict[tuple[int, int], Tensor]

    @classmethod
    def zeros(cls, pairs: Pairs, like: Tensor, head: SymmetricForm | None = None) -> PairSum:
        """The sum over nothing, in the dtype and on the device of a tensor.

        Args:
            pairs: The parts of the blocks.
            like: The tensor.
            head: The form of a head's Λ.
        """
        forms = tuple(SymmetricForm(part.n_outputs) if head is None else head for part in pairs.parts)
        return cls(pairs, forms, {pair: like.new_zeros(_shape(pairs, forms, *pair)) for pair in pairs})

    def add(self, blocks: Sequence[Block]) -> None:
        """Adds weighted blocks of these parts."""
        for _, factors in self.pairs.factors(blocks, self._dtype):
            for (i, j), values in self.sums.items():
                if i == j and not self.pairs.parts[i].is_product:
                    add_gram(values, factors[i].by_datum().flatten(0, 1))
                    continue
                outputs = factors[i].by_datum().mT @ factors[j].by_datum()  # [b, O, O']
                if i == j:
                    _add_own(values, factors[i].a, self.forms[i].picked(outputs))
                else:
                    values.addmm_(outputs.flatten(1).T, products(factors[i].a, factors[j].a))

    def add_head(self, blocks: Sequence[HeadBlock], hessian: OutputHessian) -> None:
        """Adds Σ_b Λ_b ⊗ (φ_b φ_bᵀ) of the blocks of a head."""
        ((pair, values),) = self.sums.items()
        entries = hessian.entries(*self.forms[pair[0]].indices(values.device))
        for data, (factors,) in self.pairs.factors(blocks, self._dtype):
            _add_own(values, factors.a, entries[data])

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self.sums.values())).dtype

    def squares(self) -> list[Tensor]:
        """Sums of which all others are finite if these are: of every layer and of what is multiplied out."""
        result: list[Tensor] = []
        for i, part in enumerate(self.pairs.parts):
            own = self.sums[i, i]
            if part.is_product:
                own = own.index_select(0, _squares(strips(part.n_inputs), self.forms[i].size, own.device))
            result.append(own if part.is_product else own.diagonal())
        return result

    def dense(self, n_terms: int = 1) -> Tensor:
        """The matrices `[E, P, P]`; beside them and the sums little is held.

        Args:
            n_terms: E: one per output of a head with a diagonal Λ, or 1.
        """
        size = self.pairs.size
        values = next(iter(self.sums.values()))
        if n_terms > 1:
            matrices = values.new_zeros(n_terms, size, size)
            for term, matrix in enumerate(matrices):
                self._place(matrix, term)
            return matrices
        matrix = values.new_empty(1, size, size)
        self._place(matrix[0])
        return matrix

    def _place(self, matrix: Tensor, output: int | None = None) -> None:
        """Writes the sum, or of a head with a diagonal Λ what belongs to one output, into a matrix `[P, P]`."""
        for (i, j), values in self.sums.items():
            one, other = self.pairs.parts[i], self.pairs.parts[j]
            if i == j and one.is_product:
                _place_own(one, self.forms[i], values, matrix, output)
                continue
            if i == j:
                values = mirror(values)
            values = values.view(one.n_outputs, other.n_outputs, one.n_inputs, other.n_inputs).permute(2, 3, 0, 1)
            for first, r, inputs, outputs in one.pieces():
                for second, c, other_inputs, other_outputs in other.pieces():
                    block = values[inputs, other_inputs, outputs, other_outputs]
                    first.viewed(second, matrix[r, c]).copy_(block)
                    if i != j:
                        matrix[c, r] = matrix[r, c].T


def _shape(pairs: Pairs, forms: Sequence[SymmetricForm], i: int, j: int) -> tuple[int, ...]:
    one, other = pairs.parts[i], pairs.parts[j]
    if i == j and one.is_product:
        return (forms[i].size * n_products(one.n_inputs),)
    if i == j:
        return one.n_outputs, one.n_outputs
    return one.n_outputs * other.n_outputs, one.n_inputs * other.n_inputs


@cache
def _squares(every: tuple[Strip, ...], n: int, device: torch.device) -> Tensor:
    """Places of the sums of all products a_i a_i with n numbers each, `[n · I]`."""
    places = [place for strip in every for place in strip.squares(n)]
    with torch.inference_mode(False):
        return torch.tensor(places, device=device)


def _add_own(sums: Tensor, a: Tensor, outputs: Tensor) -> None:
    """Adds Σ_b outputs ⊗ (a aᵀ) of a layer with itself, for outputs `[b, n]` and inputs `[b, I]`.

    Of the three factors, outputs, a_i and a_j, those are multiplied before the matrix product that make fewer numbers:
    outputs and a_i, or a_i and a_j.
    """
    n, columns, rows = outputs.shape[1], outputs.T.contiguous(), a.T.contiguous()
    for strip in strips(a.shape[1]):
        total = strip.of(sums, n)
        if n < total.shape[2]:
            weighted = (columns.unsqueeze(1) * rows[strip.start : strip.stop]).flatten(0, 1)
            total.view(-1, total.shape[2]).addmm_(weighted, a[:, strip.start :])
        else:
            total.view(n, -1).addmm_(columns, strip.inputs(a))


def _place_own(part: Part, form: SymmetricForm, values: Tensor, matrix: Tensor, output: int | None) -> None:
    """Writes the sum of a layer with itself into a matrix, one strip after the other."""
    for strip in strips(part.n_inputs):
        packed = strip.of(values, form.size).flatten(1).T
        if output is not None:
            packed = packed * (torch.arange(form.size, device=packed.device) == output)
        rows = form.completed(packed).unflatten(0, (strip.stop - strip.start, -1))  # [i, j, O, O]
        for first, r, inputs, _ in part.pieces():
            for second, c, others, _ in part.pieces():
                i, j = _overlap(inputs, strip.start, strip.stop), _overlap(others, strip.start, strip.width)
                if i is None or j is None:
                    continue
                block = rows[_moved(i, strip.start), _moved(j, strip.start)]
                i, j = _moved(i, inputs.start), _moved(j, others.start)
                first.viewed(second, matrix[r, c])[i, j] = block
                second.viewed(first, matrix[c, r])[j, i] = block.transpose(0, 1)


def _overlap(one: slice, start: int, stop: int) -> slice | None:
    start, stop = max(one.start, start), min(one.stop, stop)
    return slice(start, stop) if start < stop else None


def _moved(one: slice, start: int) -> slice:
    return slice(one.start - start, one.stop - start)
