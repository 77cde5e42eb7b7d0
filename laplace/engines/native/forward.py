"""One recorded forward pass: the calls of layers and functions in it, and the Jacobian blocks that they give."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, get_gradient_edge
from torch.func import vmap
from torch.nn.modules.module import _global_forward_hooks

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.memory import DATUM, in_slices
from laplace.core.pieces import bytes_at_once
from laplace.core.processes import Processes
from laplace.engines.native.autograd import differentiable, pull
from laplace.engines.native.functions import FunctionCall, LayerCall, Observer
from laplace.engines.native.graph import Graph
from laplace.engines.native.rules import BatchAxis, RoutedRows, class_with_rule, rule_for
from laplace.errors import CurvatureError, InvalidArgument, UnsupportedError
from laplace.jacobian.blocks import Block, DenseBlock, LazyBlock, TensorShape
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.jacobian import Jacobian
from laplace.network.apart import original
from laplace.network.fsdp import require_unsharded, reshard
from laplace.network.model_guard import COMPUTED_AGAIN, hooks_fire
from laplace.network.tree import Place
from laplace.weights.problem import Problem, reduce_features

# Recording: outputs with the calls of modules and functions that have random parameters.


class Owner(NamedTuple):
    """A module that holds a random parameter under an attribute."""

    module: nn.Module
    attribute: str
    slot: int


def owners(problem: Problem, places: list[Place] | None = None) -> list[Owner]:
    """Every (module, attribute) that holds a random parameter: several where tensors are tied."""
    places = places or problem.places()
    slots = {slot.name: i for i, slot in enumerate(problem.slots)}
    where = {id(module._parameters[key]): slots[name] for name, module, key in places if name in slots}
    return [
        Owner(module, key, where[id(module._parameters[key])])
        for _, module, key in places
        if id(module._parameters[key]) in where
    ]


_VIEWING = ("View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "Clone", "TBackward", "Squeeze", "Unsqueeze")
"""Beginnings of the names of autograd's nodes that only rearrange."""


