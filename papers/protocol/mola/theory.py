"""Theorem 2 of Eschenhagen et al. (2021), the confidence far from the data, and the mixture weights of equation 10."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace import MixtureLaplace, confidence_bound
from protocol.baselines.ensemble import mean_probabilities
from protocol.data import Split
from protocol.mola.methods import MethodSettings, last_layers, threshold, tune
from protocol.records import Scores

FAR = 1000.0


@torch.no_grad()
def add_theory(scores: Scores, name: str, networks: Sequence[nn.Module], parts: Split, how: MethodSettings) -> None:
    """Mean confidence at 1000 x, with how far MoLA's is below the bound at least, and the weights by the evidence."""
    mixture = MixtureLaplace(last_layers(networks, parts.train))
    tune(mixture, parts.validation, threshold(networks[0], parts.validation, how.margin), how.n_precisions)
    far = FAR * parts.test.x
    confidence = {
        "MAP": networks[0](far).softmax(1).amax(1),
        "DE": mean_probabilities(networks, far).amax(1),
        "MoLA": mixture(far).amax(1),
    }
    for method, values in confidence.items():
        scores.add(f"{name}, far", method, {"confidence": float(values.mean())})
    slack = confidence_bound(mixture, far) - confidence["MoLA"]
    scores.add(f"{name}, far", "MoLA", {"least distance to the bound": float(slack.min())})
    evidences = torch.stack([la.log_marginal_likelihood() for la in mixture.components])
    losses = torch.stack([F.cross_entropy(model(parts.train.x), parts.train.y) for model in networks])
    weights = {
        "largest weight": float(evidences.softmax(0).max()),
        "spread of log evidences": _spread(evidences),
        "spread of training losses": _spread(losses),
    }
    scores.add(f"{name}, weights", "MoLA", weights)


def _spread(values: Tensor) -> float:
    """Standard deviation over the mean."""
    return float(values.std() / values.mean().abs())
