"""A report on predictions and their labels: are they calibrated, what does the posterior change, what to do next.

Of a posterior it is `la.report(test)`; of any model's predictions `of_probabilities` and `of_gaussians`, or of a file

    python -m laplace.report predictions.csv

A verdict is a test. Under the hypothesis that predictions are calibrated, labels follow them: which predicted classes
are right, or where targets lie in their distributions, is drawn `N_DRAWS` times, and what was observed is called
miscalibrated where fewer than 1 % of the draws lie as far out. Bars are 95 % intervals (Wilson, 1927).
"""

from __future__ import annotations

import argparse
import base64
import csv
import html
import io
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from laplace import metrics, plotting
from laplace.comparison import N_BINS, Comparison, ScoredData, scores_of
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import check_generator
from laplace.core.scores import Ranking, calibrated_draws, gaps_by_datum, signed_draws, sums_by_datum
from laplace.errors import InvalidArgument, InvalidData
from laplace.likelihoods.gaussian import Gaussian

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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

_BLIND = 0.7
"""AUROC below which the two sets of data are hardly told apart."""

N_SUSPICIOUS = 20
"""Suspicious labels that a report names."""

_SHOWN = 20
"""Classes in the table of classes: those that are furthest from their frequency."""

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
class Strangers:
    """Scores by which one model tells data of another kind apart, larger is stranger: what, of test data, of others."""

    score: str
    inside: Tensor  # `[N]`
    outside: Tensor  # `[M]`

    def figures(self) -> dict[str, float]:
        """AUROC and FPR95."""
        inside, outside = (-widened(part.detach().cpu()) for part in (self.inside, self.outside))
        return {"auroc": float(metrics.auroc(inside, outside)), "fpr95": float(metrics.fpr95(inside, outside))}


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """A report on predictions: it prints as text, and `save` writes it as HTML, PNG or JSON.

    Attributes:
        verdicts: Whether each model is calibrated; that of the model in question comes first.
        comparison: Scores of both models with paired standard errors, or of one.
        classes: Predicted and observed frequencies of the classes, the most different ones first; of regression empty.
        ood: `auroc` and `fpr95` of each model's score between the test data and data of another kind, by model; empty
            if none were given.
        ood_scores: What each model's score was: its largest probability (regression: its variance), of a posterior of
            `la.report` the default of `laplace.ood_score`.
        advice: What to do next, a sentence each.
        n_data: Number of inputs.
        suspicious: Places of the training inputs whose labels contradict the others most, with their self-influence in
            nats; empty without training data.
    """

    verdicts: tuple[Verdict, ...]
    comparison: Comparison
    classes: tuple[ClassRow, ...]
    ood: Mapping[str, Mapping[str, float]]
    advice: tuple[str, ...]
    n_data: int
    _models: tuple[Predictions, ...]
    _y: Tensor
    suspicious: tuple[tuple[int, float], ...] = ()
    ood_scores: Mapping[str, str] = field(default_factory=dict)
    _strangers: tuple[Strangers, ...] = ()

    def with_strangers(self, strangers: Mapping[str, Strangers]) -> Report:
        """The report with what tells data of another kind apart, by model."""
        told = {name: part.figures() for name, part in strangers.items()}
        blind = tuple(
            f"Do not trust {_the(name)} to notice data of another kind (AUROC {values['auroc']:.2f})."
            for name, values in told.items()
            if values["auroc"] < _BLIND
        )
        scores = {name: part.score for name, part in strangers.items()}
        return replace(
            self, ood=told, ood_scores=scores, advice=(*self.advice, *blind), _strangers=tuple(strangers.values())
        )

    @property
    def verdict(self) -> str:
        """The sentence on the model in question."""
        return self.verdicts[0].sentence

    def to_dict(self) -> dict[str, Any]:
        """All numbers of the report in plain types, as JSON has them: not finite numbers are None."""
        scores = {name: vars(row) for name, row in self.comparison.rows.items()}
        if len(self._models) == 1:
            scores = {name: {self._models[0].name: row.network} for name, row in self.comparison.rows.items()}
        content = {
            "n_data": self.n_data,
            "verdicts": [vars(verdict) for verdict in self.verdicts],
            "scores": scores,
            "names": list(self.comparison.names[: len(self._models)]),
            "classes": [vars(row) for row in self.classes],
            "ood": {name: dict(values) for name, values in self.ood.items()},
            "ood_scores": dict(self.ood_scores),
            "advice": list(self.advice),
            "suspicious": [list(row) for row in self.suspicious],
        }
        return _plain(content)

    def figure(self) -> Figure:
        """The diagrams of the report side by side.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        models, y, diagrams = self._models, self._y, list[Callable[["Axes"], Any]]()
        if models[0].of_classes:
            diagrams.append(lambda ax: _draw_reliability(ax, models, y))
            diagrams.append(lambda ax: _draw_risk(ax, models, y))
            diagrams.append(lambda ax: plotting.score_histogram(ax, {m.name: _top(m.probs, y)[0] for m in models}))
        else:
            diagrams.append(lambda ax: plotting.quantile_diagram(ax, {m.name: m.moments for m in models}, y))
            diagrams.append(lambda ax: _draw_coverage(ax, models, y))
        if self._strangers:
            diagrams.append(lambda ax: _draw_strangers(ax, models[0].name, self._strangers[0]))
        figure, axes = plotting.new_figure(len(diagrams))
        for ax, diagram in zip(axes, diagrams, strict=True):
            diagram(ax)
        return figure

    def save(self, path: str | Path) -> None:
        """Writes the report to a file, by its suffix: `.html` (one file that needs no other), `.png` or `.json`.

        Raises:
            InvalidArgument: Another suffix.
            MissingDependency: matplotlib is not installed; JSON does without.
        """
        path = Path(path)
        if path.suffix == ".html":
            content = self._html().encode()
        elif path.suffix == ".png":
            content = _png(self.figure())
        elif path.suffix == ".json":
            content = json.dumps(self.to_dict(), indent=2, allow_nan=False).encode()
        else:
            raise InvalidArgument(f"path={str(path)!r}: a report is saved as .html, .png or .json.")
        path.write_bytes(content)

    def __repr__(self) -> str:
        """The verdicts, the scores and what to do next."""
        lines = [*(verdict.sentence for verdict in self.verdicts), ""]
        if len(self._models) == 2:
            lines += repr(self.comparison).splitlines()
        else:
            rows = [(title, value) for title, value, _, _ in self.comparison.cells()]
            width = max(len(title) for title, _ in rows)
            lines += [f"{title.ljust(width)}  {value:>8}" for title, value in rows]
        lines.append("")
        for name, values in self.ood.items():
            figures = f"AUROC {values['auroc']:.3f}, FPR95 {values['fpr95']:.3f}"
            lines.append(f"Data of another kind: {figures} ({name}, {self.ood_scores[name]})")
        if self.suspicious:
            lines.append(f"Suspicious labels: training inputs {', '.join(str(i) for i, _ in self.suspicious)}")
        lines += [f"- {sentence}" for sentence in self.advice]
        return "\n".join(lines)

    def _html(self) -> str:
        def table(rows: Sequence[Sequence[str]]) -> str:
            head, *body = [[html.escape(cell) for cell in row] for row in rows]
            line = "".join(f"<th>{cell}</th>" for cell in head)
            lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body)
            return f"<table><tr>{line}</tr>{lines}</table>"

        parts = [f"<h1>{html.escape(self.verdicts[0].sentence)}</h1>"]
        parts += [f"<p>{html.escape(verdict.sentence)}</p>" for verdict in self.verdicts[1:]]
        parts.append(
            "<h2>What to do next</h2><ul>" + "".join(f"<li>{html.escape(s)}</li>" for s in self.advice) + "</ul>"
        )
        parts.append("<h2>Scores</h2>")
        if len(self._models) == 2:
            parts.append(self.comparison._repr_html_())
        else:
            parts.append(table([("", self._models[0].name), *(row[:2] for row in self.comparison.cells())]))
            parts.append(f"<p>On {self.n_data:,} inputs.</p>")
        image = base64.b64encode(_png(self.figure())).decode()
        parts.append(f'<h2>Diagrams</h2><img alt="diagrams" src="data:image/png;base64,{image}">')
        if self.ood:
            rows = [
                (name, self.ood_scores[name], f"{values['auroc']:.3f}", f"{values['fpr95']:.3f}")
                for name, values in self.ood.items()
            ]
            parts.append("<h2>Data of another kind</h2>" + table([("", "score", "AUROC", "FPR95"), *rows]))
        if self.classes:
            rows = [(r.name, f"{r.frequency:.4f}", f"{r.predicted:.4f}", f"{r.p_value:.2g}") for r in self.classes]
            parts.append(
                "<h2>Classes</h2>" + table([("class", "share of labels", "mean probability", "p value"), *rows])
            )
        if self.suspicious:
            rows = [(str(i), f"{score:.3g}") for i, score in self.suspicious]
            parts.append("<h2>Suspicious labels</h2>" + table([("training input", "self-influence"), *rows]))
        return _PAGE.format(title=html.escape(self.verdicts[0].kind), body="\n".join(parts))


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Report: {title}</title>
<style>
body {{ font-family: sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; line-height: 1.45 }}
h1 {{ font-size: 1.4em }} h2 {{ font-size: 1.1em; margin-top: 2em }}
table {{ border-collapse: collapse }}
td, th {{ padding: 0.2em 0.9em; text-align: right; border-bottom: 1px solid #ddd }}
td:first-child, th:first-child {{ text-align: left }} img {{ max-width: 100% }}
</style></head><body>
{body}
</body></html>
"""


