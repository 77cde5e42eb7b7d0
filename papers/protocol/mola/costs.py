"""Table 2 of Eschenhagen et al. (2021): processor time after training and of a prediction, and what is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace import MixtureLaplace
from laplace.metrics import mean_confidence
from protocol.baselines.ensemble import mean_probabilities
from protocol.baselines.swag import fit_swag
from protocol.data import Part, Split
from protocol.mola.methods import MethodSettings, last_layers, tune
from protocol.networks import cnn
from protocol.wide_resnet import wide_resnet


@dataclass(frozen=True)
class CostSettings:
    """What is measured.

    Attributes:
        n_channels: Of a network that is wide enough for its arithmetic to outweigh the calls.
        n_epochs: Of SWAG that are measured, of all of its iterates.
        n_repeats: Of a prediction, of which the fastest counts.
        depth: Of the wide ResNet whose memory is measured, the paper's.
    """

    n_channels: int = 64
    n_epochs: int = 2
    n_repeats: int = 3
    depth: int = 16


def costs(parts: Split, how: MethodSettings, cost: CostSettings, seed: int) -> dict[str, dict[str, float]]:
    """Seconds of inference (once, tuning included) and of a prediction of the test data, and MiB that are kept.

    The networks are not trained, of which no cost depends. What is kept is that of the paper's network. An epoch of
    SWAG and a mixture's member cost as much as any other: of the iterates a few are measured and multiplied, of MSWAG
    one member.
    """
    n_networks, x = how.n_components, parts.test.x
    n_classes = int(parts.train.y.max()) + 1
    networks = [cnn(n_classes, seed + k, cost.n_channels, x.shape[1], x.shape[-1]).eval() for k in range(n_networks)]
    p = mean_probabilities(networks[:1], parts.validation.x)
    wanted = (1 + float(mean_confidence(p))) / 2  # between no and full confidence
    components, seconds = _timed(lambda: last_layers(networks[:1], parts.train))
    tuning = _timed(lambda: tune(components[0], parts.validation, wanted, how.n_precisions))[1]
    mixture, all_seconds = _timed(lambda: MixtureLaplace(last_layers(networks, parts.train)))
    all_tuning = _timed(lambda: tune(mixture, parts.validation, wanted, how.n_precisions))[1]
    few = replace(how.swag, n_snapshots=cost.n_epochs)
    gaussian, epochs = _timed(lambda: fit_swag(networks[0], parts.train, few, seed))
    swag = epochs * how.swag.n_snapshots / cost.n_epochs
    samples = gaussian.networks(how.n_swag_samples, parts.train, torch.Generator().manual_seed(seed))
    of_swag = _fastest(lambda: mean_probabilities(samples, x), 1)
    la = components[0]
    found = {
        "MAP": (0.0, _fastest(lambda: mean_probabilities(networks[:1], x), cost.n_repeats)),
        "LLLA": (seconds + tuning, _fastest(lambda: la(x), cost.n_repeats)),
        "SWAG": (swag, of_swag),
        "DE": (0.0, _fastest(lambda: mean_probabilities(networks, x), cost.n_repeats)),
        "MoLA": (all_seconds + all_tuning, _fastest(lambda: mixture(x), cost.n_repeats)),
        "MSWAG": (n_networks * swag, n_networks * of_swag),
    }
    kept = _kept(how, cost, seed)
    return {
        name: {"inference": inference, "prediction": prediction, "memory": kept[name]}
        for name, (inference, prediction) in found.items()
    }


def _kept(how: MethodSettings, cost: CostSettings, seed: int) -> dict[str, float]:
    """MiB of a wide ResNet, its factors, and SWAG's mean, variance and deviations; images are small and random."""
    network, n_images = wide_resnet(10, seed, cost.depth).eval(), 300  # more than features, for factors of full rank
    images = torch.rand(n_images, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    (la,) = last_layers([network], Part(images, torch.arange(n_images) % 10))
    network_alone, factors = mebibytes(network.state_dict()), mebibytes(la.state_dict())
    single = {
        "MAP": network_alone,
        "LLLA": network_alone + factors,
        "SWAG": (2 + how.swag.rank) * mebibytes(dict(network.named_parameters())),
    }
    several = {"DE": "MAP", "MoLA": "LLLA", "MSWAG": "SWAG"}
    return single | {name: how.n_components * single[one] for name, one in several.items()}


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    found = function()
    return found, time.process_time() - start


@torch.no_grad()
def _fastest(function: Callable[[], Any], n_repeats: int) -> float:
    return min(_timed(function)[1] for _ in range(n_repeats))


def mebibytes(state: Any) -> float:
    """Size of all tensors in nested containers."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size() / 2**20
    if isinstance(state, Mapping):
        return sum(mebibytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(mebibytes(value) for value in state)
    return 0.0
