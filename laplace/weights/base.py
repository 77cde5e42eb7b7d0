"""Choices of the weights with a distribution, which turn a model into a `Problem`: all of them, or a subnetwork."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laplace.core.batch import ForwardFn, Inputs
from laplace.core.layout import flatten
from laplace.errors import InvalidArgument, InvalidType, UnsupportedError
from laplace.network.fsdp import fsdp_processes, require_unsharded
from laplace.network.model_guard import model_lock, require_module, unwrap
from laplace.network.watch import DeterminismCheck
from laplace.weights.problem import Caller, ParameterSlice, Problem


class Weights:
    """A choice of random weights, bound to a model; what is found out later makes another one.

    Args:
        model: The network, kept by reference and never written to.
        forward_fn: How to call it, or None for the default of `laplace.core.batch.call`.

    Raises:
        InvalidType: The network is no module.
        UnsupportedError: Its weights are sharded over processes, which this choice does not take.

    Attributes:
        arguments: Names that posteriors' constructors have for its options, with its own names for them.
        takes_fsdp: Whether the network may be sharded over processes by FSDP2.
        fsdp_processes: Those processes; None of a whole network.
    """

    arguments: ClassVar[Mapping[str, str]] = {}
    takes_fsdp: ClassVar[bool] = False

    def __init__(self, model: nn.Module, forward_fn: ForwardFn | None = None) -> None:
        self._given = model
        self.model = unwrap(require_module(model))
        self.fsdp_processes = fsdp_processes(self.model)  # refuses those that are sharded in other ways than by FSDP2
        if not self.takes_fsdp:
            require_unsharded(self.model, f"{type(self).__name__} runs a part of it on its own")
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

    def set_extractor_head(self) -> None:
        """Tells the network as users see it which coordinates are random, where that was found out."""

    def discover(self, x: Inputs, first: DeterminismCheck | None = None) -> Problem:
        """The problem, found from one batch of inputs where it is not known from the start.

        Args:
            x: Inputs.
            first: What looks at the first batch of a fit, for which a pass that is made here serves; None without one.

        Raises:
            UnsupportedError: A class that neither knows its problem from the start nor defines this method.
        """
        if self.problem is None:
            raise UnsupportedError(f"{type(self).__name__} does not say which weights are random; define `discover`.")
        return self.problem

    def embed(self, samples: Tensor) -> Tensor:
        """Samples `[S, P]` of the random coordinates as users expect them from `la.sample`."""
        return samples

    def restrict_prior(self, values: Tensor) -> Tensor:
        """A prior `[n]` given for more than the random coordinates, restricted to them; others are returned as is."""
        return values

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
        return self.model if self.forward_fn is None else Caller(self.model, self.forward_fn)

    def state(self) -> dict[str, Any]:
        """Identification of the choice in a state dict."""
        return {}


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Parameters with `requires_grad`, by name, tied ones once, in `model.parameters()` order; none without entries."""
    named: dict[int, tuple[str, Tensor]] = {}
    with model_lock(model):
        for prefix, module in model.named_modules():
            for key, tensor in module._parameters.items():
                if tensor is not None and tensor.requires_grad and tensor.numel():
                    named.setdefault(id(tensor), (f"{prefix}.{key}" if prefix else key, tensor))
    return dict(named.values())


class AllWeights(Weights):
    """Treats every tensor that requires gradients at construction.

    Raises:
        InvalidArgument: No tensor does, or there is none.
    """

    takes_fsdp = True

    def __init__(self, model: nn.Module, forward_fn: ForwardFn | None = None) -> None:
        super().__init__(model, forward_fn)
        tensors = trainable(self.model)
        if not tensors and next(self.model.parameters(), None) is None:
            raise InvalidArgument(
                f"the model, a {type(self.model).__name__}, has no parameter that could be random (layers in a plain "
                "list are not registered: see nn.ModuleList)."
            )
        if not tensors:
            raise InvalidArgument(
                "every parameter of the model is frozen (requires_grad=False) or has no entries, so no weight can be "
                "random; unfreeze some (adapters of PEFT are loaded frozen without is_trainable=True), or use "
                "subset_of_weights='last_layer', which works with a frozen head."
            )
        slots = tuple(ParameterSlice(name, tensor.shape) for name, tensor in tensors.items())
        self._problem = Problem(self.model, slots, forward_fn)


