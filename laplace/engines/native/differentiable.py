"""Networks run such that they can be differentiated as curvature needs, where PyTorch's own functions cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def differentiable(module: nn.Module, *, twice: bool) -> Iterator[None]:
    """Within it gradients of the network are dense, true derivatives, and differentiable again where that is asked.

    Attention takes the kernel that has second derivatives. A table's `sparse=True` and `scale_grad_by_freq=True`
    say how it is to be trained; its derivative knows neither. Of an `EmbeddingBag` PyTorch has no second derivatives,
    and of its fused weight norm wrong ones.

    Args:
        module: The network.
        twice: True if gradients are differentiated again, or vectorised over data.
    """
    tables = (table for table in module.modules() if isinstance(table, (nn.Embedding, nn.EmbeddingBag)))
    with ExitStack() as stack:
        if twice:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if twice or any(table.sparse or table.scale_grad_by_freq for table in tables):
            stack.enter_context(_Rewritten(twice=twice))
        yield


class _Rewritten(TorchFunctionMode):
    """Runs some functions of PyTorch by others that give the same values."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.twice = twice

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        if func is F.embedding_bag:
            return _embedding_bag(*args, twice=self.twice, **kwargs)
        if func is torch._weight_norm and self.twice:
            return _weight_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    others = [d for d in range(v.ndim) if d != dim] if dim != -1 else None
    return g * v / torch.linalg.vector_norm(v, dim=others, keepdim=True)


def _embedding(
    input: Tensor,  # noqa: A002 - the names of PyTorch's function
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    del scale_grad_by_freq, sparse
    return F.embedding(input, weight, padding_idx, max_norm, norm_type)


def _embedding_bag(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    *,
    twice: bool,
) -> Tensor:
    del scale_grad_by_freq, sparse
    if not twice:
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, False, mode, False, per_sample_weights,
            include_last_offset, padding_idx
        )  # fmt: skip
    counted = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counted = input != (padding_idx if padding_idx >= 0 else padding_idx + len(weight))
    if offsets is not None:  # then input is one list
        places, inside = _bags(offsets[:-1] if include_last_offset else offsets, len(input))
        input, counted = input[places], counted[places] & inside  # noqa: A001
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights[places]
    rows = F.embedding(input, weight, None, max_norm, norm_type)
    if mode == "max":
        masked = rows.masked_fill(~counted[..., None], -torch.inf)
        return torch.where(counted.any(1, keepdim=True), masked.max(1).values, 0)
    factors = counted.to(rows.dtype) if per_sample_weights is None else counted * per_sample_weights
    total = torch.einsum("bl,bld->bd", factors, rows)
    return total if mode == "sum" else total / counted.sum(1, keepdim=True).clamp(min=1)


def _bags(offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Bags of one long list as rows of equal length: places in the list `[B, L]`, and which of them are the bag's."""
    ends = torch.cat([offsets[1:], offsets.new_tensor([length])])
    longest = max(1, int((ends - offsets).max()))
    places = offsets[:, None] + torch.arange(longest, device=offsets.device)
    return places.clamp(max=max(0, length - 1)), places < ends[:, None]
