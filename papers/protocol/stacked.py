"""Networks of one shape at several prior precisions, trained side by side on all data: one matrix product for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from protocol.data import Part
from protocol.networks import mlp


@dataclass(frozen=True)
class Steps:
    """How networks are trained, by Adam.

    Attributes:
        n_steps: Of the optimiser.
        rate: At the start; it falls by ten after `milestones`.
        milestones: Shares of the steps.
    """

    n_steps: int
    rate: float = 1e-2
    milestones: tuple[float, ...] = (0.8, 0.93)

    def optimizer(
        self, parameters: Sequence[Tensor]
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.MultiStepLR]:
        """Adam and its schedule."""
        adam = torch.optim.Adam(parameters, self.rate, foreach=True)
        ends = [round(share * self.n_steps) for share in self.milestones]
        return adam, torch.optim.lr_scheduler.MultiStepLR(adam, ends)


def n_outputs(n_classes: int) -> int:
    """Of a network: two classes have one output."""
    return 1 if n_classes == 2 else n_classes


def losses(f: Tensor, y: Tensor) -> Tensor:
    """Negative log likelihood of labels `[N]` under outputs `[K, N, C]` of K networks, a sum over data, `[K]`."""
    if f.shape[2] == 1:
        return F.binary_cross_entropy_with_logits(f.squeeze(2), y.to(f).expand(len(f), -1), reduction="none").sum(1)
    return -f.log_softmax(2).gather(2, y.expand(len(f), -1).unsqueeze(2)).sum((1, 2))


def probabilities(f: Tensor) -> Tensor:
    """Of the classes `[…, C]`, or of class 1 `[…, 1]`, from outputs."""
    return f.sigmoid() if f.shape[-1] == 1 else f.softmax(-1)


def stacked_start(sizes: Sequence[int], n_networks: int, seed: int) -> list[Tensor]:
    """Weights `[K, I, O]` and biases `[K, 1, O]` of every layer: K times those of `mlp`."""
    tensors: list[Tensor] = []
    for layer in mlp(sizes, seed, nn.Tanh):
        if isinstance(layer, nn.Linear):
            tensors += [layer.weight.detach().T.expand(n_networks, -1, -1).contiguous()]
            tensors += [layer.bias.detach().expand(n_networks, 1, -1).contiguous()]
    return tensors


def stacked_outputs(tensors: Sequence[Tensor], x: Tensor) -> Tensor:
    """Outputs `[K, N, C]` of K tanh networks at inputs `[N, D]`."""
    h = x.expand(len(tensors[0]), *x.shape)
    for place in range(0, len(tensors), 2):
        h = torch.baddbmm(tensors[place + 1], h if place == 0 else h.tanh(), tensors[place])
    return h


def map_networks(
    sizes: Sequence[int], data: Part, precisions: Sequence[float], how: Steps, seed: int
) -> list[nn.Sequential]:
    """The MAP network of every prior precision, in double precision; training is in single precision.

    Args:
        sizes: Widths of the layers, inputs and outputs included.
        data: All of it in every step; labels `[N]`.
        precisions: Of the priors N(0, 1/δ) of all weights and biases.
        how: Steps and rate.
        seed: Of the first weights, which are the same for all.
    """
    tensors = [each.requires_grad_() for each in stacked_start(sizes, len(precisions), seed)]
    deltas = torch.tensor(precisions)
    x = data.x.float()
    optimizer, schedule = how.optimizer(tensors)
    for _ in range(how.n_steps):
        optimizer.zero_grad()
        squares = torch.stack([each.square().sum((1, 2)) for each in tensors]).sum(0)
        (losses(stacked_outputs(tensors, x), data.y) + 0.5 * deltas * squares).sum().backward()
        optimizer.step()
        schedule.step()
    return [_network(sizes, [each.detach()[k] for each in tensors]) for k in range(len(precisions))]


def _network(sizes: Sequence[int], tensors: Sequence[Tensor]) -> nn.Sequential:
    """One of the networks."""
    model = mlp(sizes, 0, nn.Tanh).double()
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer, weight, bias in zip(linear, tensors[::2], tensors[1::2], strict=True):
            layer.weight.copy_(weight.T)
            layer.bias.copy_(bias[0])
    return model.eval()


def sizes_of(n_inputs: int, n_hidden: int, n_layers: int, n_classes: int) -> tuple[int, ...]:
    """Widths of a network with hidden layers of one width."""
    return (n_inputs, *[n_hidden] * n_layers, n_outputs(n_classes))
