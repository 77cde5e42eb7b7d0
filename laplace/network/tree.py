"""What a network consists of: its modules, and what these hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import filterfalse

from torch import Tensor, nn

OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: tables of parameters, buffers, submodules and hooks, and the training mode."""

HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_")))
"""Those of them that hold hooks of passes."""

Place = tuple[str, nn.Module, str]
"""Name of a parameter in the network, a module that holds it, and its key there."""


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The module and all below it, each once, in the order of `model.modules()`, which takes twice as long."""
    modules: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in modules:
            modules[id(module)] = module
            if children := module._modules:
                waiting.extend(reversed(children.values()))
    return list(modules.values())


def places_of(model: nn.Module) -> list[Place]:
    """Every place of a parameter."""
    return [
        (f"{prefix}.{key}" if prefix else key, module, key)
        for prefix, module in model.named_modules()
        for key, tensor in module._parameters.items()
        if tensor is not None
    ]


def parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters of these modules themselves, each once."""
    return _each_once(module._parameters for module in modules)


def tensors_of(modules: list[nn.Module]) -> list[Tensor]:
    """Parameters, then buffers, each once."""
    return parameters_of(modules) + _each_once(module._buffers for module in modules)


def _each_once(tables: Iterable[Mapping[str, Tensor | None]]) -> list[Tensor]:
    return list({id(t): t for table in tables if len(table) for t in table.values() if t is not None}.values())


def attributes_in(own: Mapping[str, object]) -> Iterator[str]:
    """Names of what is in the `__dict__` of a module besides what every module has, found in no loop of Python."""
    return filterfalse(OWN.__contains__, own)
