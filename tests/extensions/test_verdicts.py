"""Verdicts on calibration: those of predictions that are known to be right or wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace.extensions import report, verdicts
from tests.pairs import nightly

TEMPERATURES = {"calibrated": 1.0, "over-confident": 0.6, "under-confident": 1.6}
"""By which logits are divided that are calibrated as they are."""


SCALES = {"calibrated": 1.0, "over-confident": 0.8, "under-confident": 1.25}
"""Factors of the right standard deviations."""


def classes(kind: str, n: int = 1000, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, 5, generator=source, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), 1, generator=source)[:, 0]
    return (logits / TEMPERATURES[kind]).softmax(1), y


def targets(kind: str, n: int = 1000, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, 1, generator=source, dtype=torch.float64)
    deviation = 0.3 + torch.rand(n, 1, generator=source, dtype=torch.float64)
    y = mean + deviation * torch.randn(n, 1, generator=source, dtype=torch.float64)
    return mean, (SCALES[kind] * deviation).square(), y


@pytest.mark.parametrize("kind", nightly("calibrated", "over-confident", "under-confident"))
def test_verdicts_of_classes_are_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 95 of 100 cases; 300 draws of the labels decide as 1,000 do, but for p values of about 1 %."""
    monkeypatch.setattr(verdicts, "N_DRAWS", 300)
    found = [verdicts.Predictions("model", classes(kind, seed=seed)[:1]) for seed in range(100)]
    kinds = [
        verdicts.verdict_of_classes(
            model, classes(kind, seed=seed)[1], torch.arange(1000), torch.Generator().manual_seed(seed)
        ).kind
        for seed, model in enumerate(found)
    ]
    assert kinds.count(kind) >= 95


@pytest.mark.parametrize("kind", ["over-confident", *nightly("calibrated", "under-confident")])
def test_verdicts_of_targets_are_right(kind: str) -> None:
    cases = [targets(kind, seed=seed) for seed in range(100)]
    kinds = [
        verdicts.verdict_of_targets(verdicts.Predictions("m", (m, v)), y, torch.arange(len(y))).kind
        for m, v, y in cases
    ]
    assert kinds.count(kind) >= 95


def test_predictions_that_are_wrong_both_ways_are_uneven() -> None:
    """Half of the inputs are over-confident, the other half under-confident by as much."""
    source = torch.Generator().manual_seed(0)
    right = torch.rand(4000, generator=source, dtype=torch.float64)
    confidence = torch.where(torch.arange(4000) % 2 == 0, 0.9, 0.6).double()
    y = (right > 0.75).long()
    probs = torch.stack([confidence, 1 - confidence], 1)
    assert report.of_probabilities(probs, y).verdicts[0].kind == "uneven"


def test_a_bias_is_no_overconfidence() -> None:
    mean, variance, y = targets("calibrated", 2000)
    assert report.of_gaussians(mean + 0.1 * variance.sqrt(), variance, y).verdicts[0].kind == "biased"
