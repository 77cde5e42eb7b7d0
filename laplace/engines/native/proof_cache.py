"""A cache of proofs, for later fits of an unchanged network and for batches of other sizes.

A record of a forward pass holds the operations of autograd's graph, with their settings and shapes, and the tensors at
its leaves. Two passes with the same record differ at most in numbers. The numbers of inputs are no part of a proof
(`JacobianRule.proven`); those of the network may be (a gate that is zero hides what is behind it), so all tensors and
attributes of the network must be unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.engines.native.forward import Capture, Plan
from laplace.engines.native.functions import FunctionCall
from laplace.engines.native.proof import holds, make_plan
from laplace.engines.native.rules import rule_for
from laplace.network.apart import original
from laplace.network.watch import ModelState
from laplace.weights.problem import Problem

_MAX_PLANS = 64
"""Plans of one network."""

_LEAF = "torch::autograd::AccumulateGrad"
"""Name of the nodes of leaf tensors."""

_B = -1
"""Stands for the batch size in a shape."""


class _Known:
    def __init__(self, state: ModelState) -> None:
        self.state = state  # Tensors and settings of the network
        self.plans: dict[Hashable, Plan] = {}

    def add(self, record: Hashable, plan: Plan) -> None:
        if len(self.plans) >= _MAX_PLANS:
            self.plans.pop(next(iter(self.plans)))
        self.plans[record] = plan


_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
"""Proofs by network, without a reference to it."""


def proven_plan(
    problem: Problem, capture: Capture, x: Inputs, *, repeated: bool = False, ladder: bool = True
) -> Plan | None:
    """`make_plan`, or the plan of an earlier proof that still holds.

    None without the ladder, where a tensor needs it.
    """
    record = _record(problem, capture, x)
    if record is None:
        return make_plan(problem, capture, x, repeated=repeated, ladder=ladder)
    proofs = _known(problem)
    plan = proofs.plans.get((False, record))
    if plan is None and repeated:  # what is proven of any data is, but not the other way round
        plan = proofs.plans.get((True, record))
    if plan is None or not holds(plan, problem, capture):
        plan = make_plan(problem, capture, x, repeated=repeated, ladder=ladder)
        if plan is not None and all(rule.proven for rule in plan):
            proofs.add((repeated, record), plan)
    return plan


def _known(problem: Problem) -> _Known:
    """The proofs of a network, which are dropped if its weights, buffers or settings changed."""
    module = original(problem.module)
    now, proofs = ModelState.of(module, problem.forward_fn), _KNOWN.get(module)
    if proofs is None or not now.same_as(proofs.state):
        proofs = _KNOWN[module] = _Known(now)
    return proofs


def _record(problem: Problem, capture: Capture, x: Inputs) -> Hashable | None:
    """Everything that a proof depends on, whatever the batch size; None if that is unknown."""
    if capture.as_it_was is not None:  # a look at the graph would compute activations once more
        return None
    if any(slot.entries is not None for slot in problem.slots):  # a rule may hold of some entries and not of others
        return None
    try:
        called_by = None if problem.forward_fn is None else weakref.ref(problem.forward_fn)
        hash(called_by)
    except TypeError:  # what it holds, and hides, may be another
        return None
    n_data = len(capture.f)
    leaves = {id(tensor): name for name, tensor in capture.stand_ins.items()}
    graph = _graph(capture.f, leaves, n_data)
    if graph is None:
        return None
    slots = tuple((slot.name, slot.shape) for slot in problem.slots)
    calls = tuple(
        (call.kind, None if isinstance(call.by, FunctionCall) else rule_for(call.by), _shape(call.x.shape, n_data))
        for call in capture.calls
    )
    inputs = tuple(tuple(_plain(part, n_data) for part in parts) for parts in batches.signature(x))
    network = slots, called_by, problem.head, problem.reduction, problem.dtype, problem.device
    return network, inputs, calls, _shape(capture.f.shape, n_data), capture.positions, graph


def _graph(f: Tensor, leaves: Mapping[int, str], n_data: int) -> tuple[Hashable, ...] | None:
    """A record of every node of the graph of f; None if a user's function is among them."""
    nodes: list[Any] = [f.grad_fn]
    number = {f.grad_fn: 0}
    record: list[Hashable] = []
    for node in nodes:  # which grow on the way
        outputs = getattr(node, "_input_metadata", None)  # which not every version of PyTorch shows
        if outputs is None or isinstance(node, BackwardCFunction):
            return None
        following: list[Hashable] = []
        for after, index in node.next_functions:
            if after is not None and after not in number:
                number[after] = len(nodes)
                nodes.append(after)
            following.append((None if after is None else number[after], index))
        name = node.name()
        try:
            settings = _settings(node, name, n_data)
        except RuntimeError:  # of a tensor that was overwritten, or is computed anew when it is asked for
            return None
        if any(isinstance(value, Tensor) for value in settings):
            return None
        leaf = leaves.get(id(node.variable)) if name == _LEAF else None
        shapes = [_shape(output.shape, n_data) for output in outputs]
        record.append((name, leaf, tuple(shapes), tuple(settings), tuple(following)))
    return tuple(record)


def _settings(node: Any, name: str, n_data: int) -> list[Hashable]:
    settings = [_plain(getattr(node, saved), n_data if sizes else None) for saved, sizes in _arguments(type(node))]
    return [*settings, *_numbers(node)] if name.startswith(_PRODUCTS) else settings


def _numbers(node: Any) -> Iterator[Hashable]:
    """Plain numbers by which a product multiplies: a zero hides what is behind it."""
    for name in ("_saved_self", "_saved_other"):
        value = getattr(node, name, None)
        if isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu":
            yield str(value.tolist())  # which, of a number on the CPU, waits for nothing


_PRODUCTS = ("MulBackward", "DivBackward")


@cache
def _arguments(kind: type) -> tuple[tuple[str, bool], ...]:
    """Names of a node's saved arguments that are no tensors (tensors have a raw form), and whether they are sizes.

    Sizes say their product.
    """
    names = dir(kind)
    saved = [name for name in names if name.startswith("_saved_") and not name.endswith("numel")]
    return tuple((name, name.endswith("sizes")) for name in saved if f"_raw{name}" not in names)


def _plain(value: Any, n_data: int | None) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple([_B if part == n_data and type(part) is int else _plain(part, n_data) for part in value])
    return value


def _shape(sizes: Iterable[int], n_data: int) -> tuple[int, ...]:
    return tuple([_B if size == n_data else int(size) for size in sizes])