# Reports from predictions.


def of_probabilities(
    probs: Tensor,
    y: Tensor,
    *,
    network: Tensor | None = None,
    ood: Tensor | tuple[Tensor, Tensor] | None = None,
    classes: Sequence[str] | None = None,
    names: tuple[str, str] = ("network", "posterior"),
    generator: torch.Generator | None = None,
    datum: Tensor | None = None,
) -> Report:
    """Report on class probabilities of any model.

    Args:
        probs: Class probabilities `[N, C]` of the model in question.
        y: Labels `[N]`, integers; rows with the label −100 do not count.
        network: Class probabilities `[N, C]` of the model to compare with; None for none.
        ood: Class probabilities `[M, C]` for inputs of another kind; with `network` those of both, as a pair
            `(network, posterior)`.
        classes: Names of the C classes; None for their indices.
        names: Names of the model to compare with and of the one in question; the second alone without `network`.
        generator: Random generator of what is drawn; None for seed 0. Equal seeds give equal reports.
        datum: Index of the input that every row belongs to, `[N]`, of tokens or pixels, which are not independent; None
            where every row is one.

    Raises:
        InvalidArgument: Names that are no two texts, or not one per class; one prediction of other inputs where there
            are two models; or not one index per row.
        InvalidData: Shapes do not match, rows are no probabilities, or labels are no classes.
    """
    source = _source(generator)
    first, second = _checked_names(names)
    _require_rows(probs, "probs")
    if not isinstance(y, Tensor) or y.dim() != 1 or y.is_floating_point() or len(y) != len(probs):
        raise InvalidData(f"y of shape {list(getattr(y, 'shape', []))}; integer labels [N] of {len(probs)} inputs.")
    counts = y != metrics.IGNORE_INDEX
    of = metrics.check_datum(datum, len(y))[counts.cpu()].unique(return_inverse=True)[1]
    probs, y, network = probs[counts], y[counts], None if network is None else network[counts]
    for rows, name in ((probs, "probs"), (network, "network")):
        if rows is not None:
            _require_sums(rows, name)
    comparison = metrics.compare_probabilities(
        probs if network is None else network, probs, y, names=(second if network is None else first, second),
        generator=source, datum=of,
    )  # fmt: skip
    if classes is not None and len(classes) != probs.shape[1]:
        raise InvalidArgument(f"classes= has {len(classes)} names for {probs.shape[1]} classes.")
    if classes is not None:
        classes = [_printable(str(name)) for name in classes]
        _require_distinct("classes=", classes)
    models = _models(probs, network, first, second)
    strange = _strange(ood, network is not None, probs.shape[1])
    for rows in strange:
        _require_sums(rows, "ood")
    verdicts = [_verdict_of_classes(model, y, of, source) for model in models]
    rows = _class_rows(probs.detach(), y, of, classes)
    flagged = tuple(row.name for row in rows if row.p_value < LEVEL / len(rows))  # Bonferroni's correction
    n_data = comparison.n_data
    advice = _advice(verdicts, comparison, len(models), n_data, flagged)
    shown = tuple(sorted(rows, key=lambda row: row.p_value)[:_SHOWN])
    report = Report(tuple(verdicts), comparison, shown, {}, advice, n_data, models, y)
    return report.with_strangers(dict(map(strangers_of, models, strange)))


