"""Hamiltonian Monte Carlo (Neal, 2011) on all weights of a small network, with the checks of its chains.

Several chains move at once. During the warm-up, which is left out, the step is adapted to the acceptance by dual
averaging (Hoffman and Gelman, 2014); the number of leapfrog steps is drawn anew for every proposal, so that no orbit
closes. Weights of a network are not identified (units may be exchanged), so split R̂ (Gelman et al., 2013, 11.4) is
taken of the log density and of predictions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from protocol.baselines.ensemble import with_weights
from protocol.data import Part

Gradients = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Of weights `[K, P]` the gradients `[K, P]` and values `[K]` of the log density."""


@dataclass(frozen=True)
class HmcSettings:
    """How the chains run.

    Attributes:
        n_warmup: Proposals before the first that is kept.
        n_samples: Proposals after that, per chain.
        n_leapfrog: Steps of a proposal are drawn evenly from half of it to all of it.
        acceptance: The step is adapted to it.
    """

    n_warmup: int = 300
    n_samples: int = 300
    n_leapfrog: int = 60
    acceptance: float = 0.8


@dataclass(frozen=True)
class Chains:
    """What the chains gave.

    Attributes:
        weights: `[K, S, P]`.
        log_density: `[K, S]`.
        acceptance: Mean probability of acceptance after the warm-up.
        step: Of the leapfrog integrator, after the warm-up.
    """

    weights: Tensor
    log_density: Tensor
    acceptance: float
    step: float


def _called(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The network as a function of its weights `[P]` and inputs."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]

    def outputs(theta: Tensor, x: Tensor) -> Tensor:
        parts = theta.split(sizes)
        weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return functional_call(model, weights, (x,))

    return outputs


def log_posterior(
    model: nn.Module, data: Part, prior_precision: float, loss: Callable[..., Tensor] = F.cross_entropy
) -> Gradients:
    """Gradients and values of log p(D | θ) + log N(θ; 0, 1/δ) but for a constant, for several θ at once."""
    outputs = _called(model)

    def log_density(theta: Tensor) -> Tensor:
        misfit = loss(outputs(theta, data.x), data.y, reduction="sum")
        return -misfit - 0.5 * prior_precision * theta.square().sum()

    of_each = vmap(log_density)

    def gradients(theta: Tensor) -> tuple[Tensor, Tensor]:
        theta = theta.detach().requires_grad_()
        values = of_each(theta)
        (gradient,) = torch.autograd.grad(values.sum(), theta)  # the sum's gradients are those of every chain alone
        return gradient, values.detach()

    return gradients


class _Step:
    """The step size, adapted to an acceptance by dual averaging with Hoffman and Gelman's constants."""

    def __init__(self, first: float, target: float) -> None:
        self.size, self.target = first, target
        self._centre, self._gap, self._mean, self._count = math.log(10 * first), 0.0, 0.0, 0

    def adapt(self, acceptance: float) -> None:
        """After a proposal of the warm-up."""
        self._count += 1
        share = 1 / (self._count + 10)
        self._gap += share * (self.target - acceptance - self._gap)
        log_size = self._centre - math.sqrt(self._count) / 0.05 * self._gap
        self._mean += self._count**-0.75 * (log_size - self._mean)
        self.size = math.exp(log_size)

    def settle(self) -> None:
        """At the end of the warm-up."""
        self.size = math.exp(self._mean)


def hmc(gradients: Gradients, start: Tensor, how: HmcSettings, seed: int, first_step: float = 0.01) -> Chains:
    """Runs chains from K starting points `[K, P]`, spread as widely as the posterior.

    Args:
        gradients: Of the log density.
        start: One row per chain.
        how: They run.
        seed: Of the momenta.
        first_step: Before the step is adapted.
    """
    generator = torch.Generator().manual_seed(seed)
    step = _Step(first_step, how.acceptance)
    theta = start
    gradient, value = gradients(theta)
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for proposal in range(how.n_warmup + how.n_samples):
        n_steps = int(torch.randint(how.n_leapfrog // 2 + 1, how.n_leapfrog + 1, (1,), generator=generator))
        momentum = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        q, g, energy = theta, gradient, value - 0.5 * momentum.square().sum(1)
        moved = momentum + 0.5 * step.size * g
        for _ in range(n_steps - 1):
            q = q + step.size * moved
            g, _ = gradients(q)
            moved = moved + step.size * g
        q = q + step.size * moved
        g, new_value = gradients(q)
        moved = moved + 0.5 * step.size * g
        accepted = (new_value - 0.5 * moved.square().sum(1) - energy).clamp(max=0).exp().nan_to_num(0)
        taken = torch.rand(len(theta), generator=generator, dtype=theta.dtype) < accepted
        theta = torch.where(taken.unsqueeze(1), q, theta)
        gradient = torch.where(taken.unsqueeze(1), g, gradient)
        value = torch.where(taken, new_value, value)
        if proposal < how.n_warmup:
            step.adapt(float(accepted.mean()))
            if proposal == how.n_warmup - 1:
                step.settle()
        else:
            kept.append((theta, value, accepted))
    weights, values, accepted = (torch.stack(each, 1) for each in zip(*kept, strict=True))
    return Chains(weights, values, float(accepted.mean()), step.size)


def split_r_hat(values: Tensor) -> Tensor:
    """Split R̂ of chains `[K, S, …]`, `[…]`: √((n − 1)/n + B/(n W)) of 2K half chains of length n; 1 is converged."""
    n = values.shape[1] // 2
    halves = torch.cat([values[:, :n], values[:, -n:]])
    within = halves.var(1).mean(0)
    between = halves.mean(1).var(0)
    return ((n - 1) / n + between / within).sqrt()


def start_of(models: list[nn.Module]) -> Tensor:
    """The weights of networks, `[K, P]`: one chain starts at each."""
    return torch.stack([parameters_to_vector(model.parameters()).detach() for model in models])


def networks(model: nn.Module, chains: Chains, n_samples: int) -> list[nn.Module]:
    """Networks of samples evenly spread over all chains, to be given to `mean_probabilities`."""
    flat = chains.weights.flatten(0, 1)
    index = torch.linspace(0, len(flat) - 1, n_samples).round().long()
    return with_weights((copy.deepcopy(model) for _ in range(n_samples)), flat[index])


def predictions(model: nn.Module, chains: Chains, x: Tensor) -> Tensor:
    """Class probabilities of every sample, `[K, S, B, C]`, for their R̂."""
    outputs = _called(model)
    with torch.no_grad():
        return vmap(vmap(lambda theta: outputs(theta, x).softmax(-1)))(chains.weights)
