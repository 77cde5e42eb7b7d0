"""What autograd's graph says of the uses of a weight, whatever numbers the data have.

A probe cannot see a use that contributes zero to its batch: behind a dead ReLU, a closed gate, a mask. The graph of a
forward pass holds it all the same. So in every pass the nodes that read a weight are compared with the recorded calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from math import prod
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from laplace.engines.native.functions import LayerCall

Node = Any
"""A node of autograd's graph, of a class that PyTorch makes."""


class Explained(IntEnum):
    """How much of a weight's derivative the recorded calls explain."""

    NOT = 0  # Something else reads the weight
    HERE = 1  # All that reads it is in the calls, but how is hidden: a rule holds for the batch of its proof only
    ALWAYS = 2  # Each call reads it once, as its rule says, whatever the data


class Graph:
    """The nodes between the outputs and the tensors that require gradients, with the nodes that read each of them."""

    def __init__(self, f: Tensor, *, shows_data: bool = True) -> None:
        # False if reading the data that nodes keep would recompute activations
        self.shows_data = shows_data
        self._readers: dict[Node, list[Node]] = {}
        self._leaves: dict[int, Node] = {}
        readers = self._readers
        waiting: list[Node] = [] if f.grad_fn is None else [f.grad_fn]
        readers.update((node, []) for node in waiting)
        while waiting:
            node = waiting.pop()
            inputs = node.next_functions
            if not inputs:
                self._leaves[id(getattr(node, "variable", None))] = node
            for after, _ in inputs:
                if after is None:
                    continue
                known = readers.get(after)
                if known is None:
                    readers[after] = [node]
                    waiting.append(after)
                else:
                    known.append(node)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._readers)

    def reaches(self, tensor: Tensor) -> bool:
        return id(tensor) in self._leaves

    def explained(self, tensor: Tensor, calls: Sequence[LayerCall]) -> Explained:
        """How much of a tensor's derivative some calls explain, by the rules of their layers or functions."""
        leaf = self._leaves.get(id(tensor))
        if leaf is None:
            return Explained.ALWAYS
        homes = {node: call for call in calls for node in call.nodes}
        explained = Explained.ALWAYS
        met: set[Node] = set()
        for reader in self._meeting_data(leaf, homes):
            home, is_plain = (reader, True) if reader in homes else self._home(reader, homes)
            if home is None:
                return Explained.NOT
            if home in met or not _is_understood(reader, home, homes[home], looks=self.shows_data and is_plain):
                explained = Explained.HERE  # read twice, say, of which a rule knows one
            met.add(home)
        return explained

    def keeps_rows(self, node: Node, views: Collection[Node]) -> bool:
        """True if no operation between a call's node and the outputs mixes rows."""
        of_images = type(node).__name__.startswith(_IMAGES)
        between = self._between([node])
        others = (after for reader in between for after in _of_weights(reader))
        return not any(after in between or after is node for after in others) and all(
            (reader in views and _rearranges(reader)) or _is_by_row(reader, of_images=of_images) for reader in between
        )

    def keeps_data_apart(self, nodes: Collection[Node], n_data: int) -> bool:
        """True if no operation between calls' nodes and the outputs can make data meet, whatever the lengths.

        The results of the calls have the data in the first dimension, from where they are followed (`_outer_after`).
        """
        outer = dict.fromkeys(nodes, 1)
        waiting = list(self._between(nodes))
        followed = {*nodes, *waiting}
        while waiting:
            node = waiting[-1]
            given = [(after, index) for after, index in node.next_functions if after in followed]
            missing = [after for after, _ in given if after not in outer]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if node in outer:
                continue
            if len({outer[after] for after, _ in given}) > 1 or any(after in followed for after in _of_weights(node)):
                return False
            shapes = [tuple(after._input_metadata[index].shape) for after, index in given]
            after = _outer_after(node, outer[given[0][0]], shapes, n_data)
            if after is None:
                return False
            outer[node] = after
        return True

    def _between(self, nodes: Collection[Node]) -> set[Node]:
        """The nodes between some of them and the outputs, without these."""
        between, waiting = set(nodes), list(nodes)
        while waiting:
            for reader in self._readers[waiting.pop()]:
                if reader not in between:
                    between.add(reader)
                    waiting.append(reader)
        return between.difference(nodes)

    def _meeting_data(self, leaf: Node, homes: Mapping[Node, LayerCall]) -> list[Node]:
        """Nodes in which a tensor meets the data, behind views, casts and operations on it alone; with repetitions."""
        alone: set[Node] = set()
        for call in homes.values():
            if call.weight_alone is not None:
                alone |= _behind(call.weight_alone)
        meeting, waiting = [], [leaf]
        for node in waiting:  # which grow on the way
            for reader in self._readers[node]:
                if reader in homes or not (reader in alone or _rearranges(reader)):
                    meeting.append(reader)
                elif reader not in waiting:
                    waiting.append(reader)
        return meeting

    def _home(self, reader: Node, homes: Mapping[Node, LayerCall]) -> tuple[Node | None, bool]:
        """The one call through which every path from a node to the outputs goes, or None.

        A way through the data of a call comes from outside of it. Besides, whether the way is one, of views alone.
        """
        fed = {node for call in homes.values() for node in call.fed}
        reached: set[Node] = set()
        waiting, seen, is_plain = [reader], {reader}, True
        while waiting:
            node = waiting.pop()
            if node in homes:
                reached.add(node)
                continue
            readers = self._readers[node]
            if node in fed or not readers:
                return None, False
            is_plain &= node is reader or _rearranges(node)
            is_plain &= len(readers) == 1 and (readers[0] in homes or _rearranges(readers[0]))
            fresh = [above for above in readers if above not in seen]
            seen.update(fresh)
            waiting.extend(fresh)
        if len(reached) != 1:
            return None, False
        home = reached.pop()
        return home, is_plain and (home is reader or _rearranges(home))


