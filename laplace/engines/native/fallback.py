"""Parameters without a layer rule: per-sample derivatives of the whole network, always right, never skipped.

Three ways, each tried where the one before it fails: torch.func's `vmap` of the vector–Jacobian
product (fastest; LSTMs and data-dependent control flow defeat it), one forward pass per datum with vectorised
cotangents, and the same with one backward pass per cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor
from torch.func import vjp, vmap

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.engines.native.autograd import differentiable, pull, slow_batching_accepted
from laplace.weights.problem import Problem


class Fallback(Enum):
    """Ways to compute per-sample derivatives, from the fastest to the one that always works."""

    VMAP = "torch.func vmap"
    BATCHED = "one sample at a time, batched cotangents"
    LOOP = "one sample at a time, one cotangent at a time"


def per_sample(
    problem: Problem,
    x: Inputs,
    cotangents: Tensor,
    slots: Sequence[int],
    fallback: Fallback,
    *,
    create_graph: bool = False,
) -> list[Tensor]:
    """Dense blocks `[K, B, p]` of the given slots.

    Args:
        problem: The network and its random parameters.
        x: Inputs of B data.
        cotangents: `[K, B, M]`, M = T·C for outputs with T positions.
        slots: Indices of the wanted tensors in `problem.slots`.
        fallback: The way to compute them.
        create_graph: True if the result is to be differentiated with respect to x.
    """
    names = [problem.slots[i].name for i in slots]
    with torch.enable_grad(), differentiable(problem.module, twice=create_graph or fallback is Fallback.VMAP):
        if fallback is Fallback.VMAP:
            with slow_batching_accepted():
                derivatives = _vmapped(problem, x, cotangents, names)
        else:
            derivatives = _looped(
                problem, x, cotangents, names, loop=fallback is Fallback.LOOP, create_graph=create_graph
            )
    blocks: list[Tensor] = []
    for i, whole in zip(slots, derivatives, strict=True):
        entries = problem.slots[i].entries
        flat = whole.reshape(*whole.shape[:2], -1)
        blocks.append(flat if entries is None else flat[..., entries.to(flat.device)])
    return blocks if create_graph else [block.detach() for block in blocks]


def _vmapped(problem: Problem, x: Inputs, cotangents: Tensor, names: list[str]) -> list[Tensor]:
    n_data = cotangents.shape[1]
    fixed = problem.detached()
    leaves = batches.tensors(x)
    dims = tuple(0 if leaf.ndim and leaf.shape[0] == n_data else None for leaf in leaves)

    def one(u: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        rows = iter([leaf if d is None else leaf.unsqueeze(0) for leaf, d in zip(inputs, dims, strict=True)])
        datum = batches.transform(x, lambda _: next(rows))
        transposed = vjp(
            lambda *values: problem.run(fixed | dict(zip(names, values, strict=True)), datum)[0].flatten(),
            *[fixed[name] for name in names],
        )[1]
        return vmap(transposed)(u)

    derivatives = vmap(one, in_dims=(1, *dims), out_dims=1)(cotangents, *leaves)
    return list(derivatives)


def _looped(
    problem: Problem, x: Inputs, cotangents: Tensor, names: list[str], *, loop: bool, create_graph: bool
) -> list[Tensor]:
    n_data = cotangents.shape[1]
    rows: list[list[Tensor]] = []
    for b in range(n_data):
        stand_ins = problem.stand_ins()
        f = problem.run(stand_ins, batches.select(x, slice(b, b + 1), n_data)).flatten(1)
        wanted = [stand_ins[name] for name in names]
        gradients = pull(f, wanted, cotangents[:, b : b + 1], loop=loop, create_graph=create_graph)
        zeros = [w.new_zeros(len(cotangents), *w.shape) for w in wanted]
        rows.append([z if g is None else g for g, z in zip(gradients, zeros, strict=True)])
    return [torch.stack(blocks, 1) for blocks in zip(*rows, strict=True)]
