"""Scores against scikit-learn, plain loops and values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import Tensor

from laplace.errors import InvalidArgument, InvalidData
from laplace.metrics import (
    RunningMetric,
    RunningNLLMetric,
    accuracy,
    augrc,
    aurc,
    auroc,
    brier,
    brier_score,
    calibration_bins,
    coverage_at_risk,
    ece,
    ece_floor,
    expected_calibration_error,
    fpr95,
    gaussian_nll,
    maximum_calibration_error,
    mean_calibration_error,
    mean_confidence,
    nll,
    regression_calibration_error,
)
from tests.pairs import nightly
from tests.reference import selective

SCORES = [nll, brier, accuracy, expected_calibration_error, aurc, augrc, coverage_at_risk]


def predictions(n: int = 200, c: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    probs = (2 * torch.randn(n, c, generator=generator, dtype=dtype)).softmax(1)
    return probs, torch.randint(c, (n,), generator=generator)


def test_agrees_with_scikit_learn() -> None:
    probs, y = predictions()
    onehot = np.eye(5)[y.numpy()]
    assert float(nll(probs, y)) == pytest.approx(sk.log_loss(y, probs.numpy()), rel=1e-12)
    assert float(accuracy(probs, y)) == sk.accuracy_score(y, probs.argmax(1))
    assert float(brier(probs, y)) == pytest.approx(((probs.numpy() - onehot) ** 2).sum(1).mean(), rel=1e-12)
    assert float(mean_confidence(probs)) == pytest.approx(probs.numpy().max(1).mean(), rel=1e-12)


@pytest.mark.parametrize("n_bins", [1, 7, 15])
def test_calibration_error_is_the_textbook_sum(n_bins: int) -> None:
    probs, y = predictions()
    confidence, hit = probs.numpy().max(1), (probs.argmax(1) == y).numpy()
    expected = 0.0
    for m in range(n_bins):
        inside = (confidence > m / n_bins) & (confidence <= (m + 1) / n_bins)
        if inside.any():
            expected += inside.mean() * abs(hit[inside].mean() - confidence[inside].mean())
    assert float(expected_calibration_error(probs, y, n_bins=n_bins)) == pytest.approx(expected, rel=1e-12)


def test_calibration_error_by_hand() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [1.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0])
    # Bins of width 1/10: 0.9 twice (one hit), 0.6 (hit), 1.0 (hit).
    assert float(expected_calibration_error(probs, y, n_bins=10)) == pytest.approx((2 * 0.4 + 0.4 + 0.0) / 4)
    count, confidence, correct = calibration_bins(probs, y, n_bins=10)
    assert count.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 2, 1]
    assert confidence[8] == pytest.approx(0.9)
    assert correct[8] == 0.5


@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=30),
    st.lists(st.integers(-4, 4), min_size=1, max_size=30),
)
def test_auroc_counts_pairs_and_half_the_ties(inliers: list[int], outliers: list[int]) -> None:
    wins = sum((a > b) + 0.5 * (a == b) for a in inliers for b in outliers)
    got = auroc(torch.tensor(inliers, dtype=torch.float64), torch.tensor(outliers, dtype=torch.float64))
    assert float(got) == pytest.approx(wins / (len(inliers) * len(outliers)), rel=1e-12)


def test_auroc_agrees_with_scikit_learn() -> None:
    inliers, outliers = torch.randn(300, dtype=torch.float64) + 1, torch.randn(200, dtype=torch.float64)
    labels = [1] * 300 + [0] * 200
    expected = sk.roc_auc_score(labels, torch.cat([inliers, outliers]).numpy())
    assert float(auroc(inliers, outliers)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bad", [torch.tensor([]), torch.tensor([0.5, math.nan])])
def test_auroc_refuses_empty_sets_and_nan(bad: Tensor) -> None:
    with pytest.raises(InvalidData, match="scores_out"):
        auroc(torch.ones(3), bad)


def test_gaussian_nll_is_the_density() -> None:
    mean, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    root = torch.randn(6, 3, 3, dtype=torch.float64)
    covariance = root @ root.mT + torch.eye(3, dtype=torch.float64)
    full = torch.distributions.MultivariateNormal(mean, covariance).log_prob(y)
    torch.testing.assert_close(gaussian_nll(mean, covariance, y), -full.mean(), rtol=1e-12, atol=0)
    variance = covariance.diagonal(dim1=1, dim2=2)
    diagonal = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(1)
    torch.testing.assert_close(gaussian_nll(mean, variance, y), -diagonal.mean(), rtol=1e-12, atol=0)


def test_gaussian_nll_refuses_bad_input() -> None:
    mean = torch.zeros(4, 2)
    with pytest.raises(InvalidData, match=r"\[B, C\]"):
        gaussian_nll(mean, torch.ones(4, 2), torch.zeros(4))
    with pytest.raises(InvalidData, match="not positive"):
        gaussian_nll(mean, torch.zeros(4, 2), mean)


@pytest.mark.parametrize("score", SCORES)
def test_ignored_labels_and_leading_dimensions_do_not_matter(score) -> None:
    probs, y = predictions(24)
    expected = score(probs[:18], y[:18])
    y = y.clone()
    y[18:] = -100
    torch.testing.assert_close(score(probs.reshape(4, 6, 5), y.reshape(4, 6)), expected)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("probs", "y", "match"),
    [
        (torch.full((3, 2), 0.5), torch.zeros(4, dtype=torch.long), "accepted are"),
        (torch.full((3, 2), 0.5), torch.tensor([0, 1, 2]), "labels lie in"),
        (torch.full((3, 2), 0.5), torch.tensor([0, -1, 1]), "labels lie in"),
        (torch.full((3, 2), 0.5), torch.zeros(3), "integer classes"),
        (torch.full((3, 2), 0.5), torch.full((3,), -100), "no label"),
        (torch.full((0, 2), 0.5), torch.zeros(0, dtype=torch.long), "no label"),
        (torch.tensor([[3.0, -1.0]]), torch.tensor([0]), "not logits"),
        (torch.tensor([[math.nan, 0.5]]), torch.tensor([0]), "NaN"),
    ],
)
def test_bad_input_is_refused(score, probs: Tensor, y: Tensor, match: str) -> None:
    with pytest.raises(InvalidData, match=match):
        score(probs, y)


# Errors of the most confident predictions.

_ROWS = st.lists(st.tuples(st.integers(5, 10), st.booleans()), min_size=1, max_size=6)


def selected(rows: list[tuple[int, bool]]) -> tuple[Tensor, Tensor, list[float], list[int]]:
    """Probabilities of two classes and labels, with the confidences and errors that they mean; many ties."""
    confidence, wrong = [c / 10 for c, _ in rows], [int(w) for _, w in rows]
    p = torch.tensor(confidence, dtype=torch.float64)
    return torch.stack([p, 1 - p], 1), torch.tensor(wrong), confidence, wrong


@given(_ROWS)
def test_areas_are_means_over_all_orders(rows: list[tuple[int, bool]]) -> None:
    probs, y, confidence, wrong = selected(rows)
    assert float(aurc(probs, y)) == pytest.approx(selective.aurc(confidence, wrong), rel=1e-12, abs=1e-14)
    assert float(augrc(probs, y)) == pytest.approx(selective.augrc(confidence, wrong), rel=1e-12, abs=1e-14)
    assert float(augrc(probs, y)) == pytest.approx(selective.augrc_by_auroc(confidence, wrong), rel=1e-12, abs=1e-14)


@given(_ROWS, st.integers(0, 10))
def test_coverage_is_that_of_the_best_threshold(rows: list[tuple[int, bool]], tenths: int) -> None:
    probs, y, confidence, wrong = selected(rows)
    expected = selective.coverage_at_risk(confidence, wrong, tenths / 10)
    assert float(coverage_at_risk(probs, y, tenths / 10)) == pytest.approx(expected, rel=1e-12)


def test_a_risk_of_one_in_twenty_is_five_per_cent() -> None:
    """Wherever 0.05 n is rounded: the numbers of errors are whole."""
    for n in range(20, 400, 20):
        p = torch.linspace(0.99, 0.51, n, dtype=torch.float64)
        y = torch.zeros(n, dtype=torch.long)
        y[-n // 20 :] = 1
        assert float(coverage_at_risk(torch.stack([p, 1 - p], 1), y)) == 1


@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=45),
    st.lists(st.integers(-4, 4), min_size=1, max_size=30),
)
def test_false_positives_are_counted_at_the_largest_threshold(inliers: list[int], outliers: list[int]) -> None:
    got = fpr95(torch.tensor(inliers, dtype=torch.float64), torch.tensor(outliers, dtype=torch.float64))
    assert float(got) == pytest.approx(selective.fpr95(inliers, outliers), rel=1e-12)


@pytest.mark.parametrize("bad", [torch.tensor([]), torch.tensor([0.5, math.nan])])
def test_false_positives_need_scores(bad: Tensor) -> None:
    with pytest.raises(InvalidData, match="scores_in"):
        fpr95(bad, torch.ones(3))


@pytest.mark.parametrize("score", [aurc, augrc, coverage_at_risk, ece, ece_floor])
def test_the_order_of_the_data_does_not_matter(score) -> None:
    probs, y = predictions(200)
    probs = (probs * 4).round() / 4 + 0.25  # a few confidences, each of many data
    probs = probs / probs.sum(1, keepdim=True)
    order = torch.randperm(200)
    first, second = (probs,), (probs[order],)
    if score is not ece_floor:
        first, second = (*first, y), (*second, y[order])
    torch.testing.assert_close(score(*first), score(*second), rtol=1e-12, atol=0)


def test_areas_of_soft_labels_are_expectations() -> None:
    """Both are linear in the errors."""
    probs = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4]], dtype=torch.float64)
    soft = torch.tensor([[0.8, 0.2], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    for score in (aurc, augrc):
        expected = 0.0
        for labels in ((a, b, 0) for a in (0, 1) for b in (0, 1)):
            weight = math.prod(float(soft[i, c]) for i, c in enumerate(labels))
            expected += weight * float(score(probs, torch.tensor(labels)))
        assert float(score(probs, soft)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n_bins", [4, *nightly(1)])
def test_the_floor_is_the_expected_error_of_calibrated_probabilities(n_bins: int) -> None:
    p = torch.tensor([0.55, 0.6, 0.8, 0.85, 0.9, 0.95, 1.0], dtype=torch.float64)
    floor = float(ece_floor(torch.stack([p, 1 - p], 1), n_bins, n_resamples=20_000))
    assert floor == pytest.approx(selective.ece_floor(p.tolist(), n_bins), rel=0.02)


def test_the_floor_falls_with_the_number_of_data() -> None:
    p = torch.rand(6400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 2 + 0.5
    probs = torch.stack([p, 1 - p], 1)
    few, many = ece_floor(probs[:100]), ece_floor(probs)
    assert 6 < float(few / many) < 10  # 1/√N
    y = (torch.rand(6400, generator=torch.Generator().manual_seed(1), dtype=torch.float64) > p).long()
    assert float(ece(probs, y)) == pytest.approx(float(many), rel=0.5)


def test_the_floor_has_a_seed_and_leaves_the_global_one() -> None:
    probs, _ = predictions()
    state = torch.get_rng_state()
    seeded = [ece_floor(probs, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*seeded) and not torch.equal(seeded[0], ece_floor(probs))
    assert torch.equal(ece_floor(probs), ece_floor(probs))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_floor_cannot_be_of() -> None:
    with pytest.raises(InvalidData, match=r"\[\.\.\., C\]"):
        ece_floor(torch.ones(3))
    with pytest.raises(InvalidData, match=r"\[0, 2\]"):
        ece_floor(torch.ones(0, 2))
    with pytest.raises(InvalidData, match="not logits"):
        ece_floor(torch.tensor([[3.0, -1.0]]))
    with pytest.raises(InvalidArgument, match="n_resamples=0"):
        ece_floor(torch.tensor([[0.5, 0.5]]), n_resamples=0)
    with pytest.raises(InvalidArgument, match="risk=5"):
        coverage_at_risk(torch.tensor([[0.5, 0.5]]), torch.tensor([0]), risk=5)


def test_names_that_people_type() -> None:
    assert brier_score is brier and ece is expected_calibration_error


def test_calibration_needs_bins() -> None:
    with pytest.raises(InvalidArgument, match="n_bins=0"):
        expected_calibration_error(torch.ones(1, 1), torch.tensor([0]), n_bins=0)


def test_running_nll_does_not_depend_on_the_batches() -> None:
    probs, y = predictions(50)
    y[::7] = -100
    metric = RunningNLLMetric()
    for part in torch.arange(50).split(13):
        metric.update(probs[part], y[part])
    torch.testing.assert_close(metric.compute(), nll(probs, y))
    metric.reset()
    assert float(metric(probs[:5], y[:5])) == pytest.approx(float(nll(probs[:5], y[:5])))
    torch.testing.assert_close(metric.compute(), nll(probs[:5], y[:5]))


def test_running_nll_of_impossible_labels_is_infinite() -> None:
    metric = RunningNLLMetric()
    metric.update(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert metric.compute().isposinf()


def test_running_nll_without_labels_is_an_error() -> None:
    metric = RunningNLLMetric(ignore_index=1)
    metric.update(torch.full((2, 2), 0.5), torch.tensor([1, 1]))
    with pytest.raises(InvalidData, match="no label was counted"):
        metric.compute()


def test_running_metrics_share_one_protocol() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    assert isinstance(RunningNLLMetric(), RunningMetric)
    assert isinstance(torchmetrics.MeanSquaredError(), RunningMetric)
    assert not isinstance(nll, RunningMetric)


def test_scores_keep_dtype_and_device(device: torch.device) -> None:
    probs, y = predictions(dtype=torch.float32)
    for score in SCORES:
        result = score(probs.to(device), y.to(device))
        assert result.dtype == torch.float32
        assert result.device.type == device.type


def test_calibration_errors_of_bins_by_hand() -> None:
    """Two bins with data: confidences 0.6 and 0.9, accuracies 0.5 and 1; the third bin is empty."""
    probs = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.9, 0.1]], dtype=torch.float64)
    y = torch.tensor([0, 1, 0])
    assert mean_calibration_error(probs, y, n_bins=10).item() == pytest.approx(0.1)
    assert maximum_calibration_error(probs, y, n_bins=10).item() == pytest.approx(0.1)
    assert maximum_calibration_error(probs[:2], y[:2], n_bins=4).item() == pytest.approx(0.1)
    assert mean_calibration_error(probs, torch.tensor([1, 1, 0]), n_bins=10).item() == pytest.approx(0.35)


def test_calibration_of_quantiles() -> None:
    """Gaussian targets: right variances are calibrated; targets that always lie below miss every level by 1 − p."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(20_000, 2, generator=generator, dtype=torch.float64)
    one = torch.ones_like(y)
    right, narrow = (regression_calibration_error(0 * y, v * one, y) for v in (1.0, 0.01))
    assert right < 1e-4 < 0.03 < narrow
    levels = torch.arange(1, 10, dtype=torch.float64) / 10
    found = regression_calibration_error(y + 50, one, y, n_levels=9)
    assert found.item() == pytest.approx((1 - levels).square().mean().item())


@pytest.mark.parametrize("bad", [{"var": torch.zeros(3, 1)}, {"y": torch.zeros(3, 2)}, {"n_levels": 0}])
def test_calibration_of_quantiles_is_checked(bad: dict[str, object]) -> None:
    arguments = {"mean": torch.zeros(3, 1), "var": torch.ones(3, 1), "y": torch.zeros(3, 1)} | bad
    with pytest.raises((InvalidArgument, InvalidData)):
        regression_calibration_error(**arguments)