def _is_understood(reader: Node, home: Node, call: LayerCall, *, looks: bool) -> bool:
    """True if a call uses a weight as its rule says, whatever the data."""
    if _is_opaque(reader) or (home is not reader and _is_opaque(home)):
        return False
    return call.is_known or (looks and _reads(reader, call.x))


def _is_opaque(node: Node) -> bool:
    """True for nodes that PyTorch does not define: users' functions in Python or C++, and compiled code."""
    return isinstance(node, BackwardCFunction) or type(node).__name__.startswith("CppFunction")


_REARRANGING = (
    "Alias", "AsStrided", "Clone", "Expand", "Permute", "Repeat", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze",
    "TBackward", "ToCopy", "Transpose", "Unbind", "Unsqueeze", "UnsafeSplit", "UnsafeView", "View",
)  # fmt: skip
"""Beginnings of the names of nodes that copy, cast or move the numbers of one tensor."""


def _rearranges(node: Node) -> bool:
    return not isinstance(node, BackwardCFunction) and _is_rearranging(type(node).__name__)


@cache
def _is_rearranging(name: str) -> bool:
    return name.startswith(_REARRANGING)


_ELEMENTWISE = tuple(
    f"{name}Backward"
    for name in (
        "Abs", "Add", "Alias", "Clamp", "Clone", "Cos", "Div", "Elu", "Erf", "Exp", "Gelu", "Hardsigmoid", "Hardswish",
        "Hardtanh", "LeakyRelu", "Log", "LogSigmoid", "Mish", "Mul", "Neg", "Pow", "PreluKernel", "Reciprocal", "Relu",
        "Rsqrt", "Rsub", "Sigmoid", "Silu", "Sin", "Softplus", "Sqrt", "Sub", "Tanh", "ToCopy", "Where",
    )
)  # fmt: skip
"""Beginnings of the names of elementwise nodes."""

_IMAGES = ("Convolution", "NativeBatchNorm", "CudnnBatchNorm")
"""Beginnings of the names of nodes that have channels in the second dimension."""

_PRODUCTS = {"AddmmBackward": 1, "MmBackward": 0, "LinearBackward": 0}
"""Beginnings of the names of products, and which of their inputs holds the rows."""


def _of_weights(node: Node) -> list[Node]:
    """Nodes of the inputs of a product or convolution that are weights, and must not depend on the rows."""
    name = type(node).__name__
    rows = next(
        (at for start, at in _PRODUCTS.items() if name.startswith(start)), 0 if name.startswith(_IMAGES) else -1
    )
    return [after for at, (after, _) in enumerate(node.next_functions) if at != rows] if rows >= 0 else []


def _is_by_row(node: Node, *, of_images: bool) -> bool:
    """True for operations on every row by itself; rows are pixels of images, or all dimensions but the last."""
    name = type(node).__name__
    if isinstance(node, BackwardCFunction):
        return False
    if name.startswith(_ELEMENTWISE):
        return True
    if of_images:
        if name.startswith("Convolution"):
            sizes = node._saved_weight.shape[2:].numel() if not node._saved_transposed else 0
            return sizes == 1 and set(node._saved_stride) == {1} and set(node._saved_padding) == {0}
        return name.startswith(_IMAGES) and not getattr(node, "_saved_training", True)
    if name.startswith(tuple(_PRODUCTS)):
        return True
    if name.startswith("NativeLayerNorm"):
        return len(node._saved_normalized_shape) == 1
    shape = node._input_metadata[0].shape if getattr(node, "_input_metadata", None) else ()
    last = len(shape) - 1
    if name.startswith(("View", "UnsafeView", "ReshapeAlias")):
        return bool(shape) and tuple(node._saved_self_sym_sizes)[-1:] == (shape[last],)
    if name.startswith("Transpose"):
        return bool(shape) and last not in (_wrapped(node._saved_dim0, last), _wrapped(node._saved_dim1, last))
    if name.startswith(("Softmax", "LogSoftmax")):
        return bool(shape) and _wrapped(node._saved_dim, last) == last
    if name.startswith("MeanBackward1"):
        return bool(shape) and node._saved_keepdim and [_wrapped(d, last) for d in node._saved_dim or ()] == [last]
    return False


_BY_LAST = ("Addmm", "Mm", "Linear", "NativeLayerNorm", "Softmax", "LogSoftmax")
"""Beginnings of the names of operations on the last dimension, which those of elements and rearrangements are not."""

