"""The choice of the random coordinates among the parameters: the axis that turns a model into a `Problem`."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from laplace.core.batch import ForwardFn, Inputs
from laplace.network.model_guard import model_lock, named_modules_of, require_module, unwrap
from laplace.network.spread import processes_of, require_whole
from laplace.network.watch import FirstBatch
from laplace.weights.problem import Problem


class Weights(ABC):
    """A choice of random coordinates, bound to a model; what is found out later makes another one.

    Args:
        model: The network, kept by reference and never written to.
        forward_fn: How to call it, or None for the default of `laplace.core.batch.call`.

    Raises:
        InvalidType: The network is no module.
        UnsupportedError: Its weights are spread over processes, which this choice does not take.

    Attributes:
        arguments: Names that posteriors' constructors have for its options, with its own names for them.
        takes_spread: Whether the network may be spread over processes by FSDP2.
        spread_over: Those processes; None of a whole network.
    """

    arguments: ClassVar[Mapping[str, str]] = {}
    takes_spread: ClassVar[bool] = False

    def __init__(self, model: nn.Module, forward_fn: ForwardFn | None = None) -> None:
        self._given = model
        self.model = unwrap(require_module(model))
        self.spread_over = processes_of(self.model)  # refuses those that are spread in other ways than FSDP2's
        if not self.takes_spread:
            require_whole(self.model, f"{type(self).__name__} runs a part of it on its own")
        self.forward_fn = forward_fn
        self._problem: Problem | None = None

    @property
    def problem(self) -> Problem | None:
        """The network and its random tensors, as backends see them; None for a last layer that is not known yet."""
        return self._problem

    def shown(self, *, enable_backprop: bool) -> nn.Module:
        """The network as users see it, `la.model`.

        Args:
            enable_backprop: Whether features that it gives keep their graph.
        """
        del enable_backprop  # of the network that was given, all does
        return self._given

    def announce(self) -> None:  # noqa: B027  (most choices are known from the start)
        """Tells the network as users see it which coordinates are random, where that was found out."""

    @abstractmethod
    def discover(self, x: Inputs, first: FirstBatch | None = None) -> Problem:
        """The problem, found from one batch of inputs if it takes one.

        Args:
            x: Inputs.
            first: What looks at the first batch of a fit, for which a pass that is made here serves; None without one.
        """

    @abstractmethod
    def embed(self, samples: Tensor) -> Tensor:
        """Samples `[S, P]` of the random coordinates as users expect them from `la.sample`."""

    @abstractmethod
    def restrict_prior(self, values: Tensor) -> Tensor:
        """A prior `[n]` given for more than the random coordinates, restricted to them; others are returned as is."""

    def named(self, name: str) -> Problem | None:
        """The problem of a layer by name, for choices that are one; else the problem as it is."""
        return self.problem

    def for_backend(self, problem: Problem) -> tuple[nn.Module, dict[str, Any]]:
        """The model and the arguments with which a backend is made for this choice."""
        return self.called, {}

    def with_problem(self, problem: Problem) -> Weights:
        """The same choice, of which the problem is known."""
        other = copy.copy(self)
        other._problem = problem
        return other

    def called_by(self, forward_fn: ForwardFn | None) -> Weights:
        """The same choice, of a model that is called in another way."""
        other = copy.copy(self)
        other.forward_fn = forward_fn
        other._problem = None if self.problem is None else replace(self.problem, forward_fn=forward_fn)
        return other

    @property
    def called(self) -> nn.Module:
        """The model, such that `model(x)` is the call that `forward_fn` makes."""
        return self.model if self.forward_fn is None else Called(self.model, self.forward_fn)

    def state(self) -> dict[str, Any]:
        """Identification of the choice in a state dict."""
        return {}


class Called(nn.Module):
    """A model that is called by a `forward_fn`.

    Args:
        module: The model, kept by reference.
        forward_fn: `forward_fn(module, x)`.
    """

    def __init__(self, module: nn.Module, forward_fn: ForwardFn) -> None:
        super().__init__()
        self.module = module
        self.forward_fn = forward_fn

    def forward(self, x: Inputs) -> Any:
        """Output of `forward_fn`."""
        return self.forward_fn(self.module, x)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Parameters with `requires_grad`, by name, tied ones once, in `model.parameters()` order; none without entries."""
    named: dict[int, tuple[str, Tensor]] = {}
    with model_lock(model):
        for prefix, module in named_modules_of(model):
            for key, tensor in module._parameters.items():
                if tensor is not None and tensor.requires_grad and tensor.numel():
                    named.setdefault(id(tensor), (f"{prefix}.{key}" if prefix else key, tensor))
    return dict(named.values())
