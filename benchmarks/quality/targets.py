"""What the results are to reach, and whether they do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.methods import CALIBRATE, EVIDENCE, NETWORK, POSTERIORS, REFITS, TEMPERATURE
from laplace.extensions.ood import DEFAULT

Line = dict[str, Any]
"""One column on one split, as `__main__.measured` makes it."""
ROUNDING = 1e-6
"""Nats by which a posterior whose covariance vanishes differs from the network, in float32."""
ENOUGH = 100
"""Validation data from which on a posterior is chosen with less caution, in the words of the targets."""


def column(split: list[Line], method: str, posterior: str | None = None) -> Line | None:
    """The line of a method, of the first posterior if none is named."""
    found = [line for line in split if line["method"] == method and posterior in (None, line["posterior"])]
    return found[0] if found else None


def values(row: dict[str, Any], method: str, score: str, posterior: str | None = None) -> list[float]:
    """A score on every split; empty where the row has no such column."""
    found = [column(split, method, posterior) for split in row["splits"]]
    return [line[score] for line in found if line and score in line]


def mean_and_error(numbers: list[float]) -> tuple[float, float]:
    """Mean over splits and its standard error (0 of a single one)."""
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else 0.0
    return statistics.mean(numbers), error


def difference(row: dict[str, Any], method: str, score: str, posterior: str | None = None) -> tuple[float, float]:
    """Mean difference from the network over splits, and its paired standard error."""
    ours, network = values(row, method, score, posterior), values(row, NETWORK, score)
    return mean_and_error([a - b for a, b in zip(ours, network, strict=True)])


def gains(row: dict[str, Any], score: str, posterior: str, figure: int = 0) -> list[float]:
    """AUROC (or FPR95, figure 1) of a score of unseen inputs less the network's, on every split; empty without them."""
    found = [split[posterior] for split in row.get("unseen", ()) if posterior in split]
    return [scores[score][figure] - scores["network"][figure] for scores in found]


@dataclass(frozen=True)
class Target:
    """A target.

    Attributes:
        text: What is to be reached.
        found: What was measured.
        met: Whether it was reached; None where the rows that it is about were not run.
    """

    text: str
    found: str
    met: bool | None

    def __str__(self) -> str:
        verdict = "not run" if self.met is None else "met" if self.met else "MISSED"
        return f"{verdict:7} {self.text}: {self.found}"


def calibrated(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Line, Line]]:
    """Row, calibrated line and the network's line of every run: a split and a posterior."""
    return [
        (row, line, network)
        for row in rows
        for split in row["splits"]
        for line in split
        if line["method"] == CALIBRATE and (network := column(split, NETWORK)) is not None
    ]


def is_classification(row: dict[str, Any]) -> bool:
    """Whether a row has probabilities."""
    return "brier" in row["splits"][0][0]


def within(difference: float, error: float) -> bool:
    """Whether a posterior is not worse than the network by over one paired standard error, nor beyond rounding."""
    return difference <= error + ROUNDING


def targets(results: dict[str, Any]) -> list[Target]:
    """All targets."""
    rows = [row for row in results["rows"] if is_classification(row)]
    regressions = [row for row in results["rows"] if not is_classification(row)]
    heads = [row for row in rows if values(row, REFITS, "nll")]
    found = [*_heads(heads), *_runs(rows), _shifts(rows), _temperature(rows), _coverage(regressions)]
    return [*found, _freesolv(results.get("freesolv")), _unseen(rows)]


def lines(results: dict[str, Any]) -> Iterator[str]:
    """All targets, as they are printed."""
    return (str(target) for target in targets(results))


def _heads(rows: list[dict[str, Any]]) -> Iterator[Target]:
    def spread(score: str, method: str, other: str) -> list[float]:
        return [
            statistics.mean(a - b for a, b in zip(values(row, method, score), values(row, other, score), strict=True))
            for row in rows
        ]

    nll = spread("nll", CALIBRATE, TEMPERATURE)
    yield _judged(
        "frozen EfficientNet: NLL of calibrate above temperature scaling by at most 0.005 on the mean",
        nll, lambda: (f"{statistics.mean(nll):+.4f} (by weight decay {_signed(nll)})", statistics.mean(nll) <= 0.005),
    )  # fmt: skip
    gain = spread("nll", CALIBRATE, NETWORK)
    yield _judged(
        "frozen EfficientNet: NLL of calibrate against the network, −0.04, −0.02 and 0 within 0.01",
        gain,
        lambda: (_signed(gain), all(g <= t + 0.01 for g, t in zip(gain, (-0.04, -0.02, 0.0), strict=False))),
    )
    ece = spread("ece", CALIBRATE, NETWORK)
    yield _judged(
        "frozen EfficientNet: ECE of calibrate above the network's by at most 0.01",
        ece, lambda: (_signed(ece), max(ece) <= 0.01),
    )  # fmt: skip
    refits = [
        within(*line["paired"]) for row in rows for split in row["splits"] for line in split if line["method"] == REFITS
    ]
    means = [difference(row, REFITS, "nll") for row in rows]
    yield _judged(
        "frozen EfficientNet, no validation data: NLL at most the network's + 1 paired standard error",
        refits,
        lambda: (
            f"{_signed([mean for mean, _ in means])} on the mean; {sum(refits)} of {len(refits)} runs",
            all(mean <= error for mean, error in means) and statistics.mean(refits) >= 0.95,
        ),
    )


