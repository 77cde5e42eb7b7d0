"""Variational online Gauss–Newton (Khan et al., 2018; Osawa et al., 2019), for tasks one after the other.

A diagonal Gaussian N(μ, diag(λ + N s)⁻¹) is learnt by steps of natural gradients, with the former posterior
N(μ₀, diag(λ)⁻¹) for a prior. At sampled weights, with the gradients g_i of the data of a batch,

    s ← (1 − β₂) s + β₂ mean_i g_i²,    m ← β₁ m + (1 − β₁) (mean_i g_i + λ/N (μ − μ₀)),    μ ← μ − α m̂ / (s + λ/N),

where m̂ = m / (1 − β₁ᵗ). Khan et al. have β₁ = 0.9 and β₂ = 0.001, for more steps than a task of few data has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class VognSettings:
    """How a task is learnt.

    Attributes:
        n_epochs: Passes over its data.
        rate: α, which falls to a tenth of it during a task.
        momentum: β₁.
        forgetting: β₂, of squares of gradients.
        initial: s at the start of a task.
        n_samples: Of the weights, per step.
    """

    n_epochs: int = 50
    rate: float = 0.1
    momentum: float = 0.9
    forgetting: float = 1e-2
    initial: float = 1.0
    n_samples: int = 2


class Vogn:
    """The Gaussian of the tasks that were learnt.

    Args:
        model: Linear layers and activations; its weights are where the first task starts, and later the mean.
        prior_precision: Of all weights, around zero.
        settings: Of every task.
        seed: Of the samples.
    """

    def __init__(self, model: nn.Sequential, prior_precision: float, settings: VognSettings, seed: int) -> None:
        self.model, self.settings = model, settings
        self.generator = torch.Generator().manual_seed(seed)
        start = parameters_to_vector(model.parameters()).detach()
        self.mean = torch.zeros_like(start)
        self.precision = torch.full_like(start, prior_precision)

    def learn(self, batches: Batches, n_data: int) -> None:
        """One task; the Gaussian is then its posterior, and the network has its mean.

        Args:
            batches: The data, read once per epoch.
            n_data: How many they are.
        """
        how = self.settings
        mean = parameters_to_vector(self.model.parameters()).detach()
        prior = self.precision / n_data
        scale, moment, step = torch.full_like(mean, how.initial), torch.zeros_like(mean), 0
        for epoch in range(how.n_epochs):
            rate = how.rate * (1 - 0.9 * epoch / how.n_epochs)
            for x, y in batches:
                step += 1
                gradient, squares = self._moments(mean, 1 / (n_data * (scale + prior)).sqrt(), x, y)
                scale = (1 - how.forgetting) * scale + how.forgetting * squares
                pull = gradient + prior * (mean - self.mean)
                moment = how.momentum * moment + (1 - how.momentum) * pull
                mean = mean - rate * moment / (1 - how.momentum**step) / (scale + prior)
        self.mean, self.precision = mean, self.precision + n_data * scale
        vector_to_parameters(mean, self.model.parameters())

    def _moments(self, mean: Tensor, deviation: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Means over data and samples of gradients and of their squares, `[P]` each."""
        gradient, squares = torch.zeros_like(mean), torch.zeros_like(mean)
        n_samples = self.settings.n_samples
        for _ in range(n_samples):
            noise = torch.randn(mean.shape, generator=self.generator)
            vector_to_parameters(mean + deviation * noise, self.model.parameters())
            of_batch, of_squares = gradient_moments(self.model, x, y)
            gradient += of_batch / n_samples
            squares += of_squares / n_samples
        return gradient, squares


def gradient_moments(model: nn.Sequential, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Means over data of gradients g_i of the loss and of g_i², `[P]` each: of a linear layer g_i = δ_i ⊗ [a_i, 1]."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    h = x
    for layer in model:
        if isinstance(layer, nn.Linear):
            inputs.append(h.detach())
        h = layer(h)
        if isinstance(layer, nn.Linear):
            outputs.append(h)
    deltas = torch.autograd.grad(F.cross_entropy(h, y, reduction="sum"), outputs)
    gradient: list[Tensor] = []
    squares: list[Tensor] = []
    for a, delta in zip(inputs, deltas, strict=True):
        gradient += [(delta.T @ a).flatten(), delta.sum(0)]
        squares += [(delta.square().T @ a.square()).flatten(), delta.square().sum(0)]
    return torch.cat(gradient) / len(x), torch.cat(squares) / len(x)
