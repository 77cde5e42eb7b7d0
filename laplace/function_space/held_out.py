"""Scores of a posterior on data that it has not seen: while it is fitted, and at given hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laplace import tuning
from laplace.core.argument_checks import as_tensor, positive
from laplace.core.checks import named
from laplace.core.hyperparameters import Hyperparameters
from laplace.engines.engine import CurvatureEngine
from laplace.enums import LinkApprox, PredType
from laplace.errors import InvalidArgument
from laplace.network.model_guard import autograd_mode
from laplace.posterior.posterior import Posterior
from laplace.predictive import latent
from laplace.structures.base import Precision
from laplace.tuning.grid import Losses
from laplace.tuning.objectives import make_objective
from laplace.tuning.scores import find_score
from laplace.tuning.validation import Validation


def held_out_nll(
    posterior: Posterior, engine: CurvatureEngine, precision: Precision, sigma_noise: Tensor, loader: Iterable[Any]
) -> float:
    """Mean negative log predictive density, of a regression with its noise, else by the probit approximation.

    Args:
        posterior: Knows keys, device and likelihood; its precision is not read.
        engine: Gives Jacobians.
        precision: P.
        sigma_noise: σ, 0-dim or `[C]`.
        loader: The data.
    """
    likelihood, total, count = posterior.likelihood, 0.0, 0
    narrow = likelihood.target.reads_variances(likelihood, LinkApprox.PROBIT, for_scores=True)
    form, nll = "diagonal" if narrow else "full", find_score("nll", likelihood)
    for name, x, y in Validation(loader).batches(posterior):
        with named(name):
            outputs = latent.linearised(engine, precision, x, form)
            targets = likelihood.check_targets(outputs.mean, y)
        summary = likelihood.target.summary(
            likelihood, outputs.mean, outputs.covariance, LinkApprox.PROBIT, for_scores=True
        )
        total += nll(likelihood, summary, targets, sigma_noise).sum().item()
        count += len(targets)
    return total / count


def asked_for_candidates(
    tune: Any, objective: Any, val_loader: Iterable[Any] | None, grid: Any
) -> tuple[Iterable[Any], Iterable[Any]] | None:
    """Validation data and a sequence of candidates, where arguments stand for these; None for names and tables.

    Args:
        tune: Names, or the validation data.
        objective: The candidates where `tune` is data.
        val_loader: Validation data by name.
        grid: A sequence of candidates, or a table.
    """
    if not isinstance(tune, str) and not (isinstance(tune, Sequence) and all(isinstance(one, str) for one in tune)):
        return tune, (objective if grid is None else grid)
    if isinstance(grid, Sequence | Tensor) and val_loader is not None:
        return val_loader, grid
    return None


def best_candidate(
    posterior: Posterior, loader: Iterable[Any], candidates: Iterable[float | Sequence[float]]
) -> tuning.TuningResult:
    """The prior precision δ, or pair (δ, σ), of the smallest mean negative log predictive density.

    Args:
        posterior: A fitted posterior.
        loader: Validation data.
        candidates: Numbers δ, or pairs (δ, σ), or both.

    Raises:
        InvalidArgument: No candidate, one that is not accepted, or none with a finite density.
        InvalidData: No validation data.
    """
    posterior.require_fitted()
    now, likelihood = posterior.hypers.detached(), posterior.likelihood
    settings = [_setting(now, candidate, has_noise=likelihood.has_noise) for candidate in candidates]
    if not settings:
        raise InvalidArgument("grid holds no candidate; give prior precisions, or pairs of one and a noise.")
    with autograd_mode(), torch.no_grad():
        objective = make_objective(None, likelihood)
        predictive = tuning.Predictive(str(PredType.GLM), str(LinkApprox.PROBIT), 1, None)
        group = tuning.PosteriorGroup((posterior,))
        losses = Losses(group.candidates(settings, predictive, whole_covariance=objective.whole_covariance), objective)
        for name, x, y in Validation(loader).batches(posterior):
            with named(name):
                losses.update(x, y)
        values = losses.results()
    finite = values.isfinite()
    if not finite.any():
        raise InvalidArgument("no candidate of the grid has a finite loss; the hyper-parameters are left as they were.")
    best = int(torch.where(finite, values, torch.inf).argmin())
    chosen = settings[best]
    return tuning.TuningResult(
        chosen.prior_precision, chosen.sigma_noise, chosen.temperature, values[best].item(), values, {}, True, ()
    )


def _setting(now: Hyperparameters, candidate: float | Sequence[float], *, has_noise: bool) -> Hyperparameters:
    """The present setting with a candidate in it.

    Raises:
        InvalidArgument: Neither δ nor (δ, σ), or a noise without a noisy likelihood.
    """
    values = list(candidate) if isinstance(candidate, Sequence) else [candidate]
    if not 1 <= len(values) <= 2 or (len(values) == 2 and not has_noise):
        accepted = "a prior precision or a pair (prior_precision, sigma_noise)" if has_noise else "a prior precision"
        raise InvalidArgument(f"grid holds {candidate!r}; a candidate is {accepted}.")
    tensors = [positive("grid", as_tensor("grid", value, like=now.prior_precision)) for value in values]
    setting = replace(now, prior_precision=tensors[0].reshape(1))
    return setting if len(tensors) == 1 else replace(setting, sigma_noise=tensors[1].reshape(()))
