"""Multi-input multi-output networks as mixtures: one network, M inputs and M heads (Havasi et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core.argument_checks import check_counts
from laplace.core.layout import flatten
from laplace.errors import InvalidArgument, InvalidData
from laplace.network.model_guard import model_lock, require_module, unwrap
from laplace.network.spread import require_whole
from laplace.weights.base import trainable
from laplace.weights.discovery import find_last_layer, require_linear


@dataclass(frozen=True)
class HeadCall:
    """Calls a network of M heads for the outputs of one: a `forward_fn`.

    Head m predicts the target of input m: of one input x, which the network sees M times, or of M inputs.

    Attributes:
        head: Which one, from 0.
        n_heads: M.
    """

    head: int
    n_heads: int

    def __call__(self, model: nn.Module, x: Any) -> Tensor:
        """Outputs of the head, `[B, C]`, at one input `[B, D, …]` or at M of them.

        Raises:
            InvalidData: Another number of inputs, or outputs that are not those of M heads.
        """
        return mimo_outputs(model, x, self.n_heads)[:, self.head]


def mimo_outputs(model: nn.Module, x: Any, n_heads: int) -> Tensor:
    """Outputs of every head of a network with M inputs and M heads, `[B, M, C]`.

    Args:
        model: Takes M inputs concatenated along dimension 1; returns `[B, M·C]`, head after head, or `[B, M, C]`.
        x: For prediction: one input `[B, D, …]`, repeated M times. For training: a tuple of M inputs, one per head.
        n_heads: M.

    Raises:
        InvalidArgument: `n_heads` is not a positive integer.
        InvalidData: The number of inputs is not M, their shapes differ, or the shape of the outputs does not belong to
            M heads.
    """
    check_counts(n_heads=n_heads)
    inputs = (x,) * n_heads if isinstance(x, Tensor) else x
    if not isinstance(inputs, tuple) or len(inputs) != n_heads:
        raise InvalidData(f"give one tensor, or a tuple of {n_heads}, one for each head of the network.")
    shapes = {tuple(part.shape): None for part in inputs}
    if len(shapes) > 1:
        raise InvalidData(f"the inputs of the {n_heads} heads have the shapes {list(shapes)}; give one shape.")
    outputs = model(torch.cat(inputs, 1))
    if outputs.ndim == 2 and outputs.shape[1] % n_heads == 0:
        outputs = outputs.unflatten(1, (n_heads, -1))
    if outputs.ndim != 3 or outputs.shape[1] != n_heads:
        raise InvalidData(
            f"the network's outputs have shape {tuple(outputs.shape)}; those of {n_heads} heads are [B, M·C], "
            "head after head, or [B, M, C]."
        )
    return outputs


def last_layer_of(model: nn.Module, n_heads: int, last_layer_name: str | None, example: Tensor | None) -> str:
    """Name of the layer with the heads: as given, or found by a pass of an example.

    Args:
        model: The network.
        n_heads: M.
        last_layer_name: The name, or None.
        example: Some inputs `[B, D, …]`, or None.

    Raises:
        InvalidArgument: Neither is given, or the last layer is no `nn.Linear`.
    """
    require_whole(model)
    inner = unwrap(require_module(model))
    if last_layer_name is not None:
        return require_linear(inner, last_layer_name)
    if example is None:
        raise InvalidArgument(
            "which layer holds the heads? Pass last_layer_name=, or example= with some inputs [B, …] for a forward "
            "pass that shows it."
        )
    return find_last_layer(inner, example[:1], HeadCall(0, n_heads))


def head_indices(model: nn.Module, last_layer_name: str, call: HeadCall) -> Tensor:
    """Indices of the weights of one head among the flattened trainable parameters of a network, `[p]`.

    Args:
        model: The network.
        last_layer_name: Name of the linear layer whose outputs are those of all heads, head after head.
        call: Which head of how many.

    Raises:
        InvalidArgument: No such linear layer, a number of outputs that M does not divide, or a layer that is frozen.
    """
    inner = unwrap(model)
    layer = inner.get_submodule(require_linear(inner, last_layer_name))
    with model_lock(inner):
        own = {id(tensor) for tensor in layer.parameters()}
        every = {name: (tensor.shape, id(tensor) in own) for name, tensor in trainable(inner).items()}
        n_outputs = max((len(tensor) for tensor in layer.parameters()), default=0)
    if n_outputs % call.n_heads:
        raise InvalidArgument(
            f"layer {last_layer_name!r} has {n_outputs} outputs, which are not those of n_heads={call.n_heads} heads."
        )
    if not any(mine for _, mine in every.values()):
        raise InvalidArgument(
            f"layer {last_layer_name!r} is frozen, so none of its weights can be random; set requires_grad=True."
        )
    size = n_outputs // call.n_heads
    rows = slice(call.head * size, (call.head + 1) * size)
    marks = {name: torch.zeros(shape, dtype=torch.bool) for name, (shape, _) in every.items()}
    for name, (_, mine) in every.items():
        if mine:
            marks[name][rows] = True
    return flatten(marks).nonzero().flatten()