@dataclass(frozen=True, eq=False)
class Capture:
    """Outputs of one forward pass with the recorded calls of layers and functions."""

    # Outputs `[B, M]`, M = T·C, with a graph that reaches the random parameters
    f: Tensor
    calls: tuple[LayerCall, ...]
    stand_ins: dict[str, Tensor]  # The tensors that were differentiated, by name
    loop: bool  # True if backward passes run one by one
    create_graph: bool = False  # True if gradients are to be differentiated again, with respect to x
    # True if the features of a head with positions are reduced to `[B, D]`, so that f = head(reduced)
    reduced: bool = False
    # Dimensions of the positions, whose product is T
    positions: tuple[int, ...] = ()
    processes: Processes | None = None  # They share the network, and run backward passes together
    # For a network that checkpoints activations: a context in which it is as in this pass, since parts of it run
    # again in every backward pass
    as_it_was: Callable[[], AbstractContextManager[object]] | None = None

    def backward(self, n_cotangents: int, n_inputs: int) -> AbstractContextManager[object]:
        """Context of backward passes; processes that share a network enter it together."""
        if self.as_it_was is not None:
            return self.as_it_was()
        if self.processes is None:
            return nullcontext()
        self.processes.barrier(f"{n_cotangents} backward passes to {n_inputs} tensors")
        return self.processes.collective_region()

    @property
    def watched(self) -> bool:
        """True if calls of functions were recorded."""
        return any(isinstance(call.by, FunctionCall) for call in self.calls)

    @property
    def n_positions(self) -> int:
        return prod(self.positions)

    @property
    def rows(self) -> Tensor:
        """Outputs `[B·T, C]`, data major."""
        return self.f.reshape(len(self.f) * self.n_positions, -1) if self.positions else self.f

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.f, shows_data=self.as_it_was is None)

    @cached_property
    def heads(self) -> frozenset[int]:
        """Numbers of the calls whose output *is* f, so that its gradients are the cotangents themselves.

        With positions it may be rearranged on the way; whether its rows are those of f is for a probe to say.
        """
        f, edge = self.f, get_gradient_edge(self.f)

        def is_head(call: LayerCall) -> bool:
            if not isinstance(call.by, nn.Module) and not call.by.whole:
                return False
            if self.reduced and call.x.ndim > 2:
                return True
            if f.grad_fn is None or call.shape.numel() != f.numel():
                return False
            if self.positions:
                return call.edge.node in self._behind_views
            return call.shape == f.shape and call.edge == edge

        return frozenset(n for n, call in enumerate(self.calls) if is_head(call))

    @cached_property
    def _behind_views(self) -> set[object]:
        """Nodes between f and the tensor that it rearranges, both included."""
        nodes: set[object] = set()
        node = self.f.grad_fn
        while node is not None:
            nodes.add(node)
            if not node.name().startswith(_VIEWING) or len(node.next_functions) != 1:
                break
            node = node.next_functions[0][0]
        return nodes

    def keeps_rows(self, call: int) -> bool:
        """True if rows of a call's output never mix on the way to the network's outputs, whatever the data."""
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
    """
    run = partial(_recorded, problem, x, loop=loop, create_graph=create_graph, observed=observed)
    if problem.processes is not None:
        return run()
    try:
        with disable_saved_tensors_hooks(COMPUTED_AGAIN):
            return run()
    except RuntimeError as error:
        if COMPUTED_AGAIN not in str(error):
            raise
    return run(keeps=False)


def _recorded(
    problem: Problem, x: Inputs, *, loop: bool, create_graph: bool, observed: bool, keeps: bool = True
) -> Capture:
    """`record`; without `keeps` the network checkpoints its activations."""
    if create_graph:
        require_unsharded_problem(problem)
    calls: list[LayerCall] = []
    places = problem.places()
    modules = {module for module in {owner.module for owner in owners(problem, places)} if rule_for(module) is not None}
    processes = problem.processes
    stand_ins = problem.stand_ins(places) if processes is None else {}
    parameters = {slot.name: stand_ins[slot.name] for slot in problem.slots if slot.name in stand_ins}
    if processes is not None:
        processes.barrier("a forward pass")
    # Parts that run again in a backward pass would not be observed there.
    observer = Observer(parameters, keep_graph=create_graph) if observed and keeps else None
    starts_later = processes is not None and problem.head is not None  # the graph, at the head; stand-ins say so
    with (
        nullcontext() if processes is None else processes.collective_region(),
        torch.no_grad() if starts_later else torch.enable_grad(),
        hooks_fire(problem.module, required=True)
        if create_graph
        else nullcontext(),  # compiled code would keep the hooks of a fit
        _hooked(modules, calls, keep_graph=create_graph),
        nullcontext() if processes is None else _gathered(problem, parameters),
        differentiable(problem.module, twice=create_graph, of_head=problem.head is not None),
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
    """Context in which the network is as in a recorded pass, but for the hooks."""
    is_copy = original(problem.module) is not problem.module  # to whose modules the checkpoints belong
    with (
        nullcontext(problem) if is_copy else problem.on_private_copy() as again,
        again.holding(stand_ins),
        hooks_fire(again.module) if create_graph else nullcontext(),
        differentiable(again.module, twice=create_graph, of_head=problem.head is not None),
    ):
        yield


def require_unsharded_problem(problem: Problem) -> None:
    """Refuses second derivatives of a network that is sharded over processes."""
    if problem.processes is not None:
        require_unsharded(problem.module, "derivatives of derivatives would outlive the pass that gathers them")


@contextmanager
def _gathered(problem: Problem, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Notes the gathered tensors of a spread network by their names, as FSDP puts them there before every layer runs.

    Of a head autograd's graph starts there.
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
        reshard(problem.module.modules())
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
            x = batches.dense(args[0] if keep_graph else args[0].detach())
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
    """True if a module runs the forward of its rule's class, without hooks of the user's."""
    base = class_with_rule(type(module))
    if base is None or module._forward_hooks or _global_forward_hooks:
        return False
    return getattr(module.forward, "__func__", None) is base.forward  # which an object may replace


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous: PyTorch's batch norm on the CPU misreads some strides of one sample."""

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


# The block of a tensor: from its recorded calls, or by a fallback.


