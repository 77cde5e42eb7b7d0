"""Plots draw what they are given, and without pyplot's global state."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from laplace import Laplace
from laplace.errors import InvalidArgument, InvalidData, MissingDependency, UnsupportedError
from laplace.extensions import plotting
from laplace.extensions.plotting import (
    COLOURS,
    decision_map,
    new_figure,
    probability_map,
    quantile_diagram,
    regression_band,
    reliability_diagram,
    score_histogram,
    shift_curve,
    uncertainty_map,
)
from laplace.metrics import regression_calibration_error


def test_a_figure_is_drawn_and_saved(tmp_path: Path) -> None:
    figure, axes = new_figure(n_columns=2, n_rows=2)
    probs, y = torch.randn(40, 3).softmax(1), torch.randint(3, (40,))
    reliability_diagram(axes[0], {"MAP": probs, "Laplace": probs}, y)
    shift_curve(axes[1], [0, 10, 20], {"MAP": [0.1, 0.2, 0.3]}, "NLL")
    score_histogram(axes[2], {"known": probs.amax(1), "unseen": probs.amax(1)})
    x = torch.linspace(-1, 1, 20).unsqueeze(1)
    regression_band(axes[3], x, x.sin(), torch.ones(20, 1, 1), noise_var=0.1, data=(x, x))
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert axes[0].get_ylabel() == "accuracy"
    assert axes[1].get_ylabel() == "NLL"


def test_the_band_is_two_standard_deviations_in_order_of_x() -> None:
    _, (axes,) = new_figure()
    regression_band(axes, torch.tensor([1.0, 0.0]), torch.tensor([5.0, 3.0]), torch.tensor([4.0, 1.0]))
    (line,) = axes.lines
    assert list(line.get_xdata()) == [0.0, 1.0]
    assert list(line.get_ydata()) == [3.0, 5.0]
    corners = axes.collections[0].get_paths()[0].vertices
    assert corners[:, 1].min() == pytest.approx(3 - 2 * 1)
    assert corners[:, 1].max() == pytest.approx(5 + 2 * 2)


def test_the_reliability_diagram_leaves_out_empty_bins() -> None:
    _, (axes,) = new_figure()
    probs = torch.tensor([[0.95, 0.05], [0.95, 0.05]], dtype=torch.float64)
    reliability_diagram(axes, {"MAP": probs}, torch.tensor([0, 1]))
    assert list(axes.lines[1].get_xdata()) == pytest.approx([0.95])
    assert list(axes.lines[1].get_ydata()) == pytest.approx([0.5])


def test_the_reliability_diagram_has_no_spike_of_two_images() -> None:
    """Two of 200 data are right at a confidence of 0.35, 98 of the others at 0.55 and the rest at 0.95, one in two."""
    _, (axes,) = new_figure()
    confidence = torch.tensor([0.35] * 2 + [0.55] * 98 + [0.95] * 98 + [0.65] * 2, dtype=torch.float64)
    right = torch.tensor([1] * 2 + [0, 1] * 98 + [0] * 2)
    others = ((1 - confidence) / 2).unsqueeze(1).expand(-1, 2)
    probs = torch.cat([confidence.unsqueeze(1), others], 1)
    reliability_diagram(axes, {"MAP": probs}, 1 - right)
    x, accuracy = axes.lines[1].get_data()
    assert list(x) == pytest.approx([(2 * 0.35 + 98 * 0.55) / 100, (2 * 0.65 + 98 * 0.95) / 100])
    assert list(accuracy) == pytest.approx([51 / 100, 49 / 100])


def test_without_matplotlib_the_error_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match="pip install"):
        new_figure()


def test_every_plot_takes_axes_and_returns_them() -> None:
    drawing = [
        function
        for name, function in inspect.getmembers(plotting, inspect.isfunction)
        if function.__module__ == plotting.__name__ and not name.startswith("_") and name != "new_figure"
    ]
    assert len(drawing) == 8
    for function in drawing:
        signature = inspect.signature(function)
        assert next(iter(signature.parameters)) == "ax"
        assert signature.parameters["ax"].annotation == signature.return_annotation == "Axes"


def test_plots_return_the_axes_that_they_were_given() -> None:
    _, (ax,) = new_figure()
    x, y = torch.rand(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    moments = (torch.zeros(6, 1), torch.ones(6, 1))
    la = Laplace(torch.nn.Linear(2, 2), "classification", "all", "full")
    la.fit([(x, y)])
    drawn = [
        reliability_diagram(ax=ax, predictions={"Laplace": la(x)}, y=y),
        quantile_diagram(ax=ax, predictions={"Laplace": moments}, y=torch.randn(6, 1)),
        shift_curve(ax=ax, shift=[0, 1], values={"Laplace": [0.1, 0.2]}, ylabel="NLL"),
        score_histogram(ax=ax, scores={"known": la(x).amax(1)}),
        regression_band(ax=ax, x=x[:, 0], mean=x[:, 0], var=x[:, 1]),
        decision_map(ax=ax, predict=la, x=x, y=y, n_points=4),
        probability_map(ax=ax, predict=la, x=x, y=y, n_points=4),
        uncertainty_map(ax=ax, predict=la.predict, x=x, y=y, n_points=4),
    ]
    assert all(one is ax for one in drawn)


# More models than colours are all drawn.


def test_no_model_is_left_out() -> None:
    _, (ax,) = new_figure()
    names = [f"model {k}" for k in range(6)]
    shift_curve(ax, [0, 1], {name: [0.1, 0.2] for name in names}, "NLL")
    assert [line.get_label() for line in ax.lines] == names


# Calibration of regressions.


def test_the_quantile_diagram_counts_targets_below_quantiles() -> None:
    _, (ax,) = new_figure()
    mean, var = torch.zeros(4, 1, dtype=torch.float64), torch.full((4, 1), 4.0, dtype=torch.float64)
    y = 2 * torch.tensor([[-1.0], [-0.5], [0.1], [3.0]], dtype=torch.float64)
    quantile_diagram(ax, {"Laplace": (mean, var)}, y, n_levels=3)  # quantiles at -0.6745, 0 and 0.6745 times 2
    diagonal, line = ax.lines
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0, 1]
    assert list(line.get_xdata()) == [0.25, 0.5, 0.75]
    assert list(line.get_ydata()) == [0.25, 0.5, 0.75]
    assert line.get_label() == "Laplace (error 0.0000)"
    assert ax.get_legend().get_texts()[0].get_text() == line.get_label()


def test_a_variance_that_is_too_small_crosses_the_diagonal() -> None:
    _, (ax,) = new_figure()
    y = torch.randn(2000, 1, generator=torch.Generator().manual_seed(0))
    mean = torch.zeros_like(y)
    quantile_diagram(ax, {"narrow": (mean, mean + 0.1), "right": (mean, mean + 1)}, y)
    narrow, right = (np.array(line.get_ydata()) - np.array(line.get_xdata()) for line in ax.lines[1:])
    assert narrow[0] > 0.1 and narrow[-1] < -0.1
    assert np.abs(right).max() < 0.04
    assert np.square(narrow).mean() == pytest.approx(float(regression_calibration_error(mean, mean + 0.1, y)), rel=1e-5)
    with pytest.raises(InvalidData, match="positive"):
        quantile_diagram(ax, {"none": (mean, mean)}, y)


# Maps of two inputs.

CORNERS = torch.tensor([[0.0, 0.0], [4.0, 8.0]], dtype=torch.float64)


def by_first_input(x: torch.Tensor) -> torch.Tensor:
    """p(y = 1) rises with the first input alone, p(y = 2) is none."""
    p = torch.sigmoid(x[:, 0] - 2)
    return torch.stack([1 - p, p, torch.zeros_like(p)], 1)


def test_a_probability_map_shows_probabilities_at_the_centres_of_its_pixels() -> None:
    figure, (ax,) = new_figure()
    probability_map(ax, by_first_input, CORNERS, n_points=5)
    (image,) = ax.images
    assert image.get_extent() == [-1, 5, -2, 10]
    assert image.get_clim() == (0, 1)
    centres = -1 + 6 * (np.arange(5) + 0.5) / 5
    expected = np.broadcast_to(1 / (1 + np.exp(2 - centres)), (5, 5))
    np.testing.assert_allclose(image.get_array(), expected, rtol=1e-12)
    (line,) = [collection for collection in ax.collections if collection.get_paths()]
    np.testing.assert_allclose(line.get_paths()[0].vertices[:, 0], 2, atol=1e-12)
    _, bar = figure.axes
    assert bar.get_ylabel() == "p(y = 1)"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("$x_1$", "$x_2$")


def test_the_second_input_is_upwards() -> None:
    _, (ax,) = new_figure()
    probability_map(ax, lambda x: by_first_input(x.flip(1)), CORNERS, extent=(0, 4, 0, 4), n_points=8, label=0)
    shown = ax.images[0].get_array()
    assert ax.images[0].origin == "lower"
    assert (np.diff(shown, axis=0) < 0).all()
    np.testing.assert_allclose(np.diff(shown, axis=1), 0)


def test_a_decision_map_has_the_colour_of_the_class_as_pale_as_it_is_uncertain() -> None:
    _, (ax,) = new_figure()
    certain = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.0, 0.0, 1.0]])
    decision_map(ax, lambda x: certain.double(), CORNERS, torch.tensor([0, 2]), n_points=2)
    shown = np.array(ax.images[0].get_array()).reshape(4, 3)
    from matplotlib.colors import to_rgb

    for pixel, label in ((0, 0), (1, 1), (3, 2)):
        np.testing.assert_allclose(shown[pixel], 1 - 0.7 * (1 - np.array(to_rgb(COLOURS[label]))), atol=1e-6)
    np.testing.assert_allclose(shown[2], 1, atol=1e-6)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["class 0", "class 1", "class 2"]
    points = [line for line in ax.lines if line.get_marker() == "o"]
    assert [line.get_xydata().tolist() for line in points] == [[[0.0, 0.0]], [], [[4.0, 8.0]]]


@pytest.mark.parametrize("likelihood", ["classification", "bernoulli"])
@pytest.mark.parametrize("quantity", ["confidence", "entropy", "expected_entropy", "mutual_information"])
def test_an_uncertainty_map_shows_what_the_prediction_says(quantity: str, likelihood: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 2, dtype=torch.float64)
    y = (x[:, 0] > 0).long() if likelihood == "classification" else (x[:, :1] > 0).double()
    la = Laplace(torch.nn.Linear(2, 2 if likelihood == "classification" else 1).double(), likelihood, "all", "full")
    la.fit([(x, y)])
    predict = partial(la.predict, generator=torch.Generator().manual_seed(0))
    figure, (ax,) = new_figure()
    uncertainty_map(ax, predict, x, y, quantity=quantity, extent=(-2, 2, -2, 2), n_points=4, largest=0.8)
    centres = torch.tensor([-1.5, -0.5, 0.5, 1.5], dtype=torch.float64)
    second, first = torch.meshgrid(centres, centres, indexing="ij")
    prediction = la.predict(
        torch.stack([first.flatten(), second.flatten()], 1), generator=torch.Generator().manual_seed(0)
    )
    probs = prediction.probabilities
    expected = {
        "confidence": probs.amax(1) if likelihood == "classification" else torch.maximum(probs, 1 - probs)[:, 0],
        "entropy": prediction.entropy,
        "expected_entropy": prediction.decomposition.expected_entropy,
        "mutual_information": prediction.decomposition.mutual_information,
    }
    (image,) = ax.images
    np.testing.assert_allclose(image.get_array(), expected[quantity].view(4, 4), rtol=1e-9, atol=1e-12)
    assert image.get_clim() == (0, 0.8)
    assert ("BALD" in figure.axes[1].get_ylabel()) is (quantity == "mutual_information")
    assert sum(len(line.get_xdata()) for line in ax.lines) == 30


def test_maps_refuse_what_has_no_plane() -> None:
    _, (ax,) = new_figure()
    for draw in (decision_map, probability_map):
        with pytest.raises(InvalidArgument, match=r"\(5, 3\).*two inputs"):
            draw(ax, by_first_input, torch.rand(5, 3))
    la = Laplace(torch.nn.Linear(2, 1), "regression", "all", "full")
    la.fit([(torch.rand(5, 2), torch.rand(5, 1))])
    with pytest.raises(InvalidArgument, match="'mutual_information'"):
        uncertainty_map(ax, la.predict, torch.rand(5, 2), quantity="bald")
    with pytest.raises(UnsupportedError):
        uncertainty_map(ax, la.predict, torch.rand(5, 2), quantity="confidence")
    uncertainty_map(ax, la.predict, torch.rand(5, 2), quantity="entropy", n_points=3)
    assert ax.images[0].get_array().shape == (3, 3)


def test_maps_refuse_what_is_no_prediction_and_no_label() -> None:
    _, (ax,) = new_figure()
    x, y = torch.rand(5, 2), torch.tensor([0, 1, 1, 0, 1])
    la = Laplace(torch.nn.Linear(2, 2), "classification", "all", "full")
    la.fit([(x, y)])
    for draw in (decision_map, probability_map):
        with pytest.raises(InvalidArgument, match=r"gives a Prediction, .*give la"):
            draw(ax, la.predict, x, n_points=3)
        with pytest.raises(InvalidArgument, match="no probabilities"):
            draw(ax, la.model, x, n_points=3)
        for wrong in (y[:3], y + 1, -y, torch.eye(5)):
            with pytest.raises(InvalidArgument, match="5 labels 0 to 1"):
                draw(ax, la, x, wrong, n_points=3)
    with pytest.raises(InvalidArgument, match=r"gives a Tensor, .*give la\.predict"):
        uncertainty_map(ax, la, x, n_points=3)
    for label in (-1, 2):
        with pytest.raises(InvalidArgument, match=f"label={label}; the classes are 0 to 1"):
            probability_map(ax, la, x, label=label, n_points=3)


@pytest.mark.filterwarnings("error")
def test_data_on_a_line_have_a_plane_around_them() -> None:
    _, (ax,) = new_figure()
    decision_map(ax, by_first_input, torch.tensor([[0.0, 2.0], [4.0, 2.0]]), n_points=3)
    assert (*ax.get_xlim(), *ax.get_ylim()) == (-1, 5, 1, 3)
