"""LSTM, GRU and plain recurrent layers step by step: PyTorch runs all steps, or both products, inside one function.

A recurrent weight is a linear layer whose positions are the steps. Zeros are added to its outputs at every step: the
gradient with respect to them is that of all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Recur = Callable[[Tensor, Tensor, Tensor | None, Tensor, list[Tensor]], None]
State = tuple[Tensor, ...]

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Names of the functions that are run step by step."""


def weights_of(args: tuple[Any, ...]) -> Sequence[Tensor]:
    """The weights of a call; none of one with packed sequences or dropout, which is left to PyTorch."""
    if len(args) != 9 or not isinstance(args[3], bool):
        return ()
    _, _, weights, _, n_layers, dropout, training, _, _ = args
    return () if training and dropout > 0 and n_layers > 1 else weights


def run(name: str, args: tuple[Any, ...], linear: Linear, recur: Recur) -> tuple[Tensor, ...]:
    """Outputs and last states of one of `CELLS`.

    Args:
        name: Which.
        args: Arguments of PyTorch's function.
        linear: Applies a weight to all steps at once.
        recur: Is told of a weight that was applied step by step.
    """
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


def step(name: str, args: tuple[Any, ...], linear: Linear) -> Any:
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
    recur: Recur,
) -> tuple[Tensor, State]:
    """Outputs `[B, T, H]` of one layer in one direction, and its last state."""
    given = linear(x, weights[0], biases[0])  # [B, T, gates]
    offsets = torch.zeros_like(given).requires_grad_()
    shifts = None if projection is None else x.new_zeros(*x.shape[:2], len(projection)).requires_grad_()
    order = range(x.shape[1] - 1, -1, -1) if backwards else range(x.shape[1])
    inputs, added, shifted = given.unbind(1), offsets.unbind(1), None if shifts is None else shifts.unbind(1)
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
    recur(_in_order(before), weights[1], biases[1], offsets, products)
    if projection is not None and shifts is not None:
        recur(_in_order(unprojected), projection, None, shifts, projections)
    return _in_order(after), state


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


def _rnn_tanh(given: Tensor, recurrent: Tensor, state: State) -> State:
    del state
    return (torch.tanh(given + recurrent),)


def _rnn_relu(given: Tensor, recurrent: Tensor, state: State) -> State:
    del state
    return (torch.relu(given + recurrent),)


_CELL: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn_tanh,
    "rnn_relu": _rnn_relu,
}
