"""Kronecker factors as engines sum them: by key, with a form per treated tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

UNUSED = "unused"
"""Kind of a block that no datum has needed yet."""


@dataclass(frozen=True)
class KronParts:
    """Sums from which Kronecker-factored curvature is put together, additive over batches and shards.

    The block of a tensor, seen as a matrix (first dimension × the rest), is left ⊗ right / positions.

    Attributes:
        factors: Summed matrices by key: output sides `[E, G, O, O]` (E terms, one per output under a vector
            noise, else 1; G groups), input sides `[G, I, I]` or counts `[V]`, dense blocks `[E, p, p]`,
            diagonals `[E, p]`, numbers of positions `[]`.
        blocks: One per treated tensor, in order.
    """

    factors: Mapping[str, Tensor]
    blocks: tuple[KronBlock, ...]

    def positions(self, block: KronBlock) -> float:
        """Number of positions that share the weight; 1 without data. Data that fade may count less than 1."""
        return (float(self.factors[block.positions]) or 1.0) if block.positions else 1.0

    def kfacs(self) -> list[list[Tensor]]:
        """Factors per tensor: `[left, right]` with left ⊗ right its block, `[left]` of a bias, or a dense block."""
        result: list[list[Tensor]] = []
        for block in self.blocks:
            output = self.factors[block.output].sum(0)
            output = output[0] if block.kind == "kron" and len(output) == 1 else output
            if block.input is None:
                result.append([output])
                continue
            inputs = self.factors[block.input] / self.positions(block)
            inputs = inputs[0] if inputs.ndim == 3 and len(inputs) == 1 else inputs
            result.append([inputs, output] if block.input_first else [output, inputs])
        return result


@dataclass(frozen=True)
class KronBlock:
    """How the curvature of one tensor is held: by keys into `KronParts.factors`.

    Attributes:
        kind: `"kron"`, `"dense"`, `"diag"`, or `"unused"`: zero, and added to any other kind.
        size: Number of treated entries.
        output: Key of the output side, or of the dense or diagonal block.
        input: Key of the input side, or None (a bias: 1).
        positions: Key of the number of positions.
        input_first: The first dimension of the tensor is the input side (embeddings, transposed convolutions).
        index: Treated entries within the Kronecker product where they are not rows × columns.
    """

    kind: str
    size: int
    output: str
    input: str | None = None
    positions: str | None = None
    input_first: bool = False
    index: Tensor | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Keys of the factors that the block reads."""
        return tuple(key for key in (self.output, self.input, self.positions) if key is not None)
