"""A function of tensors as a graph of PyTorch's operations, at the sizes of the tensors that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.nn.attention import SDPBackend, sdpa_kernel

from laplace.core import checks
from laplace.deployment.rewriting import reads_numbers
from laplace.engines.native.autograd import slow_batching_accepted
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

    with checks.unread(), torch.no_grad(), slow_batching_accepted(), sdpa_kernel(SDPBackend.MATH):
        graph = make_fx(function)(*inputs)
        _require_fixed_shapes(graph.graph)
        graph.graph.eliminate_dead_code()
        if any(_writes(node) for node in graph.graph.nodes):
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


def _writes(node: fx.Node) -> bool:
    """True if an operation writes to a tensor that it is given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
