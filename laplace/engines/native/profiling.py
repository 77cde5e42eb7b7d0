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

from laplace.engines.native.forward import ForwardPass, record
from laplace.engines.profile import BatchProfile
from laplace.network.model_guard import preserve_model

_TIMED = 4
"""Cotangents of the timed backward pass."""

_WIDTH = 512
"""Width of the timed matrix product."""


def timed_profile(batch: ForwardPass, outline: BatchProfile) -> BatchProfile:
    """Adds graph and seconds to a profile, by a forward pass, a backward one of a few cotangents, and a product."""
    saved: dict[int, int] = {}
    widths: list[int] = []
    with torch.inference_mode(False), preserve_model(batch.problem.module), _watched(batch, saved, widths):
        start = _now(batch.f)
        again = record(batch.problem, batch.x, loop=outline.loop, observed=batch.capture.watched)
        forward = _now(batch.f) - start
    del again
    heads = batch.heads()
    rest = [i for i in range(len(batch.plan)) if i not in heads]
    most = batch.memory_budget // max(1, batch.bytes_per_cotangent())
    count = max(1, min(_TIMED, outline.n_columns or outline.n_outputs, most))
    outputs = batch.capture.f if batch.mixes else batch.f  # of a datum, or of a row
    eye = torch.eye(count, outputs.shape[1], device=batch.f.device, dtype=batch.f.dtype)
    start = _now(batch.f)
    if rest:
        run = batch.blocks if batch.mixes else batch.row_blocks
        run(eye.unsqueeze(1).expand(-1, len(outputs), -1), only=rest)
    backward = (_now(batch.f) - start) / count
    graph, widest = sum(saved.values()), max(widths, default=0)
    return replace(outline, graph=graph, widest=widest, forward=forward, backward=backward, rate=_rate(batch))


@contextmanager
def _watched(batch: ForwardPass, saved: dict[int, int], widths: list[int]) -> Iterator[None]:
    """Notes storages that autograd keeps, but for parameters and buffers, and what every module reads and writes."""
    module = batch.problem.module
    parameters = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
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


def _rate(batch: ForwardPass) -> float:
    """Multiplications per second of a matrix product in the curvature's dtype; the second of two counts."""
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=batch.dtype, device=batch.f.device)
    torch.mm(matrix, matrix)
    start = _now(matrix)
    torch.mm(matrix, matrix)
    return _WIDTH**3 / max(_now(matrix) - start, 1e-9)


def _now(like: Tensor) -> float:
    """Seconds on a clock, after all work on the tensor's device is done."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()