def of_gaussians(
    mean: Tensor,
    variance: Tensor,
    y: Tensor,
    *,
    network: tuple[Tensor, Tensor] | None = None,
    ood: Tensor | tuple[Tensor, Tensor] | None = None,
    names: tuple[str, str] = ("network", "posterior"),
    generator: torch.Generator | None = None,
    datum: Tensor | None = None,
) -> Report:
    """Report on Gaussian predictions of any model.

    Args:
        mean: Predicted means `[N, C]` or `[N]`.
        variance: Variances of the targets of the same shape, the observation noise included.
        y: Targets of the same shape.
        network: Mean and variance of the model to compare with; None for none.
        ood: Variances `[M, C]` or `[M]` for inputs of another kind; with `network` those of both, as a pair.
        names: Names of the model to compare with and of the one in question; the second alone without `network`.
        generator: Random generator of what is drawn; None for seed 0. Equal seeds give equal reports.
        datum: As in `of_probabilities`.

    Raises:
        InvalidArgument: Names that are no two texts; one prediction of other inputs where there are two models.
        InvalidData: Shapes do not match, there is no input, or a variance is not positive.
    """
    source = _source(generator)
    first, second = _checked_names(names)
    y = _as_rows(y)
    sides = [Predictions(second, _checked_moments(mean, variance, y))]
    if network is not None:
        sides.append(Predictions(first, _checked_moments(*network, y)))
    n_outputs, datum = y.shape[1], metrics.check_datum(datum, len(y))
    data = ScoredData()
    data.add(_scores_of_targets(sides[-1], y), _scores_of_targets(sides[0], y), datum)
    comparison = data.compared(source, (sides[-1].name, second))
    strange = _strange(ood, network is not None, n_outputs)
    verdicts, n_data = [_verdict_of_targets(side, y, datum) for side in sides], comparison.n_data
    advice = _advice(verdicts, comparison, len(sides), n_data, ())
    report = Report(tuple(verdicts), comparison, (), {}, advice, n_data, tuple(sides), y)
    return report.with_strangers(dict(map(strangers_of, sides, strange)))


