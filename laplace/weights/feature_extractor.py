"""`FeatureExtractor`: a network's outputs together with the inputs of its last layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.enums import FeatureReduction
from laplace.errors import InvalidArgument, NotFittedError
from laplace.network.model_guard import hooks_fire, unwrap
from laplace.weights.discovery import find_last_layer, require_linear


class FeatureExtractor(nn.Module):
    """Wraps a network, which it neither copies nor writes to: a hook lives for the length of one call.

    Args:
        model: The network.
        last_layer_name: Name of its last layer, an `nn.Linear`; found by the first call if None.
        enable_backprop: Whether the features keep their graph.
        feature_reduction: How features `[B, T, …, D]` become `[B, D]`: `"pick_first"`, `"pick_last"`, `"average"`;
            None keeps them.

    Raises:
        InvalidArgument: The reduction is unknown, or the name not that of an `nn.Linear`.
    """

    def __init__(
        self,
        model: nn.Module,
        last_layer_name: str | None = None,
        enable_backprop: bool = False,
        feature_reduction: FeatureReduction | str | None = None,
    ) -> None:
        super().__init__()
        if feature_reduction is not None and feature_reduction not in list(FeatureReduction):
            raise InvalidArgument(
                f"feature_reduction={feature_reduction!r}; accepted are None and {[str(r) for r in FeatureReduction]}."
            )
        self.model = model
        self.enable_backprop = enable_backprop
        self.feature_reduction = None if feature_reduction is None else FeatureReduction(feature_reduction)
        self._last_layer_name: str | None = None
        if last_layer_name is not None:
            self.set_last_layer(last_layer_name)

    @property
    def last_layer(self) -> nn.Module | None:
        """The last layer; None until it is known. Not a registered submodule: its weights belong to `model` alone."""
        name = self._last_layer_name
        return None if name is None else unwrap(self.model).get_submodule(name)

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
        self._last_layer_name = find_last_layer(self.model, x)
        return self._output(x)

    def forward(self, x: Inputs) -> Tensor:
        """The network's output; the first call finds the last layer."""
        return self.find_last_layer(x) if self._last_layer_name is None else self._output(x)

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
            self._last_layer_name = find_last_layer(self.model, x)
        output, features = self._watched(x, unwrap(self.model).get_submodule(self._last_layer_name))
        return output, reduce_features(features if self.enable_backprop else features.detach(), self.feature_reduction)

    def _output(self, x: Inputs) -> Tensor:
        return batches.latent(batches.call(self.model, x))

    def _watched(self, x: Inputs, layer: nn.Module) -> tuple[Tensor, Tensor]:
        inner, seen = unwrap(self.model), []

        def keep(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            seen.append(args[0] if args else kwargs["input"])

        handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with hooks_fire(inner):
                output = batches.latent(batches.call(inner, x))
        finally:
            handle.remove()
        if not seen:
            raise NotFittedError(
                f"the last layer {self._last_layer_name!r} was not called on this input; name the one that is called "
                "by set_last_layer."
            )
        return output, seen[-1]


def reduce_features(features: Tensor, reduction: str | None) -> Tensor:
    """Features with positions, `[B, T, …, D]`, as `[B, D]`: the first, the last, or their mean.

    They are as they were without a reduction, or without positions.
    """
    if reduction is None or features.ndim <= 2:
        return features
    positions = features.flatten(1, -2)
    if reduction == FeatureReduction.AVERAGE:
        return positions.mean(1)
    return positions[:, 0 if reduction == FeatureReduction.PICK_FIRST else -1]
