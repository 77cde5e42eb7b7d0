"""One batch seen by a native engine, without its curvature: what its shapes say, and how long small pieces take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook

from laplace.core.layout import Layout
from laplace.engines.native.capture import capture
from laplace.engines.native.passes import ForwardPass
from laplace.engines.profile import BatchProfile
from laplace.jacobian.shape import TensorShape
from laplace.network.model_guard import lent

_TIMED = 4
"""Cotangents of the timed backward pass."""

_WIDTH = 512
"""Of the timed matrix product."""


def outlined(
    taken: ForwardPass, *, n_columns: int, n_terms: int, loop: bool, product_budget: int, refused: bool
) -> BatchProfile:
    """What the shapes of a captured batch say: without its graph, which is held by then, and without seconds.

    Args:
        taken: The batch, with its proven plan.
        n_columns: K.
        n_terms: E.
        loop: Whether backward passes run one by one.
        product_budget: Bytes that the vectors of one pass may hold.
        refused: Whether the columns are more backward passes than a batch may take.
    """
    return BatchProfile(
        layout=taken.problem.layout,
        tensors=_shapes(taken),
        n_data=taken.n_data if taken.mixes else len(taken.f),
        n_outputs=taken.f.shape[1],
        n_columns=n_columns,
        n_terms=n_terms,
        itemsize=taken.dtype.itemsize,
        graph=0,
        widest=0,
        gradients=taken.bytes_per_cotangent() // 2,
        budget=taken.memory_budget,
        product_budget=product_budget,
        loop=loop,
        refused=refused,
    )


def blank(layout: Layout, *, n_columns: int, itemsize: int, product_budget: int, loop: bool) -> BatchProfile:
    """What every batch shows at least: the sizes of the tensors, and one datum with one output.

    Args:
        layout: The treated tensors.
        n_columns: K of that output.
        itemsize: Bytes of a number of the curvature.
        product_budget: Bytes that the vectors of one pass may hold.
        loop: Whether backward passes run one by one.
    """
    tensors = tuple(TensorShape(size, factored=True, is_bias=True) for size in layout.sizes)
    return BatchProfile(
        layout, tensors, n_data=1, n_outputs=1, n_columns=n_columns, n_terms=1, itemsize=itemsize, graph=0, widest=0,
        gradients=0, budget=1, product_budget=product_budget, loop=loop,
    )  # fmt: skip


def surveyed(taken: ForwardPass, outline: BatchProfile) -> BatchProfile:
    """The same with graph and seconds, by one more forward pass, a backward one of a few cotangents, and a product."""
    saved: dict[int, int] = {}
    widths: list[int] = []
    with torch.inference_mode(False), lent(taken.problem.module), _watched(taken, saved, widths):
        start = _now(taken.f)
        again = capture(taken.problem, taken.x, loop=outline.loop, observed=taken.taken.watched)
        forward = _now(taken.f) - start
    del again
    heads = taken.heads()
    rest = [i for i in range(len(taken.plan)) if i not in heads]
    most = taken.memory_budget // max(1, taken.bytes_per_cotangent())
    count = max(1, min(_TIMED, outline.n_columns or outline.n_outputs, most))
    outputs = taken.taken.f if taken.mixes else taken.f  # of a datum, or of a row
    eye = torch.eye(count, outputs.shape[1], device=taken.f.device, dtype=taken.f.dtype)
    start = _now(taken.f)
    if rest:
        run = taken.blocks if taken.mixes else taken.row_blocks
        run(eye.unsqueeze(1).expand(-1, len(outputs), -1), only=rest)
    backward = (_now(taken.f) - start) / count
    graph, widest = sum(saved.values()), max(widths, default=0)
    return replace(outline, graph=graph, widest=widest, forward=forward, backward=backward, rate=_rate(taken))


@contextmanager
def _watched(taken: ForwardPass, saved: dict[int, int], widths: list[int]) -> Iterator[None]:
    """Notes storages that autograd keeps, but for parameters and buffers, and what every module reads and writes."""
    module = taken.problem.module
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not any(True for _ in module.children()):
            tensors = [t for t in (*args, output) if isinstance(t, Tensor)]
            widths.append(sum(t.numel() * t.element_size() for t in tensors))

    handle = register_module_forward_hook(note)
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        handle.remove()


def _shapes(taken: ForwardPass) -> tuple[TensorShape, ...]:
    """How every tensor enters the outputs, from the forms of its factors alone."""
    heads = taken.head_blocks(taken.heads())
    sizes = [slot.size for slot in taken.problem.slots]
    inputs = [call.x.to("meta") for call in taken.taken.calls]  # no memory, and no work
    found: list[TensorShape] = []
    for i, explanation in enumerate(taken.plan):
        if i in heads:
            found.append(heads[i].shape(inputs))
        elif explanation.uses:
            found.append(taken.form(i, inputs).shape(inputs))
        else:
            found.append(TensorShape(sizes[i], n_outputs=sizes[i]))
    return tuple(found)


def _rate(taken: ForwardPass) -> float:
    """Multiplications per second of a matrix product in the curvature's dtype; the second of two counts."""
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=taken.dtype, device=taken.f.device)
    torch.mm(matrix, matrix)
    start = _now(matrix)
    torch.mm(matrix, matrix)
    return _WIDTH**3 / max(_now(matrix) - start, 1e-9)


def _now(like: Tensor) -> float:
    """Seconds on a clock, after all work on the tensor's device is done."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()
