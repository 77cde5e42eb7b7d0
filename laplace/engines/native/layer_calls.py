"""Calls of modules and functions with random parameters among their arguments, as a forward pass records them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from laplace.engines.native.layers import BatchAxis
from laplace.errors import CurvatureError
from laplace.jacobian.blocks import Block


class FunctionCall(ABC):
    """One call of a function of PyTorch with random parameters among its arguments, and the blocks that it gives them.

    Attributes:
        name: Name in the coverage report.
        roles: Which argument each tensor is, by the tensor's name.
    """

    name: str
    roles: Mapping[str, str]

    @property
    def whole(self) -> bool:
        """True if the tensors are used whole and as a linear layer uses them, so that the call may be a head."""
        return False

    @property
    def instead_of(self) -> FunctionCall | None:
        """The call whose output this one spreads over the data: both explain the same derivative."""
        return None

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that calls share for which one rule holds: the function, and which tensor is which argument."""
        return self.name, tuple(self.roles.items())

    @abstractmethod
    def positions(self, n_data: int) -> int:
        """Positions per datum in the leading dimensions, 0 if they cannot hold `n_data` data."""

    @abstractmethod
    def block(self, role: str, g: Tensor, n_data: int, axis: BatchAxis) -> Block:
        """The block from the gradients `[K, *shape of the output]`, at least float32."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a module or of a function: its first input and the place of its output in autograd's graph.

    The place is an edge of the graph and not the output tensor, so that a later in-place operation on the
    output does no harm and no copy is needed.

    Attributes:
        by: The module, or the call of a function.
        x: The first input.
        edge: Where the output's gradient is found.
        shape: The output's shape.
    """

    by: nn.Module | FunctionCall
    x: Tensor
    edge: GradientEdge
    shape: torch.Size

    @property
    def kind(self) -> object:
        """A key that calls share for which one rule holds: the module, or the kind of function call."""
        return self.by.kind if isinstance(self.by, FunctionCall) else id(self.by)

    @property
    def module(self) -> nn.Module:
        """The module, where it is one.

        Raises:
            CurvatureError: A function was called.
        """
        if isinstance(self.by, FunctionCall):
            raise CurvatureError(f"{self.by.name} is no layer")
        return self.by
