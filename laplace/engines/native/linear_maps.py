"""The outputs of a batch as a linear function of the random entries, and its transpose, for many vectors at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.memory import VECTOR, in_slices
from laplace.engines.native.products import Linearised, add_rows


@dataclass(frozen=True, eq=False)
class HeadMap:
    """J = I ⊗ [φ, 1] of a last layer, held as its features.

    Attributes:
        features: φ, `[B, D]`.
        places: Place of every (output, feature) in the vector of weights, `[C, D]`.
    """

    features: Tensor
    places: Tensor

    @property
    def n_bytes(self) -> int:
        """Bytes of the features."""
        return self.features.numel() * self.features.element_size()

    @property
    def is_lasting(self) -> bool:
        """True: it is numbers."""
        return True

    def push(self, vectors: Tensor) -> Tensor:
        """J v, `[R, B, C]`, of v `[R, P]`."""
        return (vectors[:, self.places] @ self.features.T).mT

    def add_pull(self, cotangents: Tensor, total: Tensor) -> None:
        """Adds Jᵀ u of u `[R, B, C]` to `[R, P]`."""
        total.index_add_(1, self.places.flatten(), (cotangents.mT @ self.features).flatten(1))


@dataclass(frozen=True, eq=False)
class DenseMap:
    """J multiplied out.

    Attributes:
        rows: J, `[B·C, P]`, data major.
        n_outputs: C.
    """

    rows: Tensor
    n_outputs: int

    @property
    def n_bytes(self) -> int:
        """Bytes of J."""
        return self.rows.numel() * self.rows.element_size()

    @property
    def is_lasting(self) -> bool:
        """True: it is numbers."""
        return True

    def push(self, vectors: Tensor) -> Tensor:
        """J v, `[R, B, C]`, of v `[R, P]`."""
        return (vectors @ self.rows.T).unflatten(1, (-1, self.n_outputs))

    def add_pull(self, cotangents: Tensor, total: Tensor) -> None:
        """Adds Jᵀ u of u `[R, B, C]` to `[R, P]`."""
        total.addmm_(cotangents.flatten(1), self.rows)


@dataclass(frozen=True)
class GraphMap:
    """J of any network, as a graph that is differentiated in both directions.

    Attributes:
        linear: The graph.
        n_outputs: C.
        at_once: Vectors that go through it together.
    """

    linear: Linearised
    n_outputs: int
    at_once: int = 1

    @property
    def n_bytes(self) -> int:
        """Bytes of the graph, about."""
        return self.linear.n_bytes

    @property
    def is_lasting(self) -> bool:
        """False: a graph holds activations several times."""
        return False

    def push(self, vectors: Tensor) -> Tensor:
        """J v, `[R, B, C]`, of v `[R, P]`; rows of outputs with positions are data."""
        parts = in_slices(len(vectors), self.at_once, lambda part: self.linear.push(vectors[part]), VECTOR)
        return torch.cat([pushed for _, pushed in parts]).reshape(len(vectors), -1, self.n_outputs).to(vectors)

    def add_pull(self, cotangents: Tensor, total: Tensor) -> None:
        """Adds Jᵀ u of u `[R, B, C]` to `[R, P]`."""
        whole = cotangents.reshape(len(cotangents), *self.linear.f.shape)
        for part, gradients in in_slices(len(whole), self.at_once, lambda part: self.linear.pull(whole[part]), VECTOR):
            add_rows(self.linear.problem, gradients, total[part])