def _runs(rows: list[dict[str, Any]]) -> Iterator[Target]:
    many = [run for run in calibrated(rows) if run[0]["sizes"][1] >= ENOUGH]
    few = [run for run in calibrated(rows) if run[0]["sizes"][1] < ENOUGH]

    def figures(runs: list[tuple[dict[str, Any], Line, Line]]) -> tuple[float, float, float, int]:
        ratios = [line["nll"] / network["nll"] for _, line, network in runs]
        share = statistics.mean(within(*line["paired"]) for _, line, _ in runs)
        return share, max(ratios), statistics.mean(-line["paired"][0] for _, line, _ in runs), len(runs)

    def said(share: float, worst: float, gain: float, n: int) -> str:
        return f"{share:.1%} of {n} runs, worst {worst:.3f} ×, mean gain {gain:.4f} nats"

    yield _judged(
        f"{ENOUGH} validation data or more: NLL at most the network's + 1 paired standard error in 95 % of runs, "
        "worst 1.05 ×",
        many, lambda: (said(*figures(many)), figures(many)[0] >= 0.95 and figures(many)[1] <= 1.05),
    )  # fmt: skip
    yield _judged(f"fewer than {ENOUGH}: worst 1.10 ×", few, lambda: (said(*figures(few)), figures(few)[1] <= 1.10))


def _shifts(rows: list[dict[str, Any]]) -> Target:
    runs = [within(*shift[1:]) for _, line, _ in calibrated(rows) for shift in line["shifts"].values()]
    gains = [-shift[1] for _, line, _ in calibrated(rows) for shift in line["shifts"].values()]
    return _judged(
        "noise and rotation, chosen on clean data: not worse than the network by over 1 paired standard error in 90 %",
        runs,
        lambda: (
            f"{statistics.mean(runs):.1%} of {len(runs)}, mean gain {statistics.mean(gains):.4f} nats",
            statistics.mean(runs) >= 0.9,
        ),
    )


def _temperature(rows: list[dict[str, Any]]) -> Target:
    pairs = [
        (line["nll"], scaled["nll"])
        for row in rows
        for split in row["splits"]
        for line in split
        if line["method"] == CALIBRATE and (scaled := column(split, TEMPERATURE)) is not None
    ]

    def figure() -> tuple[str, bool]:
        ours, theirs = (statistics.mean(part) for part in zip(*pairs, strict=True))
        return f"{ours:.4f} and {theirs:.4f} nats, {ours / theirs - 1:+.1%}", ours <= 1.01 * theirs

    return _judged("NLL on the mean not above temperature scaling by 1 %", pairs, figure)


def _coverage(rows: list[dict[str, Any]]) -> Target:
    def figure() -> tuple[str, bool]:
        covers = {}
        for posterior in sorted({line["posterior"] for _, line, _ in calibrated(rows)}):
            shares = [values(row, CALIBRATE, "coverage", posterior) for row in rows]
            kept = [mean_and_error(share) for share in shares if share]
            covers[posterior] = (sum(abs(mean - 0.9) <= 2 * error for mean, error in kept), len(kept))
        said = ", ".join(f"{good} of {n} ({posterior})" for posterior, (good, n) in covers.items())
        return said, all(good >= n - 1 for good, n in covers.values())

    return _judged("regression: 90 % intervals cover within 2 standard errors on 5 of 6 sets", rows, figure)


def _freesolv(row: dict[str, Any] | None) -> Target:
    rows = [] if row is None else [row]

    def figure() -> tuple[str, bool]:
        runs = [line["paired"] for _, line, _ in calibrated(rows)]
        gain, error = mean_and_error([-mean for mean, _ in runs])
        evidence, _ = difference(rows[0], EVIDENCE, "nll")
        good = [within(*pair) for pair in runs]
        said = f"{sum(good)} of {len(good)} seeds, gain {gain:.3f} ± {error:.3f} nats; evidence {evidence:+.3f}"
        return said, -gain <= error and all(good)

    return _judged(
        "FreeSolv: NLL at most that of the network with its best noise + 1 paired standard error", rows, figure
    )


def _unseen(rows: list[dict[str, Any]]) -> Target:
    def figure() -> tuple[str, bool]:
        said, good = [], True
        for posterior in POSTERIORS:
            means = [statistics.mean(found) for row in rows if (found := gains(row, DEFAULT, posterior))]
            if means:
                said.append(f"{min(means):+.3f} and {statistics.mean(means):+.3f} ({posterior})")
                good = good and min(means) >= -0.003 and statistics.mean(means) >= 0.01
        return ", ".join(said), good

    return _judged(
        "unseen inputs: AUROC of laplace.ood_score by default ≥ the network's − 0.003 on every row, + 0.01 on the mean",
        [row for row in rows if any(row.get("unseen", ()))], figure,
    )  # fmt: skip


def _judged(text: str, runs: list[Any], figure: Callable[[], tuple[str, bool]]) -> Target:
    if not runs:
        return Target(text, "no row", None)
    return Target(text, *figure())


def _signed(numbers: list[float]) -> str:
    return ", ".join(f"{number:+.3f}" for number in numbers)
