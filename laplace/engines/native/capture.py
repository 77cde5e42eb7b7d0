"""One forward pass that remembers what its layer rules need, ready for any number of backward passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, disable_saved_tensors_hooks, get_gradient_edge
from torch.nn.modules.module import _global_forward_hooks

from laplace.core.batch import Inputs
from laplace.core.processes import Processes
from laplace.engines.native.autograd import differentiable, pull
from laplace.engines.native.calls import FunctionCall, LayerCall
from laplace.engines.native.graph import Graph
from laplace.engines.native.layers import class_with_rule, rule_for
from laplace.engines.native.observer import Observer
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.network.model_guard import hooks_fire, preserve_model
from laplace.network.recomputation import COMPUTED_AGAIN
from laplace.network.spread import require_whole, rest_of
from laplace.weights.problem import Place, Problem


class Owner(NamedTuple):
    """A module that holds a random parameter under an attribute."""

    module: nn.Module
    attribute: str
    slot: int


def owners(problem: Problem, places: list[Place] | None = None) -> list[Owner]:
    """Every (module, attribute) that holds a random parameter: several where tensors are tied.

    Args:
        problem: The network and its random parameters.
        places: Those of all parameters, where they are known.
    """
    places = places or problem.places()
    slots = {slot.name: i for i, slot in enumerate(problem.slots)}
    where = {id(module._parameters[key]): slots[name] for name, module, key in places if name in slots}
    return [
        Owner(module, key, where[id(module._parameters[key])])
        for _, module, key in places
        if id(module._parameters[key]) in where
    ]


@dataclass(frozen=True, eq=False)
class Capture:
    """Outputs of one forward pass with the uses of every hooked module.

    Attributes:
        f: Outputs `[B, M]`, with a graph that reaches the random parameters: all M = T·C of a datum, C per position.
        uses: Calls of the modules that own random parameters and have a layer rule, then of functions, if observed.
        stand_ins: The tensors that were differentiated, by name.
        loop: True if backward passes run one by one.
        create_graph: True if gradients are to be differentiated again, with respect to x.
        reduced: True if the features of a head with positions are reduced to `[B, D]`, so that f = head(reduced).
        positions: The dimensions between that of the data and that of the channels, whose product is T.
        processes: Those that the network is spread over, which make every backward pass together.
        as_it_was: Of a network that checkpoints activations, a block in which it is as it was in this pass: its parts
            run once more in every backward pass.
    """

    f: Tensor
    calls: tuple[LayerCall, ...]
    stand_ins: dict[str, Tensor]
    loop: bool
    create_graph: bool = False
    reduced: bool = False
    positions: tuple[int, ...] = ()
    processes: Processes | None = None
    as_it_was: Callable[[], AbstractContextManager[object]] | None = None

    def backward(self, n_cotangents: int, n_inputs: int) -> AbstractContextManager[object]:
        """A block of backward passes, which of a spread network are of all processes or of none."""
        if self.as_it_was is not None:
            return self.as_it_was()
        if self.processes is None:
            return nullcontext()
        self.processes.in_step(f"{n_cotangents} backward passes to {n_inputs} tensors")
        return self.processes.passing()

    @property
    def watched(self) -> bool:
        """True if some use is that of a function."""
        return any(isinstance(call.by, FunctionCall) for call in self.calls)

    @property
    def n_positions(self) -> int:
        """T."""
        return prod(self.positions)

    @property
    def rows(self) -> Tensor:
        """Outputs `[B·T, C]`, data major."""
        return self.f.reshape(len(self.f) * self.n_positions, -1) if self.positions else self.f

    @cached_property
    def graph(self) -> Graph:
        """Autograd's graph of this pass."""
        return Graph(self.f, shows_data=self.as_it_was is None)

    @cached_property
    def heads(self) -> frozenset[int]:
        """Numbers of the calls whose output *is* f, so that its gradients are the cotangents themselves.

        With positions it may be rearranged on the way; whether its rows are those of f is for a probe to say.
        """
        return frozenset(n for n, call in enumerate(self.calls) if self._is_head(call))

    def _is_head(self, call: LayerCall) -> bool:
        f = self.f
        if not isinstance(call.by, nn.Module) and not call.by.whole:
            return False
        if self.reduced and call.x.ndim > 2:
            return True
        if f.grad_fn is None or call.shape.numel() != f.numel():
            return False
        if self.positions:
            return call.edge.node in self._behind_views
        return call.shape == f.shape and call.edge == self._edge

    @cached_property
    def _edge(self) -> GradientEdge:
        """The place of f in autograd's graph."""
        return get_gradient_edge(self.f)

    @cached_property
    def _behind_views(self) -> set[object]:
        return _behind_views(self.f)

    def keeps_rows(self, call: int) -> bool:
        """True if rows of a call's output stay by themselves up to the outputs, whatever the data."""
        return self.as_it_was is None and self.graph.keeps_rows(self.calls[call].edge.node, self._behind_views)

    def gradients(self, cotangents: Tensor, calls: Collection[int]) -> dict[int, Tensor]:
        """Gradients `[K, *output shape]` of the outputs of calls, by their numbers, for cotangents `[K, B, C]`."""
        known = frozenset() if self.positions else self.heads
        inner = [n for n in calls if n not in known]
        with self.backward(len(cotangents), len(inner)) if inner else nullcontext():
            edges = [self.calls[n].edge for n in inner]
            pulled = pull(self.f, edges, cotangents, loop=self.loop, create_graph=self.create_graph)
        gradients = {n: cotangents for n in calls if n in known}
        for n, g in zip(inner, pulled, strict=True):
            gradients[n] = self.f.new_zeros(len(cotangents), *self.calls[n].shape) if g is None else g
        return gradients


