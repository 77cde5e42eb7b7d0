"""Training by the evidence of some of the weights, written out: dense curvature, gradient descent, Adam by hand.

All trainable parameters are one vector θ `[P]` that is trained by MAP; a Laplace approximation of its random entries R,
given all others F, has the evidence that the hyper-parameters climb (Immer et al. 2021, algorithm 1, with the
evidence of the posterior over θ_R alone):

    L(θ) = (1/B) Σ_b ℓ(f(x_b; θ), y_b) + (Σ_{i∈R} δ_i (θ_i − μ)² + ε Σ_{i∈F} θ_i²) / (2 N w),    w = 1/(σ² T)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.reference import curvature, evidence

UnitCurvature = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Unit curvature of all trainable parameters at a network's present weights, `[P, P]`, from the data."""


@dataclass(frozen=True)
class Setting:
    """One training.

    Attributes:
        likelihood: Name of the likelihood.
        random: Indices R, ascending, `[p]`.
        group: Which prior precision every entry of R has, `[p]`.
        prior: δ at the start, `[k]`.
        rest: ε.
        prior_mean: μ.
        sigma: σ at the start; None for a likelihood without noise.
        temperature: T.
        lr: Step size of gradient descent on θ.
        lr_hyp: Step size of Adam on log δ and log σ.
        n_epochs: Epochs.
        n_hypersteps: Steps on the hyper-parameters after every epoch in `due`.
        due: Epochs, from 1.
    """

    likelihood: str
    random: Tensor
    group: Tensor
    prior: Tensor
    rest: float
    prior_mean: float = 0.0
    sigma: float | None = None
    temperature: float = 1.0
    lr: float = 0.05
    lr_hyp: float = 0.1
    n_epochs: int = 4
    n_hypersteps: int = 3
    due: tuple[int, ...] = (1, 2, 3, 4)


@dataclass
class History:
    """Numbers that a training passed through.

    Attributes:
        losses: Mean objective of every epoch.
        evidences: Log evidence before every step on the hyper-parameters.
        priors: δ after every estimate, `[k]` each.
        sigmas: σ after every estimate.
        weights: θ after every epoch, `[P]` each.
        best: Number of the estimate with the largest log evidence before its last step, from 0.
        best_prior: δ at which that was.
        best_sigma: σ at which that was.
        best_weights: θ at which that was.
    """

    losses: list[float] = field(default_factory=list)
    evidences: list[float] = field(default_factory=list)
    priors: list[Tensor] = field(default_factory=list)
    sigmas: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    best: int = -1
    best_prior: Tensor = field(default_factory=lambda: torch.zeros(0))
    best_sigma: float = 1.0
    best_weights: Tensor = field(default_factory=lambda: torch.zeros(0))


class Adam:
    """Adam (Kingma and Ba, 2015, algorithm 1) at its published settings, for ascent."""

    def __init__(self, lr: float) -> None:
        self.lr, self.t, self.m, self.v = lr, 0, torch.zeros(()), torch.zeros(())

    def step(self, gradient: Tensor) -> Tensor:
        """The change of the argument."""
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient.square()
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return self.lr * m / (v.sqrt() + 1e-8)


def train(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], unit_curvature: UnitCurvature, setting: Setting
) -> History:
    """Trains a network, all of whose parameters require a gradient, in float64, and leaves it at the last weights."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    history, adam, best = History(), Adam(setting.lr_hyp), -float("inf")
    logs = torch.cat([setting.prior, setting.prior.new_tensor([setting.sigma or 1.0])]).log()
    for epoch in range(1, setting.n_epochs + 1):
        history.losses.append(_epoch(model, batches, setting, logs, len(x)))
        history.weights.append(_flat(model).detach().clone())
        if epoch not in setting.due:
            continue
        hessian = unit_curvature(model, x, y)[setting.random][:, setting.random]
        for step in range(setting.n_hypersteps):
            leaf = logs.clone().requires_grad_()
            value = _log_evidence(model, x, y, hessian, setting, leaf)
            history.evidences.append(value.item())
            if step == setting.n_hypersteps - 1 and value.item() > best:
                best, history.best = value.item(), len(history.priors)
                history.best_prior, history.best_sigma = logs[:-1].exp(), logs[-1].exp().item()
                history.best_weights = history.weights[-1]
            logs = logs + adam.step(torch.autograd.grad(value, leaf)[0])
            if setting.sigma is None:
                logs[-1] = 0.0
        history.priors.append(logs[:-1].exp())
        history.sigmas.append(logs[-1].exp().item())
    return history


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.flatten() for p in model.parameters()])


def _epoch(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], setting: Setting, logs: Tensor, n_data: int
) -> float:
    """One pass of gradient descent; the mean objective, of every batch before its step."""
    total = 0.0
    for x, y in batches:
        theta = _flat(model)
        precision = torch.full_like(theta, setting.rest)
        precision[setting.random] = logs[:-1].exp()[setting.group]
        centre = torch.zeros_like(theta)
        centre[setting.random] = setting.prior_mean
        weight = 1 / (logs[-1].exp().square() * setting.temperature)
        penalty = (precision.detach() * (theta - centre).square()).sum() / (2 * n_data * weight)
        objective = curvature.loss(model(x), y, setting.likelihood) / len(x) + penalty
        gradients = torch.autograd.grad(objective, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= setting.lr * gradient
        total += objective.item() * len(x)
    return total / n_data


def _log_evidence(model: nn.Module, x: Tensor, y: Tensor, hessian: Tensor, setting: Setting, logs: Tensor) -> Tensor:
    sigma = logs[-1].exp()
    with torch.no_grad():
        f = model(x)
        unit = curvature.loss(f, y, setting.likelihood)
    likelihood = "regression" if setting.sigma is not None else setting.likelihood
    loglik = evidence.log_likelihood(unit, len(x), f.shape[1], sigma, setting.temperature, likelihood)
    scale = 1 / (sigma.square() * setting.temperature)
    theta = _flat(model).detach()[setting.random]
    prior = logs[:-1].exp()[setting.group]
    return evidence.log_marginal_likelihood(hessian, theta, prior, setting.prior_mean, scale, loglik)
