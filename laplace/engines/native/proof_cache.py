"""Proofs that an engine keeps, for batches of other sizes and lengths.

A record of a forward pass holds the operations of autograd's graph, with their settings and shapes, and the tensors at
its leaves. Two passes with the same record differ at most in numbers. The numbers of inputs are no part of a proof
(`JacobianRule.proven`); those of the network may be (a gate that is zero hides what is behind it), but do not change
during the life of an engine. Another fit has another one, and proves once more.

Nor are the numbers of data and positions a part of it, where the same operations read the same results with the same
settings, and only sizes differ. A rule says which calls use a weight, which the graph of every pass is asked (`holds`),
and that the data lie in the first dimension of their inputs (`sees_batch`, likewise). What the sizes decide is whether
rows of different data meet on the way, as windows of eight rows of `[B·T, D]` do unless T is a multiple of eight. So
sizes must differ in one way (`_Record.is_like`): what was a multiple of the data remains one, lengths that change
change alike, and a length of 0 or 1, which hides what longer ones show, is like no other. And no operation may be
able to make data meet for other lengths (`Graph.keeps_data_apart`), as a pool over `[1, D, B·T]` is, which has as many
results for some of them. A network that takes another way for another length has
other operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.engines.native.forward import Capture, Plan
from laplace.engines.native.functions import FunctionCall
from laplace.engines.native.proof import holds, make_plan, sees_batch
from laplace.engines.native.rules import rule_for
from laplace.weights.problem import Problem

_MAX_PLANS = 64

_LEAF = "torch::autograd::AccumulateGrad"
"""Name of the nodes of leaf tensors."""


@dataclass(frozen=True, eq=False)
class _Record:
    """All that a proof depends on, in two parts."""

    operations: Hashable  # With settings and numbers of dimensions
    sizes: tuple[int, ...]  # Of all dimensions, in their order
    n_data: int

    def is_like(self, other: _Record) -> bool:
        """True if what is proven of this pass holds for another one, whose sizes may be others."""
        n, m = self.n_data, other.n_data
        if self.operations != other.operations or len(self.sizes) != len(other.sizes) or (n == 1) != (m == 1):
            return False
        if self.sizes == other.sizes and n == m:
            return True
        pairs = dict.fromkeys(zip(self.sizes, other.sizes, strict=True))
        if self.has_lengths_of(other):
            return all((a == n) == (b == m) for a, b in pairs)
        lengths: dict[int, int] = {}
        for a, b in pairs:
            if (a, b) == (n, m) or (n == m and a == b):
                continue
            if a % n == 0:  # of rows, `[B·T, …]`, or a width that happens to be a multiple
                if b % m:
                    return False
                a, b = a // n, b // m
            if a != b and (min(a, b) < _LENGTH or lengths.setdefault(a, b) != b):
                return False
        return True

    def has_lengths_of(self, other: _Record) -> bool:
        """True if another pass of as many sizes differs in the number of data alone."""
        n, m = self.n_data, other.n_data
        return all(a == b or (a, b) == (n, m) for a, b in zip(self.sizes, other.sizes, strict=True))


_LENGTH = 2
"""Positions from which on it shows whether rows of different data meet."""


class _Sizes(list[int]):
    """Sizes that are taken out of what is recorded; in their place is their number."""

    def out_of(self, shape: Iterable[Any]) -> int:
        before = len(self)
        self.extend(map(int, shape))
        return len(self) - before

    def out_of_value(self, value: Any) -> Hashable:
        """The same of a setting that is a size, or several."""
        if type(value) is int:
            return self.out_of([value])
        if isinstance(value, (list, tuple)) and all(type(part) is int for part in value):
            return self.out_of(value), "sizes"
        return _plain(value)


class Plans:
    """Plans of an engine, the latest ones: by the forms of batches, and by records of what they were proven of."""

    def __init__(self) -> None:
        self._by_form: dict[object, Plan] = {}
        self._proven: deque[tuple[bool, _Record, Plan]] = deque(maxlen=_MAX_PLANS)

    def known(self, problem: Problem, capture: Capture, x: Inputs) -> Plan | None:
        """The plan of batches of this form, if it holds for the pass, which is one look at its graph."""
        plan = self._by_form.get(_form(capture, x))
        return plan if plan is not None and holds(plan, problem, capture) else None

    def keep(self, plan: Plan, capture: Capture, x: Inputs) -> None:
        """Keeps a plan that holds whatever the numbers are for batches of this form."""
        if all(rule.proven for rule in plan):
            if len(self._by_form) >= _MAX_PLANS:
                self._by_form.pop(next(iter(self._by_form)))
            self._by_form[_form(capture, x)] = plan

    def proven(
        self, problem: Problem, capture: Capture, x: Inputs, *, repeated: bool = False, ladder: bool = True
    ) -> Plan | None:
        """`make_plan`, or the plan of an earlier proof that still holds.

        None without the ladder, where a tensor needs it.
        """
        record = _record(problem, capture, x)
        plan = None if record is None else self._find(problem, capture, record, repeated=repeated)
        if plan is None:
            plan = make_plan(problem, capture, x, repeated=repeated, ladder=ladder)
            if record is not None and plan is not None and all(rule.proven for rule in plan):
                self._proven.append((repeated, record, plan))
        return plan

    def _find(self, problem: Problem, capture: Capture, record: _Record, *, repeated: bool) -> Plan | None:
        """A plan that holds for a pass. What is proven of any data is for repeated ones, but not the other way round.

        Of a fallback the sizes are a part: it goes through operations that no record shows.
        """
        for of_repeated, known, plan in self._proven:
            if of_repeated and not repeated:
                continue
            if not known.is_like(record) or (known.sizes != record.sizes and _has_fallback(plan)):
                continue
            if not known.has_lengths_of(record) and not _keeps_data_apart(plan, capture):
                continue
            if all(rule.fallback or sees_batch(rule, capture) for rule in plan) and holds(plan, problem, capture):
                return plan
        return None


def _form(capture: Capture, x: Inputs) -> object:
    calls = tuple((call.kind, call.x.shape) for call in capture.calls)
    return batches.signature(x), capture.f.shape, capture.positions, calls


def _keeps_data_apart(plan: Plan, capture: Capture) -> bool:
    if len(capture.f) == 1:
        return True
    nodes = {capture.calls[use.call].edge.node for rule in plan for use in rule.uses}
    return capture.graph.keeps_data_apart(nodes, len(capture.f))


def _has_fallback(plan: Plan) -> bool:
    return any(rule.fallback is not None for rule in plan)


def _record(problem: Problem, capture: Capture, x: Inputs) -> _Record | None:
    """Everything that a proof depends on; None if that is unknown."""
    if capture.as_it_was is not None:  # a look at the graph would compute activations once more
        return None
    if any(slot.entries is not None for slot in problem.slots):  # a rule may hold of some entries and not of others
        return None
    sizes = _Sizes()
    leaves = {id(tensor): name for name, tensor in capture.stand_ins.items()}
    graph = _graph(capture, leaves, sizes)
    if graph is None:
        return None
    calls = tuple(
        (call.kind, None if isinstance(call.by, FunctionCall) else rule_for(call.by), sizes.out_of(call.x.shape))
        for call in capture.calls
    )
    inputs = tuple(
        tuple(sizes.out_of(part) if type(part) is tuple else _plain(part) for part in parts)
        for parts in batches.signature(x)
    )
    outputs = sizes.out_of(capture.f.shape), sizes.out_of(capture.positions)
    return _Record((inputs, calls, outputs, graph), tuple(sizes), len(capture.f))


def _graph(capture: Capture, leaves: Mapping[int, str], sizes: _Sizes) -> tuple[Hashable, ...] | None:
    """A record of every node of the graph of f; None if a user's function is among them.

    The steps of a recurrence that the library ran by itself (`steps.run_recurrent`) are one node of it, however many
    they are.
    """
    start = capture.f.grad_fn
    if start is None:
        return None
    homes = _recurrences(capture)
    nodes: list[Any] = [homes.get(start, start)]
    number = {nodes[0]: 0}
    record: list[Hashable] = []
    for node in nodes:  # which grow on the way
        following: list[Hashable] = []
        for after, index in node.next_functions:
            home = homes.get(after, after)
            if home is not None and home not in number:
                number[home] = len(nodes)
                nodes.append(home)
            place: Hashable = ()
            if home is not None and home is not after:  # of a recurrence, to where it began
                place = home.place(after), sizes.out_of(after._input_metadata[index].shape)
            following.append((None if home is None else number[home], index, place))
        if isinstance(node, _Recurrence):
            record.append((node.names, tuple(following)))
            continue
        outputs = getattr(node, "_input_metadata", None)  # which not every version of PyTorch shows
        if outputs is None or isinstance(node, BackwardCFunction):
            return None
        name = node.name()
        try:
            settings = _settings(node, name, sizes)
        except RuntimeError:  # of a tensor that was overwritten, or is computed anew when it is asked for
            return None
        if any(isinstance(value, Tensor) for value in settings):
            return None
        leaf = leaves.get(id(node.variable)) if name == _LEAF else None
        shapes = [sizes.out_of(output.shape) for output in outputs]
        record.append((name, leaf, tuple(shapes), tuple(settings), tuple(following)))
    return tuple(record)


class _Recurrence:
    """The nodes of all steps of a recurrence, as one.

    Its last step comes first, so that what all steps read, and what the first one does besides, is met in an order that
    their number does not change.
    """

    def __init__(self, nodes: Iterable[Any]) -> None:
        self._own = {node: place for place, node in enumerate(sorted(nodes, key=_made, reverse=True))}
        self.names = frozenset(node.name() for node in self._own)
        outside = (edge for node in self._own for edge in node.next_functions if edge[0] not in self._own)
        self.next_functions = tuple(dict.fromkeys(outside))

    def place(self, node: Any) -> int:
        """Place of a node that is read from outside, counted from the last: results and states are made at the end."""
        return self._own[node]


def _recurrences(capture: Capture) -> dict[Any, _Recurrence]:
    """The recurrence that every node of one belongs to."""
    spans = {call.steps for call in capture.calls if call.steps is not None}
    every = list(capture.graph) if spans else []
    homes: dict[Any, _Recurrence] = {}
    for first, last in spans:
        own = [node for node in every if first <= _made(node) <= last]
        homes |= dict.fromkeys(own, _Recurrence(own))
    return homes


def _made(node: Any) -> int:
    """Number of a node in the order in which they were made; leaves have the largest."""
    return node._sequence_nr()


def _settings(node: Any, name: str, sizes: _Sizes) -> list[Hashable]:
    names = _arguments(type(node))
    if name.startswith(_PICKING) and 0 < node._saved_dim < _NEGATIVE:
        names = [saved for saved in names if saved not in _PLACES]
    settings: list[Hashable] = []
    for saved in names:
        value = getattr(node, saved)
        settings.append(sizes.out_of_value(value) if saved.endswith(_OF_SIZES) else _plain(value))
    return [*settings, *_numbers(node)] if name.startswith(_PRODUCTS) else settings


def _numbers(node: Any) -> Iterator[Hashable]:
    """Whether plain numbers by which a product multiplies are zero, which hides what is behind them."""
    for name in ("_saved_self", "_saved_other"):
        value = getattr(node, name, None)
        if isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu":
            yield value.tolist() == 0  # which, of a number on the CPU, waits for nothing


_PRODUCTS = ("MulBackward", "DivBackward")

_PICKING = ("SelectBackward", "SliceBackward")
"""Operations that pick positions; which ones, in another dimension than that of the data, is no part of a proof."""

_PLACES = ("_saved_index", "_saved_start", "_saved_end")
_NEGATIVE = 2**63
"""From here on numbers are negative ones: autograd shows dimensions as unsigned."""

_OF_SIZES = ("sizes", "size", "shape")
"""Ends of the names of settings that are sizes."""

_ELSEWHERE = ("numel", "strides", "max_q", "max_k")
"""Ends of the names of settings that say what sizes say already, or how numbers lie in memory."""


@cache
def _arguments(kind: type) -> list[str]:
    """Names of a node's saved arguments that are no tensors: these have a raw form."""
    names = dir(kind)
    saved = [name for name in names if name.startswith("_saved_") and not name.endswith(_ELSEWHERE)]
    return [name for name in saved if f"_raw{name}" not in names]


def _plain(value: Any) -> Hashable:
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
