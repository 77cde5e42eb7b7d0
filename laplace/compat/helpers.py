"""Helper functions of the legacy interface that are not linear algebra."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from laplace.compat.kronecker.scalars import is_scalar
from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.enums import LinkApprox, PredType, PriorStructure
from laplace.errors import InvalidArgument, InvalidData
from laplace.metrics import AccumulatingMetric, accepted_by
from laplace.network import next_token
from laplace.network.model_guard import unwrap
from laplace.weights.last_layer import network_of


class Predictor(Protocol):
    """A fitted Laplace approximation, as far as `validate` needs it."""

    model: nn.Module

    def __call__(self, x: Inputs, **options: str | int) -> Tensor | tuple[Tensor, Tensor]:
        """Predictions: probabilities `[B, C]`, or means and variances."""
        ...


def get_nll(out_dist: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log likelihood, in nats, of labels `[B]` under probabilities `[B, C]`; 0-dim."""
    return nn.functional.nll_loss(out_dist.log(), targets)


@torch.no_grad()
def validate(
    laplace: Predictor,
    val_loader: Iterable[Any],
    loss: AccumulatingMetric | Callable[..., Any],
    pred_type: str = PredType.GLM,
    link_approx: str = LinkApprox.PROBIT,
    n_samples: int = 100,
    dict_key_y: str = "labels",
) -> float:
    """Scores the predictions on a loader.

    Args:
        laplace: The fitted approximation.
        val_loader: Batches, pairs or mappings.
        loss: A running metric, updated batch by batch and not reset; or a function of all predictions and targets,
            `loss(probabilities, y)` or `loss(means, variances, y)`.
        pred_type: The predictive.
        link_approx: The link.
        n_samples: Number of Monte-Carlo samples.
        dict_key_y: Key of the targets in batches that are mappings.

    Returns:
        The metric's value, summed over outputs, or the function's.

    Raises:
        InvalidData: The loader is empty.
    """
    options: dict[str, str | int] = {
        "pred_type": pred_type,
        "link_approx": link_approx,
        "n_samples": n_samples,
        "fitting": True,
    }
    running = isinstance(loss, AccumulatingMetric)
    rows: list[tuple[Tensor, ...]] = []
    seen = False
    for batch in val_loader:
        seen = True
        row = _predict(laplace, batch, dict_key_y, options)
        if running:
            loss.update(*accepted_by(loss, row))
        else:
            rows.append(row)
    if not seen:
        raise InvalidData("the validation loader is empty; give at least one batch.")
    value = loss.compute() if running else loss(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    return float(value.sum() if isinstance(value, Tensor) else value)


def _predict(laplace: Predictor, batch: Inputs, dict_key_y: str, options: dict[str, str | int]) -> tuple[Tensor, ...]:
    """(probabilities, y) or (means, variances, y)."""
    x, y = next_token.split(batch, dict_key_y, unwrap(network_of(laplace.model)))
    device = next(laplace.model.parameters()).device
    predicted = laplace(batches.to_device(x, device), **options)
    parts = predicted if isinstance(predicted, tuple) else (predicted,)
    return (*parts, y.to(parts[0].device))


def parameters_per_layer(model: nn.Module) -> list[int]:
    """Number of entries of every parameter tensor, in order."""
    return [parameter.numel() for parameter in model.parameters()]


def expand_prior_precision(prior_prec: Tensor, model: nn.Module) -> Tensor:
    """Spreads prior precisions over the trainable parameters.

    Args:
        prior_prec: `[1]` or 0-dim, one per trainable tensor `[L]`, or one per parameter `[P]`.
        model: The network.

    Returns:
        `[P]`, with the graph of `prior_prec`.

    Raises:
        InvalidArgument: It has another shape.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    sizes = [p.numel() for p in trainable]
    vector = prior_prec.reshape(-1).to(trainable[0].device) if trainable else prior_prec
    if prior_prec.ndim <= 1 and len(vector) == 1:
        return vector.expand(sum(sizes))
    if prior_prec.ndim == 1 and len(vector) == sum(sizes):
        return vector
    if prior_prec.ndim == 1 and len(vector) == len(sizes):
        return torch.repeat_interleave(vector, torch.tensor(sizes, device=vector.device))
    raise InvalidArgument(
        f"the prior precision has shape {list(prior_prec.shape)}; accepted are [1], [{len(sizes)}] (one per trainable "
        f"tensor) and [{sum(sizes)}] (one per trainable parameter)."
    )


def fix_prior_prec_structure(
    prior_prec_init: float,
    prior_structure: str,
    n_layers: int,
    n_params: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A constant prior precision of a structure: `[1]`, `[n_layers]` or `[n_params]`.

    Raises:
        InvalidArgument: The structure is unknown.
    """
    lengths: dict[str, int] = {
        PriorStructure.SCALAR: 1,
        PriorStructure.LAYERWISE: n_layers,
        PriorStructure.DIAG: n_params,
    }
    if prior_structure not in lengths:
        raise InvalidArgument(f"prior_structure={prior_structure!r}; accepted are {[str(key) for key in lengths]}.")
    return torch.full((lengths[prior_structure],), prior_prec_init, device=device, dtype=dtype)


class SoDSampler(Sampler[int]):
    """Draws M of N indices without replacement, the same at every iteration.

    Args:
        N: Number of data.
        M: Number of indices, at most N.
        seed: Seed of the choice.

    Raises:
        InvalidArgument: M is not between 1 and N.
    """

    def __init__(self, N: int, M: int, seed: int = 0) -> None:
        if not 1 <= M <= N:
            raise InvalidArgument(f"M={M} of N={N} data were asked for; accepted is 1 to N.")
        import numpy as np

        self.indices: list[int] = np.random.default_rng(seed).choice(N, M, replace=False).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def _is_valid_scalar(scalar: object) -> TypeGuard[float | Tensor]:
    """True if `scalar` is a real number or a tensor with one element and at most one dimension."""
    return is_scalar(scalar)


def _is_batchnorm(module: nn.Module) -> bool:
    """True if a module is a batch normalisation of any dimension."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _all_subclasses(cls: type) -> set[type]:
    """All subclasses of a class, of any depth."""
    direct = set(cls.__subclasses__())
    return direct.union(*(_all_subclasses(child) for child in direct))
