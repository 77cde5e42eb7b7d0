"""Graphs of PyTorch's operations: of a function at one size of a batch, and one for any size from those of two sizes.

Both runs of a function whose data do not depend on each other are the same operations; what differs is numbers that
count data. Each is n·B + m, which the two sizes tell, so the graph for any size has that in its place, with B read off
an input. Whatever does not depend on the inputs is computed here, once, and held as a buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functionalize
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from laplace.core import checks
from laplace.errors import UnsupportedError


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The operations that a function runs, without any that writes in place.

    Backward passes and `torch.func` are unrolled to what they run, attention to products that every device has.
    Conditions on numbers are not asked.

    Args:
        function: Takes the inputs, returns tensors.
        inputs: Of the sizes that the graph is for.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # which imports a computer algebra system

    with checks.unread(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        graph = make_fx(function)(*inputs)
        _require_fixed_shapes(graph.graph)
        graph.graph.eliminate_dead_code()
        if any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in graph.graph.nodes):
            graph.recompile()
            graph = make_fx(functionalize(graph))(*inputs)
            graph.graph.eliminate_dead_code()
    return graph


def _require_fixed_shapes(graph: fx.Graph) -> None:
    """Refuses operations whose shapes the inputs decide: what follows of such a shape is a number without a trace."""
    depends: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
            if reads_numbers(node):
                raise UnsupportedError(
                    f"the prediction runs {node.target}, whose shape depends on the numbers in the inputs: write the "
                    "network with torch.where; or, if it is no operation of the network, use "
                    "subset_of_weights='last_layer'."
                )


Noise = Callable[[tuple[int, ...], Tensor], Tensor]
"""Standard normal numbers of a shape, in the dtype and on the device of a tensor."""


@dataclass(frozen=True)
class Count:
    """A number that is n·B + m in a batch of B data."""

    n: int
    m: int


_DATA = Count(1, 0)


class AnySize:
    """The graph that the graphs of two batch sizes have in common, made node by node.

    Args:
        sizes: Of the two batches.
        noise: Draws the numbers of one input, which all inputs share.
    """

    def __init__(self, sizes: tuple[int, int], noise: Noise) -> None:
        self.has_noise = False  # whether numbers were drawn
        self._sizes, self._noise = sizes, noise
        self._graph, self._buffers = fx.Graph(), nn.Module()
        self._constants: dict[fx.Node, Any] = {}
        self._nodes: dict[fx.Node, fx.Node] = {}
        self._twins: dict[Any, fx.Node] = {}
        self._counts: dict[Count, fx.Node] = {}
        self._places: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []
        self._only: set[fx.Node] = set()

    def module(self, pair: tuple[fx.GraphModule, fx.GraphModule], names: Sequence[str], batched: int) -> fx.GraphModule:
        """The module for batches of any size.

        Args:
            pair: The graphs of both sizes, without operations in place.
            names: Of the inputs.
            batched: Which input has the data in its first dimension.
        """
        first, second = (list(module.graph.nodes) for module in pair)
        if [_kind(node) for node in first] != [_kind(node) for node in second]:
            raise self._different()
        self._twins |= dict(zip(second, first, strict=True))
        inputs = [node for node in first if node.op == "placeholder"]
        self._nodes |= {node: self._graph.placeholder(name) for node, name in zip(inputs, names, strict=True)}
        self._batch = self._nodes[inputs[batched]]
        self._counts[_DATA] = self._graph.call_function(aten.sym_size.int, (self._batch, 0))
        for node, other in zip(first, second, strict=True):
            if node.op == "get_attr":
                ours, theirs = (operator.attrgetter(str(n.target))(m) for n, m in zip((node, other), pair, strict=True))
                if ours is not theirs and not (ours.shape == theirs.shape and torch.equal(ours, theirs)):
                    raise self._different()
                self._constants[node] = ours
            elif node.op == "output":
                self._graph.output(self._placed(self._merged(node.args[0], other.args[0])))
            elif node.op == "call_function":
                self._add(node, other)
        self._graph.eliminate_dead_code()
        return fx.GraphModule(self._buffers, self._graph, "ExportedPrediction").eval()

    # One operation.

    def _add(self, node: fx.Node, other: fx.Node) -> None:
        value = filled_with(node)
        if changes_nothing(node) and changes_nothing(other):
            before = node.all_input_nodes[0]
            table: dict[fx.Node, Any] = self._constants if before in self._constants else self._nodes
            table[node] = table[before]
        elif value is not None and value == filled_with(other):
            self._fill(node, other, value)
        else:
            self._run(node, self._merged(node.args, other.args), self._merged(node.kwargs, other.kwargs))

    def _fill(self, node: fx.Node, other: fx.Node, value: float) -> None:
        like, larger = output(node), output(other)
        if like is None or larger is None:
            raise self._different()
        shape = self._merged(tuple(like.shape), tuple(larger.shape))
        if not _has_count(shape):
            self._constants[node] = torch.full(shape, value, dtype=like.dtype, device=like.device)
            return
        arguments = self._batch, self._placed(shape), value
        self._nodes[node] = self._graph.call_function(aten.new_full.default, arguments, {"dtype": like.dtype})

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            self._draw(node, args[0])
        elif not _has_count((args, kwargs)) and all(parent in self._constants for parent in node.all_input_nodes):
            args, kwargs = pytree.tree_map(lambda leaf: self._constants.get(leaf, leaf), (args, kwargs))
            self._constants[node] = target(*args, **kwargs)
        else:
            self._call(node, args, kwargs)

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        """An operation on what depends on the inputs."""
        target: Any = node.target
        transposed = input_gradient(node, args)
        if target is operator.getitem and args[0] in self._only:
            self._nodes[node] = self._nodes[args[0]]
        elif transposed is not None:
            self._only.add(node)
            self._nodes[node] = self._graph.call_function(aten.convolution.default, self._placed(transposed))
        elif target is aten.linalg_solve_triangular.default and args[0] in self._constants:
            self._solve(node, args, **kwargs)
        else:
            target = _SAME.get(target, target)
            self._nodes[node] = self._graph.call_function(target, self._placed(args), self._placed(kwargs))

    def _solve(self, node: fx.Node, args: Any, left: bool = True, **triangle: bool) -> None:
        """A triangular solve as a product with the inverse, which every runtime has."""
        matrix = self._constants[args[0]]
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        inverse = self._buffer(torch.linalg.solve_triangular(matrix, eye, **({"upper": False} | triangle)))
        factors = (inverse, self._placed(args[1])) if left else (self._placed(args[1]), inverse)
        self._nodes[node] = self._graph.call_function(aten.matmul.default, factors)

    def _draw(self, node: fx.Node, shape: tuple[Any, ...]) -> None:
        """Numbers that are drawn: those of one datum, repeated for every one."""
        like = output(node)
        if getattr(node.target, "overloadpacket", None) is not aten.randn or like is None:
            raise UnsupportedError(
                f"the prediction draws numbers by {node.target}, of which a module can store none but standard normal "
                "ones. Choose what does not draw: pred_type='glm' with link_approx='probit'."
            )
        self.has_noise = True
        one = tuple(size.n if isinstance(size, Count) else size for size in shape)
        if any(isinstance(size, Count) and size.m for size in shape):
            raise self._different()
        noise = self._noise(one, torch.empty(0, dtype=like.dtype, device=like.device))
        if not _has_count(shape):
            self._constants[node] = noise
            return
        times = tuple(_DATA if isinstance(size, Count) else 1 for size in shape)
        self._nodes[node] = self._graph.call_function(aten.repeat.default, (self._buffer(noise), self._placed(times)))

    # What the two graphs have in common.

    def _merged(self, first: Any, second: Any) -> Any:
        """Arguments of one operation in both graphs, with counts where numbers differ."""
        ours, form = pytree.tree_flatten(first)
        theirs, other_form = pytree.tree_flatten(second)
        if form != other_form:
            raise self._different()
        return pytree.tree_unflatten([self._in_common(a, b) for a, b in zip(ours, theirs, strict=True)], form)

    def _in_common(self, first: Any, second: Any) -> Any:
        twin = self._twins.get(second) if isinstance(second, fx.Node) else second
        if twin is first or (not isinstance(first, fx.Node) and twin == first):
            return first
        if type(first) is not int or type(second) is not int:
            raise self._different()
        n, rest = divmod(second - first, self._sizes[1] - self._sizes[0])
        if rest:
            raise self._different()
        return Count(n, first - n * self._sizes[0])

    def _different(self) -> UnsupportedError:
        small, large = self._sizes
        return UnsupportedError(
            f"the prediction of {small} data and that of {large} are not the same operations: the network takes "
            "another way for other batches, or the Jacobian of a tensor is so large that data are taken one by one. "
            "Use subset_of_weights='last_layer', whose Jacobian is its features."
        )

    # Places in the new graph.

    def _placed(self, arguments: Any) -> Any:
        """Arguments as nodes of the new graph."""
        return pytree.tree_map(self._place, arguments)

    def _place(self, leaf: Any) -> Any:
        if isinstance(leaf, Count):
            return self._size(leaf)
        if leaf in self._constants:
            value = self._constants[leaf]
            return self._buffer(value) if isinstance(value, Tensor) else value
        return self._nodes[leaf] if isinstance(leaf, fx.Node) else leaf

    def _size(self, count: Count) -> fx.Node:
        """The node of n·B + m."""
        if count not in self._counts:
            times = self._counts[_DATA]
            times = times if count.n == 1 else self._graph.call_function(operator.mul, (times, count.n))
            self._counts[count] = self._graph.call_function(operator.add, (times, count.m)) if count.m else times
        return self._counts[count]

    def _buffer(self, value: Tensor) -> fx.Node:
        """A constant as a buffer: a copy, for the network's own tensors may be trained further."""
        if id(value) not in self._places:
            name = f"constant_{len(self._kept)}"
            self._buffers.register_buffer(name, value.detach().clone(memory_format=torch.contiguous_format))
            self._places[id(value)] = self._graph.get_attr(name)
            self._kept.append(value)  # so that no other has its identity
        return self._places[id(value)]


