"""Every trainable parameter."""

from __future__ import annotations

from torch import Tensor, nn

from laplace.core.batch import ForwardFn, Inputs
from laplace.errors import InvalidArgument
from laplace.network.watch import FirstBatch
from laplace.weights.base import Weights, trainable
from laplace.weights.problem import ParameterSlice, Problem


class AllWeights(Weights):
    """Treats every tensor that requires gradients at construction.

    Raises:
        InvalidArgument: No tensor does, or there is none.
    """

    takes_spread = True

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
        self._whole = Problem(self.model, slots, forward_fn)
        self._problem = self._whole

    def discover(self, x: Inputs, first: FirstBatch | None = None) -> Problem:
        return self.problem or self._whole

    def embed(self, samples: Tensor) -> Tensor:
        return samples

    def restrict_prior(self, values: Tensor) -> Tensor:
        return values
