"""The last layer: the head's tensors on frozen features."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from laplace.core.batch import ForwardFn, Inputs
from laplace.core.positions import as_returned
from laplace.enums import FeatureReduction
from laplace.errors import InvalidArgument
from laplace.network.model_guard import model_lock
from laplace.network.spread import require_whole
from laplace.network.watch import FirstBatch
from laplace.weights.base import Weights
from laplace.weights.discovery import require_linear
from laplace.weights.feature_extractor import FeatureExtractor
from laplace.weights.heads import random_head
from laplace.weights.problem import ParameterSlice, Problem
from laplace.weights.shown_head import CopiedHead


class LastLayer(Weights):
    """Treats the last linear layer; the trunk runs without a graph, and no fit or prediction copies anything.

    The features are fixed, also where the layer's weight is tied to the trunk's (to an embedding, say): only its use in
    the head is random.

    Args:
        model: The network, which may be frozen altogether.
        forward_fn: How to call it.
        name: Name of the layer, or None to find it at `fit` by watching one forward pass.
        reduction: How features with positions `[B, T, D]` are reduced, or None. It is only needed where it saves
            time: without it the positions that the model picks or averages are found by differentiation.

    Raises:
        InvalidArgument: Unknown reduction, or the named module is neither an `nn.Linear` nor a convolution.
    """

    takes_spread = True
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
            model, name, feature_reduction=reduction, forward_fn=as_returned(forward_fn), head=CopiedHead()
        )
        self.reduction = None if reduction is None else str(reduction)
        if name is not None:
            self._problem = self._of(require_linear(self.model, name))

    @property
    def problem(self) -> Problem | None:
        name = self._extractor.last_layer_name
        if self._problem is None and name is not None:
            self._problem = self._of(name)
        return self._problem

    def shown(self, *, enable_backprop: bool) -> nn.Module:
        self._extractor.enable_backprop = enable_backprop
        return self._extractor

    def announce(self) -> None:
        if self.name is not None and self._extractor.last_layer_name is None:
            self._extractor.set_last_layer(self.name)

    def discover(self, x: Inputs, first: FirstBatch | None = None) -> Problem:
        if self.problem is None:
            require_whole(self.model, "the last layer would be found by passes of one process (give last_layer_name=)")
        return self.problem or self._of(random_head(self.model, x, self.forward_fn, first))

    def named(self, name: str) -> Problem:
        return self._of(require_linear(self.model, name))

    def _of(self, name: str) -> Problem:
        """The problem of the layer of this name."""
        with model_lock(self.model):
            return self._of_module(name, self.model.get_submodule(name))

    def _of_module(self, name: str, head: nn.Module) -> Problem:
        if self.reduction is not None and not isinstance(head, nn.Linear):
            raise InvalidArgument(
                f"feature_reduction={self.reduction!r} reduces features [B, T, D]; the last layer {name!r} is of type "
                f"{type(head).__name__}: leave feature_reduction at None."
            )
        prefix = f"{name}." if name else ""
        tensors = {f"{prefix}{key}": tensor for key, tensor in head.named_parameters() if tensor.numel()}
        # A head that is frozen altogether is still random; one with a frozen part keeps that part fixed.
        random = {key: tensor for key, tensor in tensors.items() if tensor.requires_grad} or tensors
        slots = tuple(ParameterSlice(key, tensor.shape) for key, tensor in random.items())
        return Problem(self.model, slots, self.forward_fn, self.reduction, head=name)

    def embed(self, samples: Tensor) -> Tensor:
        return samples

    def restrict_prior(self, values: Tensor) -> Tensor:
        return values

    @property
    def name(self) -> str | None:
        """Name of the layer, None before it is found."""
        return None if self.problem is None else self.problem.head

    def for_backend(self, problem: Problem) -> tuple[nn.Module, dict[str, Any]]:
        name = problem.head if self.forward_fn is None or problem.head is None else f"module.{problem.head}"
        return FeatureExtractor(self.called, name, feature_reduction=self.reduction), {"last_layer": True}

    def state(self) -> dict[str, Any]:
        return {"last_layer_name": self.name}
