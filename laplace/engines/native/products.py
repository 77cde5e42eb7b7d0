"""Products of curvature with vectors by autograd alone: no Jacobian, no factors, one batch of activations.

J v is the derivative of Jᵀ u with respect to u, so that reverse mode gives both directions (Pearlmutter, 1994;
Schraudolph, 2002), for every module that can be differentiated twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laplace.core.memory import VECTOR, in_slices
from laplace.engines.engine import LinearMap
from laplace.engines.native.autograd import BackwardPasses, pull
from laplace.engines.native.forward import Capture
from laplace.weights.problem import Problem

_COPIES = 4
"""Activations that a graph holds which can be differentiated twice, per output of a layer."""


class _Differentiated:
    """Gradients of a number of the network with respect to all tensors, as a graph that is differentiated again."""

    def __init__(self, problem: Problem, capture: Capture, output: Tensor, cotangent: Tensor) -> None:
        self.problem = problem  # The network and its random parameters
        self.capture = capture  # A forward pass that was captured with `create_graph`
        self.tensors = [capture.stand_ins[slot.name] for slot in problem.slots]
        with torch.enable_grad(), capture.backward(1, len(self.tensors)):
            passes = BackwardPasses([output], self.tensors, create_graph=True)
            self._gradients = passes.gradients(cotangent)

    def _derivatives(self, vectors: Tensor, edges: list[Tensor]) -> list[Tensor | None]:
        """Derivatives of vᵀ gradient with respect to the edges, for vectors v `[R, P]`."""
        parts = self.problem.layout.split(vectors.to(self.capture.f.dtype))
        pairs = [
            (gradient, slot.place(part).reshape(len(part), *slot.shape))
            for gradient, slot, part in zip(self._gradients, self.problem.slots, parts, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        if not pairs:
            return [None] * len(edges)
        passes = BackwardPasses([gradient for gradient, _ in pairs], edges)
        with self.capture.backward(len(vectors), len(edges)):
            return passes.each(*(part for _, part in pairs), loop=self.capture.loop)


class Linearised(_Differentiated):
    """The outputs of one batch as a linear function of the random entries, and its transpose."""

    def __init__(self, problem: Problem, capture: Capture) -> None:
        self.f = capture.f  # Outputs `[B, C]`; with positions, T, `[B, T·C]`
        self.positions = capture.positions  # The dimensions whose product is T; empty for outputs `[B, C]`
        numbers = self.f.numel() + sum(call.shape.numel() for call in capture.calls)
        self.n_bytes = _COPIES * self.f.element_size() * numbers  # About how much the graph holds
        with torch.enable_grad():
            self._cotangent = torch.zeros_like(self.f, requires_grad=True)
        super().__init__(problem, capture, self.f, self._cotangent)

    def push(self, vectors: Tensor) -> Tensor:
        """J v of vectors `[R, P]`, `[R, B, C]`."""
        (pushed,) = self._derivatives(vectors, [self._cotangent])
        return self.f.new_zeros(len(vectors), *self.f.shape) if pushed is None else pushed

    def pull(self, cotangents: Tensor) -> list[Tensor | None]:
        """Jᵀ u of cotangents `[R, B, C]`, `[R, *shape]` per tensor, for `add_rows`."""
        with self.capture.backward(len(cotangents), len(self.tensors)):
            return pull(self.f, self.tensors, cotangents.to(self.f.dtype), loop=self.capture.loop)


class HessianProduct(_Differentiated):
    """∇² of a loss, 0-dim, as a linear function of the random entries."""

    def __init__(self, problem: Problem, capture: Capture, loss: Tensor) -> None:
        super().__init__(problem, capture, loss, torch.ones_like(loss))

    def times(self, vectors: Tensor) -> list[Tensor | None]:
        """∇² loss · v of vectors `[R, P]`, `[R, *shape]` per tensor, for `add_rows`."""
        return self._derivatives(vectors, self.tensors)


def add_rows(problem: Problem, gradients: Sequence[Tensor | None], total: Tensor) -> None:
    """Adds gradients `[R, *shape]` per slot to rows of random entries, `[R, P]`."""
    for gradient, slot, part in zip(gradients, problem.slots, problem.layout.split(total), strict=True):
        if gradient is not None:
            part += slot.take_rows(gradient)


@dataclass(frozen=True, eq=False)
class HeadMap(LinearMap):
    """J = I ⊗ [φ, 1] of a last layer, held as its features."""

    features: Tensor  # φ, `[B, D]`
    places: Tensor  # Place of every (output, feature) in the vector of weights, `[C, D]`

    @property
    def n_bytes(self) -> int:
        return self.features.nbytes

    def push(self, vectors: Tensor) -> Tensor:
        return (vectors[:, self.places] @ self.features.T).mT

    def add_pull(self, cotangents: Tensor, total: Tensor) -> None:
        total.index_add_(1, self.places.flatten(), (cotangents.mT @ self.features).flatten(1))


@dataclass(frozen=True, eq=False)
class DenseMap(LinearMap):
    """J multiplied out."""

    rows: Tensor  # J, `[B·C, P]`, data major
    n_outputs: int

    @property
    def n_bytes(self) -> int:
        return self.rows.nbytes

    def push(self, vectors: Tensor) -> Tensor:
        return (vectors @ self.rows.T).unflatten(1, (-1, self.n_outputs))

    def add_pull(self, cotangents: Tensor, total: Tensor) -> None:
        total.addmm_(cotangents.flatten(1), self.rows)


@dataclass(frozen=True)
class GraphMap(LinearMap):
    """J of any network, as a graph that is differentiated in both directions; of outputs with positions B is B·T."""

    linear: Linearised
    n_outputs: int
    at_once: int = 1  # Vectors that go through the graph together
    is_lasting: ClassVar[bool] = False

    @property
    def n_bytes(self) -> int:
        return self.linear.n_bytes

    def push(self, vectors: Tensor) -> Tensor:
        parts = in_slices(len(vectors), self.at_once, lambda part: self.linear.push(vectors[part]), VECTOR)
        return torch.cat([pushed for _, pushed in parts]).reshape(len(vectors), -1, self.n_outputs).to(vectors)

    def add_pull(self, cotangents: Tensor, total: Tensor) -> None:
        whole = cotangents.reshape(len(cotangents), *self.linear.f.shape)
        for part, gradients in in_slices(len(whole), self.at_once, lambda part: self.linear.pull(whole[part]), VECTOR):
            add_rows(self.linear.problem, gradients, total[part])