class Subnetwork(Weights):
    """Treats the given entries and keeps all others at their trained values [Redux, appendix eq. 5].

    Args:
        model: The network.
        indices: `[p]` distinct int64 indices of the flattened trainable parameters; in whatever order they are
            given, means, priors and curvatures of the subnetwork are in ascending order.
        forward_fn: How to call it.

    Raises:
        InvalidType: `indices` is not an int64 tensor.
        InvalidArgument: Not one-dimensional, empty, out of range or with duplicates.
    """

    arguments = {"subnetwork_indices": "indices"}  # noqa: RUF012

    def __init__(self, model: nn.Module, indices: Tensor, forward_fn: ForwardFn | None = None) -> None:
        super().__init__(model, forward_fn)
        self._tensors = {name: tensor.shape for name, tensor in trainable(self.model).items()}
        self.n_params_full = sum(shape.numel() for shape in self._tensors.values())
        self.indices = _checked(indices, self.n_params_full)
        self._order = self.indices.sort().values
        self._problem = Problem(self.model, self._slots(), forward_fn)
        self._layout = self._problem.layout

    def _slots(self) -> tuple[ParameterSlice, ...]:
        slots: list[ParameterSlice] = []
        start = 0
        for name, shape in self._tensors.items():
            inside = self._order[(self._order >= start) & (self._order < start + shape.numel())] - start
            if len(inside):
                slots.append(ParameterSlice(name, shape, None if len(inside) == shape.numel() else inside))
            start += shape.numel()
        return tuple(slots)

    def embed(self, samples: Tensor) -> Tensor:
        """`[S, all trainable parameters]`: the entries outside of the subnetwork at their trained values."""
        with model_lock(self.model):
            parameters = dict(self.model.named_parameters())
            whole = flatten([parameters[name].detach() for name in self._tensors]).to(samples)
        return whole.repeat(len(samples), 1).index_copy(1, self._order.to(samples.device), samples)

    def restrict_prior(self, values: Tensor) -> Tensor:
        """Takes a prior for every trainable parameter or tensor down to the subnetwork's."""
        layout = self._layout
        if values.numel() in (1, layout.n_params, layout.n_tensors):
            return values
        if values.numel() == self.n_params_full:
            return values[self._order.to(values.device)]
        if values.numel() == len(self._tensors):
            chosen = [i for i, name in enumerate(self._tensors) if name in layout.names]
            return values[torch.tensor(chosen, device=values.device)]
        return values

    def for_backend(self, problem: Problem) -> tuple[nn.Module, dict[str, Any]]:
        return self.called, {"subnetwork_indices": self._order}

    def state(self) -> dict[str, Any]:
        return {"subnetwork_indices": self._order.clone()}


def _checked(indices: Tensor, n_params: int) -> Tensor:
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        given = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise InvalidType(
            f"subnetwork_indices must be a torch.int64 tensor; {given} was given. Masks of laplace.utils give one by "
            "mask.select(train_loader), a tensor of truth values by values.nonzero().squeeze(1)."
        )
    if indices.ndim != 1 or indices.numel() == 0:
        raise InvalidArgument(
            f"subnetwork_indices must be a non-empty vector; a tensor of shape {tuple(indices.shape)} was given."
        )
    if int(indices.min()) < 0 or int(indices.max()) >= n_params:
        raise InvalidArgument(
            f"subnetwork_indices must lie in [0, {n_params}), the number of trainable parameters; they span "
            f"[{int(indices.min())}, {int(indices.max())}]."
        )
    if len(indices.unique()) != len(indices):
        raise InvalidArgument("subnetwork_indices holds duplicates; give every index once.")
    return indices.detach().clone()
