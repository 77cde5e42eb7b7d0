"""Scores of labels and soft labels against sums by hand, and rankings with equal confidences against their orders."""

from __future__ import annotations

from itertools import permutations

import torch

from laplace.core import scores

PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], dtype=torch.float64)


def test_soft_labels_are_expectations_over_labels() -> None:
    y, one_hot = torch.tensor([0, 1]), torch.eye(3, dtype=torch.float64)[[0, 1]]
    brier = torch.tensor([0.3**2 + 0.2**2 + 0.1**2, 0.1**2 + 0.7**2 + 0.6**2], dtype=torch.float64)
    for labels in (y, one_hot):
        torch.testing.assert_close(scores.class_brier(PROBS, labels), brier)
        torch.testing.assert_close(scores.class_log_probability(PROBS, labels), PROBS[[0, 1], [0, 1]].log())
        assert scores.class_agreement(PROBS.argmax(1), labels).tolist() == [1, 0]
    soft = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(scores.class_log_probability(PROBS[:1], soft), PROBS[:1, :2].log().mean(1))


def test_entries_that_were_not_observed_count_nothing_and_have_derivatives() -> None:
    mean = torch.tensor([[1.0, 2.0]], requires_grad=True)
    y = torch.tensor([[3.0, float("nan")]])
    total = scores.summed(lambda y: (mean - y).square(), y, mean)
    assert total.tolist() == [4.0]
    (gradient,) = torch.autograd.grad(total.sum(), mean)
    assert gradient.tolist() == [[-4.0, 0.0]]


def test_risk_of_equal_confidences_is_expected_over_their_orders() -> None:
    confidence = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.3], dtype=torch.float64)
    right = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    ranking = scores.Ranking.by_confidence(confidence, right)
    curve = ranking.curve(ranking.once)
    risks = []
    for middle in permutations((1, 2, 3)):
        wrong = 1 - right[[0, *middle, 4]]
        risks.append((wrong.cumsum(0) / torch.arange(1, 6)).mean())
    torch.testing.assert_close(curve.mean_risk()[0], torch.stack(risks).mean())
    assert curve.coverage_at(0.25).tolist() == [0.8] and curve.coverage_at(0.0).tolist() == [0.2]
