"""The truth of every probe of `deviations.py`, by its key: closed forms and dense algebra. Knows neither package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.parity import deviations, work
from tests.parity.oracle import Oracle
from tests.parity.work import Posterior
from tests.reference import curvature, kfac, predictive


def _ggn(model: nn.Module, x: Tensor, y: Tensor, likelihood: str = "classification") -> Tensor:
    return curvature.ggn(model, x, y, curvature.trainable_names(model), likelihood)


def _kfac(model: nn.Module, x: Tensor, y: Tensor, names: list[str]) -> Tensor:
    return kfac.dense_kfac(kfac.kfac(model, x, y, names, "classification"), names)


def _damping(state: Path) -> Tensor:
    """Evidence with (B + √δ) ⊗ (A + √δ) in place of B ⊗ A + δ, at T = 1."""
    model, found = deviations.mlp(state)
    names, delta = curvature.trainable_names(model), torch.tensor(0.7, dtype=torch.float64)
    factors = kfac.kfac(model, found.x, found.y, names, "classification")
    logdet = torch.zeros((), dtype=torch.float64)
    for name in names:
        ((*sides,),) = factors[name]
        offset = delta.sqrt() if len(sides) == 2 else delta
        damped = [side + offset * torch.eye(len(side), dtype=side.dtype) for side in sides]
        logdet = logdet + (kfac.kron(*damped) if len(damped) == 2 else damped[0]).logdet()
    theta = curvature.flat_parameters(model, names)
    ratio = logdet - len(theta) * delta.log()
    return -curvature.loss(model(found.x), found.y, "classification") - 0.5 * (ratio + delta * theta.square().sum())


def _variance(state: Path, scale: float) -> Tensor:
    model, found = deviations.mlp(state, "regression")
    hessian = scale * _ggn(model, found.x, found.y, "regression")
    jacobian, _ = curvature.flat_jacobian(model, found.test, curvature.trainable_names(model))
    covariance = torch.linalg.inv(hessian + torch.eye(len(hessian), dtype=hessian.dtype))
    return predictive.functional_variance(jacobian, covariance)[0, 0, 0]


def _reused(state: Path) -> Tensor:
    """A layer that is called twice has no factors: its blocks are exact."""
    model, found = deviations.seeded(deviations.Twice), deviations.mlp(state)[1]
    once = ["first.weight", "first.bias", "head.weight", "head.bias"]
    twice = ["again.weight", "again.bias"]
    exact = curvature.ggn(model, found.x, found.y, twice, "classification")
    return _kfac(model, found.x, found.y, once).trace() + exact.trace()


def _ignored(state: Path) -> Tensor:
    model, found = deviations.mlp(state)
    return _ggn(model, found.x[4:], found.y[4:]).trace()


def _single_logit(state: Path) -> Tensor:
    model = deviations.seeded(lambda: nn.Linear(3, 1))
    x = deviations.mlp(state)[1].x
    return _ggn(model, x, torch.zeros(len(x), 1), "bernoulli").trace()


def _rewards(state: Path) -> Tensor:
    return deviations.seeded(deviations.Rewards)(deviations.mlp(state)[1].test)[0, 0]


def _best(scores: list[float]) -> Tensor:
    return torch.tensor([10.0 ** (scores.index(min(scores)) - 4)], dtype=torch.float64)


def _chosen(state: Path) -> Tensor:
    """The power of ten with the least negative log probability, by the probit link."""
    model, (x, labels) = deviations.confident(state), deviations.held_out(state)
    names = ["4.weight", "4.bias"]
    hessian = curvature.ggn(model, x, labels, names, "classification")
    jacobian, f = curvature.flat_jacobian(model, x, names)
    scores = []
    for power in range(-4, 5):
        covariance = torch.linalg.inv(hessian + 10.0**power * torch.eye(len(hessian), dtype=hessian.dtype))
        probabilities = predictive.probit(f, predictive.functional_variance(jacobian, covariance))
        scores.append(nn.functional.nll_loss(probabilities.log(), labels).item())
    return _best(scores)


def _chosen_regression(state: Path) -> Tensor:
    """The power of ten under which the targets are likeliest: N(0.55; 0, v + σ²)."""
    x = torch.cat([deviations.mlp(state)[1].x, torch.ones(work.N_DATA, 1, dtype=torch.float64)], 1)
    scores = []
    for power in range(-4, 5):
        covariance = torch.linalg.inv(x.T @ x / 0.25 + 10.0**power * torch.eye(4, dtype=torch.float64))
        variance = ((x @ covariance) * x).sum(1) + 0.25
        scores.append((variance.log() + 0.55**2 / variance).sum().item())
    return _best(scores)


def _one_by_one(state: Path) -> Tensor:
    return deviations.mlp(state)[1].x[:, 0].square().sum()


def _tokens(state: Path) -> Tensor:
    return Oracle(Posterior("transformer", "classification", "all", "diag"), state).unit.trace()


def _reflection(state: Path) -> Tensor:
    found = work.data(state, "residual", "classification")
    return _ggn(deviations.seeded(deviations.reflecting), found.x, found.y).trace()


TRUTHS: dict[str, Callable[[Path], Tensor | float]] = {
    "damping": _damping,
    "correlation": lambda _: 0.0,
    "generator": lambda _: 0.0,
    "overflow": lambda _: 1.0,
    "dropped": lambda _: 6.0,
    "stale": lambda state: _variance(state, 1 / 4.0),
    "stale_process": lambda state: _variance(state, 1 / 4.0),
    "process_loss": lambda _: 1.0,
    "reused": _reused,
    "ignored": _ignored,
    "single_logit": _single_logit,
    "rewards": _rewards,
    "sampled_curvature": lambda _: 3.0,
    "chosen": _chosen,
    "chosen_regression": _chosen_regression,
    "digits": lambda _: 12.0,
    "one_by_one": _one_by_one,
    "tokens": _tokens,
    "reflection": _reflection,
    "mode": lambda _: 1.0,
}
