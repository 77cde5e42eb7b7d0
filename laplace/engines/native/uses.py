"""What a captured forward pass remembers of one use of a treated tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from laplace.engines.native.layers import Reading
from laplace.errors import CurvatureError
from laplace.jacobian.blocks import Block


class Call(ABC):
    """One call of a function of PyTorch with treated tensors among its arguments, and the blocks that it gives them.

    Attributes:
        name: Name in the coverage report.
        roles: Which argument each tensor is, by the tensor's name.
        whole: Whether the tensors are used whole and as a linear layer uses them, so that the call may be a head.
        instead_of: The call whose output this one spreads over the data: they explain the same derivative twice.
    """

    name: str
    roles: Mapping[str, str]
    whole: bool = False
    instead_of: Call | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What calls share for which one explanation holds: the function, and which tensor is which argument."""
        return self.name, tuple(self.roles.items())

    @abstractmethod
    def positions(self, n_data: int) -> int:
        """Positions per datum in the leading dimensions, 0 if they cannot hold `n_data` data."""

    @abstractmethod
    def block(self, role: str, g: Tensor, n_data: int, reading: Reading) -> Block:
        """The block from the gradients `[K, *shape of the output]`, at least float32."""


@dataclass(frozen=True)
class Use:
    """One call of a module or of a function: its first input and the place of its output in autograd's graph.

    The place (an edge) is taken instead of the output tensor, so that a later in-place operation on the
    output does no harm and no copy is needed.

    Attributes:
        by: The module, or the call of a function.
        x: The first input.
        edge: Where the output's gradient is found.
        shape: The output's shape.
    """

    by: nn.Module | Call
    x: Tensor
    edge: GradientEdge
    shape: torch.Size

    @property
    def module(self) -> nn.Module:
        """The module, where it is one.

        Raises:
            CurvatureError: A function was called.
        """
        if isinstance(self.by, Call):
            raise CurvatureError(f"{self.by.name} is no layer")
        return self.by