def record(problem: Problem, x: Inputs, *, loop: bool, create_graph: bool = False, observed: bool = False) -> Capture:
    """Runs the network on x with hooks on every module that owns a random parameter and has a rule.

    Random parameters are replaced by detached stand-ins that require gradients, whatever the user's
    `requires_grad` says; no gradient reaches the user's tensors, and the hooks are gone when this returns. A network
    that checkpoints activations is put into the state of this pass for every backward pass. One
    that is spread over processes runs as it is: FSDP gathers the weights of one part of it at a time, forwards and
    again in every backward pass, which reaches the factors by the layers' inputs and outputs alone.

    Args:
        problem: The network and its random parameters.
        x: Inputs.
        loop: True if backward passes run one by one.
        create_graph: True if gradients are to be differentiated again.
        observed: True if PyTorch's functions are watched as well as modules.

    Raises:
        InvalidArgument: Features are to be reduced, and there are positions behind them.
        UnsupportedError: A spread network whose gradients are to be differentiated again, or that leaves a tensor out.
    """
    if problem.processes is not None:
        return _recorded(problem, x, loop=loop, create_graph=create_graph, observed=observed)
    try:
        with disable_saved_tensors_hooks(COMPUTED_AGAIN):
            return _recorded(problem, x, loop=loop, create_graph=create_graph, observed=observed)
    except RuntimeError as error:
        if COMPUTED_AGAIN not in str(error):
            raise
    return _recorded(problem, x, loop=loop, create_graph=create_graph, observed=observed, keeps=False)


def _recorded(
    problem: Problem, x: Inputs, *, loop: bool, create_graph: bool, observed: bool, keeps: bool = True
) -> Capture:
    """The same of a network of which it is known whether it keeps its activations."""
    if create_graph:
        require_whole_of(problem)
    calls: list[LayerCall] = []
    places = problem.places()
    modules = {module for module in {owner.module for owner in owners(problem, places)} if rule_for(module) is not None}
    processes = problem.processes
    stand_ins = problem.stand_ins(places) if processes is None else {}
    parameters = {slot.name: stand_ins[slot.name] for slot in problem.slots if slot.name in stand_ins}
    if processes is not None:
        processes.in_step("a forward pass")
    # What runs once more in a backward pass would not be watched there, and be other functions.
    observer = Observer(parameters, keep_graph=create_graph) if observed and keeps else None
    starts_later = processes is not None and problem.head is not None  # the graph, at the head; stand-ins say so
    with (
        nullcontext() if processes is None else processes.passing(),
        torch.no_grad() if starts_later else torch.enable_grad(),
        hooks_fire(problem.module, required=True)
        if create_graph
        else nullcontext(),  # compiled code would keep the hooks of a fit
        _hooked(modules, calls, keep_graph=create_graph),
        nullcontext() if processes is None else _gathered(problem, parameters),
        differentiable(problem.module, twice=create_graph),
        observer or nullcontext(),
    ):
        last = problem.run(stand_ins, x, places)
        f = last.flatten(1)
        if not f.requires_grad:  # no random parameter is used: all derivatives are zero
            f = f.detach().requires_grad_()
    if problem.reduction is not None and last.ndim > 2:
        raise InvalidArgument(
            f"feature_reduction={problem.reduction!r}, but the network's outputs have positions, shape "
            f"{list(last.shape)}: nothing is reduced. Leave feature_reduction at None."
        )
    return Capture(
        f=f, calls=(*calls, *(observer.calls if observer else ())), stand_ins=parameters, loop=loop,
        create_graph=create_graph, reduced=problem.reduction is not None, positions=tuple(last.shape[1:-1]),
        processes=processes, as_it_was=None if keeps else partial(_as_in, problem, stand_ins, create_graph),
    )  # fmt: skip


