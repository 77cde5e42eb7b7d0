"""Two predictive distributions of the same labelled data, one of them a network's, score by score.

Differences are paired: both distributions see the same data, whose difficulty cancels. Of a score that is a mean over
the data the standard error is that of a mean; of one that is not (a calibration error, areas and shares of a ranking, a
root mean square) it is the spread over data that are drawn anew with replacement, the same for both (Efron, 1979).

With an output per token or pixel, labels of one datum are not independent: it is data that are drawn anew, and the
standard error of a mean is that of the sums of every datum (Liang and Zeger, 1986).
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.core.random_numbers import drawn_seed
from laplace.core.scores import Ranking, RiskCurve, calibration_floor, clustered_floor, gaps_by_datum
from laplace.errors import UnsupportedError
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.targets import Summary, mean_of, variance_of

N_BINS = 15
"""Bins of the calibration error, as in `laplace.metrics`."""

RISK = 0.05
"""Share of errors up to which predictions are accepted."""

N_RESAMPLES = 200
"""Samples of the data: the relative error of a standard error is 1 / √(2 · 200), 5 %."""

LEVELS = (50, 90)
"""Probabilities of the intervals that are to hold targets, in per cent."""

_AT_ONCE = 2**16
"""Counts of rows that are read at once, half a MiB: what follows from them stays in a cache."""

_GROUPED = 2**22
"""Numbers of a table of data and groups of confidence."""

_FEWEST = 20
"""Data below which a standard error is too uncertain itself for a verdict."""

_ROUNDING = 1e-5
"""Difference of two scores, relative to them or to 1, that may be rounding of float32."""

_TITLES = {
    "nll": "NLL",
    "brier": "Brier score",
    "accuracy": "accuracy",
    "ece": "ECE",
    "ece_floor": "ECE noise floor",
    "aurc": "AURC",
    "coverage_at_risk": f"coverage at {100 * RISK:g} % risk",
    "crps": "CRPS",
    "rmse": "RMSE",
    **{f"coverage_{level}": f"coverage of {level} % intervals" for level in LEVELS},
}
"""Names in the printed table, whose order is this one."""

_WITH_ARTICLE = ("network", "posterior", "ensemble")

_CELL = "padding: 0.1em 0.8em; text-align: right"
"""Style of a cell of the HTML, where a page has none for tables."""


@dataclass(frozen=True)
class ComparisonRow:
    """One score of both distributions.

    Attributes:
        network: Score of the first, the network.
        posterior: Score of the second, the posterior.
        difference: Score of the posterior minus that of the network.
        standard_error: Paired standard error of the difference; NaN where there is none (one datum, or `ece_floor`).
    """

    network: float
    posterior: float
    difference: float
    standard_error: float


@dataclass(frozen=True, repr=False)
class Comparison:
    """The network against its posterior on labelled data: `la.compare(loader)`. It prints as a table.

    Classification has the rows `nll`, `brier`, `accuracy`, `ece`, `ece_floor` (the calibration error that these
    probabilities would show if they were calibrated, with as many data), `aurc` and `coverage_at_risk` (at 5 % risk);
    regression `nll`, `crps`, `rmse`, `coverage_50` and `coverage_90` (shares of the targets in central intervals). All
    but accuracy and coverage are better if small; `laplace.metrics` has their equations.

    Attributes:
        rows: Scores by name, each a `ComparisonRow` with `network`, `posterior`, `difference` and `standard_error`.
        n_data: Number of data.
        n_labels: Number of labels or targets that were scored: more than data with an output per token or pixel.
        names: Names of the two in the table, `("network", "posterior")`; for a mixture the first is `"ensemble"`.
        n_undefined: Number of labels or targets at which a prediction is NaN; there is no verdict then.
        calibration: What a calibration has made of the posterior, in a sentence; empty without one.
    """

    rows: Mapping[str, ComparisonRow]
    n_data: int
    n_labels: int
    names: tuple[str, str] = ("network", "posterior")
    n_undefined: int = 0
    calibration: str = ""

    @property
    def verdict(self) -> str:
        """One sentence: which of the two has the lower NLL, by more than two standard errors, on 20 data or more."""
        row, data = self.rows["nll"], f"{self.n_data:,} data" if self.n_data != 1 else "one datum"
        if self.n_undefined:
            return f"no verdict: {self.n_undefined:,} of {self.n_labels:,} predictions are NaN"
        if not math.isfinite(row.difference):
            return f"no verdict: the NLL is {_number(row.network)} and {_number(row.posterior)} on {data}"
        if abs(row.difference) <= _ROUNDING * max(1.0, abs(row.network)):
            return f"no difference: the NLL is the same on {data}"
        if not math.isfinite(row.standard_error):
            return f"no verdict: a difference on {data} has no standard error"
        better = self._called(row.difference < 0)
        size = f"is lower by {_with_error(abs(row.difference), row.standard_error)} on {data}"
        if abs(row.difference) <= 2 * row.standard_error:
            return f"no difference beyond two standard errors: the NLL of {better} {size}"
        if self.n_data < _FEWEST:
            return f"too few data for a verdict: the NLL of {better} {size}"
        return f"use {better}: its NLL {size}"

    def _called(self, second: bool) -> str:
        name = self.names[second]
        return f"the {name}" if name in _WITH_ARTICLE else name

    def cells(self) -> list[tuple[str, str, str, str]]:
        """Title, both scores and the difference with its standard error, of every row."""
        cells: list[tuple[str, str, str, str]] = []
        for name, row in self.rows.items():
            error, difference = row.standard_error, ""
            if name != "ece_floor":
                difference = f"{_number(row.difference, sign='+')} ± {_number(error)}"
            cells.append((_TITLES.get(name, name), _number(row.network), _number(row.posterior), difference))
        return cells

    @property
    def _notes(self) -> tuple[str, ...]:
        """Lines below the table: what its numbers are, the calibration, and the verdict."""
        labels = "" if self.n_labels == self.n_data else f" with {self.n_labels:,} labels"
        return (
            f"Differences ± one paired standard error, on {self.n_data:,} data{labels}.",
            *([f"The {self.names[1]} is {self.calibration}."] if self.calibration else []),
            f"{self.verdict[0].upper()}{self.verdict[1:]}.",
        )

    def __repr__(self) -> str:
        """A table of plain text, and the verdict."""
        rows = [("", *self.names, "difference"), *self.cells()]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2)), row[3]]).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *self._notes])

    def _repr_html_(self) -> str:
        """The same as HTML, which notebooks show."""

        def line(cells: tuple[str, ...], tag: str) -> str:
            made = "".join(f'<{tag} style="{_CELL}">{html.escape(cell)}</{tag}>' for cell in cells)
            return f"<tr>{made}</tr>"

        head = line(("", *self.names, "difference"), "th")
        body = "".join(line(row, "td") for row in self.cells())
        notes = "<br>".join(map(html.escape, self._notes))
        return f"<table>{head}{body}</table><p>{notes}</p>"


def _number(value: float, sign: str = "") -> str:
    """A score with four decimals, or with three digits where these say too little or too much."""
    size = abs(value)
    return f"{value:{sign}.3g}" if 0 < size < 1e-3 or 1e4 <= size < math.inf else f"{value:{sign}.4f}"


def _with_error(value: float, error: float) -> str:
    """A number to the second digit of its standard error."""
    if error <= 0:
        return f"{value:.3g} ± 0"
    decimals = 1 - math.floor(math.log10(error))
    return (
        f"{value:.{max(0, decimals)}f} ± {error:.{max(0, decimals)}f}" if decimals < 7 else f"{value:.2g} ± {error:.2g}"
    )


# Scores of every row.


def scores_of(likelihood: Likelihood, summary: Summary, y: Tensor, sigma: Tensor) -> dict[str, Tensor]:
    """Scores of a predictive distribution of B rows, float64 on the CPU, by what the target knows of itself."""
    target = likelihood.target
    known = target.scores
    nll = known["nll"](likelihood, summary, y, sigma) if "nll" in known else _density(likelihood, summary, y, sigma)
    scores = {"nll": nll} | {
        name: known[name](likelihood, summary, y, sigma) for name in ("brier", "crps") if name in known
    }
    decisions, moments = target.decisions(summary, y), target.moments_of(summary, sigma)
    if decisions is not None:
        scores["confidence"], scores["agreement"] = decisions
    if moments is not None:
        mean, _ = map(widened, moments)
        seen = ~y.isnan()
        scores["square"] = _over_outputs((widened(y) - mean).square(), seen)
        below = target.below(summary, y, sigma) if "crps" in known else None
        if below is not None:
            distance = (below - 0.5).abs()
            reached = {p: (distance <= p / 200).to(mean).where(~distance.isnan(), torch.nan) for p in LEVELS}
            scores |= {f"coverage_{p}": _over_outputs(values, seen) for p, values in reached.items()}
    return {name: widened(values.detach().cpu()) for name, values in scores.items()}


def _over_outputs(values: Tensor, seen: Tensor) -> Tensor:
    """Means of values `[B, C]` over the outputs that were observed, of which every row has one."""
    return values.mean(1) if bool(seen.all()) else values.where(seen, 0.0).sum(1) / seen.sum(1)


def _density(likelihood: Likelihood, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
    try:
        return likelihood.predictive_nll(mean_of(summary), variance_of(summary), y, sigma)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"likelihood={likelihood.name!r} does not say how good a predicted mean is, without which there is nothing "
            "to compare: define predictive_nll(prediction, variance, y, sigma_noise) -> [B] in its class."
        ) from error


@dataclass(frozen=True, eq=False)
class ScoredData:
    """Scores of the rows of all batches so far.

    Attributes:
        scores: Those of the network and those of the posterior, by name, a tensor per batch.
        datum: Index of the datum that every row belongs to, `[B]` per batch.
    """

    scores: tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]] = field(default_factory=lambda: ({}, {}))
    datum: list[Tensor] = field(default_factory=list)

    def add(self, network: dict[str, Tensor], posterior: dict[str, Tensor], datum: Tensor) -> None:
        """Takes in a batch: scores as of `scores_of`, and the datum of every row, `[B]`."""
        for sums, batch in zip(self.scores, (network, posterior), strict=True):
            for name, values in batch.items():
                sums.setdefault(name, []).append(values)
        self.datum.append(datum.cpu())

    def compared(self, generator: torch.Generator, names: tuple[str, str] = ("network", "posterior")) -> Comparison:
        """The comparison on all of them."""
        network, posterior = ({name: torch.cat(values) for name, values in side.items()} for side in self.scores)
        _, datum = torch.cat(self.datum).unique(return_inverse=True)
        return _compared(network, posterior, datum, generator, names)


# Differences and their standard errors.

Statistics = Callable[[Tensor], dict[str, Tensor]]
"""Scores `[R]` by name, of rows that count so often, `[R, B]`."""


def _compared(
    network: dict[str, Tensor],
    posterior: dict[str, Tensor],
    datum: Tensor,
    generator: torch.Generator,
    names: tuple[str, str],
) -> Comparison:
    rows = {
        name: _of_means(network[name], posterior[name], datum)
        for name in network
        if name not in ("confidence", "agreement", "square")
    }
    if "agreement" in network:
        seen = ~network["agreement"].isnan()
        shares = [_over_outputs(side["agreement"], seen) for side in (network, posterior)]
        rows["accuracy"] = _of_means(shares[0], shares[1], datum)
        rows["ece_floor"] = _of_floors(network, posterior, datum, drawn_seed(generator))
    by_datum = None
    if len(datum) > max(_AT_ONCE, int(datum.max()) + 1):
        by_datum = _statistics_by_datum(network, datum), _statistics_by_datum(posterior, datum)
    rows |= _of_statistics(_statistics(network), _statistics(posterior), by_datum, datum, generator)
    ordered = {name: rows[name] for name in _TITLES if name in rows}
    undefined = [_is_undefined(side) for side in (network, posterior)]
    if bool(torch.stack(undefined).any()):  # NaN is no score: neither a hit nor a miss, nor something to average over
        sides = [bool(rows.any()) for rows in undefined]
        ordered = {name: _without_numbers(row, *sides) for name, row in ordered.items()}
    n_undefined = int(torch.stack(undefined).any(0).sum())
    return Comparison(ordered, int(datum.max()) + 1, len(datum), names, n_undefined)


def _is_undefined(scores: dict[str, Tensor]) -> Tensor:
    """Whether a score of a row is NaN, `[B]`; an agreement is, too, with what was not observed."""
    return torch.stack([v.isnan().reshape(len(v), -1).any(1) for name, v in scores.items() if name != "agreement"]).any(
        0
    )


def _observed(scores: dict[str, Tensor], datum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence, agreement and datum of every label that was observed, `[n]` each."""
    seen = ~scores["agreement"].isnan()
    return scores["confidence"][seen], scores["agreement"][seen], datum.unsqueeze(1).expand_as(seen)[seen]


