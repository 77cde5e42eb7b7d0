"""Products of curvature with vectors by autograd alone: no Jacobian, no factors, one batch of activations.

J v is the derivative of Jᵀ u with respect to u, so that reverse mode gives both directions (Pearlmutter, 1994;
Schraudolph, 2002), for every module that can be differentiated twice.


The outputs of a batch as a linear function of the random entries, and its transpose, for many vectors at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.memory import VECTOR, in_slices
from laplace.engines.native.autograd import BackwardPasses, pull
from laplace.engines.native.forward import Capture
from laplace.weights.problem import Problem

_COPIES = 4
"""Activations that a graph holds which can be differentiated twice, per output of a layer."""


class Linearised:
    """The outputs of one batch as a linear function of the random entries, and its transpose."""

    def __init__(self, problem: Problem, capture: Capture) -> None:
        self.problem = problem  # The network and its random parameters
        self.capture = capture  # A forward pass that was captured with `create_graph`
        self.f = capture.f  # Outputs `[B, C]`; with positions, T, `[B, T·C]`
        self.positions = capture.positions  # The dimensions whose product is T; empty for outputs `[B, C]`
        self.loop = capture.loop
        # About how much the graph holds
        self.n_bytes = _COPIES * self.f.element_size() * (self.f.numel() + sum(u.shape.numel() for u in capture.calls))
        self.tensors = [capture.stand_ins[slot.name] for slot in problem.slots]
        with torch.enable_grad(), capture.backward(1, len(self.tensors)):
            self._cotangent = torch.zeros_like(self.f, requires_grad=True)
            self._gradients = BackwardPasses([self.f], self.tensors, create_graph=True).gradients(self._cotangent)

    def push(self, vectors: Tensor) -> Tensor:
        """J v of vectors `[R, P]`, `[R, B, C]`."""
        parts = self.problem.layout.split(vectors.to(self.f.dtype))
        pairs = _used(self.problem, self._gradients, parts)
        if pairs:
            passes = BackwardPasses([g for g, _ in pairs], [self._cotangent])
            with self.capture.backward(len(vectors), 1):
                (pushed,) = passes.each(*(v for _, v in pairs), loop=self.loop)
            if pushed is not None:
                return pushed
        return self.f.new_zeros(len(vectors), *self.f.shape)

    def pull(self, cotangents: Tensor) -> list[Tensor | None]:
        """Jᵀ u of cotangents `[R, B, C]`, `[R, *shape]` per tensor, for `add_rows`."""
        with self.capture.backward(len(cotangents), len(self.tensors)):
            return pull(self.f, self.tensors, cotangents.to(self.f.dtype), loop=self.loop)


class HessianProduct:
    """∇² of a loss as a linear function of the random entries."""

    def __init__(self, problem: Problem, capture: Capture, loss: Tensor) -> None:
        self.problem = problem  # The network and its random parameters
        self.capture = capture  # A forward pass that was captured with `create_graph`
        self.loop = capture.loop
        self.dtype = capture.f.dtype
        self.tensors = [capture.stand_ins[slot.name] for slot in problem.slots]
        with torch.enable_grad(), capture.backward(1, len(self.tensors)):
            passes = BackwardPasses([loss], self.tensors, create_graph=True)
            self._gradients = passes.gradients(torch.ones_like(loss))

    def times(self, vectors: Tensor) -> list[Tensor | None]:
        """∇² loss · v of vectors `[R, P]`, `[R, *shape]` per tensor, for `add_rows`."""
        parts = self.problem.layout.split(vectors.to(self.dtype))
        pairs = _used(self.problem, self._gradients, parts)
        if not pairs:
            return [None] * len(self.tensors)
        passes = BackwardPasses([g for g, _ in pairs], self.tensors)
        with self.capture.backward(len(vectors), len(self.tensors)):
            return passes.each(*(v for _, v in pairs), loop=self.loop)


def _used(problem: Problem, gradients: Sequence[Tensor | None], parts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Gradients that can be differentiated, each with its part `[R, *shape]` of the vectors."""
    return [
        (gradient, slot.place(part).reshape(len(part), *slot.shape))
        for gradient, slot, part in zip(gradients, problem.slots, parts, strict=True)
        if gradient is not None and gradient.requires_grad
    ]


def add_rows(problem: Problem, gradients: Sequence[Tensor | None], total: Tensor) -> None:
    """Adds gradients `[R, *shape]` per slot to rows of random entries, `[R, P]`."""
    for gradient, slot, part in zip(gradients, problem.slots, problem.layout.split(total), strict=True):
        if gradient is not None:
            part += slot.take_rows(gradient)


@dataclass(frozen=True, eq=False)
class HeadMap:
    """J = I ⊗ [φ, 1] of a last layer, held as its features."""

    features: Tensor  # φ, `[B, D]`
    places: Tensor  # Place of every (output, feature) in the vector of weights, `[C, D]`

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
    """J multiplied out."""

    rows: Tensor  # J, `[B·C, P]`, data major
    n_outputs: int  # C

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
    """J of any network, as a graph that is differentiated in both directions."""

    linear: Linearised  # The graph
    n_outputs: int  # C
    at_once: int = 1  # Vectors that go through it together

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
