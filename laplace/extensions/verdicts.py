"""Whether predictions are calibrated: verdicts by tests, with the numbers behind them.

Under the hypothesis that predictions are calibrated, labels follow them: which predicted classes are right, or where
targets lie in their distributions, is drawn `N_DRAWS` times, and what was observed is called miscalibrated where fewer
than 1 % of the draws lie as far out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from laplace import metrics
from laplace.comparison import N_BINS, Comparison
from laplace.core.precision_policy import widened
from laplace.core.scores import Ranking, calibrated_draws, gaps_by_datum, signed_draws, sums_by_datum

N_DRAWS = 1000
"""Draws of the labels under the hypothesis of calibration."""

LEVEL = 0.01
"""Level of a test: a calibrated model is called miscalibrated by one of two tests in about 2 % of all cases."""

FEWEST = 20
"""Labels below which there is no verdict."""

_FEW = 500
"""Labels below which the noise of a calibration error is worth a word."""

_TIE = 1e-9
"""Relative rounding within which two calibration errors are the same."""

Kind = Literal["over-confident", "under-confident", "uneven", "biased", "calibrated", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """Whether one model is calibrated.

    Attributes:
        name: Name of the model.
        kind: `"over-confident"`, `"under-confident"`, `"uneven"` (right on average over all predictions, wrong at some
            confidences), `"biased"` (regression: targets lie on one side of the predictions), `"calibrated"` (no
            miscalibration beyond chance) or `"unknown"` (too few labels).
        sentence: The verdict with its numbers.
        p_values: Of the tests behind it, by name.
    """

    name: str
    kind: Kind
    sentence: str
    p_values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClassRow:
    """One class of a classification.

    Attributes:
        name: Its name, or its index as text.
        frequency: Share of the labels.
        predicted: Mean predicted probability.
        p_value: Of the hypothesis that the two differ by chance (normal approximation).
    """

    name: str
    frequency: float
    predicted: float
    p_value: float


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of one model: `(probabilities,)`, `[N, C]`, or mean and variance of the targets, `[N, C]` each."""

    name: str
    values: tuple[Tensor, ...]

    @property
    def of_classes(self) -> bool:
        """True for class probabilities."""
        return len(self.values) == 1

    @property
    def probs(self) -> Tensor:
        """Class probabilities, `[N, C]`."""
        return self.values[0].detach()

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the targets, `[N, C]` each."""
        return self.values[0].detach(), self.values[1].detach()


@dataclass(frozen=True, eq=False)
class OodScores:
    """Scores by which one model tells data of another kind apart, larger is stranger: what, of test data, of others."""

    score: str
    inside: Tensor  # `[N]`
    outside: Tensor  # `[M]`

    def figures(self) -> dict[str, float]:
        """AUROC and FPR95."""
        inside, outside = (-widened(part.detach().cpu()) for part in (self.inside, self.outside))
        return {"auroc": float(metrics.auroc(inside, outside)), "fpr95": float(metrics.fpr95(inside, outside))}


def ood_scores_of(model: Predictions, other: Tensor) -> tuple[str, OodScores]:
    """Name of a model, and how sure it is of the test data and of others, of which probabilities or variances are."""
    if model.of_classes:
        return model.name, OodScores("1 − largest probability", 1 - model.probs.amax(1), 1 - other.amax(1))
    return model.name, OodScores("predicted variance", model.moments[1].sum(1), other.sum(1))


# Verdicts.


def verdict_of_classes(model: Predictions, y: Tensor, datum: Tensor, source: torch.Generator) -> Verdict:
    """By draws of the labels; where data have several of them, which depend on each other, by signs of data's gaps."""
    confidence, right = top(model.probs, y)
    n, mean, share = int(datum.max()) + 1, float(confidence.mean()), float(right.mean())
    is_one_each = n == len(right)
    error = math.sqrt(share * (1 - share) / n) if is_one_each else _error_of_mean(right, datum)
    at = f"at {100 * mean:.1f} % mean confidence {{}} is right in {100 * share:.1f} ± {100 * error:.1f} %"
    if n < FEWEST:
        return Verdict(model.name, "unknown", f"Too few labels for a verdict ({n}) on {called(model.name)}.")
    ranking = Ranking.by_confidence(confidence, right)
    observed = float(ranking.calibration_error(ranking.once, N_BINS))
    if is_one_each:
        errors, shares = calibrated_draws(confidence, N_BINS, N_DRAWS, source)
    else:
        errors, shifts = signed_draws(gaps_by_datum(confidence, right, datum, N_BINS), len(right), N_DRAWS, source)
        shares = mean + shifts
    fewer, more = int((shares <= share).sum()), int((shares >= share).sum())
    larger = int((errors >= observed * (1 - _TIE)).sum())
    p_values = {"accuracy": min(1.0, 2 * (min(fewer, more) + 1) / (N_DRAWS + 1)), "ece": (larger + 1) / (N_DRAWS + 1)}
    limit = float(errors.quantile(0.95))
    subject = called(model.name)
    if p_values["accuracy"] < LEVEL:
        kind: Kind = "over-confident" if share < mean else "under-confident"
        return Verdict(model.name, kind, f"{capitalised(subject)} is {kind}: {at.format('it')}.", p_values)
    if p_values["ece"] < LEVEL:
        sentence = (
            f"{capitalised(subject)} is uneven: {at.format('it')}, but not so at every confidence (ECE "
            f"{observed:.4f}; of a calibrated model it would be below {limit:.4f} in 95 % of all cases)."
        )
        return Verdict(model.name, "uneven", sentence, p_values)
    sentence = (
        f"{capitalised(subject)} shows no miscalibration beyond chance: {at.format('it')} (ECE {observed:.4f}; of "
        f"a calibrated model it would be below {limit:.4f} in 95 % of all cases)."
    )
    return Verdict(model.name, "calibrated", sentence, p_values)


