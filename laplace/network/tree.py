"""The modules of a network, and their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

Place = tuple[str, nn.Module, str]
"""Name of a parameter in the network, a module that holds it, and its key there."""


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The module and all below it, each once, in the order of `model.modules()`, of whose time it takes a fifth."""
    modules: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in modules:
            modules[id(module)] = module
            if children := module._modules:
                waiting.extend(reversed(children.values()))
    return list(modules.values())


def named_modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The same with their names, as `model.named_modules()` has them."""
    modules: dict[int, tuple[str, nn.Module]] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) not in modules:
            modules[id(module)] = name, module
            if children := module._modules:
                prefix = f"{name}." if name else ""
                waiting.extend((prefix + key, child) for key, child in reversed(children.items()) if child is not None)
    return list(modules.values())


def places_of(model: nn.Module) -> list[Place]:
    """Every place of a parameter."""
    return [
        (f"{prefix}.{key}" if prefix else key, module, key)
        for prefix, module in named_modules_of(model)
        for key, tensor in module._parameters.items()
        if tensor is not None
    ]


def tensors_of(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers of these modules themselves."""
    for module in modules:
        for table in (module._parameters, module._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)
