"""Scores of two predictive distributions and errors of their differences, datum by datum, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.reference import selective

N_BINS = 15


def class_scores(probs: Tensor, y: Tensor) -> dict[str, list[float]]:
    """Scores of class probabilities `[B, C]` and labels `[B]` or `[B, C]`, a number per row."""
    q = torch.nn.functional.one_hot(y, probs.shape[1]).to(probs) if y.ndim == 1 else y
    rows = list(zip(probs.tolist(), q.tolist(), strict=True))
    predicted = [p.index(max(p)) for p, _ in rows]
    return {
        "nll": [-sum(b * math.log(a) for a, b in zip(p, t, strict=True) if b) for p, t in rows],
        "brier": [sum((a - b) ** 2 for a, b in zip(p, t, strict=True)) for p, t in rows],
        "accuracy": [t[k] for k, (_, t) in zip(predicted, rows, strict=True)],
        "confidence": [p[k] for k, (p, _) in zip(predicted, rows, strict=True)],
    }


def binary_scores(probs: Tensor, y: Tensor) -> dict[str, list[float]]:
    """Scores of probabilities `[B, C]` of C labels `[B, C]`: a number per row, and those of every label, row-major."""
    terms = -(y * probs.log() + (1 - y) * (1 - probs).log())
    predicted = (probs > 0.5).to(probs)
    right = predicted * y + (1 - predicted) * (1 - y)
    return {
        "nll": terms.sum(1).tolist(),
        "brier": (probs - y).square().sum(1).tolist(),
        "accuracy": right.mean(1).tolist(),
        "confidence": torch.maximum(probs, 1 - probs).flatten().tolist(),
        "right": right.flatten().tolist(),
    }


def gaussian_scores(mean: Tensor, variance: Tensor, y: Tensor) -> dict[str, list[float]]:
    """Scores of independent Gaussians `[B, C]`, by PyTorch's density and the integral that the CRPS is."""
    normal = torch.distributions.Normal(mean, variance.sqrt())
    inside = (normal.cdf(y) - 0.5).abs()
    return {
        "nll": (-normal.log_prob(y)).sum(1).tolist(),
        "crps": _crps(mean, variance, y).sum(1).tolist(),
        "square": (y - mean).square().mean(1).tolist(),
        "coverage_50": (inside <= 0.25).double().mean(1).tolist(),
        "coverage_90": (inside <= 0.45).double().mean(1).tolist(),
    }


def _crps(mean: Tensor, variance: Tensor, y: Tensor, n: int = 20_001) -> Tensor:
    """∫ (F(x) − 1[x ≥ y])² dx by the midpoint rule on both sides of y, where the integrand jumps."""
    scale = variance.sqrt()
    reach = 12 * scale + (y - mean).abs()
    u = (torch.arange(n, dtype=mean.dtype) + 0.5) / n
    total = torch.zeros_like(mean)
    for side in (-1, 1):
        x = y + side * reach * u.view(-1, 1, 1)
        cdf = torch.special.ndtr((x - mean) / scale)
        total += ((cdf if side < 0 else 1 - cdf).square() * reach / n).sum(0)
    return total


def mean_difference(first: Sequence[float], second: Sequence[float], datum: Sequence[int]) -> tuple[float, float]:
    """Σ d / M over the M rows and its standard error as a ratio of sums of independent data."""
    d = [b - a for a, b in zip(first, second, strict=True)]
    mean, data = sum(d) / len(d), sorted(set(datum))
    if len(data) == 1:
        return mean, math.nan
    rests = [sum(x - mean for x, n in zip(d, datum, strict=True) if n == each) for each in data]
    return mean, math.sqrt(len(data) / (len(data) - 1) * sum(r * r for r in rests)) / len(d)


def statistics(scores: dict[str, list[float]]) -> dict[str, Callable[[Sequence[int]], float]]:
    """Scores of the rows at some indices, repeated ones included, that are no means."""
    if "square" in scores:
        square = scores["square"]
        return {"rmse": lambda rows: math.sqrt(sum(square[i] for i in rows) / len(rows))}
    confidence, right = scores["confidence"], scores.get("right", scores["accuracy"])
    labels = len(confidence) // len(scores["accuracy"])

    def expanded(of: Callable[[list[float], list[float]], float]) -> Callable[[Sequence[int]], float]:
        def at(rows: Sequence[int]) -> float:
            places = [i * labels + j for i in rows for j in range(labels)]
            return of([confidence[i] for i in places], [1 - right[i] for i in places])

        return at

    return {
        "ece": expanded(lambda c, wrong: selective.ece(c, [1 - w for w in wrong], N_BINS)),
        "aurc": expanded(_aurc),
        "coverage_at_risk": expanded(lambda c, wrong: selective.coverage_at_risk(c, wrong, 0.05)),
    }


def _aurc(confidence: Sequence[float], wrong: Sequence[float]) -> float:
    """`selective.aurc` of many rows: in the place of every order the mean error of equal confidences."""
    mean = {c: [w for d, w in zip(confidence, wrong, strict=True) if d == c] for c in set(confidence)}
    rates = [sum(mean[c]) / len(mean[c]) for c in sorted(confidence, reverse=True)]
    return sum(sum(rates[: i + 1]) / (i + 1) for i in range(len(rates))) / len(rates)