def strangers_of(model: Predictions, other: Tensor) -> tuple[str, Strangers]:
    """Name of a model, and how sure it is of the test data and of others, of which probabilities or variances are."""
    if model.of_classes:
        return model.name, Strangers("1 − largest probability", 1 - model.probs.amax(1), 1 - other.amax(1))
    return model.name, Strangers("predicted variance", model.moments[1].sum(1), other.sum(1))


# Verdicts.


def _verdict_of_classes(model: Predictions, y: Tensor, datum: Tensor, source: torch.Generator) -> Verdict:
    """By draws of the labels; where data have several of them, which depend on each other, by signs of data's gaps."""
    confidence, right = _top(model.probs, y)
    n, mean, share = int(datum.max()) + 1, float(confidence.mean()), float(right.mean())
    is_one_each = n == len(right)
    error = math.sqrt(share * (1 - share) / n) if is_one_each else _error_of_mean(right, datum)
    at = f"at {100 * mean:.1f} % mean confidence {{}} is right in {100 * share:.1f} ± {100 * error:.1f} %"
    if n < FEWEST:
        return Verdict(model.name, "unknown", f"Too few labels for a verdict ({n}) on {_the(model.name)}.")
    ranking = Ranking.of(confidence, right)
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
    subject = _the(model.name)
    if p_values["accuracy"] < LEVEL:
        kind: Kind = "over-confident" if share < mean else "under-confident"
        return Verdict(model.name, kind, f"{_capital(subject)} is {kind}: {at.format('it')}.", p_values)
    if p_values["ece"] < LEVEL:
        sentence = (
            f"{_capital(subject)} is uneven: {at.format('it')}, but not so at every confidence (ECE "
            f"{observed:.4f}; of a calibrated model it would be below {limit:.4f} in 95 % of all cases)."
        )
        return Verdict(model.name, "uneven", sentence, p_values)
    sentence = (
        f"{_capital(subject)} shows no miscalibration beyond chance: {at.format('it')} (ECE {observed:.4f}; of "
        f"a calibrated model it would be below {limit:.4f} in 95 % of all cases)."
    )
    return Verdict(model.name, "calibrated", sentence, p_values)


