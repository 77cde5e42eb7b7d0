"""The last layer as a `FeatureExtractor` shows it and runs it: the network's own, or a copy that may be written to."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core.batch import ForwardFn, Inputs
from laplace.network.spread import is_spread
from laplace.network.watch import checksums, same_sums
from laplace.weights.discovery import find_last_layer
from laplace.weights.heads import random_head


class ShownHead(ABC):
    """Decides which layer is the last one, which module stands for it, and with which tensors it runs.

    Attributes:
        copies: True if that module may be another one than the network's.
    """

    copies: bool = False

    @abstractmethod
    def find(self, model: nn.Module, x: Inputs, forward_fn: ForwardFn | None) -> str:
        """Name of the last layer of a network, by passes on `x`."""

    @abstractmethod
    def shown(self, layer: nn.Module) -> nn.Module:
        """The module that stands for the network's layer."""

    @abstractmethod
    def substitutes(self, layer: nn.Module, *, alone: bool) -> Mapping[str, Tensor]:
        """Tensors to run the network's layer with in place of its own, by their names in it.

        Args:
            layer: The layer.
            alone: Whether the network is inside of no other module, which its passes would leave out.
        """


class OwnHead(ShownHead):
    """The network's own layer: the last one to run."""

    def find(self, model: nn.Module, x: Inputs, forward_fn: ForwardFn | None) -> str:
        return find_last_layer(model, x, forward_fn)

    def shown(self, layer: nn.Module) -> nn.Module:
        return layer

    def substitutes(self, layer: nn.Module, *, alone: bool) -> Mapping[str, Tensor]:
        return {}


class CopiedHead(ShownHead):
    """A copy of the layer that a last-layer posterior makes random, for users to load samples into.

    It has memory of its own from the moment when it is first asked for, and runs in the layer's place. It is made anew
    once the network's layer has other numbers, or another device or dtype, than when it was copied: after training, for
    one. Before, passes that record a graph run with its parameters, too, which still share the layer's memory, so that
    gradients lead to them whatever was first, the pass or the question. They lead to the network's own tensors as well.
    """

    copies = True

    def __init__(self) -> None:
        self._copy: nn.Module | None = None
        self._copied: tuple[Any, Tensor] | None = None

    def find(self, model: nn.Module, x: Inputs, forward_fn: ForwardFn | None) -> str:
        return random_head(model, x, forward_fn)

    def shown(self, layer: nn.Module) -> nn.Module:
        current = self._written(layer)
        if current is not None:
            return current
        if self._copied is None and self._copy is not None and _share_memory(self._copy, layer):
            current = self._copy
            for parameter in current.parameters():  # to which a user may write from here on
                parameter.data = parameter.data.clone()
        else:
            current = self._copy = copy.deepcopy(layer)
        self._copied = _places(layer), checksums(layer)
        return current

    def substitutes(self, layer: nn.Module, *, alone: bool) -> Mapping[str, Tensor]:
        own = dict(layer.named_parameters())
        graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in own.values())
        current = self._written(layer)
        if current is None:
            plain = all(isinstance(tensor, nn.Parameter) for tensor in own.values())  # and not a user's functional_call
            if not graph or not alone or not plain or is_spread(layer):
                return {}
            if self._copied is not None or self._copy is None or not _share_memory(self._copy, layer):
                self._copy, self._copied = _sharing(layer), None
            current = self._copy
        # Samples may have another dtype than a network in half precision.
        tensors = {name: tensor.to(own[name]) for name, tensor in current.named_parameters()}
        if not graph:
            return tensors
        return {name: tensor + (own[name] - own[name].detach()) for name, tensor in tensors.items()}

    def _written(self, layer: nn.Module) -> nn.Module | None:
        """The copy that was shown, if it is of the layer as it is now."""
        if self._copy is None or self._copied is None:
            return None
        places, sums = self._copied
        return self._copy if places == _places(layer) and same_sums(sums, checksums(layer)) else None

    def __getstate__(self) -> dict[str, Any]:
        """Without parameters that share the layer's memory: in copies and pickles they would no more."""
        return {"_copy": None if self._copied is None else self._copy, "_copied": self._copied}


def _sharing(layer: nn.Module) -> nn.Module:
    """A layer with parameters of its own, which share their memory with those of the given one."""
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in layer.parameters()}
    return copy.deepcopy(layer, shared)


def _share_memory(one: nn.Module, other: nn.Module) -> bool:
    """True if the parameters of two layers are the same memory, read alike."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape for a, b in pairs)


def _places(layer: nn.Module) -> list[Any]:
    """Device and dtype of every parameter."""
    return [(parameter.device, parameter.dtype) for parameter in layer.parameters()]
