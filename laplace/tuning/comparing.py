"""A network, or an ensemble of them, against its posterior on labelled data, in one pass over the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laplace.comparison import Comparison, ScoredData, scores_of
from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.random_numbers import drawn_seed
from laplace.engines.engine import outputs
from laplace.enums import PredType
from laplace.likelihoods.targets import Summary
from laplace.network.model_guard import autograd_mode
from laplace.posterior.posterior import Posterior
from laplace.predictive.latent import LinearisedOutputs
from laplace.predictive.options import PredictOptions
from laplace.predictive.prediction import PosteriorOutputs, Prediction, mixed
from laplace.predictive.tilted import TiltedOutputs
from laplace.tuning.candidates import rows_of_call
from laplace.tuning.group import PosteriorGroup
from laplace.tuning.losses import Targets, Validation, warn_if_worse_than_chance

Predict = Callable[[Inputs, PredictOptions, dict[str, Any]], Prediction]


def compare(
    predict: Predict, group: PosteriorGroup, loader: Iterable[Any], options: PredictOptions, *, progress_bar: bool
) -> Comparison:
    """Scores of the predictions and of the networks' own, or their mean [Mixtures, eq. 3], by the same likelihood.

    Without a generator numbers are drawn from seed 0.
    """
    batches.require_loader(loader, "loader")
    for posterior in group.posteriors:
        posterior.require_fitted()
    kinds = [options.kind(posterior.choices.pred_types) for posterior in group.posteriors]
    first = group.first
    likelihood, target, calibration = first.likelihood, first.likelihood.target, first.calibration
    source = torch.Generator().manual_seed(0) if options.generator is None else options.generator
    resampling, seed = torch.Generator().manual_seed(drawn_seed(source)), drawn_seed(source)
    draws = torch.Generator().manual_seed(seed)
    data, n_data = ScoredData(), 0
    with group.same_random_states(), autograd_mode(), torch.no_grad():
        for name, x, y in Validation(loader, progress_bar=progress_bar).batches(first, "compare"):
            with named(name):
                if PredType.NN in kinds:
                    draws.manual_seed(seed)  # samples of the weights are the same for all data
                prediction = predict(x, replace(options, generator=draws), {}).rows
                parts = list(zip(group.posteriors, prediction.components, strict=True))
                weights = prediction.weights
                summary = mixed([_summary(one, rows, x, options) for one, rows in parts], weights)
                f = [network_outputs(one, rows, x) for one, rows in parts]
                positions = prediction.positions
                targets = Targets.from_outputs(first, f[0], y, positions)
                known = mixed([target.at_outputs(likelihood, each) for each in f], weights)
                sigma = prediction.sigma_noise
                noise = sigma if calibration is None else calibration.network_noise  # that of a posterior is less
                network = scores_of(likelihood, *targets.counted(known), noise)
                posterior = scores_of(likelihood, *targets.counted(summary), sigma)
            inputs = n_data + torch.arange(len(f[0])) // math.prod(positions)
            data.add(network, posterior, inputs if targets.rows is None else inputs[targets.rows.cpu()])
            n_data += len(f[0]) // math.prod(positions)
    several = len(group.posteriors) > 1
    found = data.compared(resampling, ("ensemble", "posterior") if several else ("network", "posterior"))
    warn_of_worse_than_chance(first, found)
    return found if calibration is None else replace(found, calibration=calibration.sentence)


def warn_of_worse_than_chance(posterior: Posterior, found: Comparison) -> None:
    """Warns where the network predicts worse than a guess, by what a comparison found."""
    squares = torch.tensor(found.rows["rmse"].network).square() if "rmse" in found.rows else None
    warn_if_worse_than_chance(posterior, found.n_data, found.rows["nll"].network, squares)


def _summary(posterior: Posterior, rows: PosteriorOutputs, x: Inputs, options: PredictOptions) -> Summary:
    """A prediction as scores read it; where a user's class predicts by its own `__call__`, what that returns."""
    if not posterior.overrides("__call__"):
        return posterior.likelihood.target.read_by_scores(rows)
    pred_types, channel_dim = posterior.choices.pred_types, posterior.channel_dim
    with posterior.as_user_object() as la:
        prediction = la(
            x, pred_type=pred_types.name(options.kind(pred_types)), link_approx=options.link_approx,
            n_samples=options.n_samples, generator=rows.draws(),
        )  # fmt: skip
    return rows_of_call(prediction, channel_dim)


def network_outputs(posterior: Posterior, rows: PosteriorOutputs, x: Inputs) -> Tensor:
    """The outputs f(x, θ*), `[B, C]`: the mean of the linearised network, unless that was refined; else of a pass."""
    if isinstance(rows.source, TiltedOutputs) and posterior.refined_step is None:
        return rows.source.network().values
    linearised = isinstance(rows.source, LinearisedOutputs) and posterior.refined_step is None
    return rows.latent_mean if linearised and rows.users_latents is None else outputs(posterior.engine, x).values
