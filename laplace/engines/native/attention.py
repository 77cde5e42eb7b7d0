"""`nn.MultiheadAttention` by matrix products that can be observed: PyTorch's own runs them inside one function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_PROJECTIONS = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias",
                "q_proj_weight", "k_proj_weight", "v_proj_weight")  # fmt: skip

_SHORT = 2
"""Tokens per number of a head up to which scores are no larger than other activations of the layer.

There products are faster than PyTorch's fused attention, whose backward pass is not vectorised over cotangents.
"""


def run(linear: Linear, parameters: Container[int], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None] | None:
    """Output `[L, N, E]` and weights of `F.multi_head_attention_forward`, or None where that is to be called itself.

    Args:
        linear: Applies a projection.
        parameters: Ids of the random parameters.
        args: Arguments of that function.
        kwargs: The same by name.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    added = any(a[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v")) or a["add_zero_attn"]
    dropped = a["training"] and a["dropout_p"] > 0
    if added or dropped or a["query"].ndim != 3 or not any(id(a[name]) in parameters for name in _PROJECTIONS):
        return None
    n_heads = a["num_heads"]
    q, k, v = (_split(part, n_heads) for part in _projected(linear, a))  # [N, H, L, E / H]
    causal = a["is_causal"] and a["key_padding_mask"] is None and not a["need_weights"]
    mask = _mask(None if causal else a["attn_mask"], a["key_padding_mask"], q, k)
    weights = None
    short = mask is None and not causal and k.shape[-2] <= _SHORT * k.shape[-1]
    if a["need_weights"] or short:
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        context = weights @ v
        weights = weights.mean(1) if a["average_attn_weights"] and a["need_weights"] else weights
    else:
        context = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    output = linear(context.transpose(1, 2).flatten(2), a["out_proj_weight"], a["out_proj_bias"])
    return output.transpose(0, 1), weights if a["need_weights"] else None


def _projected(linear: Linear, a: dict[str, Any]) -> list[Tensor]:
    """Queries, keys and values `[N, L, E]`, by as few products as there are different inputs."""
    query, key, value = a["query"], a["key"], a["value"]
    sources = [query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)]
    bias = a["in_proj_bias"]
    if not a["use_separate_proj_weight"] and query is key and key is value:
        return list(linear(sources[0], a["in_proj_weight"], bias).chunk(3, -1))
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if a["use_separate_proj_weight"]:
        weights = (a["q_proj_weight"], a["k_proj_weight"], a["v_proj_weight"])
    else:
        weights = a["in_proj_weight"].chunk(3)
    return [linear(*parts) for parts in zip(sources, weights, biases, strict=True)]


def _split(projected: Tensor, n_heads: int) -> Tensor:
    return projected.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def _mask(attention: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask that is added to the scores, broadcastable to `[N, H, L, S]`."""
    total: Tensor | None = None
    if attention is not None:
        total = _as_numbers(attention, q)
        total = total.unflatten(0, (len(q), -1)) if total.ndim == 3 else total
    if padding is not None:
        hidden = _as_numbers(padding, q).view(len(k), 1, 1, -1)
        total = hidden if total is None else total + hidden
    return total


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of truth values as numbers: −∞ where it is true."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill(mask, -torch.inf)