def _verdict_of_targets(model: Predictions, y: Tensor, datum: Tensor) -> Verdict:
    """By the mean of u = |2 Φ(z) − 1|, 1/2 ± 1/√(12 n) if calibrated, and of Φ(z), of rows with one output each.

    Of several outputs, whose errors are not independent, n is the number of rows and the variance that of their means;
    of several rows of one datum it is the number of data, and the variance that of their sums.
    """
    n = int(datum.max()) + 1
    if n < FEWEST:
        return Verdict(model.name, "unknown", f"Too few targets for a verdict ({n}) on {_the(model.name)}.")
    place = _places(model, y)
    outer, centre = (2 * place - 1).abs().mean(1) - 0.5, place.mean(1) - 0.5
    p_values = {"width": _p_of_mean(outer, datum, y.shape[1]), "bias": _p_of_mean(centre, datum, y.shape[1])}
    within = widened((2 * place - 1).abs() <= 0.9)
    inside = float(within.mean())
    error = math.sqrt(0.09 / n) if n == len(y) else _error_of_mean(within.mean(1), datum)
    at = f"its 90 % intervals hold {100 * inside:.1f} ± {100 * error:.1f} % of the targets"
    subject = _capital(_the(model.name))
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


def _class_rows(probs: Tensor, y: Tensor, datum: Tensor, classes: Sequence[str] | None) -> list[ClassRow]:
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


def _advice(
    verdicts: list[Verdict],
    comparison: Comparison,
    n_models: int,
    n_data: int,
    flagged: tuple[str, ...],
) -> tuple[str, ...]:
    sentences: list[str] = []
    kind, row = verdicts[0].kind, comparison.rows["nll"]
    if n_models == 2:
        sentences.append(f"{_capital(comparison.verdict)}.")
    if kind in ("over-confident", "under-confident", "uneven"):
        sentences.append(
            "Calibrate: `la.calibrate(val_loader)`, on data that neither training nor this report has seen, scales a "
            "posterior's covariance; of another model, divide the logits by a temperature, or wrap it with `Laplace`."
        )
    if kind == "biased":
        sentences.append("Look at the residuals: a bias is no question of uncertainty, but of the mean.")
    if n_models == 2 and row.difference > 2 * row.standard_error:
        better, worse = (_the(name) for name in comparison.names)
        sentences.append(f"{_capital(worse)} predicts worse than {better}: a posterior is tuned by `la.calibrate`.")
    if kind == "calibrated" and not flagged:
        sentences.append("Use these predictions as they are; look at data that are unlike the training data next.")
    if n_data < _FEW:
        sentences.append(f"Use more test data: with {n_data} the noise of a calibration error is large.")
    if flagged:
        names = ", ".join(flagged[:5]) + (" and others" if len(flagged) > 5 else "")
        sentences.append(f"Look at the classes {names}: they are predicted more or less often than they occur.")
    return tuple(sentences)


# Numbers behind verdicts and diagrams.


