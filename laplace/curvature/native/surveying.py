"""One batch seen by a native engine, without its curvature."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook

from laplace.curvature.blocks import Block, PickedBlock, SumBlock
from laplace.curvature.factors import IndexBlock, OuterBlock
from laplace.curvature.native.capture import capture
from laplace.curvature.native.passes import ForwardPass
from laplace.curvature.survey import Survey, TensorShape
from laplace.lending import lent

_TIMED = 4
"""Cotangents of the timed backward pass."""

_WIDTH = 512
"""Of the timed matrix product."""


def surveyed(taken: ForwardPass, *, n_columns: int, n_terms: int, loop: bool, product_budget: int) -> Survey:
    """What a batch shows, by one more forward pass, a backward pass of a few cotangents and one matrix product.

    Args:
        taken: The batch, with its proven plan.
        n_columns: K.
        n_terms: E.
        loop: Whether backward passes run one by one.
        product_budget: Bytes that the vectors of one pass may hold.
    """
    saved: dict[int, int] = {}
    widths: list[int] = []
    held = {use.x.untyped_storage().data_ptr() for use in taken.taken.uses}
    with torch.inference_mode(False), lent(taken.problem.module), _watched(taken, saved, widths):
        start = _now(taken.f)
        again = capture(taken.problem, taken.x, loop=loop, observed=taken.taken.watched)
        forward = _now(taken.f) - start
    del again
    heads, n_outputs = taken.heads(), taken.f.shape[1]
    rest = [i for i in range(len(taken.plan)) if i not in heads]
    count = max(1, min(_TIMED, n_columns or n_outputs, taken.memory_budget // max(1, taken.bytes_per_cotangent())))
    outputs = taken.taken.f if taken.mixes else taken.f  # of a datum, or of a row
    eye = torch.eye(count, outputs.shape[1], device=taken.f.device, dtype=taken.f.dtype)
    cotangents = eye.unsqueeze(1).expand(-1, len(outputs), -1)
    start = _now(taken.f)
    run = taken.blocks if taken.mixes else taken.row_blocks
    blocks = run(cotangents, only=rest) if rest else {}
    backward = (_now(taken.f) - start) / len(eye)
    shapes = {i: _shape(block, held) for i, block in blocks.items()}
    shapes |= {i: _shape(block, held, is_head=True) for i, block in taken.head_blocks(heads).items()}
    return Survey(
        layout=taken.problem.layout,
        tensors=tuple(shapes[i] for i in range(len(taken.plan))),
        n_data=len(outputs),
        n_outputs=n_outputs,
        n_columns=n_columns,
        n_terms=n_terms,
        itemsize=taken.dtype.itemsize,
        graph=sum(saved.values()),
        widest=max(widths, default=0),
        gradients=taken.bytes_per_cotangent() // 2,
        budget=taken.memory_budget,
        product_budget=product_budget,
        loop=loop,
        forward=forward,
        backward=backward,
        rate=_rate(taken),
    )


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


def _shape(block: Block, held: set[int], *, is_head: bool = False) -> TensorShape:
    """The shape of a block; inputs that lie in one of the `held` storages are no copies."""
    whole = block.whole if isinstance(block, PickedBlock) else block
    if isinstance(whole, IndexBlock):
        return TensorShape(
            block.size, factored=True, indexed=True, n_outputs=whole.g.shape[3], n_inputs=whole.n_rows,
            positions=whole.g.shape[2],
        )  # fmt: skip
    if isinstance(whole, OuterBlock):
        a = whole.a
        copied = 0 if a is None or a.untyped_storage().data_ptr() in held else a.untyped_storage().nbytes()
        return TensorShape(
            block.size, factored=True, groups=whole.groups, n_outputs=whole.g.shape[4], n_inputs=whole.n_inputs,
            positions=whole.n_positions, is_bias=a is None, is_head=is_head, copied=copied,
        )  # fmt: skip
    parts = whole.parts if isinstance(whole, SumBlock) else ()
    copied = sum(_shape(part, held).copied for part in parts)
    return TensorShape(block.size, n_outputs=block.size, copied=copied)


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
