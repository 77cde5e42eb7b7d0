"""The shape of a tensor's Jacobian: what the work and memory of contractions depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorShape:
    """Sizes and form of the Jacobian of one random parameter.

    Attributes:
        size: p, random entries.
        factored: True if its Jacobian is a sum of outer products.
        indexed: True if their input side is one-hot (embeddings), of `n_inputs` rows.
        groups: G.
        n_outputs: O of a group; p without factors.
        n_inputs: I of a group; 1 for a bias and without factors.
        positions: T, positions that share the tensor.
        is_bias: True if there is no input side.
        is_head: True if the layer's outputs are the network's.
        copied: Bytes of inputs that are laid out anew for the contraction (unfolded images), for the whole batch.
    """

    size: int
    factored: bool = False
    indexed: bool = False
    groups: int = 1
    n_outputs: int = 1
    n_inputs: int = 1
    positions: int = 1
    is_bias: bool = False
    is_head: bool = False
    copied: int = 0

    @property
    def output_side(self) -> int:
        """Entries of the output side of a Kronecker product, G·O²."""
        return self.groups * self.n_outputs**2

    @property
    def input_side(self) -> int:
        """Entries of its input side, G·I², or I counts."""
        if self.is_bias:
            return 0
        return self.n_inputs if self.indexed else self.groups * self.n_inputs**2
