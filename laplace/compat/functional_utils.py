"""Batch, loader and sampling helpers of the legacy function-space classes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.gaussian import Gaussian
from laplace.errors import InvalidData, InvalidType, StateError
from laplace.network.model_guard import gradients_set_aside


class _HasModel(Protocol):
    model: nn.Module


P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner", bound=_HasModel)

_DEFAULT_BATCH = 128  # Where a loader's own batch size is unknown (a custom batch sampler).


def split_batch(batch: Inputs, dict_key_y: str = "labels") -> tuple[Inputs, Tensor]:
    """Inputs and targets of a batch, a pair or a mapping (which is its own input).

    Raises:
        InvalidData: The batch has another form.
    """
    return batches.split(batch, dict_key_y)


def batch_size(x: Inputs, dict_key_x: str = "input_ids") -> int:
    """Number of rows of a tensor, or of a mapping of tensors.

    Raises:
        InvalidData: There is no tensor with a leading dimension.
    """
    return batches.size(x, dict_key_x)


def to_device(x: Inputs, device: torch.device | str, dtype: torch.dtype | None = None) -> Inputs:
    """Moves every tensor among the inputs, and casts the floating-point ones to `dtype` if one is given."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return batches.transform(x, move)


def select_rows(x: Inputs, indices: Tensor | slice | Sequence[int]) -> Inputs:
    """Rows of a tensor, or of every tensor of a mapping."""
    rows = indices if isinstance(indices, slice) else torch.as_tensor(indices)
    return batches.transform(x, lambda tensor: tensor[rows.to(tensor.device) if isinstance(rows, Tensor) else rows])


