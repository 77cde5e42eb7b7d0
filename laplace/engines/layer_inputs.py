"""Inputs of layers, as their weights meet them, beside the outputs of the network: one forward pass, no Jacobian."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.positions import OutputRows, as_returned, channels_last
from laplace.engines.engine import CurvatureEngine, detached
from laplace.engines.native.rules import BatchAxis, rule_for
from laplace.errors import InvalidData
from laplace.jacobian.patches import Patches
from laplace.weights.problem import Problem

_READ = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose inputs are read; an embedding's are indices, a norm's are no inputs of a product."""


def read_layers(problem: Problem) -> dict[str, int]:
    """Names of the layers that have a random weight and inputs that can be read, with the place of its slot."""
    found: dict[str, int] = {}
    for place, slot in enumerate(problem.slots):
        path, _, key = slot.name.rpartition(".")
        if key == "weight" and isinstance(problem.module.get_submodule(path), _READ):
            found[path] = place
    return found


def first_dense(problem: Problem) -> list[str]:
    """Name of the layer that the network begins with, where that is dense and none of those with random weights.

    Of a convolution r would cost as much as the layer itself, and was measured to say little.
    """
    named = ((name, module) for name, module in problem.module.named_modules() if isinstance(module, _READ))
    name, module = next(named, ("", None))
    return [name] if isinstance(module, nn.Linear) and name not in read_layers(problem) else []


def layer_inputs(
    problem: Problem, x: Inputs, names: Sequence[str], *, create_graph: bool = False
) -> tuple[OutputRows, dict[str, Tensor]]:
    """Outputs of the network, and of every named layer the inputs `[B, T, G, I]`: T positions of G groups.

    Layers that the network does not call, or whose inputs are not one or more positions of every datum, are left out.
    A layer that is called several times has the positions of all calls.
    """
    x = batches.to_device(x, problem.device)
    with problem.on_private_copy() as own, torch.set_grad_enabled(create_graph):
        f, inputs = inputs_of(own.module, names, lambda: own.run(own.detached(), x if create_graph else detached(x)))
    return OutputRows.from_outputs(f.to(torch.promote_types(f.dtype, torch.float32))), inputs


def inputs_of(network: nn.Module, names: Sequence[str], run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs `[B, …]` of a call of the network, and the inputs of its layers, as of `layer_inputs`."""
    calls: dict[str, list[Tensor]] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.setdefault(name, []).extend(arg for arg in args[:1] if isinstance(arg, Tensor))

    with ExitStack() as hooks:
        modules = {name: network.get_submodule(name) for name in names}
        for name, module in modules.items():
            hooks.callback(module.register_forward_pre_hook(partial(note, name)).remove)
        f = run()
    if not len(f):
        raise InvalidData("the batch holds no data.")
    inputs = {name: [_rows(modules[name], given, len(f)) for given in calls.get(name, ())] for name in names}
    known = {name: [part for part in parts if part is not None] for name, parts in inputs.items()}
    return f, {name: torch.cat(parts, 1) for name, parts in known.items() if parts and len(parts) == len(calls[name])}


@dataclass(frozen=True, eq=False)
class _Noting:
    """A way of calling a model that writes down the inputs of its layers."""

    call: ForwardFn | None
    names: tuple[str, ...]
    passes: list[tuple[int, dict[str, Tensor]]]  # numbers of data, and inputs

    def __call__(self, model: nn.Module, x: Inputs) -> Tensor:
        f, inputs = inputs_of(model, self.names, lambda: batches.latent((self.call or batches.call)(model, x)))
        self.passes.append((len(f), inputs))
        return f


class Noted:
    """Inputs of layers at every pass of an engine's network: what a Jacobian needs a pass for is read by the same one.

    Args:
        engine: The engine; its network and what it has proven are shared.
        names: Names of layers.

    Attributes:
        engine: The engine that notes.
    """

    def __init__(self, engine: CurvatureEngine, names: Sequence[str]) -> None:
        problem, self.engine = copy.copy(engine.problem), copy.copy(engine)
        self._passes: list[tuple[int, dict[str, Tensor]]] = []
        call = _Noting(as_returned(problem.forward_fn), tuple(names), self._passes)
        object.__setattr__(problem, "forward_fn", channels_last(call, problem.channel_dim))
        self.engine.problem = problem

    def inputs(self, n_data: int) -> dict[str, Tensor] | None:
        """Of so many data, where every one was run once; else None, as where a first pass is run again to be proven."""
        layers = [each for _, each in self._passes]
        known = bool(layers) and all(each.keys() == layers[0].keys() for each in layers)
        if not known or sum(count for count, _ in self._passes) != n_data:
            return None
        joined = {name: torch.cat([each[name] for each in layers]) for name in layers[0]}
        return joined if torch.is_grad_enabled() else {name: each.detach() for name, each in joined.items()}


def in_rows(inputs: dict[str, Tensor], n_rows: int) -> dict[str, Tensor]:
    """The inputs of every row of the outputs, `[B·T, 1, G, I]`, where all layers have its positions; else as they are.

    So tokens of a language model are apart, and the patches of an image belong to its one row.
    """
    if not all(each.shape[:2].numel() == n_rows for each in inputs.values()):
        return inputs
    return {name: each.flatten(0, 1).unsqueeze(1) for name, each in inputs.items()}


def _rows(module: nn.Module, x: Tensor, n_data: int) -> Tensor | None:
    """One input of a layer as `[B, T, G, I]`; None where its first dimension does not hold the data."""
    rule = rule_for(module)
    leads = len(x) == n_data or (x.ndim == 2 and n_data and len(x) % n_data == 0)
    if rule is None or not leads or not rule.accepts(module, x):
        return None
    found = rule.activation(module, "weight", x, n_data, BatchAxis.LEADING)
    return found.rows if isinstance(found, Patches) else found
