"""The last layer as a `FeatureExtractor` shows it and runs it: the network's own, or a copy that may be written to."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from laplace.core.batch import ForwardFn, Inputs
from laplace.network.fingerprint import checksums, same_sums
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
    def substitutes(self, layer: nn.Module) -> Mapping[str, Tensor]:
        """Tensors to run the network's layer with in place of its own, by their names in it."""


class OwnHead(ShownHead):
    """The network's own layer: the last one to run."""

    def find(self, model: nn.Module, x: Inputs, forward_fn: ForwardFn | None) -> str:
        return find_last_layer(model, x, forward_fn)

    def shown(self, layer: nn.Module) -> nn.Module:
        return layer

    def substitutes(self, layer: nn.Module) -> Mapping[str, Tensor]:
        return {}


class CopiedHead(ShownHead):
    """A copy of the layer that a last-layer posterior makes random, for users to load samples into.

    It is made when it is first asked for, and then runs in the layer's place. It is made anew once the network's layer
    has other numbers, or another device or dtype, than when it was copied: after training, for one.
    """

    copies = True

    def __init__(self) -> None:
        self._copy: nn.Module | None = None
        self._copied: tuple[Any, Tensor] | None = None

    def find(self, model: nn.Module, x: Inputs, forward_fn: ForwardFn | None) -> str:
        return random_head(model, x, forward_fn)

    def shown(self, layer: nn.Module) -> nn.Module:
        current = self._current(layer)
        if current is None:
            current = self._copy = copy.deepcopy(layer)
            self._copied = _places(layer), checksums(layer)
        return current

    def substitutes(self, layer: nn.Module) -> Mapping[str, Tensor]:
        current = self._current(layer)
        if current is None:
            return {}
        # Samples may have another dtype than a network in half precision.
        return {name: tensor.to(layer.get_parameter(name)) for name, tensor in current.named_parameters()}

    def _current(self, layer: nn.Module) -> nn.Module | None:
        """The copy, if there is one, and it is of the layer as it is now."""
        if self._copy is None or self._copied is None:
            return None
        places, sums = self._copied
        return self._copy if places == _places(layer) and same_sums(sums, checksums(layer)) else None


def _places(layer: nn.Module) -> list[Any]:
    """Device and dtype of every parameter."""
    return [(parameter.device, parameter.dtype) for parameter in layer.parameters()]