def _without_numbers(row: ComparisonRow, network: bool, posterior: bool) -> ComparisonRow:
    """A row without the numbers of one side or both."""
    return ComparisonRow(
        math.nan if network else row.network, math.nan if posterior else row.posterior, math.nan, math.nan
    )


def _of_floors(network: dict[str, Tensor], posterior: dict[str, Tensor], datum: Tensor, seed: int) -> ComparisonRow:
    """Calibration errors of calibrated predictions with these confidences `[B, L]`, from the same random numbers."""

    def floor(scores: dict[str, Tensor]) -> float:
        confidence, agreement, of = _observed(scores, datum)
        if len(datum) == int(datum.max()) + 1:
            source = torch.Generator().manual_seed(seed)
            return float(calibration_floor(confidence, N_BINS, N_RESAMPLES, source))
        return float(clustered_floor(confidence, agreement, of, N_BINS))

    first, second = floor(network), floor(posterior)
    return ComparisonRow(first, second, second - first, math.nan)


def _of_means(network: Tensor, posterior: Tensor, datum: Tensor) -> ComparisonRow:
    """Means of scores of rows, `[B]`, with the standard error of their difference.

    Of sums D_n and numbers of rows m_n of N data the difference is d = Σ D_n / Σ m_n, a ratio, whose standard error is
    √(N / (N − 1) Σ (D_n − m_n d)²) / Σ m_n: of one row per datum that of a mean.
    """
    n_data, difference = int(datum.max()) + 1, posterior - network
    mean = difference.mean()
    rest = torch.zeros(n_data, dtype=difference.dtype).index_add_(0, datum, difference - mean)
    error = math.nan if n_data == 1 else float((n_data / (n_data - 1) * rest.square().sum()).sqrt() / len(difference))
    return ComparisonRow(float(network.mean()), float(posterior.mean()), float(mean), error)


