"""Cyclical stochastic gradient Hamiltonian Monte Carlo (Zhang et al., 2020).

The step falls by a cosine from α₀ to 0 in every of M cycles. Far from a cycle's end the network is trained by SGD with
momentum; towards it noise is added, and the last epochs each leave a sample:

    v ← (1 − η) v − α ∇U(θ) / N + ε,    θ ← θ + v,    ε ~ N(0, 2 η α T / N)  (only towards the end),

with U the negative log posterior. The authors' settings, by their code: four cycles of 50 epochs, noise in the last
five, a sample after each of the last three, 1 − η = 0.9, T = 1/N; α₀ = 0.5 for residual networks.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from protocol.data import Part
from protocol.training import Loss


@dataclass(frozen=True)
class CyclicalSettings:
    """How the chain runs.

    Attributes:
        n_cycles: M.
        n_epochs: Of a cycle.
        n_samples: Of a cycle: its last epochs.
        n_noisy: The last epochs of a cycle that have noise.
        rate: α₀.
        friction: η.
        weight_decay: ½ w ‖θ‖² is added to the mean loss, so that the prior precision is w N.
        batch_size: Of the batches.
    """

    n_cycles: int = 4
    n_epochs: int = 50
    n_samples: int = 3
    n_noisy: int = 5
    rate: float = 0.1
    friction: float = 0.1
    weight_decay: float = 5e-4
    batch_size: int = 64


def sample_networks(
    model: nn.Module, data: Part, how: CyclicalSettings, seed: int, loss: Loss = F.cross_entropy
) -> list[nn.Module]:
    """Samples of all cycles, from the weights of an untrained network.

    Args:
        model: Where the chain starts; it is left as it is.
        data: To train on.
        how: The chain runs.
        seed: Of order and noise.
        loss: Mean over a batch.
    """
    generator = torch.Generator().manual_seed(seed)
    chain = copy.deepcopy(model).train()
    weights = list(chain.parameters())
    speeds = [torch.zeros_like(weight) for weight in weights]
    n_steps = how.n_epochs * math.ceil(len(data) / how.batch_size)
    samples: list[nn.Module] = []
    for _ in range(how.n_cycles):
        step = 0
        for epoch in range(how.n_epochs):
            noisy = epoch >= how.n_epochs - how.n_noisy
            for x, y in data.batches(how.batch_size, generator):
                rate = 0.5 * how.rate * (math.cos(math.pi * step / n_steps) + 1)
                gradients = torch.autograd.grad(loss(chain(x), y), weights)
                scale = math.sqrt(2 * how.friction * rate) / len(data) if noisy else 0.0
                with torch.no_grad():
                    for weight, speed, gradient in zip(weights, speeds, gradients, strict=True):
                        speed.mul_(1 - how.friction).sub_(rate * (gradient + how.weight_decay * weight))
                        if noisy:
                            speed.add_(scale * torch.randn(speed.shape, generator=generator))
                        weight.add_(speed)
                step += 1
            if epoch >= how.n_epochs - how.n_samples:
                samples.append(copy.deepcopy(chain).eval())
    return samples