@dataclass(frozen=True)
class UseOfParameter:
    call: int  # Index of the recorded call
    attribute: str  # Attribute of the module, or argument of the function, that the tensor is
    axis: BatchAxis  # Dimension of the data


Activations = dict[tuple[int, str, bool, torch.dtype], Any]
"""Parts of a forward pass that blocks need, as they were computed for the first cotangents.

By the use, whose axis is the leading one or not, and the dtype.
"""


_promoted = cache(torch.promote_types)  # which PyTorch dispatches as an operation


def block_of(
    problem: Problem,
    slot: int,
    uses: Sequence[UseOfParameter],
    capture: Capture,
    gradients: Mapping[int, Tensor] | Sequence[Tensor],
    activations: Activations | None = None,
) -> Block:
    """The block of one slot from its uses and the gradients `[K, *output shape]` of their calls.

    `activations` keeps what does not depend on the cotangents from one call to the next.
    """
    calls, n_data, dtype = capture.calls, len(capture.f), _promoted(problem.dtype, torch.float32)
    memory = {} if activations is None else activations
    blocks: list[Block] = []
    for use in uses:
        call, g = calls[use.call], gradients[use.call]
        digits = _promoted(g.dtype, dtype)  # a network may compute in fewer than its weights have
        if isinstance(call.by, nn.Module):
            rule = rule_for(call.by)
            if rule is None:
                raise CurvatureError(f"no layer rule for {type(call.by).__name__}")
            key = use.call, use.attribute, use.axis is BatchAxis.LEADING, digits
            if key not in memory:
                x = reduce_features(call.x.to(digits) if call.x.is_floating_point() else call.x, problem.reduction)
                memory[key] = rule.activation(call.by, use.attribute, x, n_data, use.axis)
            block = rule.block(call.by, use.attribute, memory[key], g.to(digits), n_data, use.axis)
        else:
            block = call.by.block(use.attribute, g.to(digits), n_data, use.axis)
        blocks.append(block.at_places(use.axis.present) if isinstance(use.axis, RoutedRows) else block)
    block = blocks[0].add(blocks[1:]) if len(blocks) > 1 else blocks[0]
    random = problem.slots[slot]
    if random.entries is not None:
        random = random.on(problem.device)
    selection, entries = random.selection, random.entries
    return block if selection is None or entries is None else block.select_entries(selection, entries)


class Fallback(Enum):
    """The ladder: ways to compute per-sample derivatives, from the fastest to the one that always works."""

    VMAP = "torch.func vmap"
    BATCHED = "one sample at a time, batched cotangents"
    LOOP = "one sample at a time, one cotangent at a time"


def per_sample(
    problem: Problem,
    x: Inputs,
    cotangents: Tensor,
    slots: Sequence[int],
    fallback: Fallback,
    *,
    create_graph: bool = False,
) -> list[Tensor]:
    """Dense blocks `[K, B, p]` of the given slots, for cotangents `[K, B, M]`."""
    names = [problem.slots[i].name for i in slots]
    twice, of_head = create_graph or fallback is Fallback.VMAP, problem.head is not None
    with torch.enable_grad(), differentiable(problem.module, twice=twice, of_head=of_head):
        if fallback is Fallback.VMAP:
            derivatives = _vmapped(problem, x, cotangents, names, create_graph=create_graph)
        else:
            loop = fallback is Fallback.LOOP
            derivatives = _looped(problem, x, cotangents, names, loop=loop, create_graph=create_graph)
    blocks: list[Tensor] = []
    for i, whole in zip(slots, derivatives, strict=True):
        entries = problem.slots[i].on(whole.device).entries
        flat = whole.reshape(*whole.shape[:2], -1)
        blocks.append(flat if entries is None else flat[..., entries])
    return blocks if create_graph else [block.detach() for block in blocks]


