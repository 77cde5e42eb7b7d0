"""The last layer: the head's tensors on frozen features, and the network as users see it around that head."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from laplace.core.batch import ForwardFn, Inputs
from laplace.core.positions import as_returned
from laplace.enums import FeatureReduction
from laplace.errors import InvalidArgument, NotFittedError
from laplace.network.apart import needs_itself, shared
from laplace.network.fsdp import has_sharded_weights, require_unsharded
from laplace.network.model_guard import hooks_fire, model_lock, unwrap
from laplace.network.watch import DeterminismCheck, checksums, same_sums
from laplace.weights.base import Weights
from laplace.weights.discovery import find_last_layer, random_head, require_linear
from laplace.weights.problem import Caller, ParameterSlice, Problem, reduce_features

# ----------------------------------------------------------------------------------------------------------------------
# The choice of weights
# ----------------------------------------------------------------------------------------------------------------------


class LastLayer(Weights):
    """Treats the last linear layer [Redux, appendix eq. 8]; the trunk runs without a graph, and nothing is copied.

    The features are fixed, also where the layer's weight is tied to the trunk's (to an embedding, say): only its use in
    the head is random.

    Args:
        model: The network, which may be frozen altogether.
        forward_fn: How to call it.
        name: Name of the layer, or None to find it at `fit` by watching one forward pass.
        reduction: How features with positions `[B, T, D]` are reduced, or None. It is only needed where it saves
            time: without it the positions that the model picks or averages are found by differentiation.

    Raises:
        InvalidArgument: Unknown reduction, or the named module is no linear layer, see `is_linear`.
    """

    takes_fsdp = True
    arguments = {"last_layer_name": "name", "feature_reduction": "reduction"}  # noqa: RUF012

    def __init__(
        self,
        model: nn.Module,
        forward_fn: ForwardFn | None = None,
        name: str | None = None,
        reduction: FeatureReduction | str | None = None,
    ) -> None:
        super().__init__(model, forward_fn)
        self._extractor = FeatureExtractor(
            model, name, feature_reduction=reduction, forward_fn=as_returned(forward_fn), head=HeadCopy()
        )
        self.reduction = None if reduction is None else str(reduction)
        if name is not None:
            self._problem = self.named(name)

    @property
    def problem(self) -> Problem | None:
        name = self._extractor.last_layer_name
        if self._problem is None and name is not None:
            self._problem = self.named(name)
        return self._problem

    @property
    def name(self) -> str | None:
        """Name of the layer, None before it is found."""
        return None if self.problem is None else self.problem.head

    def named(self, name: str) -> Problem:
        name = require_linear(self.model, name)
        with model_lock(self.model):
            head = self.model.get_submodule(name)
            if self.reduction is not None and not isinstance(head, nn.Linear):
                raise InvalidArgument(
                    f"feature_reduction={self.reduction!r} reduces features [B, T, D]; the last layer {name!r} is of "
                    f"type {type(head).__name__}: leave feature_reduction at None."
                )
            prefix = f"{name}." if name else ""
            tensors = {f"{prefix}{key}": tensor for key, tensor in head.named_parameters() if tensor.numel()}
        # A head that is frozen altogether is still random; one with a frozen part keeps that part fixed.
        random = {key: tensor for key, tensor in tensors.items() if tensor.requires_grad} or tensors
        slots = tuple(ParameterSlice(key, tensor.shape) for key, tensor in random.items())
        return Problem(self.model, slots, self.forward_fn, self.reduction, head=name)

    def discover(self, x: Inputs, first: DeterminismCheck | None = None) -> Problem:
        if self.problem is not None:
            return self.problem
        require_unsharded(self.model, "the last layer would be found by passes of one process (give last_layer_name=)")
        return self.named(random_head(self.model, x, self.forward_fn, first))

    def shown(self, *, enable_backprop: bool) -> nn.Module:
        self._extractor.enable_backprop = enable_backprop
        return self._extractor

    def set_extractor_head(self) -> None:
        if self.name is not None and self._extractor.last_layer_name is None:
            self._extractor.set_last_layer(self.name)

    def for_backend(self, problem: Problem) -> tuple[nn.Module, dict[str, Any]]:
        name = problem.head if self.forward_fn is None or problem.head is None else f"module.{problem.head}"
        return FeatureExtractor(self.called, name, feature_reduction=self.reduction), {"last_layer": True}

    def state(self) -> dict[str, Any]:
        return {"last_layer_name": self.name}


# ----------------------------------------------------------------------------------------------------------------------
# The network with its features, as users see it
# ----------------------------------------------------------------------------------------------------------------------


class FeatureExtractor(nn.Module):
    """Wraps a network, which it neither copies nor writes to: a hook lives for the length of one call.

    `la.model` of a last-layer posterior is one, around the network that was given, which is its `model`. There
    `last_layer` is a copy of the head: samples of the posterior that are loaded into it reach `la.model(x)` and
    `forward_with_features`, and neither the network nor the posterior. Gradients of these calls lead to the copy and to
    the network. A constructor that is given `la.model` takes the network.

    Args:
        model: The network.
        last_layer_name: Name of its last layer, an `nn.Linear`; found by the first call if None.
        enable_backprop: Whether the features keep their graph.
        feature_reduction: How features `[B, T, …, D]` become `[B, D]`: `"pick_first"`, `"pick_last"`, `"average"`;
            None keeps them.
        forward_fn: How to call the network on inputs; None for `model(x)`.
        head: Which module stands for the last layer; the network's own if None.

    Attributes:
        model: The network.

    Raises:
        InvalidArgument: The reduction is unknown, or the name not that of an `nn.Linear`.
    """

    def __init__(
        self,
        model: nn.Module,
        last_layer_name: str | None = None,
        enable_backprop: bool = False,
        feature_reduction: FeatureReduction | str | None = None,
        *,
        forward_fn: ForwardFn | None = None,
        head: HeadView | None = None,
    ) -> None:
        super().__init__()
        if feature_reduction is not None and feature_reduction not in list(FeatureReduction):
            raise InvalidArgument(
                f"feature_reduction={feature_reduction!r}; accepted are None and {[str(r) for r in FeatureReduction]}."
            )
        self.model = model
        self.enable_backprop = enable_backprop
        self.feature_reduction = None if feature_reduction is None else FeatureReduction(feature_reduction)
        self._forward_fn = forward_fn
        self._head = head or HeadView()
        self._last_layer_name: str | None = None
        if last_layer_name is not None:
            self.set_last_layer(last_layer_name)

    @property
    def last_layer(self) -> nn.Module | None:
        """The last layer; None until it is known. Not a submodule, so that its parameters are not listed twice."""
        return None if self._last_layer_name is None else self._head.shown(self._layer(self._last_layer_name))

    @property
    def last_layer_name(self) -> str | None:
        """Name of the last layer in the network; None until it is known."""
        return self._last_layer_name

    def set_last_layer(self, last_layer_name: str) -> None:
        """Names the last layer.

        Raises:
            InvalidArgument: The network has no `nn.Linear` of this name.
        """
        self._last_layer_name = require_linear(self.model, last_layer_name)

    def find_last_layer(self, x: Inputs) -> Tensor:
        """Finds the last layer by a forward pass on `x`.

        Returns:
            The network's output on x.

        Raises:
            InvalidArgument: It is known already, or cannot be found.
        """
        if self._last_layer_name is not None:
            raise InvalidArgument(f"the last layer is known already, {self._last_layer_name!r}; make a new extractor.")
        return self._run(self.model, x, self._found(x))

    def forward(self, x: Inputs) -> Tensor:
        """The network's output; the first call finds the last layer."""
        return self._run(self.model, x, self._found(x))

    def forward_with_features(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Output and features of a batch.

        Args:
            x: A batch of B inputs.

        Returns:
            Output `[B, C]` and features `[B, D]` (`[B, T, …, D]` if they are not reduced), detached unless
            `enable_backprop`.

        Raises:
            InvalidArgument: The last layer cannot be found.
            NotFittedError: The last layer did not run on x.
        """
        name, inner, seen = self._found(x), unwrap(self.model), []

        def keep(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            seen.append(args[0] if args else kwargs["input"])

        handle = self._layer(name).register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with hooks_fire(inner):
                output = self._run(inner, x, name)
        finally:
            handle.remove()
        if not seen:
            raise NotFittedError(
                f"the last layer {name!r} was not called on this input; name the one that is called by set_last_layer."
            )
        features = seen[-1] if self.enable_backprop else seen[-1].detach()
        return output, reduce_features(features, self.feature_reduction)

    def _found(self, x: Inputs) -> str:
        """Name of the last layer, found now where it is not known."""
        if self._last_layer_name is None:
            self._last_layer_name = self._head.find(unwrap(self.model), x, self._forward_fn)
        return self._last_layer_name

    def _layer(self, name: str) -> nn.Module:
        return unwrap(self.model).get_submodule(name)

    def _run(self, network: nn.Module, x: Inputs, name: str) -> Tensor:
        """Output of the network, whose last layer runs with the tensors of the one that stands for it."""
        inner = unwrap(network)
        tensors = self._head.substitutes(self._layer(name), alone=inner is network)
        if not tensors:
            return Caller(network, self._forward_fn)(x)
        if needs_itself(inner, self._forward_fn):
            prefix = f"module.{name}." if name else "module."
            substitutes = {f"{prefix}{key}": tensor for key, tensor in tensors.items()}
            with model_lock(inner), hooks_fire(inner):
                return functional_call(Caller(inner, self._forward_fn), substitutes, (x,), tie_weights=False)
        own = shared(inner)
        for key, tensor in tensors.items():
            *path, last = key.split(".")
            own.get_submodule(".".join(filter(None, [name, *path])))._parameters[last] = tensor  # pyright: ignore
        return Caller(own, self._forward_fn)(x)

    def of_network(self) -> FeatureExtractor:
        """An extractor of the network's own last layer, for backends that differentiate it."""
        if type(self._head) is HeadView:
            return self
        return FeatureExtractor(
            self.model, self._last_layer_name, self.enable_backprop, self.feature_reduction, forward_fn=self._forward_fn
        )


def network_of(model: nn.Module) -> nn.Module:
    """The network inside an extractor, as `la.model` is one; other modules as they are."""
    while isinstance(model, FeatureExtractor):
        model = model.model
    return model


class HeadView:
    """The last layer as an extractor shows and runs it: here the network's own layer, the last one to run."""

    def find(self, model: nn.Module, x: Inputs, forward_fn: ForwardFn | None) -> str:
        """Name of the last layer of a network, by passes on `x`."""
        return find_last_layer(model, x, forward_fn)

    def shown(self, layer: nn.Module) -> nn.Module:
        """The module that stands for the network's layer."""
        return layer

    def substitutes(self, layer: nn.Module, *, alone: bool) -> Mapping[str, Tensor]:
        """Tensors to run the layer with in place of its own; `alone`: no other module wraps the network."""
        return {}


class HeadCopy(HeadView):
    """A copy of the layer that a last-layer posterior makes random, for users to load samples into.

    It has memory of its own from the moment when it is first asked for, and runs in the layer's place. It is made anew
    once the network's layer has other numbers, or another device or dtype, than when it was copied: after training, for
    one. Before, passes that record a graph run with its parameters, too, which still share the layer's memory, so that
    gradients lead to them whatever was first, the pass or the question. They lead to the network's own tensors as well.
    """

    def __init__(self) -> None:
        self._copy: nn.Module | None = None
        self._copied: tuple[Any, Tensor] | None = None

    def find(self, model: nn.Module, x: Inputs, forward_fn: ForwardFn | None) -> str:
        return random_head(model, x, forward_fn)

    def shown(self, layer: nn.Module) -> nn.Module:
        current = self._current(layer)
        if current is not None:
            return current
        if self._copied is None and self._copy is not None and _share_memory(self._copy, layer):
            current = self._copy
            for parameter in current.parameters():  # to which a user may write from here on
                parameter.data = parameter.data.clone()
        else:
            current = self._copy = copy.deepcopy(layer)
        self._copied = _devices_and_dtypes(layer), checksums(layer)
        return current

    def substitutes(self, layer: nn.Module, *, alone: bool) -> Mapping[str, Tensor]:
        originals = dict(layer.named_parameters())
        graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in originals.values())
        current = self._current(layer)
        if current is None:
            plain = all(
                isinstance(tensor, nn.Parameter) for tensor in originals.values()
            )  # and not a user's functional_call
            if not graph or not alone or not plain or has_sharded_weights(layer):
                return {}
            if self._copied is not None or self._copy is None or not _share_memory(self._copy, layer):
                shared = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in layer.parameters()}
                self._copy, self._copied = copy.deepcopy(layer, shared), None
            current = self._copy
        # Samples may have another dtype than a network in half precision.
        tensors = {name: tensor.to(originals[name]) for name, tensor in current.named_parameters()}
        if not graph:
            return tensors
        return {name: tensor + (originals[name] - originals[name].detach()) for name, tensor in tensors.items()}

    def _current(self, layer: nn.Module) -> nn.Module | None:
        """The copy that was shown, if it is of the layer as it is now."""
        if self._copy is None or self._copied is None:
            return None
        places, sums = self._copied
        return self._copy if places == _devices_and_dtypes(layer) and same_sums(sums, checksums(layer)) else None

    def __getstate__(self) -> dict[str, Any]:
        """Without parameters that share the layer's memory: in copies and pickles they would no more."""
        return {"_copy": None if self._copied is None else self._copy, "_copied": self._copied}


def _share_memory(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape for a, b in pairs)


def _devices_and_dtypes(layer: nn.Module) -> list[Any]:
    return [(parameter.device, parameter.dtype) for parameter in layer.parameters()]
