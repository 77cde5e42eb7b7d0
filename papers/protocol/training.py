"""Training a network to its MAP estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from protocol.data import Part

Augment = Callable[[Tensor, torch.Generator], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Training:
    """How a network is trained.

    Attributes:
        n_epochs: Passes over the data.
        batch_size: Of the batches.
        rate: Of Adam at the start; it falls to zero by a cosine.
        weight_decay: ½ w ‖θ‖² is added to the mean loss, so that the prior precision is w N.
        momentum: SGD with Nesterov's momentum in place of Adam; None for Adam.
    """

    n_epochs: int = 100
    batch_size: int = 64
    rate: float = 1e-3
    weight_decay: float = 5e-4
    momentum: float | None = None


def train(
    model: nn.Module,
    data: Part,
    how: Training,
    seed: int,
    augment: Augment | None = None,
    loss: Loss = F.cross_entropy,
) -> nn.Module:
    """The same network, trained, in evaluation mode; the seed is that of the order of the data."""
    generator = torch.Generator().manual_seed(seed)
    if how.momentum is None:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(
            model.parameters(), how.rate, weight_decay=how.weight_decay, foreach=True
        )
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), how.rate, how.momentum, weight_decay=how.weight_decay, nesterov=True, foreach=True
        )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.n_epochs)
    model.train()
    for _ in range(how.n_epochs):
        for x, y in data.batches(how.batch_size, generator):
            optimizer.zero_grad()
            loss(model(x if augment is None else augment(x, generator)), y).backward()
            optimizer.step()
        schedule.step()
    return model.eval()