def _vmapped(problem: Problem, x: Inputs, cotangents: Tensor, names: list[str], *, create_graph: bool) -> list[Tensor]:
    # Data and cotangents are two batches; vmap within vmap has wrong derivatives of some operations (PReLU, cdist).
    # So vmap takes the data forward, and autograd pulls the cotangents back.
    if not batches.is_dense(x):
        raise UnsupportedError("graphs have other numbers of nodes, other inputs no rows to map over: one by one.")
    n_data = cotangents.shape[1]
    fixed = problem.detached()
    leaves = batches.tensors(x)
    dims = tuple(0 if leaf.ndim and leaf.shape[0] == n_data else None for leaf in leaves)
    copies = [fixed[name].expand(n_data, *fixed[name].shape).requires_grad_() for name in names]

    def one(weights: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        rows = iter([leaf if d is None else leaf.unsqueeze(0) for leaf, d in zip(inputs, dims, strict=True)])
        datum = batches.transform(x, lambda _: next(rows))
        return problem.run(fixed | dict(zip(names, weights, strict=True)), datum)[0].flatten()

    with disable_saved_tensors_hooks(COMPUTED_AGAIN):  # which would be without vmap
        f = vmap(one, in_dims=(0, *dims))(copies, *leaves)
    gradients = pull(f, copies, cotangents, loop=False, create_graph=create_graph)
    zeros = (copy.new_zeros(()).expand(len(cotangents), *copy.shape) for copy in copies)
    return [zero if gradient is None else gradient for gradient, zero in zip(gradients, zeros, strict=True)]


def _looped(
    problem: Problem, x: Inputs, cotangents: Tensor, names: list[str], *, loop: bool, create_graph: bool
) -> list[Tensor]:
    n_data = cotangents.shape[1]
    rows: list[list[Tensor]] = []
    for b in range(n_data):
        stand_ins = problem.stand_ins()
        wanted = [stand_ins[name] for name in names]
        with problem.holding(stand_ins):  # also while activations that were not kept are computed once more
            f = problem.outputs(batches.select(x, slice(b, b + 1), n_data)).flatten(1)
            gradients = pull(f, wanted, cotangents[:, b : b + 1], loop=loop, create_graph=create_graph)
        zeros = [w.new_zeros(len(cotangents), *w.shape) for w in wanted]
        rows.append([z if g is None else g for g, z in zip(gradients, zeros, strict=True)])
    return [torch.stack(blocks, 1) for blocks in zip(*rows, strict=True)]


@dataclass(frozen=True)
class JacobianRule:
    """The way to the block of one tensor: from its recorded uses, or by a fallback."""

    # Uses whose contributions add up; empty if the tensor does not influence the outputs
    uses: tuple[UseOfParameter, ...] = ()
    fallback: Fallback | None = None  # The fallback that computes the block, or None
    description: str = "unused"  # Text for the coverage report
    # True if the rule holds for the next batch of this form too. It does not where the batch could not tell it
    # from another (zeros, equal data) or where the place of the data may depend on them.
    proven: bool = True
    # True if rows were indexed on their way to the outputs, each by its own number: another batch may do otherwise
    indexed: bool = False
    # With positions: True if every row of the outputs depends on its own position of the layer's input alone, so
    # that the cost does not grow with the square of the positions
    by_row: bool = False
    is_head: bool = False  # With positions: True if the layer's outputs are the network's
    # A cache of shapes of the tensor's Jacobian
    shapes: dict[Hashable, TensorShape] = field(init=False, default_factory=dict, compare=False, repr=False)

    @property
    def is_routed(self) -> bool:
        """True if rows were routed to the tensor's layer, so that the data decide how often it is called."""
        return any(isinstance(use.axis, RoutedRows) for use in self.uses)


Plan = tuple[JacobianRule, ...]
"""One rule per parameter."""


# All blocks of a batch.


_CACHED = 2**24
"""Bytes of output gradients up to which stacking them is cheaper than more rounds of sums."""

_LAZY_SHARE = 4
"""Dense fallback blocks above a quarter of the budget are computed piece by piece instead of held."""


class ForwardPass:
    """A captured forward pass with its proven plan, which gives blocks for any cotangents."""

    def __init__(
        self, problem: Problem, x: Inputs, capture: Capture, plan: Plan, memory_budget: int, widest: int | None = None
    ) -> None:
        self.problem = problem  # The network and its random parameters
        self.x = x  # Inputs of B data
        self.capture = capture  # What the hooks captured
        self.plan = plan  # How the block of every tensor is made
        self.n_data = len(capture.f)
        self.positions = capture.positions  # Dimensions whose product is T; empty for outputs `[B, C]`
        self.memory_budget = memory_budget  # Bytes of dense fallback blocks held at once
        # Size of the largest batch among processes that share the network; None for B
        self.widest = self.n_data if widest is None else widest
        self.f = capture.rows.detach()  # Outputs `[B·T, C]`, detached; T = 1 where a sample has one position
        self.dtype = torch.promote_types(self.f.dtype, torch.float32)
        self._activations: Activations = {}
        self._any_numbers: dict[int, Tensor] = {}  # Gradients of calls of which only the shapes are used

    def at_outputs(self, outputs: Tensor | None = None) -> Tensor:
        """Outputs `[B·T, C]`, or K of every row `[B·T, K]`, with their graph if one was asked for."""
        rows = self.capture.rows if self.capture.create_graph else self.f
        return rows if outputs is None else rows.gather(1, outputs)

    def by_row(self, slot: int) -> bool:
        """True if the block of a tensor has a row for every position; always without positions."""
        return not self.positions or self.plan[slot].by_row

    @property
    def mixes(self) -> bool:
        """True if some tensor needs separate cotangents for every position."""
        return bool(self.positions) and not all(rule.by_row or rule.description == "unused" for rule in self.plan)

    def bytes_per_cotangent(self) -> int:
        """Bytes of output gradients that one cotangent holds; a head's are the cotangents themselves."""
        read = {use.call for rule in self.plan for use in rule.uses}
        entries = sum([self.capture.calls[n].shape.numel() for n in read - self.capture.heads])
        entries += self.capture.f.numel() if self.positions and self.mixes else 0
        return 2 * entries * self.f.element_size() * self.widest // max(1, self.n_data)

    def columns_at_once(self, *, together: bool) -> int:
        """Cotangents whose output gradients are held at once, within the memory budget.

        Of passes that run one by one on a CPU few, since many large ones take longer to stack than they save.
        """
        looped = self.capture.loop and not together
        budget = min(self.memory_budget, bytes_at_once(_CACHED, self.f.device)) if looped else self.memory_budget
        # Besides the gradients the cotangent itself, `[B, C]`, twice: as it is made, and in the dtype of the outputs.
        own = 2 * self.f.numel() * self.f.element_size() * self.widest // max(1, self.n_data)
        return max(1, budget // (self.bytes_per_cotangent() + own))

    @cached_property
    def heads(self) -> dict[int, HeadBlock]:
        """Blocks of the last layer where all its entries are random: they need no gradients."""
        blocks = {i: self._by_row(self._without_gradients(i)) for i in range(len(self.plan)) if self._ends(i)}
        heads = {i: HeadBlock.from_block(block, self.f.shape[1]) for i, block in blocks.items() if block is not None}
        return {i: head for i, head in heads.items() if head is not None}

    def _by_row(self, block: Block) -> Block | None:
        return block.fold_positions(self.capture.n_positions) if self.positions else block

    def _ends(self, slot: int) -> bool:
        rule = self.plan[slot]
        return (
            len(rule.uses) == 1
            and self.problem.slots[slot].entries is None
            and (rule.is_head or not self.positions)
            and rule.uses[0].call in self.capture.heads
        )

    def _without_gradients(self, slot: int, capture: Capture | None = None) -> Block:
        """The block of a slot for one cotangent of any numbers, which takes no backward pass and no memory."""
        recorded, uses = self.capture if capture is None else capture, self.plan[slot].uses
        activations = self._activations if capture is None else None
        known = frozenset() if self.positions else self.capture.heads  # whose gradients are those of the outputs
        any_numbers = self._any_numbers if capture is None else {}
        for use in uses:
            if use.call not in any_numbers:  # a weight and its bias have the same
                call = recorded.calls[use.call]
                shape = self.capture.f.shape if use.call in known else call.shape
                any_numbers[use.call] = self.f.new_empty((), device=call.x.device).expand(1, *shape)
        return block_of(self.problem, slot, uses, recorded, any_numbers, activations)

    def _form(self, slot: int) -> Block:
        """The block of a slot for one cotangent, of which only the shapes are used."""
        try:
            block = self._without_gradients(slot, self._formal)
        except (RuntimeError, TypeError):  # a rule that looks at the numbers
            block = self._without_gradients(slot)
        rows = None if self.mixes else self._by_row(block)
        return block if rows is None else rows

    def shapes(self) -> tuple[TensorShape, ...]:
        """Shapes of the Jacobians of all tensors, which every rule caches."""
        shapes: list[TensorShape] = []
        for i, (slot, rule) in enumerate(zip(self.problem.slots, self.plan, strict=True)):
            if i in self.heads:
                shapes.append(self.heads[i].shape(()))
            elif rule.uses:
                calls = (self.capture.calls[use.call] for use in rule.uses)
                forms = tuple((call.x.shape, call.x.stride(), call.x.dtype, call.shape) for call in calls)
                key = self.capture.f.shape, self.positions, self.mixes, forms
                if key not in rule.shapes:
                    rule.shapes[key] = self._form(i).shape([call.x for call in self._formal.calls])
                shapes.append(rule.shapes[key])
            else:
                shapes.append(TensorShape(slot.size, n_outputs=slot.size))
        return tuple(shapes)

    @cached_property
    def _formal(self) -> Capture:
        """The pass with the inputs of layers on the meta device: shapes without numbers."""
        return replace(self.capture, calls=tuple(replace(call, x=call.x.to("meta")) for call in self.capture.calls))

    def jacobian(self, outputs: Tensor | None = None, part: slice | None = None) -> Jacobian:
        """The Jacobian of the network's rows, of some outputs `[B·T, K]`, or at a part of one input's positions."""
        rest = [i for i in range(len(self.plan)) if i not in self.heads]
        blocks: dict[int, Block] = dict(self.heads)
        if outputs is not None:
            blocks = {i: block.select_outputs(outputs) for i, block in blocks.items()}
        if simple := [i for i in rest if self.by_row(i)]:
            blocks |= self._at_rows(outputs, simple)
        if part is not None:
            blocks = {i: block.at(part) for i, block in blocks.items()}
        if mixed := [i for i in rest if not self.by_row(i)]:
            blocks |= self._at_positions(torch.arange(self.capture.n_positions)[part or slice(None)], outputs, mixed)
        chosen = outputs if outputs is None or part is None else outputs[part]
        return Jacobian(tuple(blocks[i] for i in range(len(self.plan))), self.positions, outputs=chosen)

    def _at_rows(self, outputs: Tensor | None, only: list[int]) -> dict[int, Block]:
        """Blocks `[K, B·T, p]` for one-hot cotangents of all rows, a few at a time where there are many."""
        count = self.f.shape[1] if outputs is None else outputs.shape[1]
        step = max(1, self.memory_budget // (2 * self.f.numel() * self.f.element_size()))
        parts: list[dict[int, Block]] = []
        for start in range(0, count, step):
            hot = self._one_hot(outputs, slice(start, min(start + step, count)))
            parts.append(self.row_blocks(hot.expand(-1, len(self.f), -1), only))
        first, *others = parts
        return {i: block.join([part[i] for part in others]) for i, block in first.items()} if others else first

    def _one_hot(self, outputs: Tensor | None, some: slice) -> Tensor:
        """One-hot cotangents of some of the K outputs, `[k, B·T, C]`, or `[k, 1, C]` if all rows share them."""
        if outputs is None:
            hot = self.f.new_zeros(some.stop - some.start, 1, self.f.shape[1])
            hot[:, 0].diagonal(some.start).fill_(1)
            return hot
        at = outputs.T[some].unsqueeze(2)
        return self.f.new_zeros(*at.shape[:2], self.f.shape[1]).scatter_(2, at, 1.0)

    def _at_positions(self, at: Tensor, outputs: Tensor | None, only: list[int]) -> dict[int, Block]:
        """Blocks `[K, B·S, p]` of the rows of S positions, by S·K cotangents of the whole outputs."""
        n_positions = self.capture.n_positions
        n_data = 1 if outputs is None else self.n_data  # all outputs are those of any sample
        count = self.f.shape[1] if outputs is None else outputs.shape[1]
        hot = self._one_hot(outputs, slice(0, count)).expand(-1, n_data * n_positions, -1)
        rows = hot.unflatten(1, (n_data, n_positions))[:, :, at]  # [K, B, S, C]
        whole = hot.new_zeros(len(at), count, n_data, n_positions, hot.shape[2])
        whole[torch.arange(len(at)), :, :, at] = rows.permute(2, 0, 1, 3)
        cotangents = whole.flatten(3).flatten(0, 1).expand(-1, self.n_data, -1)
        return {i: block.fold_cotangents(len(at)) for i, block in self.blocks(cotangents, only).items()}

    def row_blocks(self, cotangents: Tensor, only: list[int]) -> dict[int, Block]:
        """Blocks of slots with a row for every position, for cotangents `[K, B·T, C]`."""
        if not self.positions:
            return self.blocks(cotangents, only)
        blocks = self.blocks(cotangents.reshape(len(cotangents), self.n_data, -1), only)
        folded = {i: self._by_row(block) for i, block in blocks.items()}
        return {i: block for i, block in folded.items() if block is not None}

    def blocks(self, cotangents: Tensor, only: list[int]) -> dict[int, Block]:
        """Blocks of the slots in `only`, for cotangents `[K, B, T·C]`."""
        plan, capture = self.plan, self.capture
        with torch.inference_mode(False):
            gradients = capture.gradients(cotangents, sorted({use.call for i in only for use in plan[i].uses}))
            blocks: dict[int, Block] = {}
            for i in only:
                if plan[i].uses:
                    blocks[i] = block_of(self.problem, i, plan[i].uses, capture, gradients, self._activations)
                elif plan[i].fallback is None:
                    zero = torch.zeros((), dtype=self.dtype, device=self.f.device)
                    blocks[i] = DenseBlock(zero.expand(len(cotangents), self.n_data, self.problem.slots[i].size))
            for fallback in Fallback:
                if slots := [i for i in only if plan[i].fallback is fallback]:
                    blocks |= self._by_fallback(cotangents, slots, fallback)
        return blocks

    def _by_fallback(self, cotangents: Tensor, slots: list[int], fallback: Fallback) -> dict[int, Block]:
        """Dense blocks by one of the fallbacks, computed piece by piece if they are large."""
        n_cotangents, numel = len(cotangents), {i: self.problem.slots[i].shape.numel() for i in slots}

        def values(rows: slice, some: list[int]) -> list[Tensor]:
            """Dense blocks of some samples and tensors, as many samples at once as the memory budget allows."""
            first, stop, _ = rows.indices(self.n_data)

            def computed(part: slice) -> list[Tensor]:
                part = slice(first + part.start, first + part.stop)
                whole = part == slice(0, self.n_data)
                x = self.x if whole else batches.select(self.x, part, self.n_data)
                graph = self.capture.create_graph
                return per_sample(problem, x, cotangents[:, part], some, fallback, create_graph=graph)

            entries = sum(numel[i] for i in some) + self.capture.f.shape[1]
            held = 4 * self.bytes_per_cotangent() // self.n_data + entries * self.dtype.itemsize
            step = max(1, self.memory_budget // (n_cotangents * held))
            with self.problem.on_private_copy() as problem, torch.inference_mode(False):
                parts = [blocks for _, blocks in in_slices(stop - first, step, computed, DATUM)]
            return [torch.cat(blocks, 1).to(self.dtype) for blocks in zip(*parts, strict=True)]

        n_bytes = n_cotangents * self.n_data * sum(numel.values()) * self.dtype.itemsize
        if n_bytes * _LAZY_SHARE <= self.memory_budget:
            dense = values(slice(None), slots)
            return {i: DenseBlock(block) for i, block in zip(slots, dense, strict=True)}
        return {
            i: LazyBlock(
                compute=lambda rows, i=i: values(rows, [i])[0], sizes=(n_cotangents, self.problem.slots[i].size),
                span=(0, self.n_data), norm=cotangents.norm(),
            )
            for i in slots
        }  # fmt: skip