def _top(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Probability of the predicted class, and whether it is the label, `[N]` each, float64."""
    confidence, predicted = widened(probs.detach().cpu()).max(1)
    return confidence.clamp(max=1.0), widened(predicted == y.cpu())


def _places(model: Predictions, y: Tensor) -> Tensor:
    """Φ((y − mean) / standard deviation), `[N, C]`, float64: uniform if calibrated."""
    mean, variance = (widened(values.detach().cpu()) for values in model.moments)
    return torch.special.ndtr((widened(y.cpu()) - mean) / variance.sqrt())


def _scores_of_targets(model: Predictions, y: Tensor) -> dict[str, Tensor]:
    """Scores of every row, `[N]`, as `la.compare` has them."""
    mean, variance, y = (widened(values.detach().cpu()) for values in (*model.moments, y))
    return scores_of(Gaussian(), (mean, variance), y, mean.new_zeros(()))


def _wilson(right: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """95 % interval of a share of `count` (Wilson, 1927)."""
    z = 1.96
    share = right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count.square())).sqrt()
    return (middle - half).clamp(min=0), (middle + half).clamp(max=1)


# Diagrams.


def _draw_reliability(ax: Axes, models: tuple[Predictions, ...], y: Tensor) -> None:
    """Accuracy against confidence in bins of equal width, with 95 % intervals of the accuracy."""
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    for model, colour in zip(models, plotting.COLOURS, strict=False):
        count, confidence, correct = (widened(part.cpu()) for part in metrics.calibration_bins(model.probs, y, N_BINS))
        used = count > 0
        _draw_shares(ax, confidence[used], (correct * count)[used], count[used], model.name, colour)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    ax.legend(frameon=False)


def _draw_shares(ax: Axes, x: Tensor, right: Tensor, count: Tensor, name: str, colour: str) -> None:
    share, (low, high) = right / count, _wilson(right, count)
    bars = [(share - low).clamp(min=0).tolist(), (high - share).clamp(min=0).tolist()]
    ax.errorbar(x.tolist(), share.tolist(), yerr=bars, fmt="o-", ms=4, capsize=2, color=colour, label=name)


def _draw_risk(ax: Axes, models: tuple[Predictions, ...], y: Tensor) -> None:
    """Share of errors among the most confident predictions against their share of all."""
    for model, colour in zip(models, plotting.COLOURS, strict=False):
        confidence, right = _top(model.probs, y)
        order = confidence.argsort(descending=True, stable=True)
        number = widened(torch.arange(1, len(order) + 1))
        risk = (1 - right[order]).cumsum(0) / number
        shown = torch.linspace(0, len(order) - 1, min(len(order), 500)).long()
        area = float(metrics.aurc(model.probs, y))
        ax.plot((number / len(order))[shown], risk[shown], color=colour, label=f"{model.name} (AURC {area:.4f})")
    ax.set(xlim=(0, 1), xlabel="share of predictions that are accepted", ylabel="share of errors among them")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)


def _draw_coverage(ax: Axes, models: tuple[Predictions, ...], y: Tensor) -> None:
    """Coverage of 90 % intervals by tenths of the predicted width, with 95 % intervals."""
    ax.axhline(0.9, color="0.7", linewidth=1, zorder=0)
    for model, colour in zip(models, plotting.COLOURS, strict=False):
        width = widened(model.moments[1].cpu()).sqrt().flatten()
        inside = widened((2 * _places(model, y) - 1).abs() <= 0.9).flatten()
        n_groups = 10 if bool(width.amax() > width.amin()) else 1
        groups = [group for group in width.argsort(stable=True).tensor_split(n_groups) if len(group)]
        x = torch.stack([width[group].mean() for group in groups])
        right = torch.stack([inside[group].sum() for group in groups])
        count = inside.new_tensor([float(len(group)) for group in groups])
        _draw_shares(ax, x, right, count, model.name, colour)
    ax.set(ylim=(0, 1), xlabel="predicted standard deviation, in tenths", ylabel="coverage of 90 % intervals")
    ax.legend(frameon=False)


def _draw_strangers(ax: Axes, name: str, strangers: Strangers) -> None:
    """Scores of the test data, and of data of another kind, of the model in question."""
    inside, outside = (widened(part.detach().cpu()) for part in (strangers.inside, strangers.outside))
    ends = float(torch.cat([inside, outside]).min()), float(torch.cat([inside, outside]).max())
    for values, label, colour in ((inside, "test data", "#0072B2"), (outside, "data of another kind", "#D55E00")):
        weights = [1 / len(values)] * len(values)
        ax.hist(values.tolist(), bins=20, range=ends, weights=weights, alpha=0.6, color=colour, label=label)
    ax.set(xlabel=strangers.score, ylabel="share", title=name)
    ax.legend(frameon=False)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


# Checks and words.


def _source(generator: torch.Generator | None) -> torch.Generator:
    check_generator(generator)
    return torch.Generator().manual_seed(0) if generator is None else generator


def _checked_names(names: tuple[str, str]) -> tuple[str, str]:
    if isinstance(names, str) or len(names) != 2 or names[0] == names[1]:
        raise InvalidArgument(f"names={names!r}; give two different ones, such as ('network', 'posterior').")
    return str(names[0]), str(names[1])


def _require_rows(probs: Tensor, name: str) -> None:
    if not isinstance(probs, Tensor) or probs.dim() != 2 or probs.shape[1] < 2 or not probs.is_floating_point():
        shape = list(getattr(probs, "shape", []))
        raise InvalidData(f"{name} of shape {shape}; class probabilities [N, C] of at least two classes are accepted.")


def _require_sums(probs: Tensor, name: str) -> None:
    """Refuses rows that are no probabilities: logits, say, or sigmoids of them."""
    values = widened(probs.detach())
    tolerance = max(_SUM, 4 * torch.finfo(probs.dtype).eps)
    wrong = ~(((values.sum(1) - 1).abs() <= tolerance) & (values >= -tolerance).all(1))  # so is NaN
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InvalidData(
            f"{name}: row {row} is no distribution over the classes, its sum is {values[row].sum().item():.4g}, its "
            f"smallest entry {values[row].min().item():.3g}; give probabilities that add up to 1, by softmax(1)."
        )


_SUM = 1e-3
"""Distance from 1 of a sum of probabilities that is rounding, as in a file with three decimals."""


def _require_distinct(what: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgument(f"{what} has {', '.join(map(repr, twice[:3]))} more than once; names must be distinct.")


def _printable(name: str) -> str:
    """A name without codes that a terminal would carry out."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def _models(probs: Tensor, network: Tensor | None, first: str, second: str) -> tuple[Predictions, ...]:
    models = (Predictions(second, (probs,)),)
    return models if network is None else (*models, Predictions(first, (network,)))


def _strange(ood: Tensor | tuple[Tensor, Tensor] | None, several: bool, n_columns: int) -> tuple[Tensor, ...]:
    """Predictions for data of another kind, those of the model in question first."""
    if ood is None:
        return ()
    if several == isinstance(ood, Tensor) or (not isinstance(ood, Tensor) and len(ood) != 2):
        raise InvalidArgument("ood= is one tensor without network=, and the pair (network, posterior) with it.")
    parts = (ood,) if isinstance(ood, Tensor) else (ood[1], ood[0])
    rows = tuple(_as_rows(part).detach() for part in parts)
    for part in rows:
        if part.shape[1] != n_columns or len(part) == 0 or not bool(part.isfinite().all()):
            raise InvalidData(f"ood of shape {list(part.shape)}: finite predictions [M, {n_columns}] are accepted.")
    return rows


def _as_rows(values: Tensor) -> Tensor:
    if not isinstance(values, Tensor) or values.dim() not in (1, 2):
        raise InvalidData(f"got shape {list(getattr(values, 'shape', []))}; [N] and [N, C] are accepted.")
    return values.unsqueeze(1) if values.dim() == 1 else values


def _checked_moments(mean: Tensor, variance: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = _as_rows(mean), _as_rows(variance)
    if not mean.shape == variance.shape == y.shape or len(y) == 0:
        shapes = f"{list(mean.shape)}, {list(variance.shape)} and {list(y.shape)}"
        raise InvalidData(f"mean, variance and y have the shapes {shapes}; the same shape [N, C] is needed.")
    if not all(bool(values.isfinite().all()) for values in (mean, variance, y)):
        raise InvalidData("mean, variance or y holds numbers that are not finite; leave such rows out.")
    if bool((variance <= 0).any()):
        raise InvalidData("variance holds numbers that are not positive; give variances, the noise included.")
    return mean, variance


def _the(name: str) -> str:
    return f"the {name}" if name in ("network", "posterior", "ensemble", "model") else name


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _plain(value: Any) -> Any:
    """Nested values with lists for tuples, and None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The command.


def _read(path: str) -> tuple[list[str], Tensor]:
    """Names of the columns of a CSV file, and its numbers, `[N, K]`."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            head, *rows = [row for row in csv.reader(file) if row]
    except (OSError, ValueError, csv.Error) as error:
        raise InvalidData(f"{path}: {error or 'the file is empty'}") from error
    names = [_printable(name.strip()) for name in head]
    _require_distinct(f"{path}: the head", names)
    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise InvalidData(f"{path}: row {number} has {len(row)} values for {len(names)} columns.")
    try:
        return names, torch.tensor([[float(value) for value in row] for row in rows], dtype=wide_dtype())
    except ValueError as error:
        raise InvalidData(f"{path}: {error}; every value but those of the first row must be a number.") from error


_Y = ("y", "label", "labels", "target")
_MOMENTS = ("mean", "std")


def _of_file(path: str, ood: str | None, name: str) -> Report:
    names, values = _read(path)
    strange_names, strange = (None, None) if ood is None else _read(ood)
    labels = [column for column in names if column.lower() in _Y]
    if len(labels) > 1:
        raise InvalidData(f"{path}: {' and '.join(map(repr, labels))} both name the labels; leave one of them.")
    label = labels[0] if labels else None
    if label is None or len(values) == 0:
        raise InvalidData(
            f"{path}: rows of numbers under a head are needed, with a column {' or '.join(map(repr, _Y[:2]))} beside "
            f"one per class, or beside 'mean' and 'std'; this head is {', '.join(names[:8])}."
        )
    y, columns = values[:, names.index(label)], [column for column in names if column != label]
    places = [names.index(column) for column in columns]
    if strange_names is not None and [c for c in strange_names if c.lower() not in _Y] != columns:
        raise InvalidData(f"{ood}: the columns must be those of {path}: {', '.join(columns[:8])}.")
    if strange is not None and strange_names is not None:
        strange = strange[:, [strange_names.index(column) for column in columns]]
    if sorted(columns) == sorted(_MOMENTS):
        mean, std = (values[:, names.index(column)] for column in _MOMENTS)
        if bool((std <= 0).any()):
            raise InvalidData(f"{path}: 'std' holds numbers that are not positive.")
        outside = None if strange is None else strange[:, columns.index("std")].square()
        return of_gaussians(mean, std.square(), y, ood=outside, names=(f"not {name}", name))
    if not bool((y == y.round()).all()):
        raise InvalidData(f"{path}: labels are indices of the {len(columns)} columns of probabilities, from 0 on.")
    return of_probabilities(values[:, places], y.long(), ood=strange, classes=columns, names=(f"not {name}", name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes a report on the predictions in a file, and prints it; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m laplace.report",
        description="A report on predictions and their labels: are they calibrated, and what to do next?",
        epilog="The file has a head. Classification: a column per class, and 'label', the index of one of them. "
        "Regression: 'mean', 'std' (of the target, noise included) and 'y'.",
    )
    parser.add_argument("predictions", help="a CSV file")
    parser.add_argument("--ood", help="predictions for data of another kind, with the same columns but the label")
    parser.add_argument(
        "--out", default="report.html", help="file to write: .html, .png or .json (default: %(default)s)"
    )
    parser.add_argument("--name", default="model", help="what to call the model (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        report = _of_file(given.predictions, given.ood, given.name)
        report.save(given.out)
    except (InvalidData, InvalidArgument, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(report)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
