"""What a method gains and risks over all runs of the classifications: the tables of docs/quality.md and docs/choose.md.

Differences are from the network of the same run. A run is a row and a split.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.methods import (
    CALIBRATE,
    CALIBRATED_ENSEMBLE,
    DROPOUT,
    ENSEMBLE,
    EVIDENCE,
    NETWORK,
    SNAPSHOTS,
    TEMPERATURE,
)
from benchmarks.quality.targets import ROUNDING, Line, column, mean_and_error

Row = dict[str, Any]
LAST, ALL = "last layer, kron", "all weights, kron"
METHODS = {
    "temperature scaling": (TEMPERATURE, ("",)),
    "MC dropout": (DROPOUT, ("",)),
    "five networks": (ENSEMBLE, ("",)),
    "default + evidence": (EVIDENCE, (LAST,)),
    "calibrate, last layer": (CALIBRATE, (LAST,)),
    "calibrate, all weights": (CALIBRATE, (ALL, LAST)),
    "snapshots and short restarts, calibrate": (SNAPSHOTS, (LAST,)),
    "five networks, calibrate": (CALIBRATED_ENSEMBLE, (LAST,)),
}
"""Method and posterior of every line, by its heading; of several posteriors the first that a row has."""
MANY = 90
"""Validation data from which on the worst run is counted by itself."""
LEAST = 0.001
"""Nats that nobody notices."""


def table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown whose first column is text and the others are numbers."""
    heading = list(heading)
    parts = [heading, ["---", *["--:"] * (len(heading) - 1)], *rows]
    return "\n".join("| " + " | ".join(part) + " |" for part in parts)


def rounded(value: Any, digits: int = 4) -> Any:
    """Numbers with so many digits, in whatever holds them."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    return [rounded(item, digits) for item in value] if isinstance(value, list | tuple) else value


def number(value: float, digits: int = 3) -> str:
    """A number without the zero before the point."""
    text = f"{value:.{digits}f}"
    return re.sub(r"^(-?)0\.", r"\1.", text).replace("-", "−")


def signed(value: float, digits: int = 3) -> str:
    """A difference, with its sign."""
    return number(value, digits) if value < 0 else "+" + number(value, digits)


def with_floor(row: Row) -> Row:
    """The row with the calibration error above its floor as a score."""
    splits = [[line | {"excess": line["ece"] - line["ece_floor"]} for line in split] for split in row["splits"]]
    return row | {"splits": splits}


def shifted(row: Row) -> Iterator[Row]:
    """A row for every change of the test inputs."""
    for name in row["splits"][0][0]["shifts"]:
        splits = [[line | {"nll": line["shifts"][name][0]} for line in split] for split in row["splits"]]
        yield row | {"name": f"{row['name']}, {name}", "splits": splits}


@dataclass(frozen=True)
class Summary:
    """Means over the rows of a method's differences from the network; standard errors are over splits of these means.

    Attributes:
        nll: Mean difference of the negative log likelihood, and its standard error.
        within: Share of runs that are worse than the network by at most one paired standard error.
        within_least: The same and 0.001 nats.
        worst: Largest ratio to the network's negative log likelihood in a run.
        worst_many: The same with 90 validation data or more.
        shift: Mean difference over all changes of the test inputs, and its standard error.
        shift_median: Median over the changes.
        auroc: Mean difference of the AUROC of unseen inputs, and its standard error.
        auroc_worst: That of the worst row.
        brier: Mean difference of the Brier score, and its standard error.
        aurc: Of the area under the risk-coverage curve.
        ece: Of the calibration error above its floor.
        trainings: Trainings besides the network's, on the mean.
    """

    nll: tuple[float, float]
    within: float
    within_least: float
    worst: float
    worst_many: float
    shift: tuple[float, float]
    shift_median: float
    auroc: tuple[float, float]
    auroc_worst: float
    brier: tuple[float, float]
    aurc: tuple[float, float]
    ece: tuple[float, float]
    trainings: float

    @classmethod
    def of(cls, rows: list[Row], method: str, posteriors: tuple[str, ...]) -> Summary | None:
        """Of the rows that have this method; None without any."""
        runs = [found for row in rows if (found := Runs.of(row, method, posteriors)) is not None]
        if not runs:
            return None
        changed = [part for run in runs for part in run.shifted()]
        unseen = [run for run in runs if "auroc" in run.lines[0]]
        paired = [line["paired"] for run in runs for line in run.lines]
        ratios = [(run.n_val, ratio) for run in runs for ratio in run.ratios()]
        return cls(
            _mean(runs, lambda line: line["nll"]),
            statistics.mean(mean <= error + ROUNDING for mean, error in paired),
            statistics.mean(mean <= error + LEAST for mean, error in paired),
            max(ratio for _, ratio in ratios),
            max((ratio for n_val, ratio in ratios if n_val >= MANY), default=math.nan),
            _mean(changed, lambda line: line["nll"]),
            statistics.median(statistics.mean(run.gaps(lambda line: line["nll"])) for run in changed),
            _mean(unseen, lambda line: line["auroc"]),
            min(statistics.mean(run.gaps(lambda line: line["auroc"])) for run in unseen),
            _mean(runs, lambda line: line["brier"]),
            _mean(runs, lambda line: line["aurc"]),
            _mean(runs, lambda line: line["ece"] - line["ece_floor"]),
            statistics.mean(line.get("trainings", _TRAININGS.get(method, 0.0)) for run in runs for line in run.lines),
        )


_TRAININGS = {ENSEMBLE: 4.0}
"""Of results that were kept before trainings were counted."""


@dataclass(frozen=True)
class Runs:
    """A method on every split of a row, beside the network.

    Attributes:
        lines: Of the method.
        networks: Of the network.
        n_val: Number of validation data.
    """

    lines: list[Line]
    networks: list[Line]
    n_val: int

    @classmethod
    def of(cls, row: Row, method: str, posteriors: tuple[str, ...]) -> Runs | None:
        """The first of some posteriors that the row has; None where it has none."""
        for posterior in posteriors:
            pairs = [(column(split, method, posterior), column(split, NETWORK)) for split in row["splits"]]
            known = [(line, network) for line, network in pairs if line is not None and network is not None]
            if len(known) == len(pairs):
                return cls([line for line, _ in known], [network for _, network in known], row["sizes"][1])
        return None

    def gaps(self, score: Callable[[Line], float]) -> list[float]:
        """Difference of a score from the network's, on every split."""
        return [score(line) - score(network) for line, network in zip(self.lines, self.networks, strict=True)]

    def ratios(self) -> list[float]:
        """Negative log likelihood over the network's, on every split."""
        return [line["nll"] / network["nll"] for line, network in zip(self.lines, self.networks, strict=True)]

    def shifted(self) -> Iterator[Runs]:
        """The same for every change of the test inputs."""
        for name in self.lines[0]["shifts"]:
            changed = [[{"nll": line["shifts"][name][0]} for line in part] for part in (self.lines, self.networks)]
            yield Runs(changed[0], changed[1], self.n_val)


