"""A subnetwork: single entries of the flattened vector of trainable parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from laplace.core.batch import ForwardFn, Inputs
from laplace.core.layout import flatten
from laplace.errors import InvalidArgument, InvalidType
from laplace.network.model_guard import model_lock
from laplace.network.watch import FirstBatch
from laplace.weights.base import Weights, trainable
from laplace.weights.problem import ParameterSlice, Problem


class Subnetwork(Weights):
    """Treats the given entries and keeps all others at their trained values.

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
        self._selected = Problem(self.model, self._slots(), forward_fn)
        self._problem = self._selected

    def _slots(self) -> tuple[ParameterSlice, ...]:
        slots: list[ParameterSlice] = []
        start = 0
        for name, shape in self._tensors.items():
            inside = self._order[(self._order >= start) & (self._order < start + shape.numel())] - start
            if len(inside):
                slots.append(ParameterSlice(name, shape, None if len(inside) == shape.numel() else inside))
            start += shape.numel()
        return tuple(slots)

    def discover(self, x: Inputs, first: FirstBatch | None = None) -> Problem:
        return self.problem or self._selected

    def embed(self, samples: Tensor) -> Tensor:
        """`[S, all trainable parameters]`: the entries outside of the subnetwork at their trained values."""
        with model_lock(self.model):
            parameters = dict(self.model.named_parameters())
            whole = flatten([parameters[name].detach() for name in self._tensors]).to(samples)
        return whole.repeat(len(samples), 1).index_copy(1, self._order.to(samples.device), samples)

    def restrict_prior(self, values: Tensor) -> Tensor:
        """Takes a prior for every trainable parameter or tensor down to the subnetwork's."""
        layout = self._selected.layout
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
