"""A report as text, as an HTML page that needs no other file, as diagrams and as JSON.

Bars are 95 % intervals (Wilson, 1927).
"""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace import metrics
from laplace.comparison import N_BINS, Comparison
from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument
from laplace.extensions import plotting
from laplace.extensions.verdicts import ClassRow, OodScores, Predictions, Verdict, called, places, top

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLIND = 0.7
"""AUROC below which the two sets of data are hardly told apart."""


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
            `laplace.report` the default of `laplace.ood_score`.
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
    _ood: tuple[OodScores, ...] = ()

    def with_ood(self, strangers: Mapping[str, OodScores]) -> Report:
        """The report with what tells data of another kind apart, by model."""
        told = {name: part.figures() for name, part in strangers.items()}
        blind = tuple(
            f"Do not trust {called(name)} to notice data of another kind (AUROC {values['auroc']:.2f})."
            for name, values in told.items()
            if values["auroc"] < _BLIND
        )
        scores = {name: part.score for name, part in strangers.items()}
        return replace(self, ood=told, ood_scores=scores, advice=(*self.advice, *blind), _ood=tuple(strangers.values()))

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
            diagrams.append(lambda ax: plotting.score_histogram(ax, {m.name: top(m.probs, y)[0] for m in models}))
        else:
            diagrams.append(lambda ax: plotting.quantile_diagram(ax, {m.name: m.moments for m in models}, y))
            diagrams.append(lambda ax: _draw_coverage(ax, models, y))
        if self._ood:
            diagrams.append(lambda ax: _draw_ood(ax, models[0].name, self._ood[0]))
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


def _wilson(right: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """95 % interval of a share of `count` (Wilson, 1927)."""
    z = 1.96
    share = right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count.square())).sqrt()
    return (middle - half).clamp(min=0), (middle + half).clamp(max=1)


def _draw_risk(ax: Axes, models: tuple[Predictions, ...], y: Tensor) -> None:
    """Share of errors among the most confident predictions against their share of all."""
    for model, colour in zip(models, plotting.COLOURS, strict=False):
        confidence, right = top(model.probs, y)
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
        inside = widened((2 * places(model, y) - 1).abs() <= 0.9).flatten()
        n_groups = 10 if bool(width.amax() > width.amin()) else 1
        groups = [group for group in width.argsort(stable=True).tensor_split(n_groups) if len(group)]
        x = torch.stack([width[group].mean() for group in groups])
        right = torch.stack([inside[group].sum() for group in groups])
        count = inside.new_tensor([float(len(group)) for group in groups])
        _draw_shares(ax, x, right, count, model.name, colour)
    ax.set(ylim=(0, 1), xlabel="predicted standard deviation, in tenths", ylabel="coverage of 90 % intervals")
    ax.legend(frameon=False)


def _draw_ood(ax: Axes, name: str, strangers: OodScores) -> None:
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


def _plain(value: Any) -> Any:
    """Nested values with lists for tuples, and None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