_IN_ORDER = ("Clone", "ReshapeAlias", "Squeeze", "ToCopy", "Unsqueeze", "UnsafeView", "View")
"""Beginnings of the names of operations that leave numbers in their order."""

_ALONG = ("Cat", "Select", "Slice", "Split", "Stack", "Unbind", "Unfold", "UnsafeSplit")
"""Beginnings of the names of operations that pick or join along one dimension."""


_REDUCING = ("MeanBackward1", "SumBackward1")
"""Beginnings of the names of operations that leave one number of a dimension, or of several."""


def _outer_after(node: Node, outer: int, shapes: Sequence[tuple[int, ...]], n_data: int) -> int | None:
    """How many times the data stand in a result, one after the other; None if they may have met.

    Results are numbers `[outer, B, …]` in a row, in whatever dimensions these are: `[T, B, D]` has outer = T, and
    `[T·B, D]`, too. Where the data are in the first dimension, alone or with positions, most operations are of one
    datum each; where they are elsewhere those that are known are followed.

    Args:
        node: The operation.
        outer: Of all results with data that it is given.
        shapes: Of these results.
        n_data: B.
    """
    name, results = type(node).__name__, [tuple(result.shape) for result in node._input_metadata]
    if isinstance(node, BackwardCFunction) or name.startswith("AsStrided"):
        return None
    if name.startswith((*_ELEMENTWISE, "Expand")):
        return outer if all(_grows_behind(shape, results[0], outer * n_data) for shape in shapes) else None
    if name.startswith(_IN_ORDER):
        return outer
    shape = max(shapes, key=len)
    if name.startswith(_BY_LAST):
        is_last = _wrapped(getattr(node, "_saved_dim", -1), len(shape) - 1) == len(shape) - 1
        return outer if is_last and prod(shape[:-1]) % (outer * n_data) == 0 else None
    dim = next((d for d, n in enumerate(shape) if prod(shape[:d]) == outer and n % n_data == 0), None)
    if dim is None:
        return None
    order = list(range(len(shape)))
    if name.startswith(("Transpose", "TBackward")):
        dims = (0, 1) if name.startswith("TB") else (node._saved_dim0, node._saved_dim1)
        one, other = (_wrapped(d, len(order) - 1) for d in dims)
        order[one], order[other] = other, one
        return prod(results[0][: order.index(dim)])
    if name.startswith("Permute"):
        return prod(results[0][: [_wrapped(d, len(order) - 1) for d in node._saved_dims].index(dim)])
    if name.startswith(_REDUCING):
        summed = {_wrapped(d, len(order) - 1) for d in node._saved_dim or order}
        return None if dim in summed else prod(n for d, n in enumerate(shape[:dim]) if d not in summed)
    if name.startswith(_ALONG):
        along = _wrapped(node._saved_dimension if name.startswith("Unfold") else node._saved_dim, len(order) - 1)
        if along <= dim and name.startswith("Stack"):  # a new dimension before that of the data
            return prod(results[0][: dim + 1])
        if along == dim or (along < dim and name.startswith("Unfold")):
            return None
        gone = along < dim and name.startswith(("Select", "Unbind"))
        return prod(results[0][: dim - gone])
    by_datum = dim == 0 and all(result and result[0] % n_data == 0 for result in results)
    return 1 if by_datum else None


def _grows_behind(shape: tuple[int, ...], result: tuple[int, ...], count: int) -> bool:
    """True if numbers are repeated only in dimensions behind the first `count` entries of a shape."""
    before = (1,) * (len(result) - len(shape)) + shape
    return all(a == b or prod(before[:d]) >= count for d, (a, b) in enumerate(zip(before, result, strict=True)))


def _wrapped(dim: int, last: int) -> int:
    """A dimension counted from the first; autograd shows negative ones as unsigned numbers."""
    dim = dim - 2**64 if dim >= 2**63 else dim
    return dim % (last + 1)


_LAYERS = ("Addmm", "Mm", "Linear", "Convolution", "CudnnConvolution", "MkldnnConvolution", "NativeLayerNorm",
           "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm", "Embedding")  # fmt: skip
"""Beginnings of the names of nodes that are a whole layer."""

_DATA = ("_saved_mat1", "_saved_self", "_saved_input", "_saved_indices")
"""Names under which such a node keeps its data."""


def _reads(node: Node, x: Tensor) -> bool:
    """True if a node is a whole layer with this input."""
    if not type(node).__name__.startswith(_LAYERS):
        return False
    for name in _DATA:
        try:
            saved = getattr(node, name, None)
        except RuntimeError:  # of a tensor that was overwritten
            return False
        if isinstance(saved, Tensor) and saved.data_ptr() == x.data_ptr() and saved.numel() == x.numel():
            return True
    return False


def _behind(value: Tensor) -> set[Node]:
    nodes: set[Node] = {value.grad_fn}
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        for after, _ in () if node is None else node.next_functions:
            if after is not None and after not in nodes:
                nodes.add(after)
                waiting.append(after)
    return nodes
