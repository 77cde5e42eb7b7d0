"""Products of curvature with vectors by autograd alone: no Jacobian, no factors, one batch of activations.

J v is the derivative of Jᵀ u with respect to u, so that reverse mode gives both directions (Pearlmutter, 1994;
Schraudolph, 2002), for every module that can be differentiated twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace.curvature.native.backward import pull, slow_batching_accepted
from laplace.curvature.native.capture import Capture
from laplace.weights.problem import Problem


class Linearised:
    """The outputs of one batch as a linear function of the treated entries, and its transpose.

    Args:
        problem: The network and its treated tensors.
        taken: A forward pass that was captured with `create_graph`.
    """

    def __init__(self, problem: Problem, taken: Capture) -> None:
        self.problem = problem
        self.f = taken.f
        self.loop = taken.loop
        self.tensors = [taken.stand_ins[slot.name] for slot in problem.slots]
        with torch.enable_grad():
            self._cotangent = torch.zeros_like(self.f, requires_grad=True)
            self._gradients = torch.autograd.grad(
                self.f, self.tensors, self._cotangent, create_graph=True, allow_unused=True
            )

    def push(self, vectors: Tensor) -> Tensor:
        """J v of vectors `[R, P]`, `[R, B, C]`."""
        parts = self.problem.layout.split(vectors.to(self.f.dtype))
        pairs = [
            (gradient, slot.place(part).view(len(vectors), *slot.shape))
            for gradient, slot, part in zip(self._gradients, self.problem.slots, parts, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        if not pairs:
            return self.f.new_zeros(len(vectors), *self.f.shape)
        return _transposed([g for g, _ in pairs], self._cotangent, [v for _, v in pairs], loop=self.loop)

    def pull(self, cotangents: Tensor) -> Tensor:
        """Jᵀ u of cotangents `[R, B, C]`, `[R, P]`."""
        found = pull(self.f, self.tensors, cotangents.to(self.f.dtype), loop=self.loop)
        return _flat(self.problem, found, cotangents)


def hessian_products(problem: Problem, taken: Capture, loss: Tensor, vectors: Tensor) -> Tensor:
    """∇² loss · v of vectors `[R, P]`, `[R, P]`.

    Args:
        problem: The network and its treated tensors.
        taken: A forward pass that was captured with `create_graph`.
        loss: 0-dim, a function of its outputs.
        vectors: v.
    """
    tensors = [taken.stand_ins[slot.name] for slot in problem.slots]
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
        parts = problem.layout.split(vectors.to(taken.f.dtype))
        used = [
            (gradient * slot.place(part).view(len(vectors), *slot.shape)).flatten(1).sum(1)
            for gradient, slot, part in zip(gradients, problem.slots, parts, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        if not used:
            return torch.zeros_like(vectors)
        directional = torch.stack(used).sum(0)  # gᵀ v of every vector, [R]
    eye = torch.eye(len(vectors), dtype=directional.dtype, device=directional.device)
    return _flat(problem, pull(directional, tensors, eye, loop=taken.loop), vectors)


def _flat(problem: Problem, gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Gradients `[R, *shape]` per slot as rows of treated entries, `[R, P]`."""
    rows = [
        like.new_zeros(len(like), slot.size) if gradient is None else slot.take_rows(gradient).to(like)
        for gradient, slot in zip(gradients, problem.slots, strict=True)
    ]
    return torch.cat(rows, 1)


def _transposed(outputs: list[Tensor], inputs: Tensor, vectors: list[Tensor], *, loop: bool) -> Tensor:
    """Derivatives of Σ outputs · v with respect to the inputs for R vectors at once or one by one."""
    if not loop and len(vectors[0]) > 1:
        try:
            with slow_batching_accepted():
                return torch.autograd.grad(outputs, inputs, vectors, retain_graph=True, is_grads_batched=True)[0]
        except RuntimeError:  # an operation on the way has no batching rule
            pass
    rows = [torch.autograd.grad(outputs, inputs, list(row), retain_graph=True)[0] for row in zip(*vectors, strict=True)]
    return torch.stack(rows)