def _mean(runs: list[Runs], score: Callable[[Line], float]) -> tuple[float, float]:
    """Mean over rows of the differences of a score, and its standard error over splits."""
    return mean_and_error([statistics.mean(gaps) for gaps in zip(*(run.gaps(score) for run in runs), strict=True)])


def summaries(rows: list[Row]) -> dict[str, Summary]:
    """Of every method that the rows have, by its heading."""
    found = {name: Summary.of(rows, *given) for name, given in METHODS.items()}
    return {name: one for name, one in found.items() if one is not None}


HEADING = (
    "", "clean NLL", "within 1 s.e. (+ .001 nats)", "worst (90 validation data and more)", "NLL under shift (median)",
    "AUROC of unseen (worst row)", "Brier", "AURC", "ECE − floor", "more trainings",
)  # fmt: skip


def opening(rows: list[Row], own: dict[str, Summary] | None = None) -> str:
    """The table of all methods, and of others by their names."""
    return table(HEADING, (_line(name, found) for name, found in {**summaries(rows), **(own or {})}.items()))


SHORT = ("", "NLL", "not worse", "NLL under shift", "AUROC of unseen", "Brier", "AURC", "more trainings")


def short(rows: list[Row]) -> str:
    """The same without errors and worst cases."""
    return table(
        SHORT,
        (
            [
                name, signed(one.nll[0]), number(one.within_least, 2), signed(one.shift[0], 2), signed(one.auroc[0], 2),
                signed(one.brier[0]), signed(one.aurc[0], 4), _trainings(one),
            ]
            for name, one in summaries(rows).items()
        ),
    )  # fmt: skip


def _trainings(found: Summary) -> str:
    return number(found.trainings, 1) if found.trainings else "0"


def _line(name: str, found: Summary) -> list[str]:
    def with_error(pair: tuple[float, float], digits: int = 3) -> str:
        return f"{signed(pair[0], digits)} ± {number(pair[1], digits)}"

    return [
        name,
        with_error(found.nll),
        f"{number(found.within, 2)} ({number(found.within_least, 2)})",
        f"{found.worst:.2f}" + (f" ({found.worst_many:.2f})" if math.isfinite(found.worst_many) else ""),
        f"{with_error(found.shift, 2)} ({signed(found.shift_median)})",
        f"{with_error(found.auroc)} ({signed(found.auroc_worst)})",
        with_error(found.brier),
        with_error(found.aurc, 4),
        with_error(found.ece),
        _trainings(found),
    ]
