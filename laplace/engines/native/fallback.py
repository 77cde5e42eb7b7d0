"""Parameters without a layer rule: per-sample derivatives of the whole network, always right, never skipped.

Three ways, each tried where the one before it fails: torch.func's `vmap` of a forward pass in which every datum has
its own copy of the weight (fastest; LSTMs and data-dependent control flow defeat it), one forward pass per datum with
vectorised cotangents, and the same with one backward pass per cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import vmap

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.engines.native.autograd import differentiable, pull, slow_batching_accepted
from laplace.errors import UnsupportedError
from laplace.network.recomputation import COMPUTED_AGAIN
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
                derivatives = _vmapped(problem, x, cotangents, names, create_graph=create_graph)
        else:
            derivatives = _looped(
                problem, x, cotangents, names, loop=fallback is Fallback.LOOP, create_graph=create_graph
            )
    blocks: list[Tensor] = []
    for i, whole in zip(slots, derivatives, strict=True):
        entries = problem.slots[i].on(whole.device).entries
        flat = whole.reshape(*whole.shape[:2], -1)
        blocks.append(flat if entries is None else flat[..., entries])
    return blocks if create_graph else [block.detach() for block in blocks]


def _vmapped(problem: Problem, x: Inputs, cotangents: Tensor, names: list[str], *, create_graph: bool) -> list[Tensor]:
    # Data and cotangents are two batches; vmap within vmap has wrong derivatives of some operations (PReLU, cdist).
    # So vmap takes the data forward, and autograd pulls the cotangents back.
    if batches.are_graphs(x):
        raise UnsupportedError("graphs have other numbers of nodes: they go one by one.")
    n_data = cotangents.shape[1]
    fixed = problem.detached()
    leaves = batches.tensors(x)
    dims = tuple(0 if leaf.ndim and leaf.shape[0] == n_data else None for leaf in leaves)
    copies = [fixed[name].expand(n_data, *fixed[name].shape).requires_grad_() for name in names]

    def one(weights: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        rows = iter([leaf if d is None else leaf.unsqueeze(0) for leaf, d in zip(inputs, dims, strict=True)])
        datum = batches.transform(x, lambda _: next(rows))
        return problem.run(fixed | dict(zip(names, weights, strict=True)), datum)[0].flatten()

    with disable_saved_tensors_hooks(COMPUTED_AGAIN):  # which would be without vmap
        f = vmap(one, in_dims=(0, *dims))(copies, *leaves)
    gradients = pull(f, copies, cotangents, loop=False, create_graph=create_graph)
    zeros = (copy.new_zeros(()).expand(len(cotangents), *copy.shape) for copy in copies)
    return [zero if gradient is None else gradient for gradient, zero in zip(gradients, zeros, strict=True)]


def _looped(
    problem: Problem, x: Inputs, cotangents: Tensor, names: list[str], *, loop: bool, create_graph: bool
) -> list[Tensor]:
    n_data = cotangents.shape[1]
    rows: list[list[Tensor]] = []
    for b in range(n_data):
        stand_ins = problem.stand_ins()
        wanted = [stand_ins[name] for name in names]
        with problem.holding(stand_ins):  # also while activations that were not kept are computed once more
            f = problem.outputs(batches.select(x, slice(b, b + 1), n_data)).flatten(1)
            gradients = pull(f, wanted, cotangents[:, b : b + 1], loop=loop, create_graph=create_graph)
        zeros = [w.new_zeros(len(cotangents), *w.shape) for w in wanted]
        rows.append([z if g is None else g for g, z in zip(gradients, zeros, strict=True)])
    return [torch.stack(blocks, 1) for blocks in zip(*rows, strict=True)]
