"""The one place that decides how K backward passes are run: one by one, or vectorised.

On small CPU convolutions a loop is faster than the vectorised pass (whose batching folds K into the
batch of a slower kernel); on networks of matrix products the vectorised pass wins.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from laplace.core.memory import ran_out

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RECURRENT = (nn.RNNBase,)


def prefers_loop(module: nn.Module, *, twice: bool = False, stepwise: bool = False) -> bool:
    """True if the network holds layers whose vectorised backward pass is slow or missing.

    Args:
        module: The network.
        twice: Of passes that differentiate twice, which also for convolutions are faster when vectorised.
        stepwise: Of passes in which recurrent layers run step by step, by operations that are vectorised.
    """
    slow = (() if twice else _CONVOLUTIONS) + (() if stepwise else _RECURRENT)
    return any(isinstance(child, slow) for child in module.modules())


def pull(
    f: Tensor,
    edges: Sequence[GradientEdge | Tensor],
    cotangents: Tensor,
    *,
    loop: bool,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """Gradients of Σ_bc u_kbc f_bc with respect to every edge, for every k.

    Args:
        f: Outputs `[B, C]`.
        edges: What to differentiate with respect to.
        cotangents: u, `[K, B, C]`.
        loop: One pass for each k instead of a vectorised one.
        create_graph: True if the gradients can be differentiated again.

    Returns:
        One tensor `[K, *shape of the edge]` per edge, or None where f does not depend on it.
    """
    if not edges:
        return []
    if not loop and len(cotangents) > 1:
        try:
            with slow_batching_accepted():
                return list(_grad(f, edges, cotangents, create_graph, batched=True))
        except RuntimeError as error:  # an operation on the way has no batching rule
            if ran_out(error):
                raise
    passes = [_grad(f, edges, u, create_graph, batched=False) for u in cotangents]
    return [stack(gradients) for gradients in zip(*passes, strict=True)]


@contextmanager
def slow_batching_accepted() -> Iterator[None]:
    """Silences PyTorch's note that an operation is batched by a loop of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def _grad(
    f: Tensor, edges: Sequence[GradientEdge | Tensor], u: Tensor, create_graph: bool, *, batched: bool
) -> tuple[Tensor | None, ...]:
    inputs: Any = edges  # edges and tensors may be mixed, which the signature of torch does not say
    return torch.autograd.grad(
        f, inputs, u, retain_graph=True, create_graph=create_graph, allow_unused=True, is_grads_batched=batched
    )


def stack(gradients: tuple[Tensor | None, ...]) -> Tensor | None:
    """Gradients of one tensor, one per pass, as `[K, *shape]`: zero where it was not reached, None if it never was."""
    nonzero = [g for g in gradients if g is not None]
    if not nonzero:
        return None
    if len(nonzero) == 1:
        return nonzero[0].unsqueeze(0)
    return torch.stack([torch.zeros_like(nonzero[0]) if g is None else g for g in gradients])
