"""Mean-field variational inference, "Bayes by backprop" (Blundell et al., 2015), by local reparameterisation.

q is a Gaussian with a mean and a scale of every weight. A step maximises E_q[log p(D | θ)] − KL(q ‖ p) by one sample of
every pre-activation, a Gaussian with mean x μ and variance x² σ² of every datum (Kingma et al., 2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.data import Part
from protocol.stacked import Steps, losses, probabilities, stacked_start

FIRST_SCALE = 0.05


@dataclass(frozen=True)
class MeanField:
    """K variational posteriors of tanh networks.

    Attributes:
        means: Of weights `[K, I, O]` and biases `[K, 1, O]` of every layer.
        scales: Their standard deviations.
    """

    means: list[Tensor]
    scales: list[Tensor]

    def outputs(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """One sample of the outputs `[K, N, C]` at inputs `[N, D]`, drawn for every datum anew."""
        h = x.expand(len(self.means[0]), *x.shape)
        for place in range(0, len(self.means), 2):
            h = h if place == 0 else h.tanh()
            mean = torch.baddbmm(self.means[place + 1], h, self.means[place])
            variance = torch.baddbmm(self.scales[place + 1].square(), h.square(), self.scales[place].square())
            h = mean + variance.sqrt() * torch.randn(mean.shape, generator=generator)
        return h

    def samples(self, x: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Probabilities at inputs `[N, D]`, `[S, K, N, C]`."""
        with torch.no_grad():
            return torch.stack([probabilities(self.outputs(x.float(), generator)) for _ in range(n_samples)])

    def predict(self, x: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Mean probabilities at inputs `[N, D]`, `[K, N, C]`."""
        total = torch.zeros(())
        with torch.no_grad():
            for _ in range(n_samples):
                total = total + probabilities(self.outputs(x.float(), generator))
        return total / n_samples

    def picked(self, k: int) -> MeanField:
        """One of the posteriors."""
        return MeanField([each[k : k + 1] for each in self.means], [each[k : k + 1] for each in self.scales])

    def divergence(self, precisions: Tensor) -> Tensor:
        """KL(q ‖ N(0, 1/δ)) in nats, `[K]`."""
        total = torch.zeros(len(precisions))
        for mean, scale in zip(self.means, self.scales, strict=True):
            delta = precisions.view(-1, 1, 1)
            ratio = delta * scale.square()
            total = total + 0.5 * (ratio + delta * mean.square() - 1 - ratio.log()).sum((1, 2))
        return total


def mean_field(
    sizes: Sequence[int], data: Part, precisions: Sequence[float], how: Steps, seed: int, batch_size: int | None = None
) -> MeanField:
    """The variational posterior of every prior precision.

    Args:
        sizes: Widths of the layers, inputs and outputs included.
        data: Inputs `[N, D]` and labels `[N]`.
        precisions: Of the priors N(0, 1/δ) of all weights and biases.
        how: Steps and rate.
        seed: Of the first means, which are the same for all, of the batches and of the samples.
        batch_size: Of the data of a step; None for all.
    """
    generator = torch.Generator().manual_seed(seed)
    means = [each.requires_grad_() for each in stacked_start(sizes, len(precisions), seed)]
    logs = [torch.full_like(each, FIRST_SCALE).log().requires_grad_() for each in means]
    deltas, x = torch.tensor(precisions), data.x.float()
    optimizer, schedule = how.optimizer([*means, *logs])
    n_data = len(data)
    for _ in range(how.n_steps):
        chosen = slice(None)
        if batch_size is not None and batch_size < n_data:
            chosen = torch.randint(n_data, (batch_size,), generator=generator)
        y = data.y[chosen]
        optimizer.zero_grad()
        q = MeanField(means, [each.exp() for each in logs])
        misfit = losses(q.outputs(x[chosen], generator), y) * (n_data / len(y))
        (misfit + q.divergence(deltas)).sum().backward()
        optimizer.step()
        schedule.step()
    return MeanField([each.detach() for each in means], [each.detach().exp() for each in logs])
