"""Plots of predictive distributions; matplotlib is imported when the first one is drawn.

All functions draw into `Axes` that the caller gives and return them; `new_figure` makes a figure without pyplot, so
that nothing global (backend, current figure) is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.errors import MissingDependency
from laplace.metrics import calibration_bins, expected_calibration_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that stay apart in grey and for colour-blind readers (Okabe and Ito, 2008).
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")


def new_figure(
    n_columns: int = 1, n_rows: int = 1, width: float = 4.2, height: float = 3.4
) -> tuple[Figure, list[Axes]]:
    """Makes a figure and its axes, row by row.

    Args:
        n_columns: Axes per row.
        n_rows: Number of rows.
        width: Width of one of the axes, in inches.
        height: Height of one of the axes, in inches.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("plots need matplotlib: pip install 'laplace-bayes[examples]'.") from error
    figure = Figure(figsize=(width * n_columns, height * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    return figure, list(axes.flat)


def reliability_diagram(axes: Axes, predictions: Mapping[str, Tensor], y: Tensor, n_bins: int = 10) -> Axes:
    """Draws accuracy against confidence, one line per model; under the diagonal a model is over-confident.

    Args:
        axes: Where to draw.
        predictions: Name to class probabilities `[B, C]`.
        y: Labels `[B]`.
        n_bins: Number of bins over the confidence; empty ones are left out.
    """
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    for (name, probs), colour in zip(predictions.items(), COLOURS, strict=False):
        count, confidence, correct = (values.tolist() for values in calibration_bins(probs, y, n_bins))
        used = [m for m in range(n_bins) if count[m] > 0]
        label = f"{name} (ECE {float(expected_calibration_error(probs, y)):.3f})"
        axes.plot([confidence[m] for m in used], [correct[m] for m in used], "o-", ms=4, color=colour, label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    return _finish(axes)


def shift_curve(
    axes: Axes, shift: Sequence[float], values: Mapping[str, Sequence[float]], ylabel: str, xlabel: str = "rotation (°)"
) -> Axes:
    """Draws a score against the strength of a shift of the inputs, one line per model.

    Args:
        axes: Where to draw.
        shift: Strengths of the shift, K of them (rotation angles in degrees, say).
        values: Name to the K scores.
        ylabel: Name of the score.
        xlabel: Name of the shift.
    """
    for (name, scores), colour in zip(values.items(), COLOURS, strict=False):
        axes.plot(list(shift), list(scores), "o-", ms=4, color=colour, label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return _finish(axes)


def score_histogram(axes: Axes, scores: Mapping[str, Tensor], xlabel: str = "confidence", n_bins: int = 20) -> Axes:
    """Draws histograms of a score in [0, 1] over each other, as shares of each set.

    Args:
        axes: Where to draw.
        scores: Name of a set of inputs to its scores `[B]`.
        xlabel: Name of the score.
        n_bins: Number of bins.
    """
    edges = [m / n_bins for m in range(n_bins + 1)]
    for (name, values), colour in zip(scores.items(), reversed(COLOURS), strict=False):
        heights = values.detach().cpu().tolist()
        weights = [1 / max(len(heights), 1)] * len(heights)
        axes.hist(heights, bins=edges, weights=weights, color=colour, alpha=0.55, label=name)
    axes.set(xlabel=xlabel, ylabel="share of inputs", xlim=(0, 1))
    return _finish(axes)


def regression_band(
    axes: Axes, x: Tensor, mean: Tensor, var: Tensor, noise_var: float = 0.0, data: tuple[Tensor, Tensor] | None = None
) -> Axes:
    """Draws a mean with two standard deviations of the function, and around it of the target.

    Args:
        axes: Where to draw.
        x: Inputs `[B]` or `[B, 1]`, in any order.
        mean: Predictive mean `[B]` or `[B, 1]`.
        var: Latent variance `[B]`, `[B, 1]` or `[B, 1, 1]`, in squared units of the target.
        noise_var: Variance σ² of the observation noise, in squared units of the target; 0 draws one band only.
        data: Inputs and targets to show as points.
    """
    inputs, order = x.detach().flatten().cpu().sort()
    centre, spread = mean.detach().flatten().cpu()[order], var.detach().flatten().cpu()[order]
    for extra, alpha, label in ((noise_var, 0.15, "± 2 std of y"), (0.0, 0.3, "± 2 std of f")):
        if label.endswith("f") or noise_var > 0:
            half = 2 * torch.sqrt(spread + extra)
            low, high = (centre - half).tolist(), (centre + half).tolist()
            axes.fill_between(inputs.tolist(), low, high, color=COLOURS[1], alpha=alpha, linewidth=0, label=label)
    axes.plot(inputs.tolist(), centre.tolist(), color=COLOURS[1], label="mean")
    if data is not None:
        points = [values.detach().flatten().cpu().tolist() for values in data]
        axes.plot(*points, ".", color="0.2", ms=4, label="data", zorder=3)
    axes.set(xlabel="x", ylabel="y")
    return _finish(axes)


def _finish(axes: Axes) -> Axes:
    """The common look: light grid, no upper and right spine, small legend."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return axes