def verdict_of_targets(model: Predictions, y: Tensor, datum: Tensor) -> Verdict:
    """By the mean of u = |2 Φ(z) − 1|, 1/2 ± 1/√(12 n) if calibrated, and of Φ(z), of rows with one output each.

    Of several outputs, whose errors are not independent, n is the number of rows and the variance that of their means;
    of several rows of one datum it is the number of data, and the variance that of their sums.
    """
    n = int(datum.max()) + 1
    if n < FEWEST:
        return Verdict(model.name, "unknown", f"Too few targets for a verdict ({n}) on {called(model.name)}.")
    place = places(model, y)
    outer, centre = (2 * place - 1).abs().mean(1) - 0.5, place.mean(1) - 0.5
    p_values = {"width": _p_of_mean(outer, datum, y.shape[1]), "bias": _p_of_mean(centre, datum, y.shape[1])}
    within = widened((2 * place - 1).abs() <= 0.9)
    inside = float(within.mean())
    error = math.sqrt(0.09 / n) if n == len(y) else _error_of_mean(within.mean(1), datum)
    at = f"its 90 % intervals hold {100 * inside:.1f} ± {100 * error:.1f} % of the targets"
    subject = capitalised(called(model.name))
    if p_values["width"] < LEVEL:
        kind: Kind = "over-confident" if float(outer.mean()) > 0 else "under-confident"
        return Verdict(model.name, kind, f"{subject} is {kind}: {at}.", p_values)
    if p_values["bias"] < LEVEL:
        below = 100 * float(widened(place < 0.5).mean())
        sentence = f"{subject} is biased: {below:.1f} % of the targets lie below the predicted medians, and {at}."
        return Verdict(model.name, "biased", sentence, p_values)
    return Verdict(model.name, "calibrated", f"{subject} shows no miscalibration beyond chance: {at}.", p_values)


def _error_of_mean(values: Tensor, datum: Tensor) -> float:
    """Standard error of a mean over rows `[R]` that depend on each other within a datum (Liang and Zeger, 1986)."""
    sums = sums_by_datum(values - values.mean(), datum)
    return float((sums.square().sum() * len(sums) / (len(sums) - 1)).sqrt()) / len(values)


