"""SWAG (Maddox et al., 2019): a Gaussian through the iterates of SGD with a constant learning rate.

Its mean is that of the iterates θ_1, …, θ_T, its covariance half diagonal and half of low rank,

    θ = θ̄ + √(½ var) z_1 + D z_2 / √(2 (K − 1)),    D = [θ_t − θ̄_t for the last K of t], θ̄_t the mean up to t.

Daxberger et al. (2021, C.2) take 40 iterates, one per epoch, 30 samples, and a learning rate from a grid by a threshold
on the mean confidence. Where a network has batch normalisation, its statistics are those of the sampled weights.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from laplace.metrics import mean_confidence
from protocol.baselines.ensemble import mean_probabilities, with_weights
from protocol.data import Part
from protocol.training import Augment, Loss

RATES = (1e-1, 5e-2, 1e-2, 5e-3, 1e-3)
"""The grid of the papers for MNIST."""


@dataclass(frozen=True)
class SwagSettings:
    """How the iterates are made.

    Attributes:
        rate: Of SGD, constant.
        n_snapshots: Iterates T.
        n_epochs_between: Iterates.
        rank: K, at most T.
        momentum: Of SGD.
        weight_decay: That of the training before.
        batch_size: Of the batches.
    """

    rate: float = 1e-2
    n_snapshots: int = 40
    n_epochs_between: int = 1
    rank: int = 20
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 64

    def at(self, rate: float) -> SwagSettings:
        """The same with another learning rate."""
        return replace(self, rate=rate)


@dataclass(frozen=True)
class Swag:
    """The Gaussian.

    Attributes:
        model: The network, whose weights are replaced.
        mean: θ̄, `[P]`.
        variance: 1/T Σ θ² − θ̄², `[P]`.
        deviations: Rows of Dᵀ, `[K, P]`.
    """

    model: nn.Module
    mean: Tensor
    variance: Tensor
    deviations: Tensor

    def sample(self, n_samples: int, generator: torch.Generator) -> Tensor:
        """Weights `[S, P]`."""
        rank = len(self.deviations)
        first = torch.randn(n_samples, len(self.mean), generator=generator)
        second = torch.randn(n_samples, rank, generator=generator)
        low_rank = second @ self.deviations / (2 * max(rank - 1, 1)) ** 0.5
        return self.mean + (self.variance / 2).sqrt() * first + low_rank

    def networks(self, n_samples: int, data: Part, generator: torch.Generator) -> list[nn.Module]:
        """Sampled networks, to be given to `mean_probabilities`; data are those of the statistics of batch norm."""
        copies = (copy.deepcopy(self.model) for _ in range(n_samples))
        models = with_weights(copies, self.sample(n_samples, generator))
        for model in models:
            renew_batch_norm(model, data)
        return models


def fit_swag(
    model: nn.Module,
    data: Part,
    how: SwagSettings,
    seed: int,
    augment: Augment | None = None,
    loss: Loss = F.cross_entropy,
) -> Swag:
    """Trains a copy of a trained network on, and takes the moments of its iterates."""
    generator = torch.Generator().manual_seed(seed)
    learner = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(
        learner.parameters(), how.rate, how.momentum, weight_decay=how.weight_decay, foreach=True
    )
    iterates: list[Tensor] = []
    for epoch in range(1, how.n_snapshots * how.n_epochs_between + 1):
        for x, y in data.batches(how.batch_size, generator):
            optimizer.zero_grad()
            loss(learner(x if augment is None else augment(x, generator)), y).backward()
            optimizer.step()
        if epoch % how.n_epochs_between == 0:
            iterates.append(parameters_to_vector(learner.parameters()).detach())
    stacked = torch.stack(iterates)
    counts = torch.arange(1, len(stacked) + 1).unsqueeze(1)
    deviations = (stacked - stacked.cumsum(0) / counts)[-how.rank :]
    return Swag(learner.eval(), stacked.mean(0), stacked.var(0, correction=0), deviations)


@torch.no_grad()
def renew_batch_norm(model: nn.Module, data: Part, batch_size: int = 256) -> None:
    """Replaces the statistics of batch normalisation by those of the data; a network without it is left as it is."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    if norms:
        for x in data.x.split(batch_size):
            model(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def choose_rate(
    model: nn.Module,
    data: Part,
    validation: Part,
    how: SwagSettings,
    seed: int,
    threshold: float,
    rates: Sequence[float] = RATES,
    n_samples: int = 30,
) -> tuple[float, list[nn.Module]]:
    """A learning rate, and networks sampled from its Gaussian.

    It is the largest whose mean confidence on validation data reaches a threshold; else the smallest. This is to SWAG
    what the smallest prior precision above that threshold is to Laplace approximations (Eschenhagen et al., 2021, F.4).
    """
    rate: float = min(rates)
    networks: list[nn.Module] = []
    for rate in sorted(rates, reverse=True):
        posterior = fit_swag(model, data, how.at(rate), seed)
        networks = posterior.networks(n_samples, data, torch.Generator().manual_seed(seed))
        p = mean_probabilities(networks, validation.x)
        if float(mean_confidence(p)) >= threshold:  # false for weights that are not finite, too
            break
    return rate, networks
