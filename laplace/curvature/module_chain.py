"""Detects whether the tail of a network is a plain sequence of modules."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core.batch import Inputs
from laplace.errors import CurvatureError


@dataclass(frozen=True, eq=False)
class ModuleChain:
    """Modules one after the other, of which the last gives the outputs of the network.

    Attributes:
        modules: The modules, no two of them the same object.
        x: Inputs of the first one.
    """

    modules: tuple[nn.Module, ...]
    x: Tensor


@dataclass(frozen=True)
class _Call:
    """One call of a module without children; versions count the writes to a tensor."""

    module: nn.Module
    x: Any
    x_version: int
    output: Any
    output_version: int


def chain_from(module: nn.Module, x: Inputs, tensors: Sequence[Tensor]) -> ModuleChain:
    """The chain that begins with the first module that holds one of the tensors, watched in one forward pass.

    What runs before that module may be anything: it does not depend on the tensors.

    Args:
        module: The network, a private copy.
        x: Its inputs.
        tensors: Parameters that all have to be held by modules of the chain.

    Raises:
        CurvatureError: Something else happens in between (a function, a sum of branches, a write in place).
    """
    wanted = {id(tensor) for tensor in tensors}
    calls: list[_Call] = []
    with torch.no_grad(), _watched(module, calls):
        f = module(x)
    starts = [n for n, call in enumerate(calls) if wanted & _held(call.module)]
    links = calls[starts[0] :] if starts else []
    if not links or not _joined(links, f) or not isinstance(links[0].x, Tensor):
        raise CurvatureError("the network is not a chain of modules")
    if not wanted <= set().union(*(_held(call.module) for call in links)):
        raise CurvatureError("a parameter is not held by a module of the chain")
    return ModuleChain(tuple(_apart([call.module for call in links])), links[0].x)


def _held(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in module._parameters.values() if tensor is not None}


def _joined(links: Sequence[_Call], f: Any) -> bool:
    """True if the input of every module is the output of the one before, unchanged, and the last one's is f."""
    last = links[-1]
    between = all(b.x is a.output and b.x_version == a.output_version for a, b in itertools.pairwise(links))
    return between and f is last.output and isinstance(f, Tensor) and f._version == last.output_version


def _apart(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules with copies of those that come again: what is written to a module must be of one call."""
    seen: set[int] = set()
    apart: list[nn.Module] = []
    for module in modules:
        apart.append(copy.deepcopy(module) if id(module) in seen else module)
        seen.add(id(module))
    return apart


@contextmanager
def _watched(module: nn.Module, calls: list[_Call]) -> Iterator[None]:
    def remember(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = args[0] if len(args) == 1 and not kwargs else None
        calls.append(_Call(part, x, _version(x), output, _version(output)))

    leaves = [part for part in module.modules() if not any(True for _ in part.children())]
    handles = [leaf.register_forward_hook(remember, with_kwargs=True) for leaf in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else -1