def _kind(node: fx.Node) -> tuple[str, Any]:
    return node.op, node.target if node.op == "call_function" else None


def _has_count(arguments: Any) -> bool:
    return any(isinstance(leaf, Count) for leaf in pytree.tree_leaves(arguments))


# Operations of a traced graph that say more than they need to: which change nothing, and which fill a tensor.


aten: Any = torch.ops.aten

_VIEWS = frozenset({
    aten.detach.default, aten.alias.default, aten.slice.Tensor, aten.expand.default, aten.view.default,
    aten._unsafe_view.default, aten.cat.default, aten._to_copy.default,
})  # fmt: skip
"""Operations that change nothing where shape and dtype stay as they are."""

_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor})
"""Operations that change nothing where there is one part."""

_FILLS: dict[Any, Callable[..., Any]] = {
    packet: value
    for packets, value in {
        (aten.zeros, aten.new_zeros, aten.zeros_like): lambda *_: 0,
        (aten.ones, aten.new_ones, aten.ones_like): lambda *_: 1,
        (aten.full, aten.new_full, aten.full_like): lambda *args: args[1],
    }.items()
    for packet in packets
}
"""Operations that fill a tensor, and with what."""


_SAME = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Operations by others that do the same, whatever the strides of a tensor, which compilers choose."""


def output(node: fx.Node) -> Tensor | None:
    """A tensor without numbers, of the shape and dtype that an operation gave; None where it is no single tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def changes_nothing(node: fx.Node) -> bool:
    """True if an operation gave the only tensor that it was given.

    A slice of all data, say, up to a number that this batch has not, or a split into parts of which this batch is one:
    batches of any size are not cut. The only part of such a split counts, too.
    """
    given = node.all_input_nodes
    if node.target is operator.getitem and given[0].target in _SPLITS:
        return changes_nothing(given[0])
    if node.target not in _VIEWS | _SPLITS or len(given) != 1:
        return False
    parts = node.meta.get("val", ()) if node.target in _SPLITS else (output(node),)
    before, after = output(given[0]), parts[0] if len(parts) == 1 else None
    if before is None or after is None:
        return False
    return (before.shape, before.dtype, before.device) == (after.shape, after.dtype, after.device)


