"""The last layer: the head's tensors on frozen features."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.memory import ran_out
from laplace.enums import FeatureReduction
from laplace.errors import ApproximationWarning, InvalidArgument, warn
from laplace.network.model_guard import model_lock
from laplace.weights.base import Weights
from laplace.weights.discovery import find_last_layer, require_linear
from laplace.weights.feature_extractor import FeatureExtractor
from laplace.weights.heads import treated_head
from laplace.weights.problem import ParameterSlice, Problem


class LastLayer(Weights):
    """Treats the last linear layer; the trunk runs without a graph, and nothing is copied.

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

    arguments = {"last_layer_name": "name", "feature_reduction": "reduction"}  # noqa: RUF012

    def __init__(
        self,
        model: nn.Module,
        forward_fn: ForwardFn | None = None,
        name: str | None = None,
        reduction: FeatureReduction | str | None = None,
    ) -> None:
        super().__init__(model, forward_fn)
        known = [str(member) for member in FeatureReduction]
        if reduction is not None and str(reduction) not in known:
            raise InvalidArgument(f"feature_reduction={reduction!r}; accepted are None and {known}.")
        self.reduction = None if reduction is None else str(reduction)
        if name is not None:
            self.problem = self._problem(require_linear(self.model, name))

    def discover(self, x: Inputs) -> Problem:
        if self.problem is not None:
            return self.problem
        self._check_trunk()
        return self._problem(self._found(x))

    def _check_trunk(self) -> None:
        """Warns where the features of a datum depend on its batch, which the head alone does not show."""
        coupled = [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.running_mean is None
        ]
        if coupled:
            warn(
                f"{coupled[0]!r} normalises by the batch at hand, since it has no running statistics: the features of "
                "a datum, and with them fits and predictions, depend on the data beside it. Use "
                "track_running_stats=True, or another norm.",
                ApproximationWarning,
            )

    def _found(self, x: Inputs) -> str:
        """Name of the last layer, by passes of one datum; of the whole batch if the model takes no single datum."""
        rows = batches.tensors(x)
        n_data = rows[0].shape[0] if rows and rows[0].ndim else 1
        few = batches.select(x, slice(0, 1), n_data)
        try:
            name = find_last_layer(self.model, few, self.forward_fn)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if ran_out(error):
                raise
            few, name = x, find_last_layer(self.model, x, self.forward_fn)
        return require_linear(self.model, treated_head(self.model, name, few, self.forward_fn))

    def named(self, name: str) -> Problem:
        return self._problem(require_linear(self.model, name))

    def _problem(self, name: str) -> Problem:
        with model_lock(self.model):
            return self._problem_of(name)

    def _problem_of(self, name: str) -> Problem:
        head = self.model.get_submodule(name)
        if self.reduction is not None and not isinstance(head, nn.Linear):
            raise InvalidArgument(
                f"feature_reduction={self.reduction!r} reduces features [B, T, D]; the last layer {name!r} is of type "
                f"{type(head).__name__}: leave feature_reduction at None."
            )
        prefix = f"{name}." if name else ""
        tensors = {f"{prefix}{key}": tensor for key, tensor in head.named_parameters()}
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
