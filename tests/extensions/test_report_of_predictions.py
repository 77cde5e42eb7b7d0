"""Reports on the predictions of any model: numbers, ignored labels, seeds, and what is no prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from laplace import metrics
from laplace.errors import InvalidArgument, InvalidData
from laplace.extensions import report
from tests.extensions.test_verdicts import classes, targets


def test_numbers_are_those_of_the_metrics() -> None:
    (probs, y), network = classes("calibrated"), classes("over-confident")[0]
    found = report.of_probabilities(probs, y, network=network, ood=(network[:200], probs[:100]))
    rows = found.comparison.rows
    assert rows["nll"].posterior == pytest.approx(float(metrics.nll(probs, y)))
    assert rows["ece"].network == pytest.approx(float(metrics.ece(network, y)))
    assert found.ood["posterior"]["auroc"] == pytest.approx(float(metrics.auroc(probs.amax(1), probs[:100].amax(1))))
    assert found.ood["network"]["fpr95"] == pytest.approx(float(metrics.fpr95(network.amax(1), network[:200].amax(1))))
    assert [verdict.kind for verdict in found.verdicts] == ["calibrated", "over-confident"]
    assert found.classes[0].p_value <= found.classes[-1].p_value
    mean, variance, targets_ = targets("calibrated")
    mean, variance, targets_ = (torch.cat([values, values.flip(0)], 1) for values in (mean, variance, targets_))
    scores = report.of_gaussians(mean, variance, targets_).comparison.rows
    assert scores["nll"].network == pytest.approx(float(metrics.gaussian_nll(mean, variance, targets_)))
    assert scores["crps"].network == pytest.approx(float(metrics.gaussian_crps(mean, variance, targets_)))


def test_ignored_labels_do_not_count() -> None:
    probs, y = classes("calibrated", 200)
    marked = torch.cat([y, torch.full((5,), -100)])
    first, second = report.of_probabilities(probs, y), report.of_probabilities(torch.cat([probs, probs[:5]]), marked)
    assert first.to_dict() == second.to_dict()


def test_equal_seeds_give_equal_reports() -> None:
    probs, y = classes("calibrated")
    first, second = (report.of_probabilities(probs, y, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.to_dict() == second.to_dict()


def test_wrong_arguments_are_refused() -> None:
    probs, y = classes("calibrated", 50)
    mean, variance, values = targets("calibrated", 50)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (InvalidData, "class probabilities", lambda: report.of_probabilities(probs[:, 0], y)),
        (InvalidArgument, "5 classes", lambda: report.of_probabilities(probs, y, classes=["a"])),
        (InvalidArgument, "pair", lambda: report.of_probabilities(probs, y, ood=(probs, probs))),
        (InvalidData, "shape", lambda: report.of_probabilities(probs, y, ood=probs[:, :2])),
        (InvalidArgument, "two different", lambda: report.of_probabilities(probs, y, names=("a", "a"))),
        (InvalidData, "same shape", lambda: report.of_gaussians(mean, variance, values[:3])),
        (InvalidData, "not positive", lambda: report.of_gaussians(mean, 0 * variance, values)),
        (InvalidData, "not finite", lambda: report.of_gaussians(mean / 0, variance, values)),
        (InvalidArgument, "saved as", lambda: report.of_gaussians(mean, variance, values).save("report.pdf")),
    ]
    for kind, words, call in wrong:
        with pytest.raises(kind, match=words):
            call()
    assert report.of_probabilities(probs[:10], y[:10]).verdicts[0].kind == "unknown"


def test_rows_that_are_no_probabilities_are_refused(tmp_path: Path) -> None:
    """Sigmoids and logits of a softmax network, and what has digits missing; rows without a label may be anything."""
    probs, y = classes("calibrated", 200)
    for rows in (probs.logit().sigmoid() * 1.1, probs.log(), probs * probs.isfinite().logical_not() + torch.nan):
        with pytest.raises(InvalidData, match=r"row 0 is no distribution over the classes"):
            report.of_probabilities(rows, y)
    with pytest.raises(InvalidData, match="network: row 7 is no"):
        report.of_probabilities(probs, y, network=probs.index_add(0, torch.tensor([7]), probs[:1]))
    with pytest.raises(InvalidData, match="ood: row 0 is no"):
        report.of_probabilities(probs, y, ood=2 * probs)
    unlabelled = torch.cat([probs, torch.zeros(1, 5)]), torch.cat([y, torch.tensor([-100])])
    assert str(report.of_probabilities(*unlabelled)) == str(report.of_probabilities(probs, y))
    report.of_probabilities(probs.to(torch.bfloat16), y)
    report.of_probabilities((probs * 1e4).round() / 1e4, y)


@pytest.mark.parametrize("kind", ["classes", "targets"])
def test_pixels_of_one_image_are_no_evidence_each(kind: str) -> None:
    """Labels that all pixels of an image share: calibrated, and only the images are independent of each other."""
    draws, n, size = torch.Generator().manual_seed(5), 60, 100
    datum = torch.arange(n).repeat_interleave(size)
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(0)}
    if kind == "classes":
        y = (torch.rand(n, generator=draws) > 0.8).long()[datum]
        probs = torch.tensor([[0.8, 0.2]]).expand(n * size, 2)
        apart, together = (report.of_probabilities(probs, y, datum=of, **options) for of in (None, datum))
        share = (y == 0).double().view(n, size).mean(1)
    else:
        y = torch.randn(n, generator=draws)[datum]
        nothing, one = torch.zeros(n * size), torch.ones(n * size)
        apart, together = (report.of_gaussians(nothing, one, y, datum=of, **options) for of in (None, datum))
        share = (y.abs() <= 1.6449).double().view(n, size).mean(1)
    assert together.n_data == n and apart.n_data == n * size
    assert together.verdicts[0].kind == "calibrated" and apart.verdicts[0].kind != "calibrated"
    assert f"{100 * float(share.mean()):.1f} ± {100 * float(share.std() / n**0.5):.1f} %" in together.verdict
    with pytest.raises(InvalidArgument, match="datum of shape"):
        report.of_gaussians(torch.zeros(3), torch.ones(3), torch.zeros(3), datum=torch.zeros(2))


@pytest.mark.parametrize("share", [0.6, 0.95])
def test_pixels_that_are_miscalibrated_are_found(share: float) -> None:
    draws, n, size = torch.Generator().manual_seed(4), 200, 30
    y = (torch.rand(n * size, generator=draws) > share).long()
    probs = torch.tensor([[0.8, 0.2]]).expand(n * size, 2)
    found = report.of_probabilities(probs, y, datum=torch.arange(n).repeat_interleave(size))
    assert found.verdicts[0].kind == ("over-confident" if share < 0.8 else "under-confident")
