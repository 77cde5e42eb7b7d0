"""Errors of the most confident predictions, by plain loops over orders, thresholds and labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, permutations, product


def _orders(confidence: Sequence[float]) -> list[tuple[int, ...]]:
    """All orders of the rows, from the most confident on."""
    rows = range(len(confidence))
    return [order for order in permutations(rows) if all(confidence[a] >= confidence[b] for a, b in pairwise(order))]


def aurc(confidence: Sequence[float], wrong: Sequence[float]) -> float:
    """(1/N) Σ_i (errors among the first i) / i, a mean over all orders of rows of equal confidence."""

    def of(order: tuple[int, ...]) -> float:
        return sum(sum(wrong[j] for j in order[: i + 1]) / (i + 1) for i in range(len(order))) / len(order)

    return _mean(of, _orders(confidence))


def augrc(confidence: Sequence[float], wrong: Sequence[float]) -> float:
    """Area under the line through (i/N, errors among the first i / N), a mean over all orders."""
    n = len(wrong)

    def of(order: tuple[int, ...]) -> float:
        heights = [sum(wrong[j] for j in order[:i]) / n for i in range(n + 1)]
        return sum((a + b) / 2 / n for a, b in pairwise(heights))

    return _mean(of, _orders(confidence))


def augrc_by_auroc(confidence: Sequence[float], wrong: Sequence[int]) -> float:
    """(1 − AUROC_f) a (1 − a) + ½ (1 − a)², for labels that are certain (Traub et al., 2024)."""
    right = [c for c, w in zip(confidence, wrong, strict=True) if not w]
    failed = [c for c, w in zip(confidence, wrong, strict=True) if w]
    a = len(right) / len(wrong)
    if not right or not failed:
        return 0.5 * (1 - a) ** 2
    area = sum((r > f) + 0.5 * (r == f) for r in right for f in failed) / (len(right) * len(failed))
    return (1 - area) * a * (1 - a) + 0.5 * (1 - a) ** 2


def coverage_at_risk(confidence: Sequence[float], wrong: Sequence[float], risk: float) -> float:
    """The largest share that a threshold accepts with at most this share of errors."""
    best = 0.0
    for threshold in confidence:
        kept = [w for c, w in zip(confidence, wrong, strict=True) if c >= threshold]
        if sum(kept) <= risk * len(kept) + 1e-9:
            best = max(best, len(kept) / len(wrong))
    return best


def fpr95(inliers: Sequence[float], outliers: Sequence[float]) -> float:
    """The smallest share of outliers above a threshold that at least 95 % of the inliers reach."""
    shares = [
        sum(o >= threshold for o in outliers) / len(outliers)
        for threshold in inliers
        if 20 * sum(i >= threshold for i in inliers) >= 19 * len(inliers)
    ]
    return min(shares)


def ece(confidence: Sequence[float], right: Sequence[float], n_bins: int) -> float:
    """Σ_m (n_m / N) |accuracy_m − confidence_m|."""
    total = 0.0
    for m in range(n_bins):
        rows = [i for i, c in enumerate(confidence) if m == min(max(math.ceil(c * n_bins) - 1, 0), n_bins - 1)]
        total += abs(sum(right[i] - confidence[i] for i in rows))
    return total / len(right)


def ece_floor(confidence: Sequence[float], n_bins: int) -> float:
    """The expected error over every possible outcome, each with its probability."""
    total = 0.0
    for right in product((0, 1), repeat=len(confidence)):
        weight = math.prod(c if hit else 1 - c for c, hit in zip(confidence, right, strict=True))
        total += weight * ece(confidence, right, n_bins)
    return total


def _mean(of: Callable[[tuple[int, ...]], float], orders: list[tuple[int, ...]]) -> float:
    return sum(map(of, orders)) / len(orders)
