"""Plots of predictive distributions; matplotlib is imported when the first one is drawn.

All functions draw into the `Axes` that the caller gives as `ax` and return them; `new_figure` makes a figure without
pyplot, so that nothing global (backend, current figure) is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from laplace.core.scores import quantile_shares
from laplace.errors import InvalidArgument, MissingDependency
from laplace.metrics import calibration_bins, expected_calibration_error, regression_calibration_error
from laplace.predictive.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Extent = tuple[float, float, float, float]
"""Left, right, bottom and top."""

# Colours that stay apart in grey and for colour-blind readers (Okabe and Ito, 2008).
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")
_FURTHER = ("#E69F00", "#56B4E9", "#F0E442")


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
        raise MissingDependency("plots need matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=(width * n_columns, height * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    return figure, list(axes.flat)


def reliability_diagram(ax: Axes, predictions: Mapping[str, Tensor], y: Tensor, n_bins: int = 10) -> Axes:
    """Draws accuracy against confidence, one line per model; under the diagonal a model is over-confident.

    Args:
        ax: Where to draw; returned.
        predictions: Name to class probabilities `[B, C]`.
        y: Labels `[B]`.
        n_bins: Number of bins over the confidence. One of fewer than 10 data, and than 2 %, joins a neighbour.
    """
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    for (name, probs), colour in zip(predictions.items(), cycle(COLOURS), strict=False):
        points = _joined(*(values.tolist() for values in calibration_bins(probs.detach(), y, n_bins)))
        label = f"{name} (ECE {float(expected_calibration_error(probs.detach(), y)):.3f})"
        ax.plot([x for x, _ in points], [share for _, share in points], "o-", ms=4, color=colour, label=label)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    return _finish(ax)


def _joined(count: list[float], confidence: list[float], correct: list[float]) -> list[tuple[float, float]]:
    """Mean confidence and accuracy of bins with data enough, that none is a spike of two."""
    least, bins = min(10.0, 0.02 * sum(count)), list[list[float]]()
    for n, *means in zip(count, confidence, correct, strict=True):
        if not bins or bins[-1][0] >= max(1.0, least):
            bins.append([0.0, 0.0, 0.0])
        bins[-1] = [total + part for total, part in zip(bins[-1], [n, *(n * mean for mean in means)], strict=True)]
    if len(bins) > 1 and bins[-1][0] < least:
        few = bins.pop()
        bins[-1] = [total + part for total, part in zip(bins[-1], few, strict=True)]
    return [(confident / n, right / n) for n, confident, right in bins if n]


def quantile_diagram(ax: Axes, predictions: Mapping[str, tuple[Tensor, Tensor]], y: Tensor, n_levels: int = 20) -> Axes:
    """Draws the share of targets below predictive quantiles against their levels, one line per model.

    What `reliability_diagram` is for classes (Kuleshov et al., 2018, section 3): a calibrated regression lies on the
    diagonal. One whose variance is too small lies above it at low levels and below it at high ones; one that is biased
    lies on one side. The error in the legend is `laplace.metrics.regression_calibration_error`.

    Args:
        ax: Where to draw; returned.
        predictions: Name to mean and variance of the target, `[B, C]` each, the observation noise included:
            `(prediction.mean, prediction.variance)` of a `la.predict(x)`.
        y: Targets `[B, C]`.
        n_levels: Number of levels m; they are j / (m + 1), j = 1 … m.

    Raises:
        InvalidArgument: `n_levels` is not positive.
        InvalidData: Shapes do not match, there is no datum, or a variance is not positive.
    """
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    for (name, (mean, var)), colour in zip(predictions.items(), cycle(COLOURS), strict=False):
        label = f"{name} (error {float(regression_calibration_error(mean, var, y, n_levels)):.4f})"
        levels, shares = (values.tolist() for values in quantile_shares(mean, var, y, n_levels))
        ax.plot(levels, shares, "o-", ms=4, color=colour, label=label)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="level of the quantile", ylabel="share of targets below it")
    return _finish(ax)


def shift_curve(
    ax: Axes, shift: Sequence[float], values: Mapping[str, Sequence[float]], ylabel: str, xlabel: str = "rotation (°)"
) -> Axes:
    """Draws a score against the strength of a shift of the inputs, one line per model.

    Args:
        ax: Where to draw; returned.
        shift: Strengths of the shift, K of them (rotation angles in degrees, say).
        values: Name to the K scores.
        ylabel: Name of the score.
        xlabel: Name of the shift.
    """
    for (name, scores), colour in zip(values.items(), cycle(COLOURS), strict=False):
        ax.plot(list(shift), list(scores), "o-", ms=4, color=colour, label=name)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return _finish(ax)


def score_histogram(ax: Axes, scores: Mapping[str, Tensor], xlabel: str = "confidence", n_bins: int = 20) -> Axes:
    """Draws histograms of a score in [0, 1] over each other, as shares of each set.

    Args:
        ax: Where to draw; returned.
        scores: Name of a set of inputs to its scores `[B]`.
        xlabel: Name of the score.
        n_bins: Number of bins.
    """
    edges = [m / n_bins for m in range(n_bins + 1)]
    for (name, values), colour in zip(scores.items(), cycle(reversed(COLOURS)), strict=False):
        heights = values.detach().cpu().tolist()
        weights = [1 / max(len(heights), 1)] * len(heights)
        ax.hist(heights, bins=edges, weights=weights, color=colour, alpha=0.55, label=name)
    ax.set(xlabel=xlabel, ylabel="share of inputs", xlim=(0, 1))
    return _finish(ax)


def regression_band(
    ax: Axes,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    noise_var: float = 0.0,
    data: tuple[Tensor, Tensor] | None = None,
    functions: Sequence[nn.Module] = (),
) -> Axes:
    """Draws a mean with two standard deviations of the function, and around it of the target.

    Args:
        ax: Where to draw; returned.
        x: Inputs `[B]` or `[B, 1]`, in any order.
        mean: Predictive mean `[B]` or `[B, 1]`.
        var: Latent variance `[B]`, `[B, 1]` or `[B, 1, 1]`, in squared units of the target.
        noise_var: Variance σ² of the observation noise, in squared units of the target; 0 draws one band only.
        data: Inputs and targets to show as points.
        functions: Functions to show as lines, those of `laplace.draw(la, n)`, which take inputs `[B, 1]`.
    """
    inputs, order = x.detach().flatten().cpu().sort()
    centre, spread = mean.detach().flatten().cpu()[order], var.detach().flatten().cpu()[order]
    for extra, alpha, label in ((noise_var, 0.15, "± 2 std of y"), (0.0, 0.3, "± 2 std of f")):
        if label.endswith("f") or noise_var > 0:
            half = 2 * torch.sqrt(spread + extra)
            low, high = (centre - half).tolist(), (centre + half).tolist()
            ax.fill_between(inputs.tolist(), low, high, color=COLOURS[1], alpha=alpha, linewidth=0, label=label)
    ax.plot(inputs.tolist(), centre.tolist(), color=COLOURS[1], label="mean")
    for i, function in enumerate(functions):
        values = function(x.detach().reshape(-1, 1)).detach().flatten().cpu()[order]
        ax.plot(inputs.tolist(), values.tolist(), color=COLOURS[0], lw=0.7, label=None if i else "drawn functions")
    if data is not None:
        points = [values.detach().flatten().cpu().tolist() for values in data]
        ax.plot(*points, ".", color="0.2", ms=4, label="data", zorder=3)
    ax.set(xlabel="x", ylabel="y")
    return _finish(ax)


# The plane of two inputs.

Uncertainty = Literal["confidence", "entropy", "expected_entropy", "mutual_information"]
"""What `uncertainty_map` can show of a prediction."""

_UNCERTAINTIES: dict[str, tuple[str, Callable[[Prediction], Tensor]]] = {
    "confidence": ("confidence", lambda prediction: _rows(prediction.probabilities).amax(1)),
    "entropy": ("entropy (nats)", lambda prediction: prediction.entropy),
    "expected_entropy": (
        "expected entropy, aleatoric (nats)",
        lambda prediction: prediction.decomposition.expected_entropy,
    ),
    "mutual_information": (
        "mutual information, BALD (nats)",
        lambda prediction: prediction.decomposition.mutual_information,
    ),
}
"""The label of the colour bar, and the numbers `[B]`."""


@dataclass(frozen=True)
class _Plane:
    """A grid over a rectangle, whose points are the centres of an image's pixels."""

    extent: Extent
    n_points: int

    @classmethod
    def around(cls, x: Tensor, extent: Extent | None, n_points: int) -> _Plane:
        """The given rectangle, or one around data `[B, 2]` with a quarter of their range on every side."""
        if x.ndim != 2 or x.shape[1] != 2 or not len(x):
            raise InvalidArgument(f"x has shape {tuple(x.shape)}; maps are of data with two inputs, [B, 2].")
        if extent is not None:
            return cls(extent, n_points)
        low, high = x.detach().amin(0), x.detach().amax(0)
        margin = torch.where(high > low, 0.25 * (high - low), 1.0)
        (left, right), (bottom, top) = torch.stack([low - margin, high + margin], 1).tolist()
        return cls((left, right, bottom, top), n_points)

    def lines(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The two coordinates of the points, `[n]` each."""
        centres = (torch.arange(self.n_points, dtype=like.dtype, device=like.device) + 0.5) / self.n_points
        left, right, bottom, top = self.extent
        return left + (right - left) * centres, bottom + (top - bottom) * centres

    def inputs(self, like: Tensor) -> Tensor:
        """All points, `[n², 2]`, row by row from below."""
        first, second = self.lines(like)
        return torch.stack([first.repeat(self.n_points), second.repeat_interleave(self.n_points)], 1)

    def image(self, values: Tensor) -> list[Any]:
        """Numbers or colours of all points, `[n², …]`, as rows from below."""
        return values.detach().cpu().reshape(self.n_points, self.n_points, *values.shape[1:]).tolist()

    def show(self, ax: Axes, values: Tensor, **style: Any) -> AxesImage:
        """Draws an image of the values."""
        return ax.imshow(self.image(values), origin="lower", extent=self.extent, aspect="auto", zorder=0, **style)


def decision_map(
    ax: Axes,
    predict: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor | None = None,
    *,
    extent: Extent | None = None,
    n_points: int = 150,
) -> Axes:
    """Draws the most probable class over the plane of two inputs, the paler the less probable it is.

    Args:
        ax: Where to draw; returned.
        predict: Inputs `[B, 2]` to probabilities `[B, C]` (`[B, 1]` of one indicator): a posterior `la`, or a network
            with its softmax.
        x: Data `[N, 2]`.
        y: Labels of the data, which are shown then as points, `[N]` or `[N, 1]`.
        extent: Left, right, bottom and top of the map; None for the data's range and a quarter of it on every side.
        n_points: Points per axis.

    Raises:
        InvalidArgument: The data have not two inputs, `predict` gives no probabilities, or y holds no labels.
    """
    from matplotlib.colors import to_rgb

    plane = _Plane.around(x, extent, n_points)
    probs = _probabilities(predict, plane.inputs(x))
    n_classes = probs.shape[1]
    colours = torch.tensor([to_rgb(colour) for colour in _class_colours(n_classes)], dtype=probs.dtype)
    confidence, predicted = probs.max(1)
    strength = ((confidence - 1 / n_classes) / (1 - 1 / n_classes)).clamp(0, 1).unsqueeze(1)
    plane.show(ax, 1 - 0.7 * strength * (1 - colours[predicted]))
    for label, colour in enumerate(_class_colours(n_classes)):
        ax.plot([], [], "s", color=colour, alpha=0.7, label=f"class {label}")
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return _points(ax, plane, x, y, n_classes)


def probability_map(
    ax: Axes,
    predict: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor | None = None,
    *,
    label: int = 1,
    extent: Extent | None = None,
    n_points: int = 150,
) -> Axes:
    """Draws the probability of one class over the plane of two inputs, with a colour bar and the line where it is ½.

    Args:
        ax: Where to draw; returned.
        predict: As of `decision_map`.
        x: Data `[N, 2]`.
        y: Labels of the data, which are shown then as points, `[N]` or `[N, 1]`.
        label: The class.
        extent: As of `decision_map`.
        n_points: Points per axis.

    Raises:
        InvalidArgument: As of `decision_map`, or there is no such class.
    """
    from matplotlib.colors import LinearSegmentedColormap

    plane = _Plane.around(x, extent, n_points)
    probs = _probabilities(predict, plane.inputs(x))
    colours = _class_colours(probs.shape[1])
    if label not in range(len(colours)):
        raise InvalidArgument(f"label={label}; the classes are 0 to {len(colours) - 1}.")
    other = colours[1 - label] if len(colours) == 2 else "0.3"
    cmap = LinearSegmentedColormap.from_list("classes", [other, "white", colours[label]])
    image = plane.show(ax, probs[:, label], cmap=cmap, vmin=0, vmax=1)
    if probs[:, label].min() < 0.5 < probs[:, label].max():
        lines = [line.tolist() for line in plane.lines(x)]
        ax.contour(*lines, plane.image(probs[:, label]), levels=[0.5], colors="0.2", linewidths=1)
    _colour_bar(ax, image, f"p(y = {label})")
    return _points(ax, plane, x, y, len(colours))


def uncertainty_map(
    ax: Axes,
    predict: Callable[[Tensor], Prediction],
    x: Tensor,
    y: Tensor | None = None,
    *,
    quantity: Uncertainty = "mutual_information",
    largest: float | None = None,
    extent: Extent | None = None,
    n_points: int = 100,
) -> Axes:
    """Draws an uncertainty over the plane of two inputs, with a colour bar.

    Args:
        ax: Where to draw; returned.
        predict: Inputs `[B, 2]` to a `Prediction`: `la.predict`, or one with options, `partial(la.predict, "nn")`.
        x: Data `[N, 2]`.
        y: Labels of the data, which are shown then as points, `[N]` or `[N, 1]`.
        quantity: `"entropy"` of the predictive distribution; its two parts `"expected_entropy"`, which more data cannot
            remove, and `"mutual_information"` (BALD: Houlsby et al., 2011), which they can; or `"confidence"`, the
            probability of the most probable class.
        largest: Upper end of the colour bar, to compare maps; None for the largest value.
        extent: As of `decision_map`.
        n_points: Points per axis.

    Raises:
        InvalidArgument: As of `decision_map`, `predict` gives no `Prediction`, or another quantity.
    """
    if quantity not in _UNCERTAINTIES:
        raise InvalidArgument(f"quantity={quantity!r}; accepted are {list(_UNCERTAINTIES)}.")
    plane = _Plane.around(x, extent, n_points)
    text, numbers = _UNCERTAINTIES[quantity]
    prediction: Any = predict(plane.inputs(x))
    if not isinstance(prediction, Prediction):
        raise InvalidArgument(f"predict gives a {type(prediction).__name__}, not a Prediction; give la.predict.")
    values = numbers(prediction).detach().cpu()
    ends = {"vmin": min(0.0, float(values.min())), "vmax": float(values.max()) if largest is None else largest}
    image = plane.show(ax, values, cmap="viridis", **ends)
    _colour_bar(ax, image, text)
    return _points(ax, plane, x, y, max(2, prediction.mean.shape[1]))


def _probabilities(predict: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """Probabilities of classes at x, `[B, C]`.

    Raises:
        InvalidArgument: These are none, but latents, say.
    """
    given = predict(x)
    if not isinstance(given, Tensor):
        raise InvalidArgument(f"predict gives a {type(given).__name__}, not probabilities [B, C]; give la.")
    probs = _rows(given.detach().cpu())
    sums = probs.sum(1)
    if probs.min() < 0 or not torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        raise InvalidArgument("predict gives numbers [B, C] that are no probabilities; of a network take the softmax.")
    return probs


def _rows(probs: Tensor) -> Tensor:
    """Probabilities of classes, `[B, C]`: of one indicator `[B, 1]`, those of 0 and 1."""
    return torch.cat([1 - probs, probs], 1) if probs.shape[1] == 1 else probs


def _class_colours(n_classes: int) -> list[str]:
    return list(islice(cycle((*COLOURS, *_FURTHER)), n_classes))


def _colour_bar(ax: Axes, image: AxesImage, label: str) -> None:
    ax.figure.colorbar(image, ax=ax, label=label)


def _points(ax: Axes, plane: _Plane, x: Tensor, y: Tensor | None, n_classes: int) -> Axes:
    """Data with their labels, as points, and names of the axes.

    Raises:
        InvalidArgument: There is not one label per datum, or one is of no class.
    """
    if y is not None:
        labels = y.detach().cpu().flatten().long()
        if len(labels) != len(x) or not 0 <= labels.min() <= labels.max() < n_classes:
            raise InvalidArgument(f"y has shape {list(y.shape)}; {len(x)} labels 0 to {n_classes - 1} are accepted.")
        for label, colour in enumerate(_class_colours(n_classes)):
            points = x.detach().cpu()[labels == label]
            ax.plot(*points.T.tolist(), "o", ms=4, color=colour, markeredgecolor="white", markeredgewidth=0.6)
    left, right, bottom, top = plane.extent
    ax.set(xlim=(left, right), ylim=(bottom, top), xlabel="$x_1$", ylabel="$x_2$")
    return ax


def _finish(ax: Axes) -> Axes:
    """The common look: light grid, no upper and right spine, small legend."""
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    return ax
