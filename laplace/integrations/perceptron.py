"""A multilayer perceptron on standardised features, and training by a loss with a Gaussian prior."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace.core.precision_policy import wide_dtype
from laplace.errors import InvalidArgument
from laplace.network.model_guard import preserve_model


class Standardise(nn.Module):
    """(x − mean) / std of every feature, with constants as buffers.

    Args:
        mean: `[D]`.
        std: `[D]`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: NDArray[Any], std: NDArray[Any]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=wide_dtype()))
        self.register_buffer("std", torch.tensor(std, dtype=wide_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        """Standardised features, `[B, D]`."""
        return (x - self.mean) / self.std


def checked_weights(given: Any, n_data: int) -> NDArray[Any]:
    """Weights of data as users give them, `[N]`: None for 1 each, or one number for all.

    Raises:
        InvalidArgument: Another shape, negative or infinite numbers, NaN, or none that is positive.
    """
    weights = np.ones(n_data) if given is None else np.asarray(given, dtype=float)
    weights = np.full(n_data, weights) if weights.ndim == 0 else weights
    if weights.shape != (n_data,) or not np.isfinite(weights).all() or weights.min() < 0 or weights.max() == 0:
        raise InvalidArgument(
            f"sample_weight of shape {weights.shape}; {n_data} finite ones of at least 0 are accepted, not all zero."
        )
    return weights


def moments_of(values: NDArray[Any], weights: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Means and standard deviations `[D]` of values `[N, D]` that count `[N]` times, with 1 in the place of 0.

    Zero is what rounding of equal values leaves: divided by that, a feature that is new by a last digit would be huge.
    """
    mean = np.average(values, axis=0, weights=weights)
    std = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    largest = np.abs(values).max(0)
    return mean, np.where(std > len(values) * np.finfo(float).eps * largest, std, 1.0)


def tensor_for(module: nn.Module, values: NDArray[Any]) -> Tensor:
    """Values in the dtype and on the device of a module's first parameter."""
    like = next(module.parameters())
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def array_of(values: Tensor) -> NDArray[Any]:
    """Values as an array of floats."""
    return values.detach().cpu().numpy().astype(float)


def perceptron(X: NDArray[Any], weights: NDArray[Any], widths: Sequence[int] | int, n_outputs: int) -> nn.Sequential:
    """A perceptron with tanh, in float64, for inputs like X `[N, D]`, which count `[N]` times."""
    sizes = [X.shape[1], *map(int, np.atleast_1d(widths))]
    layers: list[nn.Module] = [Standardise(*moments_of(X, weights))]
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out, dtype=wide_dtype()), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], n_outputs, dtype=wide_dtype()))


def check_outputs(module: nn.Module, x: Tensor, n_outputs: int) -> None:
    """Raises unless a network's outputs at x are `[B, C]`.

    Raises:
        InvalidArgument: They have another shape.
    """
    with torch.no_grad(), preserve_model(module):
        shape = module.eval()(x[:2]).shape
    if tuple(shape) != (len(x[:2]), n_outputs):
        raise InvalidArgument(
            f"the network's outputs of {len(x[:2])} data have shape {list(shape)}; y asks for {n_outputs} outputs, one "
            "per class or value."
        )


def train(
    module: nn.Module,
    data: TensorDataset,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    prior_precision: float,
    n_epochs: int,
    learning_rate: float,
    batch_size: int,
) -> None:
    """Minimises the negative log posterior over Σw, (Σ w loss + δ ‖θ‖² / 2) / Σw, by Adam with a cosine schedule.

    Args:
        module: Changed in place, and left in evaluation mode.
        data: Inputs, targets and weights w.
        loss: Of outputs and targets, `[B]`.
        prior_precision: δ.
        n_epochs: Passes over the data.
        learning_rate: Step size at the start.
        batch_size: Data of a step.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(parameters, learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, n_epochs))
    total = data.tensors[2].sum()
    decay, scale = 0.5 * prior_precision / total, len(data) / total
    module.train()
    for _ in range(n_epochs):
        for x, y, weight in DataLoader(data, batch_size, shuffle=True):
            optimiser.zero_grad()
            squares = torch.stack([parameter.square().sum() for parameter in parameters]).sum()
            (scale * (weight * loss(module(x), y)).mean() + decay * squares).backward()
            optimiser.step()
        schedule.step()
    module.eval()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """PyTorch's random numbers of a seed, and afterwards those that would have come."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
