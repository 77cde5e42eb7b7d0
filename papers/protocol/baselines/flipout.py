"""Mean-field variational Bayes (Blundell et al., 2015) with flipout (Wen et al., 2018).

A layer with weights μ + σ ε perturbs every datum by its own signs, which decorrelates their gradients,

    z_b = μ a_b + r_b ∘ (σ ε) (s_b ∘ a_b),    r_b, s_b of ±1,

at twice the cost of the layer. Daxberger et al. (2021, C.2): prior precision 5e-4 per datum, which is weight decay's,
KL term × 0.1; the scale starts at softplus(−3), as in Bayesian-Torch, which they use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from protocol.data import Part
from protocol.training import Augment, Loss, Training


@dataclass(frozen=True)
class FlipoutSettings:
    """The variational objective: mean loss + kl_scale · KL / N.

    Attributes:
        prior_precision: Of every weight, per datum: N(0, 1 / (N · prior_precision)).
        kl_scale: Of the KL divergence.
        rho: Scales start at softplus(rho).
    """

    prior_precision: float = 5e-4
    kl_scale: float = 0.1
    rho: float = -3.0


Applied = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A layer as a function of inputs, weight and bias."""


class Flipout(nn.Module):
    """A linear or convolutional layer whose weights are Gaussian; its means start at the weights of that layer."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rho: float, generator: torch.Generator) -> None:
        super().__init__()
        self.mean = nn.Parameter(layer.weight.detach().clone())
        self.rho = nn.Parameter(torch.full_like(self.mean, rho))
        if layer.bias is None:
            raise ValueError(f"{layer} has no bias; a flipout layer has one.")
        self.bias_mean = nn.Parameter(layer.bias.detach().clone())
        self.bias_rho = nn.Parameter(torch.full_like(self.bias_mean, rho))
        self.apply_layer: Applied = layer._conv_forward if isinstance(layer, nn.Conv2d) else F.linear
        self.generator = generator

    def _signs(self, n_data: int, n_channels: int, n_axes: int) -> Tensor:
        """Random signs `[B, C]`, with as many axes of length one behind as the data have."""
        signs = torch.randint(2, (n_data, n_channels), generator=self.generator) * 2.0 - 1.0
        return signs.view(n_data, n_channels, *[1] * (n_axes - 2))

    def noise(self) -> tuple[Tensor, Tensor]:
        """σ ε of weight and bias."""
        weight = F.softplus(self.rho) * torch.randn(self.rho.shape, generator=self.generator)
        return weight, F.softplus(self.bias_rho) * torch.randn(self.bias_rho.shape, generator=self.generator)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of sampled weights."""
        weight, bias = self.noise()
        ingoing = self._signs(len(x), x.shape[1], x.ndim)
        outgoing = self._signs(len(x), len(self.mean), x.ndim)
        perturbed = self.apply_layer(x * ingoing, weight, None) * outgoing
        return self.apply_layer(x, self.mean, self.bias_mean + bias) + perturbed

    def divergence(self, prior_precision: float) -> Tensor:
        """KL(q ‖ N(0, 1/δ)) = ½ Σ (δ (μ² + σ²) − 1 − log δσ²)."""
        total = self.mean.new_zeros(())
        for mean, rho in ((self.mean, self.rho), (self.bias_mean, self.bias_rho)):
            share = prior_precision * F.softplus(rho).square()
            total = total + 0.5 * (prior_precision * mean.square() + share - 1 - share.log()).sum()
        return total


def flipped(model: nn.Sequential, rho: float, generator: torch.Generator) -> nn.Sequential:
    """The network with `Flipout` in place of its linear and convolutional layers."""
    return nn.Sequential(
        *(
            Flipout(layer, rho, generator) if isinstance(layer, nn.Linear | nn.Conv2d) else copy.deepcopy(layer)
            for layer in model
        )
    )


def _layers(model: nn.Sequential) -> Iterable[Flipout]:
    return (layer for layer in model if isinstance(layer, Flipout))


@dataclass(frozen=True)
class MeanField:
    """The variational posterior.

    Attributes:
        model: The network whose layers are replaced.
        variational: The same with `Flipout` layers, trained.
    """

    model: nn.Sequential
    variational: nn.Sequential

    def networks(self, n_samples: int) -> list[nn.Module]:
        """Sampled networks, to be given to `mean_probabilities`; their noise follows that of the training."""
        pairs = list(zip(self.model, self.variational, strict=True))
        return [nn.Sequential(*(_sampled(*pair) for pair in pairs)).eval() for _ in range(n_samples)]


@torch.no_grad()
def _sampled(layer: nn.Module, variational: nn.Module) -> nn.Module:
    """A layer with sampled weights; one without is the trained one, batch normalisation above all."""
    if not isinstance(variational, Flipout):
        return copy.deepcopy(variational)
    sampled, means = copy.deepcopy(layer), (variational.mean, variational.bias_mean)
    for tensor, mean, noise in zip(sampled.parameters(), means, variational.noise(), strict=True):
        tensor.copy_(mean + noise)
    return sampled


def fit_flipout(
    model: nn.Sequential,
    data: Part,
    how: Training,
    settings: FlipoutSettings,
    seed: int,
    augment: Augment | None = None,
    loss: Loss = F.cross_entropy,
) -> MeanField:
    """Variational Bayes from the weights of an untrained network, trained as MAP but for the prior.

    Args:
        model: A sequence of layers.
        data: To train on.
        how: Epochs, batches and rate; its weight decay is not used, for the KL term has the prior.
        settings: Of the objective.
        seed: Of order and noise.
        augment: Of the inputs.
        loss: Mean over a batch.
    """
    generator = torch.Generator().manual_seed(seed)
    variational = flipped(model, settings.rho, generator).train()
    optimizer = torch.optim.Adam(variational.parameters(), how.rate, foreach=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.n_epochs)
    n_data = len(data)
    for _ in range(how.n_epochs):
        for x, y in data.batches(how.batch_size, generator):
            optimizer.zero_grad()
            divergence = sum(layer.divergence(settings.prior_precision * n_data) for layer in _layers(variational))
            misfit = loss(variational(x if augment is None else augment(x, generator)), y)
            (misfit + settings.kl_scale * divergence / n_data).backward()
            optimizer.step()
        schedule.step()
    return MeanField(model, variational.eval())
