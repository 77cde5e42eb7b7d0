"""Scores of predictions on test data: means, and differences from the network with their paired standard error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.data import Split
from benchmarks.quality.methods import Column, Predicted
from laplace import metrics

LEVEL = 1.6448536269514722
"""Standard deviations on either side of the mean that hold 90 % of a Gaussian."""


def losses(predicted: Predicted, y: Tensor) -> Tensor:
    """Negative log score of every datum, `[N]`, float64, in nats."""
    if isinstance(predicted, Tensor):
        return -predicted.double().gather(1, y.unsqueeze(1)).squeeze(1).clamp(min=1e-300).log()
    mean, variance = (part.double() for part in predicted)
    return (0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))).squeeze(1)


def paired(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean of the differences of two losses of the same data, and its standard error."""
    difference = one - other
    return float(difference.mean()), float(difference.std() / math.sqrt(len(difference)))


def scores(predicted: Predicted, y: Tensor, unseen: Tensor | None = None) -> dict[str, float]:
    """The scores of one column on test data.

    Args:
        predicted: Class probabilities `[N, C]`, or mean and variance.
        y: Labels `[N]`, or targets `[N, 1]`.
        unseen: Class probabilities of inputs that belong to no class `[M, C]`.
    """
    found = {"nll": float(losses(predicted, y).mean())}
    if not isinstance(predicted, Tensor):
        mean, variance = predicted
        inside = (y - mean).abs() <= LEVEL * variance.sqrt()
        found["crps"] = float(metrics.gaussian_crps(mean, variance, y))
        found["coverage"] = float(inside.float().mean())
        found["rmse"] = float((y - mean).square().mean().sqrt())
        return found
    found["accuracy"] = float(metrics.accuracy(predicted, y))
    found["brier"] = float(metrics.brier(predicted, y))
    found["ece"] = float(metrics.expected_calibration_error(predicted, y))
    found["ece_floor"] = float(metrics.ece_floor(predicted, generator=torch.Generator().manual_seed(0)))
    found["aurc"] = float(metrics.aurc(predicted, y))
    if unseen is not None:
        found["auroc"] = float(metrics.auroc(predicted.max(1).values, unseen.max(1).values))
    return found


def scored(columns: Iterable[Column], split: Split) -> list[dict[str, Any]]:
    """Method, posterior, what was chosen, and scores of columns, of which the first is the network.

    `paired` is the mean difference of the negative log scores from those of the network, on the test data, and its
    standard error; `shifts` has both, and the score itself, for each change of the test inputs.
    """
    network: dict[str, Tensor] = {}
    found = []
    for column in columns:
        with torch.no_grad():
            predicted = column.predict(split.test[0])
            unseen = None if split.unseen is None else column.predict(split.unseen)
            line: dict[str, Any] = {"method": column.method, "posterior": column.posterior, "chosen": column.chosen}
            line |= scores(predicted, split.test[1], unseen)
            lost = losses(predicted, split.test[1])
            line |= {"trainings": column.trainings} if column.trainings else {}
            line["paired"] = paired(lost, network.setdefault("", lost))
            line["shifts"] = {}
            for name, (x, y) in split.shifts.items():
                lost = losses(column.predict(x), y)
                line["shifts"][name] = (float(lost.mean()), *paired(lost, network.setdefault(name, lost)))
        found.append(line)
    return found