@contextmanager
def _as_in(problem: Problem, stand_ins: dict[str, Tensor], create_graph: bool) -> Iterator[None]:
    """A block in which the network is as it is in a pass that is recorded, hooks apart."""
    with (
        preserve_model(problem.module),
        problem.holding(stand_ins),
        hooks_fire(problem.module) if create_graph else nullcontext(),
        differentiable(problem.module, twice=create_graph),
    ):
        yield


_VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "Clone", "TBackward", "Squeeze", "Unsqueeze")
"""Beginnings of the names of autograd's nodes that only rearrange."""


def _behind_views(f: Tensor) -> set[object]:
    """The nodes that f is a rearrangement of, itself included."""
    nodes: set[object] = set()
    node = f.grad_fn
    while node is not None:
        nodes.add(node)
        if not node.name().startswith(_VIEWS) or len(node.next_functions) != 1:
            break
        node = node.next_functions[0][0]
    return nodes


def require_whole_of(problem: Problem) -> None:
    """Refuses a network that is spread over processes where gradients are to be differentiated again."""
    if problem.processes is not None:
        require_whole(problem.module, "derivatives of derivatives would outlive the pass that gathers them")


@contextmanager
def _gathered(problem: Problem, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Notes the gathered tensors of a spread network by their names, as FSDP puts them there before every layer runs.

    Of a head autograd's graph starts there.

    Raises:
        UnsupportedError: A random tensor was not there, or no gradient reaches it.
    """
    layers: dict[nn.Module, list[Owner]] = {}
    head = None if problem.head is None else problem.module.get_submodule(problem.head)
    for owner in owners(problem):
        if head is None or owner.module is head:
            layers.setdefault(owner.module, []).append(owner)

    def note(module: nn.Module, args: object) -> None:
        del args
        if head is not None:
            torch.set_grad_enabled(True)
        for owner in layers[module]:
            tensor = module._parameters[owner.attribute]
            if tensor is not None and tensor.requires_grad:
                parameters[problem.slots[owner.slot].name] = tensor

    handles = [module.register_forward_pre_hook(note) for module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        rest_of(problem.module.modules())
    for slot in problem.slots:
        if slot.name not in parameters:
            raise UnsupportedError(
                f"{slot.name!r} of a network that is spread over processes is frozen, or belongs to no layer that ran: "
                "there its derivatives are not known. Freeze what is not random by requires_grad_(False) before."
            )


@contextmanager
def _hooked(modules: set[nn.Module], calls: list[LayerCall], *, keep_graph: bool) -> Iterator[None]:
    def remember(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(output, Tensor) and output.requires_grad and isinstance(args[0], Tensor):
            x = args[0] if keep_graph else args[0].detach()
            fed, edge = tuple(arg.grad_fn for arg in args if isinstance(arg, Tensor)), get_gradient_edge(output)
            calls.append(LayerCall(module, x, edge, output.shape, fed, module in known, (edge.node,)))

    known = {module for module in modules if _is_known(module)}
    handles = [module.register_forward_hook(remember) for module in modules]
    if keep_graph:
        handles += [module.register_forward_pre_hook(_with_contiguous_gradient) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_known(module: nn.Module) -> bool:
    """True if a module runs what the class runs that its rule is of, and nothing besides."""
    base = class_with_rule(type(module))
    if base is None or module._forward_hooks or _global_forward_hooks:
        return False
    return getattr(module.forward, "__func__", None) is base.forward  # which an object may replace


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous: PyTorch's batch norm on the CPU misreads some strides of one datum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone(memory_format=torch.contiguous_format)


def _with_contiguous_gradient(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    del module
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return None
    return (_ContiguousGradient.apply(args[0]), *args[1:])