def _statistics(scores: dict[str, Tensor]) -> Statistics:
    """Scores of one distribution that are no means over the rows."""

    def of_squares(counts: Tensor) -> dict[str, Tensor]:
        return {"rmse": (counts @ scores["square"] / counts.sum(1)).sqrt()}

    if "square" in scores:
        return of_squares
    if "agreement" not in scores:
        return lambda counts: {}
    n_labels, seen = scores["agreement"].shape[1], ~scores["agreement"].isnan().flatten()
    ranking = Ranking.by_confidence(scores["confidence"].flatten(), scores["agreement"].nan_to_num(0.0).flatten())

    def of_ranking(counts: Tensor) -> dict[str, Tensor]:
        each = counts if n_labels == 1 else counts.repeat_interleave(n_labels, 1)
        ordered = ranking.ordered(each * seen)  # a label that was not observed counts never
        curve = ranking.curve(ordered)
        return {
            "ece": ranking.calibration_error(ordered, N_BINS),
            "aurc": curve.mean_risk(),
            "coverage_at_risk": curve.coverage_at(RISK),
        }

    return of_ranking


def _statistics_by_datum(scores: dict[str, Tensor], datum: Tensor) -> Statistics:
    """The same from sums over the rows of every datum: a sample costs no pass over the rows.

    Confidences are in groups of almost equal ones, each of at most 1/256 of all rows.
    """
    n_data = int(datum.max()) + 1

    def sums(values: Tensor, of: Tensor, columns: Tensor, width: int) -> Tensor:
        """Sums `[N, width]` of values of rows, by datum and column."""
        return values.new_zeros(n_data * width).index_add_(0, of * width + columns, values).view(n_data, width)

    if "square" in scores:
        squares = sums(scores["square"], datum, torch.zeros_like(datum), 1)
        sizes = widened(torch.bincount(datum, minlength=n_data)).unsqueeze(1)
        return lambda counts: {"rmse": (counts @ squares / (counts @ sizes)).sqrt().squeeze(1)}
    if "agreement" not in scores:
        return lambda counts: {}
    confidence, agreement, of = _observed(scores, datum)
    gaps = gaps_by_datum(confidence, agreement, of, N_BINS)
    n_groups = min(max(_GROUPED // n_data, 256), 4096)
    descending = confidence.sort(descending=True).values
    starts = (-descending[(torch.arange(1, n_groups) * len(descending)) // n_groups]).contiguous()
    group = torch.searchsorted(starts, -confidence)
    sizes = sums(torch.ones_like(confidence), of, group, n_groups)
    errors = sums(1 - agreement, of, group, n_groups)

    def of_ranking(counts: Tensor) -> dict[str, Tensor]:
        size, wrong = counts @ sizes, counts @ errors
        curve = RiskCurve(size, wrong, size.cumsum(1), wrong.cumsum(1))
        return {
            "ece": (counts @ gaps).abs().sum(1) / size.sum(1),
            "aurc": curve.mean_risk(),
            "coverage_at_risk": curve.coverage_at(RISK),
        }

    return of_ranking


def _of_statistics(
    network: Statistics,
    posterior: Statistics,
    by_datum: tuple[Statistics, Statistics] | None,
    datum: Tensor,
    generator: torch.Generator,
) -> dict[str, ComparisonRow]:
    """Statistics of the data, and the spread of their differences over resampled data.

    `by_datum` are the same of data, `[R, N]`, in place of rows: of many rows of few data.
    """
    once = widened(torch.ones_like(datum)).unsqueeze(0)
    first, second = network(once), posterior(once)
    counts = resampled(datum, generator) if first else ()
    if by_datum is not None:
        network, posterior = by_datum
        counts = resampled(torch.arange(int(datum.max()) + 1), generator) if first else ()
    samples = [(network(times), posterior(times)) for times in counts]
    rows: dict[str, ComparisonRow] = {}
    for name in first:
        values = float(first[name]), float(second[name])
        spread = torch.cat([after[name] - before[name] for before, after in samples]).std()
        rows[name] = ComparisonRow(*values, values[1] - values[0], float(spread) if int(datum.max()) > 0 else math.nan)
    return rows


def resampled(datum: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Numbers of times that every row counts in `N_RESAMPLES` samples of the data with replacement, `[r, B]` at once.

    A sample takes N random numbers, however many samples are drawn at once.
    """
    n_data, at_once = int(datum.max()) + 1, max(1, _AT_ONCE // len(datum))
    for start in range(0, N_RESAMPLES, at_once):
        counts = [
            torch.bincount(torch.randint(n_data, (n_data,), generator=generator), minlength=n_data)[datum]
            for _ in range(min(at_once, N_RESAMPLES - start))
        ]
        yield widened(torch.stack(counts))
