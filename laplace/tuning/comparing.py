"""A network, or an ensemble of them, against its posterior on labelled data, in one pass over the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import laplace
from laplace.comparison import Comparison, ScoredData, scores_of
from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.random_numbers import check_generator, drawn_seed
from laplace.engines.engine import outputs
from laplace.enums import PredType
from laplace.errors import UnsupportedError
from laplace.likelihoods.targets import Summary
from laplace.network.model_guard import autograd_mode
from laplace.posterior.posterior import Posterior
from laplace.predictive.latent import LinearisedOutputs
from laplace.predictive.options import PredictOptions
from laplace.predictive.prediction import PosteriorOutputs, Prediction, mixed
from laplace.report import (
    N_SUSPICIOUS,
    Predictions,
    Report,
    Strangers,
    of_gaussians,
    of_probabilities,
    strangers_of,
)
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
                f = [_outputs(one, rows, x) for one, rows in parts]
                positions = prediction.positions
                targets = Targets.of(first, f[0], y, positions)
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
    _warn_if_worse_than_chance(first, found)
    return found


def _warn_if_worse_than_chance(posterior: Posterior, found: Comparison) -> None:
    squares = torch.tensor(found.rows["rmse"].network).square() if "rmse" in found.rows else None
    warn_if_worse_than_chance(posterior, found.n_data, found.rows["nll"].network, squares)


def reported(
    predict: Predict, group: PosteriorGroup, loader: Iterable[Any], ood: Iterable[Any] | None,
    train: Iterable[Any] | None, options: PredictOptions, *, progress_bar: bool,
) -> Report:  # fmt: skip
    """The report on predictions beside the networks' own, of class labels or of targets with Gaussian noise."""
    for name, given in (("test", loader), ("ood", ood), ("train", train)):
        if given is not None or name == "test":
            batches.require_loader(given, name)
    check_generator(options.generator)
    for posterior in group.posteriors:
        posterior.require_fitted()
    first = group.first
    likelihood = first.likelihood
    if not likelihood.class_targets and not (likelihood.has_noise and likelihood.latent_prediction):
        raise UnsupportedError(
            f"report with likelihood={likelihood.name!r}: reports are on class labels and on targets with Gaussian "
            "noise. la.compare(loader) scores every likelihood."
        )
    if any(posterior.overrides("__call__") for posterior in group.posteriors):
        raise UnsupportedError("report of a class that overrides __call__; give its predictions to laplace.report.")
    if train is not None and len(group.posteriors) > 1:
        raise UnsupportedError("report(train=) of a mixture, whose networks rank labels apart; leave train out.")
    source = torch.Generator().manual_seed(0) if options.generator is None else options.generator
    drawn, seed = torch.Generator().manual_seed(drawn_seed(source)), drawn_seed(source)
    draws = torch.Generator()

    def both(x: Inputs) -> tuple[Prediction, list[Tensor], list[Tensor]]:
        """A prediction as rows, and what posterior and network say of y: probabilities, or mean and variance."""
        draws.manual_seed(seed)  # samples of the weights are the same for all data
        rows = predict(x, replace(options, generator=draws), {}).rows
        parts = zip(group.posteriors, rows.components, strict=True)
        f = [_outputs(one, part, x) for one, part in parts]
        if not likelihood.has_noise:
            return rows, [rows.mean], [rows.average([likelihood.inverse_link(each) for each in f])]
        noise = rows.sigma_noise if first.calibration is None else first.calibration.network_noise
        mean = rows.average(f)
        between = rows.average([(each - mean).square() for each in f])
        return rows, [rows.mean, rows.variance], [mean, between + noise.square()]

    scorer = None if ood is None else laplace.ood_scorer(group, n_samples=options.n_samples)
    sides: tuple[list[list[Tensor]], list[list[Tensor]]] = ([], [])
    network_outside: list[Tensor] = []
    inside: list[Tensor] = []
    outside: list[Tensor] = []
    labels: list[Tensor] = []
    datum: list[Tensor] = []
    n_data = 0
    data = Validation(loader, ood, progress_bar=progress_bar)
    with group.same_random_states(), autograd_mode(), torch.no_grad():
        for name, x, y in data.batches(first, "report"):
            with named(name):
                rows, posterior, network = both(x)
                targets = Targets.of(first, network[0], y, rows.positions)
                labels.append(targets.counted(network[0])[1])
                of = n_data + torch.arange(len(network[0])) // math.prod(rows.positions)
                datum.append(of if targets.rows is None else of[targets.rows.cpu()])
                n_data += len(of) // math.prod(rows.positions)
                for side, values in zip(sides, (posterior, network), strict=True):
                    side.append([targets.counted(value)[0] for value in values])
                if scorer is not None:
                    inside.append(targets.counted(scorer(x).reshape(-1, 1))[0])
        if scorer is not None:
            for name, x in data.ood_inputs(first):
                with named(name):
                    network_outside.append(both(x)[2][-1])  # probabilities, or variances
                    outside.append(scorer(x).flatten())
    ours, theirs = ([torch.cat(parts).cpu() for parts in zip(*side, strict=True)] for side in sides)
    names = ("ensemble" if len(group.posteriors) > 1 else "network", "posterior")
    y, of_rows = torch.cat(labels).cpu(), torch.cat(datum)
    if likelihood.has_noise:
        (mean, variance), network = ours, (theirs[0], theirs[1])
        found = of_gaussians(mean, variance, y, network=network, names=names, generator=drawn, datum=of_rows)
    else:
        found = of_probabilities(ours[0], y, network=theirs[0], names=names, generator=drawn, datum=of_rows)
    _warn_if_worse_than_chance(first, found.comparison)
    if scorer is not None:
        told = Strangers(f"{scorer.methods[0]} of laplace.ood_score", torch.cat(inside).squeeze(1), torch.cat(outside))
        others = strangers_of(Predictions(names[0], tuple(theirs)), torch.cat(network_outside).cpu())
        found = found.with_strangers(dict([(names[1], told), others]))
    return found if train is None else replace(found, suspicious=_suspicious(group, train, progress_bar))


def _suspicious(group: PosteriorGroup, train: Iterable[Any], progress_bar: bool) -> tuple[tuple[int, float], ...]:
    """Training inputs whose labels contradict the others most, with their self-influence."""
    errors = laplace.label_errors(group.first, train, progress_bar=progress_bar)
    first = errors.indices[:N_SUSPICIOUS]
    return tuple(zip(first.tolist(), errors.self_influence[first].tolist(), strict=True))


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


def _outputs(posterior: Posterior, rows: PosteriorOutputs, x: Inputs) -> Tensor:
    """The outputs f(x, θ*), `[B, C]`: the mean of the linearised network, unless that was refined; else of a pass."""
    linearised = isinstance(rows.source, LinearisedOutputs) and posterior.refined_step is None
    return rows.latent_mean if linearised and rows.users_latents is None else outputs(posterior.engine, x).values
