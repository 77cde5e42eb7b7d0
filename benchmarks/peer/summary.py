"""One plot of the comparison with laplace-torch, from the table that benchmarks/results.md stores.

python -m benchmarks.peer.summary
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "benchmarks" / "results.md", ROOT / "docs" / "benchmarks_speed.png"
HEADING = "## Side by side with laplace-torch"

KINDS = {
    "fits": r", fit$",
    "predictions": r", probit$",
    "predictions by\nsampled weights": r"^nn, ",
    "evidence steps": "evidence steps",
    "grid searches": "candidates",
    "whole scripts": r"^script, ",
}
"""Kinds of tasks, and what their names hold."""

_FINISHED = re.compile(r"^(.+?, (?:fit|probit|full|kron|diag)) +([\d.e+]+) [\d.e+]+ – [\d.e+]+ ")
_FAILED = re.compile(r"^(.+?, (?:fit|probit|full|kron|diag)) +(out of memory|over \d+ s|\w+Error) ")
_FASTER, _SLOWER, _ALONE = "tab:blue", "tab:orange", "0.35"
_EDGE = 1.2e4
"""Where those are drawn that laplace-torch does not finish."""


@dataclass(frozen=True)
class Summary:
    """The tasks of a table.

    Attributes:
        ratios: Time of laplace-torch over that of this library, by task; above 1 this library is faster.
        failures: What stopped laplace-torch, by task; this library finishes these.
    """

    ratios: dict[str, float]
    failures: dict[str, str]

    @classmethod
    def read(cls, text: str) -> Summary:
        """The first table below the heading.

        Raises:
            ValueError: A line is neither of a task that both finish, nor of one that laplace-torch does not.
        """
        lines = text.partition(HEADING)[2].split("```text\n")[1].partition("```")[0].splitlines()[1:]
        finished = [match for line in lines if (match := _FINISHED.match(line))]
        failed = [match for line in lines if (match := _FAILED.match(line))]
        if len(finished) + len(failed) != len(lines):
            raise ValueError("the table has lines of another form")
        return cls({match[1]: float(match[2]) for match in finished}, {match[1]: match[2] for match in failed})

    def of(self, kind: str) -> Summary:
        """The tasks of one kind."""
        pattern = re.compile(KINDS[kind])
        ratios = {name: ratio for name, ratio in self.ratios.items() if pattern.search(name)}
        return Summary(ratios, {name: said for name, said in self.failures.items() if pattern.search(name)})

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios."""
        return statistics.geometric_mean(self.ratios.values())

    @property
    def n_slower(self) -> int:
        """Number of tasks that take longer with this library."""
        return sum(ratio < 1 for ratio in self.ratios.values())


def plot(summary: Summary, path: Path) -> None:
    """A dot per task, a row per kind; right of the line this library is faster."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8.0, 3.6), layout="constrained")
    for row, kind in enumerate(KINDS):
        _draw(axes, -row, summary.of(kind))
    axes.axvline(1, color="black", linewidth=1)
    axes.axvline(6e3, color=_ALONE, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlim(0.4, 3e4)
    axes.set_ylim(-len(KINDS) + 0.5, 0.75)
    axes.set_xticks([1, 10, 100, 1000, _EDGE], ["same", "10 ×", "100 ×", "1000 ×", "laplace-torch\nstops"])
    axes.xaxis.minorticks_off()
    axes.set_yticks([-row for row in range(len(KINDS))], list(KINDS))
    axes.tick_params(length=0)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.set_title(
        "Speed against laplace-torch 0.3: one dot per task, geometric means as bars", fontsize=10, loc="left"
    )
    axes.set_xlabel("this library is faster by")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axes: Axes, height: int, tasks: Summary) -> None:
    """The dots of one row, spread in height so that they do not hide each other, with the mean."""
    ratios = sorted(tasks.ratios.values())
    colours = [_FASTER if ratio >= 1 else _SLOWER for ratio in ratios]
    axes.scatter(ratios, _spread(len(ratios), height), c=colours, s=22, alpha=0.75, linewidths=0)
    axes.plot([tasks.mean] * 2, [height - 0.34, height + 0.34], color="black", linewidth=2.5)
    beside = {"ha": "center", "fontsize": 9, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}
    axes.annotate(f"{tasks.mean:.2g} ×", (tasks.mean, height + 0.38), va="bottom", **beside)
    if tasks.failures:
        axes.annotate(
            f"{len(tasks.failures)} task{'s' * (len(tasks.failures) > 1)}",
            (_EDGE, height),
            va="center",
            color=_ALONE,
            **beside,
        )


def _spread(n: int, height: int) -> Sequence[float]:
    return [height + 0.08 * (i % 5 - 2) for i in range(n)]


def main() -> None:
    """Reads the page and draws the picture of docs/benchmarks.md."""
    plot(Summary.read(PAGE.read_text("utf-8")), PICTURE)


if __name__ == "__main__":
    main()
