"""Plots draw what they are given, and without pyplot's global state."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from laplace.errors import MissingDependency
from laplace.plotting import new_figure, regression_band, reliability_diagram, score_histogram, shift_curve


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


def test_without_matplotlib_the_error_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match="pip install"):
        new_figure()
