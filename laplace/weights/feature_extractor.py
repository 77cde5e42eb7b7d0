"""`FeatureExtractor`: a network's outputs together with the inputs of its last layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from laplace.core.batch import ForwardFn, Inputs
from laplace.enums import FeatureReduction
from laplace.errors import InvalidArgument, NotFittedError
from laplace.network.model_guard import hooks_fire, model_lock, unwrap
from laplace.weights.discovery import require_linear
from laplace.weights.problem import Caller, reduce_features
from laplace.weights.shown_head import OwnHead, ShownHead


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
        head: ShownHead | None = None,
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
        self._head = head or OwnHead()
        self._last_layer_name: str | None = None
        if last_layer_name is not None:
            self.set_last_layer(last_layer_name)

    @property
    def last_layer(self) -> nn.Module | None:
        """The last layer; None until it is known. Not a registered submodule: parameters are those of `model` alone."""
        return None if self._last_layer_name is None else self._head.shown(self._own_layer(self._last_layer_name))

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
        self._last_layer_name = self._find(x)
        return self._run(self.model, x, self._last_layer_name)

    def forward(self, x: Inputs) -> Tensor:
        """The network's output; the first call finds the last layer."""
        name = self._last_layer_name
        return self.find_last_layer(x) if name is None else self._run(self.model, x, name)

    def forward_with_features(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Output and features of a batch.

        Args:
            x: Inputs of B data.

        Returns:
            Output `[B, C]` and features `[B, D]` (`[B, T, …, D]` if they are not reduced), detached unless
            `enable_backprop`.

        Raises:
            InvalidArgument: The last layer cannot be found.
            NotFittedError: The last layer did not run on x.
        """
        if self._last_layer_name is None:
            self._last_layer_name = self._find(x)
        output, features = self._watched(x, self._last_layer_name)
        return output, reduce_features(features if self.enable_backprop else features.detach(), self.feature_reduction)

    def _find(self, x: Inputs) -> str:
        return self._head.find(unwrap(self.model), x, self._forward_fn)

    def _own_layer(self, name: str) -> nn.Module:
        """The network's own layer of this name."""
        return unwrap(self.model).get_submodule(name)

    def _run(self, network: nn.Module, x: Inputs, name: str) -> Tensor:
        """Output of the network, whose last layer runs with the tensors of the one that stands for it."""
        inner, prefix = unwrap(network), f"module.{name}." if name else "module."
        tensors = self._head.substitutes(self._own_layer(name), alone=inner is network)
        if not tensors:
            return Caller(network, self._forward_fn)(x)
        substitutes = {f"{prefix}{key}": tensor for key, tensor in tensors.items()}
        with model_lock(inner), hooks_fire(inner):
            return functional_call(Caller(inner, self._forward_fn), substitutes, (x,), tie_weights=False)

    def _watched(self, x: Inputs, name: str) -> tuple[Tensor, Tensor]:
        inner, seen = unwrap(self.model), []

        def keep(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            seen.append(args[0] if args else kwargs["input"])

        handle = self._own_layer(name).register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with hooks_fire(inner):
                output = self._run(inner, x, name)
        finally:
            handle.remove()
        if not seen:
            raise NotFittedError(
                f"the last layer {name!r} was not called on this input; name the one that is called by set_last_layer."
            )
        return output, seen[-1]

    def with_own_head(self) -> FeatureExtractor:
        """The same, of the network's own last layer, for those who differentiate it."""
        if not self._head.copies:
            return self
        return FeatureExtractor(
            self.model, self._last_layer_name, self.enable_backprop, self.feature_reduction, forward_fn=self._forward_fn
        )


def network_of(model: nn.Module) -> nn.Module:
    """The network that an extractor, as `la.model` is one, wraps; other modules as they are."""
    while isinstance(model, FeatureExtractor):
        model = model.model
    return model
