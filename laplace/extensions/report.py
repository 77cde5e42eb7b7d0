"""A report on predictions and their labels: are they calibrated, what does the posterior change, what to do next.

Of a posterior it is `laplace.report(la, test)`; of any model's predictions `of_probabilities` and `of_gaussians`, or
of a file

    python -m laplace.extensions.report predictions.csv

Verdicts are tests (`verdicts.py`); the report is a text, a page or diagrams (`document.py`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.arguments import checked
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.random_numbers import check_generator, drawn_seed
from laplace.enums import LinkApprox, LinkName, PredType, PredTypeName
from laplace.errors import UnsupportedError
from laplace.extensions.asked import group_of
from laplace.extensions.document import Report
from laplace.extensions.influence import label_errors
from laplace.extensions.ood import ood_scorer
from laplace.extensions.report_of_file import main
from laplace.extensions.report_of_predictions import of_gaussians, of_probabilities
from laplace.extensions.verdicts import OodScores, Predictions, ood_scores_of
from laplace.network.model_guard import autograd_mode
from laplace.predicting import Predicting
from laplace.predictive.options import PredictOptions
from laplace.predictive.prediction import Prediction
from laplace.tuning.comparing import network_outputs, warn_of_worse_than_chance
from laplace.tuning.group import PosteriorGroup
from laplace.tuning.losses import Targets, Validation

N_SUSPICIOUS = 20
"""Suspicious labels that a report names."""


@checked
def report(
    la: Predicting,
    test: Iterable[Any],
    *,
    ood: Iterable[Any] | None = None,
    train: Iterable[Any] | None = None,
    pred_type: PredTypeName = PredType.GLM,
    link_approx: LinkName = LinkApprox.PROBIT,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> Report:
    """Whether predictions are calibrated, what the posterior changes, and what to do next, in one document.

    `laplace.report(la, test).save("report.html")` writes one file that needs no other; `.png` and `.json` are accepted,
    too. It prints as text. The network is scored as in `la.compare`.

    Args:
        la: A fitted posterior or mixture.
        test: Labelled data that are new to training and tuning; read once.
        ood: Inputs of another kind, which a good model is less sure of; batches, labels are not read.
        train: The training data, whose most suspicious labels are then named (`laplace.label_errors`).
        pred_type: As in `la.compare`.
        link_approx: As in `la.compare`.
        n_samples: As in `la.compare`.
        generator: Random generator of samples, resampled data and labels; None for seed 0.
        progress_bar: Show progress bars over the batches.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: An option is not accepted.
        InvalidType: `la` is no posterior or mixture, or a loader is none.
        InvalidData: There are no data, all labels are ignored, or a batch cannot be used.
        UnsupportedError: A likelihood other than those of classes and of targets with Gaussian noise.
        ModelChangedError: The network was trained further after `fit`.

    Warns:
        DataWarning: The data are those of the fit.
    """
    for name, given in (("test", test), ("ood", ood), ("train", train)):
        if given is not None or name == "test":
            batches.require_loader(given, name)
    check_generator(generator)
    group = group_of(la)
    options = PredictOptions(
        pred_type, n_samples, diagonal_output=False, generator=generator, joint=False, link_approx=link_approx
    )
    _refuse_others(group, train)
    source = torch.Generator().manual_seed(0) if generator is None else generator
    drawn, seed = torch.Generator().manual_seed(drawn_seed(source)), drawn_seed(source)
    models = _BothModels(la, group, options, seed)
    scorer = None if ood is None else ood_scorer(group, n_samples=n_samples)
    data, first = Validation(test, ood, progress_bar=progress_bar), group.first
    labelled, inside, outside, of_network = _Labelled(), list[Tensor](), list[Tensor](), list[Tensor]()
    with group.same_random_states(), autograd_mode(), torch.no_grad():
        for name, x, y in data.batches(first, "report"):
            with named(name):
                rows, posterior, network = models(x)
                targets = Targets.from_outputs(first, network[0], y, rows.positions)
                labelled.add(targets, posterior, network, math.prod(rows.positions))
                if scorer is not None:
                    inside.append(targets.counted(scorer(x).reshape(-1, 1))[0])
        if scorer is not None:
            for name, x in data.ood_inputs(first):
                with named(name):
                    of_network.append(models(x)[2][-1])  # probabilities, or variances
                    outside.append(scorer(x).flatten())
    names = ("ensemble" if len(group.posteriors) > 1 else "network", "posterior")
    ours, theirs, y, datum = labelled.joined()
    if first.likelihood.has_noise:
        network = theirs[0], theirs[1]
        found = of_gaussians(ours[0], ours[1], y, network=network, names=names, generator=drawn, datum=datum)
    else:
        found = of_probabilities(ours[0], y, network=theirs[0], names=names, generator=drawn, datum=datum)
    warn_of_worse_than_chance(first, found.comparison)
    if scorer is not None:
        own = OodScores(f"{scorer.methods[0]} of laplace.ood_score", torch.cat(inside).squeeze(1), torch.cat(outside))
        others = ood_scores_of(Predictions(names[0], tuple(theirs)), torch.cat(of_network).cpu())
        found = found.with_ood(dict([(names[1], own), others]))
    return found if train is None else replace(found, suspicious=_suspicious(group, train, progress_bar))


def _refuse_others(group: PosteriorGroup, train: Iterable[Any] | None) -> None:
    """Refuses likelihoods and classes whose predictions are neither probabilities of classes nor Gaussian."""
    likelihood = group.likelihood
    if not likelihood.class_targets and not (likelihood.has_noise and likelihood.latent_prediction):
        raise UnsupportedError(
            f"report with likelihood={likelihood.name!r}: reports are on class labels and on targets with Gaussian "
            "noise. la.compare(loader) scores every likelihood."
        )
    if any(posterior.overrides("__call__") for posterior in group.posteriors):
        raise UnsupportedError(
            "report of a class that overrides __call__; give its predictions to of_probabilities or of_gaussians of "
            "laplace.extensions.report."
        )
    if train is not None and len(group.posteriors) > 1:
        raise UnsupportedError("report(train=) of a mixture, whose networks rank labels apart; leave train out.")


@dataclass(frozen=True)
class _BothModels:
    """What posterior and networks say of the target: class probabilities, or mean and variance."""

    la: Predicting
    group: PosteriorGroup
    options: PredictOptions
    seed: int

    def __call__(self, x: Inputs) -> tuple[Prediction, list[Tensor], list[Tensor]]:
        """The prediction as rows, and the values of posterior and network, `[B, C]` each."""
        draws = torch.Generator().manual_seed(self.seed)  # samples of the weights are the same for all data
        rows = self.la.predict_batch(x, replace(self.options, generator=draws), {}).rows
        parts = zip(self.group.posteriors, rows.components, strict=True)
        f = [network_outputs(one, part, x) for one, part in parts]
        likelihood, calibration = self.group.likelihood, self.group.first.calibration
        if not likelihood.has_noise:
            return rows, [rows.mean], [rows.average([likelihood.inverse_link(each) for each in f])]
        noise = rows.sigma_noise if calibration is None else calibration.network_noise
        mean = rows.average(f)
        between = rows.average([(each - mean).square() for each in f])
        return rows, [rows.mean, rows.variance], [mean, between + noise.square()]


@dataclass(eq=False)
class _Labelled:
    """Predictions of all batches so far at the rows that count, with their labels and the datum of every row."""

    posterior: list[list[Tensor]] = field(default_factory=list)
    network: list[list[Tensor]] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    datum: list[Tensor] = field(default_factory=list)
    n_data: int = 0

    def add(self, targets: Targets, posterior: list[Tensor], network: list[Tensor], n_positions: int) -> None:
        """Takes in a batch, whose data have so many positions each."""
        n_rows = len(network[0])
        datum = self.n_data + torch.arange(n_rows) // n_positions
        self.labels.append(targets.counted(network[0])[1])
        self.datum.append(datum if targets.rows is None else datum[targets.rows.cpu()])
        self.n_data += n_rows // n_positions
        for side, values in ((self.posterior, posterior), (self.network, network)):
            side.append([targets.counted(value)[0] for value in values])

    def joined(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """Values of posterior and network, labels and data, on the CPU."""
        sides = self.posterior, self.network
        ours, theirs = ([torch.cat(parts).cpu() for parts in zip(*side, strict=True)] for side in sides)
        return ours, theirs, torch.cat(self.labels).cpu(), torch.cat(self.datum)


def _suspicious(group: PosteriorGroup, train: Iterable[Any], progress_bar: bool) -> tuple[tuple[int, float], ...]:
    """Training inputs whose labels contradict the others most, with their self-influence."""
    errors = label_errors(group.first, train, progress_bar=progress_bar)
    first = errors.indices[:N_SUSPICIOUS]
    return tuple(zip(first.tolist(), errors.self_influence[first].tolist(), strict=True))


if __name__ == "__main__":
    sys.exit(main())
