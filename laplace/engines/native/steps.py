"""Recurrent and attention layers by matrix products that can be observed; PyTorch runs them inside one function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# LSTM, GRU and plain recurrent layers, step by step.
#
# A recurrent weight is a linear layer whose positions are the steps. Zeros are added to its outputs at every step: the
# gradient with respect to them is that of all steps.


Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Span = tuple[int, int]
"""Numbers of the first and the last node of autograd's graph, in the order in which they were made."""

Recur = Callable[[Tensor, Tensor, Tensor | None, Tensor, list[Tensor], "Span | None"], None]
State = tuple[Tensor, ...]

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Names of the functions that are run step by step."""


def weights_of(args: tuple[Any, ...]) -> Sequence[Tensor]:
    """The weights of a call; none if it has packed sequences or dropout and is left to PyTorch."""
    if len(args) != 9 or not isinstance(args[3], bool):
        return ()
    _, _, weights, _, n_layers, dropout, training, _, _ = args
    return () if training and dropout > 0 and n_layers > 1 else weights


def run_recurrent(name: str, args: tuple[Any, ...], linear: Linear, recur: Recur | None = None) -> tuple[Tensor, ...]:
    """Outputs and last states of one of `CELLS`; `recur` is told of its recurrent products."""
    x, first, weights, biased, n_layers, _, _, bidirectional, batch_first = args
    states: State = tuple(first) if name == "lstm" else (first,)
    projected = len(states) == 2 and states[0].shape[2] != states[1].shape[2]
    sides, each = 2 if bidirectional else 1, 2 + 2 * biased + projected
    x = x if batch_first else x.transpose(0, 1)
    last: list[State] = []
    for layer in range(n_layers):
        outputs: list[Tensor] = []
        for side in range(sides):
            n = layer * sides + side
            tensors = list(weights[n * each : (n + 1) * each])
            w, b = tensors[:2], tensors[2:4] if biased else [None, None]
            out, state = _one_way(
                name, x, tuple(s[n] for s in states), w, b, tensors[-1] if projected else None, side == 1, linear, recur
            )
            outputs.append(out)
            last.append(state)
        x = torch.cat(outputs, 2)
    ends = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    return (x if batch_first else x.transpose(0, 1), *ends)


STEPS = {"lstm_cell": "lstm", "gru_cell": "gru", "rnn_tanh_cell": "rnn_tanh", "rnn_relu_cell": "rnn_relu"}
"""Names of the functions of a single step, and which of `CELLS` it is of."""


def run_cell(name: str, args: tuple[Any, ...], linear: Linear) -> Any:
    """The next state of one of `STEPS`: (h, c) of an LSTM, h of the others."""
    x, first, given, recurrent, *biases = args
    b_given, b_recurrent = biases if biases else (None, None)
    state: State = tuple(first) if name == "lstm_cell" else (first,)
    state = _CELL[STEPS[name]](linear(x, given, b_given), linear(state[0], recurrent, b_recurrent), state)
    return state if name == "lstm_cell" else state[0]


def _one_way(
    name: str,
    x: Tensor,
    state: State,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    projection: Tensor | None,
    backwards: bool,
    linear: Linear,
    recur: Recur | None,
) -> tuple[Tensor, State]:
    given = linear(x, weights[0], biases[0])  # [B, T, gates]
    offsets = torch.zeros_like(given)
    shifts = None if projection is None else x.new_zeros(*x.shape[:2], len(projection))
    if recur is not None:
        offsets.requires_grad_()
        shifts = None if shifts is None else shifts.requires_grad_()
    order = range(x.shape[1] - 1, -1, -1) if backwards else range(x.shape[1])
    added, inputs, shifted = offsets.unbind(1), given.unbind(1), None if shifts is None else shifts.unbind(1)
    products: list[Tensor] = []
    projections: list[Tensor] = []
    before: dict[int, Tensor] = {}
    unprojected: dict[int, Tensor] = {}
    after: dict[int, Tensor] = {}
    for t in order:
        before[t] = state[0]
        products.append(F.linear(state[0], weights[1], biases[1]))
        state = _CELL[name](inputs[t], products[-1] + added[t], state)
        if projection is not None and shifted is not None:
            unprojected[t] = state[0]
            projections.append(F.linear(state[0], projection))
            state = (projections[-1] + shifted[t], *state[1:])
        after[t] = state[0]
    outputs = _in_order(after)
    if recur is not None:
        span = _span(added[0], outputs)
        recur(_in_order(before), weights[1], biases[1], offsets, products, span)
        if projection is not None and shifts is not None:
            recur(_in_order(unprojected), projection, None, shifts, projections, span)
    return outputs, state


def _span(first: Tensor, last: Tensor) -> Span | None:
    """The nodes from that of one result to that of another; None where PyTorch does not number them."""
    ends = first.grad_fn, last.grad_fn
    if not all(hasattr(node, "_sequence_nr") for node in ends):
        return None
    start, stop = (node._sequence_nr() for node in ends)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    return start, stop


def _in_order(steps: dict[int, Tensor]) -> Tensor:
    return torch.stack([steps[t] for t in range(len(steps))], 1)


def _lstm(given: Tensor, recurrent: Tensor, state: State) -> State:
    i, f, g, o = (given + recurrent).chunk(4, 1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(given: Tensor, recurrent: Tensor, state: State) -> State:
    (r, z, n), (r_h, z_h, n_h) = given.chunk(3, 1), recurrent.chunk(3, 1)
    update = torch.sigmoid(z + z_h)
    new = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
    return ((1 - update) * new + update * state[0],)


_CELL: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda given, recurrent, _: (torch.tanh(given + recurrent),),
    "rnn_relu": lambda given, recurrent, _: (torch.relu(given + recurrent),),
}


# `nn.MultiheadAttention`.


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_PROJECTIONS = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias",
                "q_proj_weight", "k_proj_weight", "v_proj_weight")  # fmt: skip

_SHORT = 2
"""Tokens per feature of a head up to which scores are no larger than other activations of the layer.

There products are faster than PyTorch's fused attention, whose backward pass is not vectorised over cotangents.
"""


def has_few_scores(keys: Tensor) -> bool:
    """True if products are the better way of attention with these keys `[…, L, E]`."""
    return keys.shape[-2] <= _SHORT * keys.shape[-1]


def attend(
    linear: Linear, parameters: Container[int], *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None] | None:
    """Output `[L, N, E]` and weights of `F.multi_head_attention_forward`; None if PyTorch is to run it."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    added = any(a[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v")) or a["add_zero_attn"]
    dropped = a["training"] and a["dropout_p"] > 0
    if added or dropped or a["query"].ndim != 3 or not any(id(a[name]) in parameters for name in _PROJECTIONS):
        return None
    n_heads = a["num_heads"]
    q, k, v = (part.unflatten(-1, (n_heads, -1)).transpose(1, 2) for part in _projected(linear, a))  # [N, H, L, E / H]
    causal = a["is_causal"] and a["key_padding_mask"] is None and not a["need_weights"]
    mask = _mask(None if causal else a["attn_mask"], a["key_padding_mask"], q, k)
    weights = None
    short = mask is None and not causal and has_few_scores(k)
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


def _mask(attention: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    total: Tensor | None = None
    if attention is not None:
        total = _as_numbers(attention, q)
        total = total.unflatten(0, (len(q), -1)) if total.ndim == 3 else total
    if padding is not None:
        hidden = _as_numbers(padding, q).view(len(k), 1, 1, -1)
        total = hidden if total is None else total + hidden
    return total


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    """A Boolean mask as numbers: −∞ where it is true."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill(mask, -torch.inf)
