"""The plot of `mixtures.py`: figures 4, 6 and 10."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laplace.extensions.plotting import new_figure
from protocol.mola.tables import LEVELS, numbers
from protocol.records import Estimate, Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(records: Records, output: Path) -> None:
    """Saves NLL and ECE against the level of the shift, of the variants, and against the number of components."""
    figure, axes = new_figure(n_columns=3, n_rows=2, width=3.5, height=2.6)
    for row, (task, xlabel) in enumerate((("rotated", "rotation in degrees"), ("corrupted", "severity"))):
        for panel, measure in zip(axes[3 * row :], ("NLL", "ECE"), strict=False):
            for method in records.methods(f"{task}, shifted"):
                found = [records.estimate(f"{task}, level {level}", method, measure) for level in LEVELS[task]]
                _line(panel, LEVELS[task], found, method)
            panel.set(xlabel=xlabel, ylabel=measure, title=f"{task} digits")
    for name in records.methods("variants: corrupted, shifted"):
        levels = LEVELS["corrupted"]
        found = [records.estimate(f"variants: corrupted, level {level}", name, "NLL") for level in levels]
        _line(axes[2], levels, found, name)
    axes[2].set(xlabel="severity", ylabel="NLL", title="LLLA: structure, link")
    for method in ("DE", "MoLA"):
        found = [records.estimate(f"K = {n}: corrupted, shifted", method, "NLL") for n in numbers(records)]
        _line(axes[5], numbers(records), found, method)
    axes[5].set(xlabel="components", ylabel="NLL", title="corrupted digits, all severities")
    for panel in (axes[2], axes[3], axes[5]):
        panel.legend(frameon=False, fontsize=6)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)


def _line(panel: Axes, x: Sequence[int], found: Sequence[Estimate], label: str) -> None:
    """Means with a shade of one standard error, where there is one."""
    means = [each.mean for each in found]
    (line,) = panel.plot(x, means, marker="o", markersize=3, linewidth=1, label=label)
    if not any(math.isnan(each.error) for each in found):
        low, high = ([each.mean + sign * each.error for each in found] for sign in (-1, 1))
        panel.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
