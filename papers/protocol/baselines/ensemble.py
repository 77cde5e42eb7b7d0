"""Deep ensembles (Lakshminarayanan et al., 2017), and the mean prediction of any list of networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from protocol.data import Part
from protocol.training import Augment, Training, train

MEMBER_SEEDS = 1000
"""Seeds of the members are seed · 1000 + 0, 1, …: no two experiments share a network."""


def deep_ensemble(
    make: Callable[[int], nn.Module],
    data: Part,
    how: Training,
    seed: int,
    n_members: int = 5,
    augment: Augment | None = None,
) -> list[nn.Module]:
    """MAP networks of as many seeds; the first is the one that stands for MAP elsewhere.

    Args:
        make: An untrained network of a seed.
        data: To train on.
        how: They are trained.
        seed: Of the experiment.
        n_members: Five in Daxberger et al. (2021).
        augment: Of the inputs.
    """
    seeds = range(seed * MEMBER_SEEDS, seed * MEMBER_SEEDS + n_members)
    return [train(make(each), data, how, each, augment) for each in seeds]


@torch.no_grad()
def mean_probabilities(models: Sequence[nn.Module], x: Tensor) -> Tensor:
    """1/S Σ_s softmax f_s(x), `[B, C]`, of networks that are members or samples."""
    total = models[0](x).softmax(1)
    for model in models[1:]:
        total += model(x).softmax(1)
    return total / len(models)


def with_weights(copies: Iterable[nn.Module], samples: Tensor) -> list[nn.Module]:
    """Copies of a network, each with a row of samples `[S, P]` in place of its weights."""
    models = list(copies)
    for model, sample in zip(models, samples, strict=True):
        vector_to_parameters(sample, model.parameters())
    return models