def filled_with(node: fx.Node) -> Any:
    """The number that an operation fills a tensor with; None of others, or if the number is computed."""
    value = _FILLS.get(getattr(node.target, "overloadpacket", None), lambda *_: None)(*node.args)
    return value if isinstance(value, int | float) else None


def reads_numbers(node: fx.Node) -> bool:
    """True if the shape that an operation gives depends on the numbers that it is given: the rows of a mask, say."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    given = [output(parent) for parent in node.all_input_nodes]
    masks = [value for value in given[1:] if value is None or value.dtype in (torch.bool, torch.uint8)]
    return node.target is not aten.index.Tensor or bool(masks)


def input_gradient(node: fx.Node, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """Arguments of the transposed convolution that is the backward pass to a convolution's input.

    None where an operation is another one, or gives the other gradients, too.
    """
    if node.target is not aten.convolution_backward.default or list(args[10]) != [True, False, False] or args[7]:
        return None
    gradient, before, kernel = (output(parent) for parent in node.all_input_nodes)
    if gradient is None or before is None or kernel is None:
        return None
    _, _, _, _, stride, padding, dilation, _, _, groups, _ = args
    missing = tuple(
        size - ((small - 1) * s - 2 * p + d * (k - 1) + 1)
        for size, small, k, s, p, d in zip(
            before.shape[2:], gradient.shape[2:], kernel.shape[2:], stride, padding, dilation, strict=True
        )
    )
    return args[0], args[2], None, stride, padding, dilation, True, missing, groups
