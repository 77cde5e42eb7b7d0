"""How time and memory grow with the number of data N, of classes C and of weights P."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer.line import Line

LAST = 3
"""A slope is that of so many of the largest sizes: below them constant costs hide it."""

Points = tuple[tuple[float, float], ...]
"""Pairs of size and seconds, or MiB, without those that failed."""


def slope(points: Points) -> float:
    """Slope of the least-squares line through the last points of log y against log x; NaN with less than two.

    Args:
        points: Sizes, ascending, and values.
    """
    if len(points) < 2:
        return math.nan
    x, y = ([math.log(value) for value in values] for values in zip(*points[-LAST:], strict=True))
    return statistics.linear_regression(x, y).slope


@dataclass(frozen=True)
class Series:
    """One action on one axis.

    Attributes:
        axis: What grows.
        action: What is timed.
        seconds: Of laplace-torch, and of this library.
        mib: Peak memory, likewise.
        stops: What ended the series of laplace-torch before its last size; else empty.
    """

    axis: str
    action: str
    seconds: tuple[Points, Points]
    mib: tuple[Points, Points]
    stops: str

    def __str__(self) -> str:
        times, sizes = ([f"{slope(points):5.2f}" for points in both] for both in (self.seconds, self.mib))
        stops = f"  laplace-torch: {self.stops}" if self.stops else ""
        head = f"growth with {self.axis}, {self.action}"
        return f"{head:<58} time {times[0]} and {times[1]}, memory {sizes[0]} and {sizes[1]}{stops}"


def series(lines: Sequence[Line]) -> list[Series]:
    """The lines with an axis, gathered."""
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line.workload.axis:
            found.setdefault((line.workload.axis, line.workload.action), []).append(line)
    return [_gathered(*key, members) for key, members in found.items()]


def _gathered(axis: str, action: str, lines: list[Line]) -> Series:
    seconds: list[Points] = []
    mib: list[Points] = []
    for side in ("theirs", "ours"):
        halves = [(float(line.workload.size), getattr(line, side)) for line in lines]
        seconds.append(tuple((size, half.median) for size, half in halves if not half.failure))
        mib.append(tuple((size, max(half.extra_mib, 0.1)) for size, half in halves if not half.failure))
    failed = next((line for line in lines if line.theirs.failure), None)
    stops = "" if failed is None else f"{failed.theirs.failure} at {failed.workload.size}"
    return Series(axis, action, (seconds[0], seconds[1]), (mib[0], mib[1]), stops)


def plot(found: list[Series], path: Path) -> None:
    """Times above, memory below, one column per axis, all logarithmic. Nothing without a series.

    Args:
        found: What to show.
        path: Of the picture.
    """
    if not found:
        return
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    axes = list(dict.fromkeys(one.axis for one in found))
    figure, grid = plt.subplots(2, len(axes), figsize=(3.0 * len(axes), 5.0), squeeze=False, layout="constrained")
    for one in found:
        column, style = axes.index(one.axis), "-" if one.action == "fit" else "--"
        for row, both in enumerate((one.seconds, one.mib)):
            for points, who, colour in zip(both, ("laplace-torch", "laplace"), ("tab:orange", "tab:blue"), strict=True):
                if points:
                    grid[row, column].loglog(
                        *zip(*points, strict=True), style, marker=".", color=colour, label=f"{who}, {one.action}"
                    )
    for column, axis in enumerate(axes):
        grid[0, column].set_title(axis.partition(": ")[2], fontsize=8)
        grid[1, column].set_xlabel(axis[0])
        sizes = [size for one in found if one.axis == axis for points in one.seconds for size, _ in points] or [1.0]
        for panel in grid[:, column]:
            panel.xaxis.set_minor_formatter(ticker.NullFormatter())
            panel.set_xticks([min(sizes), max(sizes)], [f"{size:.0f}" for size in (min(sizes), max(sizes))])
    grid[0, 0].set_ylabel("seconds")
    grid[1, 0].set_ylabel("peak MiB")
    grid[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=70)
    plt.close(figure)