def concatenate_rows(parts: Sequence[Inputs]) -> Inputs:
    """One tensor, or one mapping, of the rows of several with the same keys.

    Raises:
        InvalidData: There are no parts, or they differ in kind or keys.
    """
    if not parts:
        raise InvalidData("there are no rows to concatenate; give at least one batch.")
    if isinstance(parts[0], Tensor) and all(isinstance(part, Tensor) for part in parts):
        return torch.cat(list(parts))
    if not all(isinstance(part, Mapping) and set(part) == set(parts[0]) for part in parts):
        raise InvalidData(
            "batches of different kinds or keys cannot be concatenated; give all as tensors or alike mappings."
        )
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def regression_targets(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets on the device and in the dtype of the outputs.

    Raises:
        InvalidData: The shapes differ.
    """
    if targets.shape != outputs.shape:
        raise InvalidData(
            f"regression targets have shape {list(targets.shape)} and outputs {list(outputs.shape)}; they must be "
            "equal. Reshape the targets, for instance by y.unsqueeze(-1)."
        )
    return targets.to(outputs)


def classification_targets(targets: Tensor, n_outputs: int) -> Tensor:
    """Class indices `[B]`, int64, from indices `[B]` or `[B, 1]`, or from one-hot rows `[B, C]`.

    Raises:
        InvalidData: Another shape, rows that are not one-hot, or indices out of range.
    """
    if targets.ndim == 2 and targets.shape[1] == n_outputs and n_outputs > 1:
        one_hot = ((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all()
        if not bool(one_hot):
            raise InvalidData("targets [B, C] must be one-hot rows; give class indices [B] instead.")
        return targets.argmax(1)
    flat = targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets
    integral = not (flat.is_floating_point() or flat.is_complex())
    if flat.ndim != 1 or not integral or bool(((flat < 0) | (flat >= n_outputs)).any()):
        raise InvalidData(
            f"class targets of shape {list(targets.shape)} and dtype {targets.dtype}; accepted are integers from 0 to "
            f"{n_outputs - 1} of shape [B] or [B, 1], or one-hot rows [B, {n_outputs}]."
        )
    return flat.long()


def training_indices(loader: DataLoader[Any]) -> list[int]:
    """Indices of the data that one pass over the loader sees (samplers and `drop_last` respected), ascending.

    The global random state is left as it was.

    Raises:
        InvalidType: The loader has no indices: its dataset is an iterable.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise InvalidType("the loader's dataset is an iterable without indices; give one with __getitem__.")
    with torch.random.fork_rng(devices=[]):
        if loader.batch_sampler is None:
            return sorted(set(loader.sampler))
        return sorted({index for batch in loader.batch_sampler for index in batch})


def subset_loader(loader: DataLoader[Any], indices: Sequence[int] | Tensor) -> DataLoader[Any]:
    """A loader over some data of another loader's dataset, in the order of `indices`, batched and collated alike."""
    chosen = indices.tolist() if isinstance(indices, Tensor) else list(indices)
    return DataLoader(
        Subset(loader.dataset, chosen),
        batch_size=loader.batch_size or _DEFAULT_BATCH,
        shuffle=False,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
    )


def draw_gaussian(mean: Tensor, covariance: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws from Gaussians whose covariance may be singular.

    Args:
        mean: `[B, C]`, or `[D]` for one joint Gaussian.
        covariance: `[B, C, C]`, `[B, C]`, or joint `[B·C, B·C]`; `[D, D]` for a mean `[D]`.
        n_samples: Number of draws S.
        generator: Source of randomness; the global one if None.

    Returns:
        `[S, B, C]`, or `[S, D]`.

    Raises:
        InvalidArgument: The shapes do not fit.
        CurvatureError: The covariance is not finite.
    """
    if mean.ndim == 1:
        return Gaussian(mean.unsqueeze(0), covariance.unsqueeze(0)).sample(n_samples, generator).squeeze(1)
    return Gaussian(mean, covariance).sample(n_samples, generator)


def same_configuration(first: object, second: object) -> bool:
    """True if two nested configurations are equal, tensors compared entry by entry with shape and dtype."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first.cpu(), second.cpu())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_configuration(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same_configuration, first, second))
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return False
    return bool(first == second)


def _individual_reward_inputs(inputs: Inputs, dict_key_x: str) -> Inputs:
    """Items `[2·B, …]` of pairs `[B, 2, …]`, one pair after the other; what has one row for a pair is repeated.

    Raises:
        InvalidData: The inputs are no pairs.
    """
    x = inputs if isinstance(inputs, Tensor) else batches.tensors(inputs)[0]
    if isinstance(inputs, Mapping) and isinstance(inputs.get(dict_key_x), Tensor):
        x = inputs[dict_key_x]
    if x.ndim < 2 or x.shape[1] != 2:
        raise InvalidData(f"inputs of shape {list(x.shape)} are no pairs; give [B, 2, …], two items for every datum.")

    def items(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or len(tensor) != len(x):
            return tensor
        return tensor.flatten(0, 1) if tensor.shape[1:2] == (2,) else tensor.repeat_interleave(2, 0)

    return batches.transform(inputs, items)


def _model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Copies of a network's parameters and buffers, its trainable parameters, and its modules."""
    return {
        "state_dict": {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()},
        "active_parameters": [
            (name, tuple(p.shape), p.dtype) for name, p in model.named_parameters() if p.requires_grad
        ],
        "module_structure": [
            (name, type(module).__module__, type(module).__qualname__, module.extra_repr())
            for name, module in model.named_modules()
        ],
    }


def _check_model_fingerprint(model: nn.Module, fingerprint: Mapping[str, Any]) -> None:
    """Refuses another network than that of a fingerprint.

    Raises:
        StateError: Parameters, buffers, trainable parameters or modules differ.
    """
    now = _model_fingerprint(model)
    differ = [part for part in now if part not in fingerprint or not same_configuration(now[part], fingerprint[part])]
    if differ:
        raise StateError(f"the network is not that of the fingerprint, whose {' and '.join(differ)} differ.")


def preserve_model_gradients(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """Decorates a method of an object with a `model`: the model's `.grad` are after the call as they were before it."""

    @functools.wraps(method)
    def wrapped(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with gradients_set_aside(self.model):
            return method(self, *args, **kwargs)

    return wrapped