def _p_of_mean(values: Tensor, datum: Tensor, n_outputs: int) -> float:
    """Two-sided p value of a mean of rows being 0; of one output the variance 1/12 of a uniform number is known."""
    if len(values) > int(datum.max()) + 1:
        return math.erfc(abs(float(values.mean())) / max(_error_of_mean(values, datum), 1e-300) / math.sqrt(2))
    deviation = math.sqrt(1 / 12) if n_outputs == 1 else float(values.std())
    return math.erfc(abs(float(values.mean())) * math.sqrt(len(values)) / max(deviation, 1e-300) / math.sqrt(2))


def class_rows(probs: Tensor, y: Tensor, datum: Tensor, classes: Sequence[str] | None) -> list[ClassRow]:
    rows, n, wide = [], len(y), widened(probs)
    frequency = widened(torch.bincount(y, minlength=probs.shape[1])) / n
    predicted, error = wide.mean(0), (wide * (1 - wide)).sum(0).sqrt() / n
    if n > int(datum.max()) + 1:
        gaps = sums_by_datum(torch.nn.functional.one_hot(y, probs.shape[1]) - wide, datum.to(y.device))
        error = gaps.square().sum(0).sqrt() / n
    for k in range(probs.shape[1]):
        z = float((frequency[k] - predicted[k]).abs() / error[k].clamp(min=1e-300))
        name = str(k) if classes is None else classes[k]
        rows.append(ClassRow(name, float(frequency[k]), float(predicted[k]), math.erfc(z / math.sqrt(2))))
    return rows


def advice_on(
    verdicts: list[Verdict],
    comparison: Comparison,
    n_models: int,
    n_data: int,
    flagged: tuple[str, ...],
) -> tuple[str, ...]:
    sentences: list[str] = []
    kind, row = verdicts[0].kind, comparison.rows["nll"]
    if n_models == 2:
        sentences.append(f"{capitalised(comparison.verdict)}.")
    if kind in ("over-confident", "under-confident", "uneven"):
        sentences.append(
            "Calibrate: `la.calibrate(val_loader)`, on data that neither training nor this report has seen, scales a "
            "posterior's covariance; of another model, divide the logits by a temperature, or wrap it with `Laplace`."
        )
    if kind == "biased":
        sentences.append("Look at the residuals: a bias is no question of uncertainty, but of the mean.")
    if n_models == 2 and row.difference > 2 * row.standard_error:
        better, worse = (called(name) for name in comparison.names)
        sentences.append(f"{capitalised(worse)} predicts worse than {better}: a posterior is tuned by `la.calibrate`.")
    if kind == "calibrated" and not flagged:
        sentences.append("Use these predictions as they are; look at data that are unlike the training data next.")
    if n_data < _FEW:
        sentences.append(f"Use more test data: with {n_data} the noise of a calibration error is large.")
    if flagged:
        names = ", ".join(flagged[:5]) + (" and others" if len(flagged) > 5 else "")
        sentences.append(f"Look at the classes {names}: they are predicted more or less often than they occur.")
    return tuple(sentences)


# Numbers behind verdicts and diagrams.


def top(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Probability of the predicted class, and whether it is the label, `[N]` each, float64."""
    confidence, predicted = widened(probs.detach().cpu()).max(1)
    return confidence.clamp(max=1.0), widened(predicted == y.cpu())


def places(model: Predictions, y: Tensor) -> Tensor:
    """Φ((y − mean) / standard deviation), `[N, C]`, float64: uniform if calibrated."""
    mean, variance = (widened(values.detach().cpu()) for values in model.moments)
    return torch.special.ndtr((widened(y.cpu()) - mean) / variance.sqrt())


# Words.


def called(name: str) -> str:
    return f"the {name}" if name in ("network", "posterior", "ensemble", "model") else name


def capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
