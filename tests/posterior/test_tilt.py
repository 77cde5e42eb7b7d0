"""Distances of inputs from the training data, layer by layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InvalidData
from tests.reference import tilt as reference
from tests.reference.compare import assert_close
from tests.tuning.test_tilting import N_TRAIN, WIDTH, calibrated, data, fitted, network, new_inputs


class PositionsFirst(nn.Module):
    """A network of sequences `[B, T, d]`, whose layers see the positions of all data, one after the other."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.flat = flat
        self.inner, self.outer = nn.Linear(WIDTH, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).flatten(0, 1) if self.flat else x.transpose(0, 1)
        return self.outer(self.inner(rows).tanh().view(x.shape[1], len(x), -1).mean(0))


@pytest.mark.parametrize("flat", [False, True])
def test_layers_whose_inputs_are_not_in_the_order_of_the_data_are_left_out(flat: bool) -> None:
    """They would make a prediction depend on the batch that an input is in, even of as many data as positions."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 5, WIDTH, dtype=torch.float64) * torch.rand(40, 1, 1).double(), torch.arange(40) % 3
    la = Laplace(PositionsFirst(flat=flat), "classification", "all", "diag")
    la.fit([(x[:20], y[:20])])
    for size in (5, 8):
        found = la.calibrate([(x[i : i + size], y[i : i + size]) for i in range(20, 40, size)], train_loader=[(x, y)])
        assert found.tilt is not None
        assert found.tilt.layers == ("outer",)


def test_convolutions_have_the_mean_of_their_patches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)).double()
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(n, 2, 5, 5, generator=generator, dtype=torch.float64) for n in (20, 30, 6)]
    labels = torch.arange(30) % 3
    la: Any = Laplace(model, "classification", "all", "kron")
    la.fit([(parts[0], labels[:20])])
    found = la.calibrate([(parts[1], labels)])
    la.calibration = dataclasses.replace(found, tilt=dataclasses.replace(found.tilt, width=1.0), scale=0.0)
    layers = [[nn.functional.unfold(x, 3, padding=1, stride=2).mT, model[:3](x).detach().unsqueeze(1)] for x in parts]
    ours = [[reference.leverages(a, b) for a, b in zip(layers[0], each, strict=True)] for each in layers[1:]]
    r = reference.distances(*ours)[1]
    assert_close(la(parts[2]), reference.probabilities(model(parts[2]).detach(), r, 1.0, found.tilt.far), "algebra")


def test_inputs_that_are_no_numbers_are_refused() -> None:
    la, x = calibrated(fitted("all", "kron"), 2.0, 3.0, 0.0), new_inputs()
    x[2, 1] = torch.nan
    with pytest.raises(InvalidData, match="NaN"):
        la(x)


calls: list[int] = []


class Counting(nn.Module):
    """A network whose calls are counted, those of its copies too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        calls.append(len(x))
        return self.layers(x)


@pytest.mark.parametrize("scale", [0.0, 0.1])
def test_one_forward_pass_reads_all_layers(scale: float) -> None:
    """Also where a posterior of the last layer is on top, with the features by the same pass."""
    model, x = Counting(), new_inputs()
    la: Any = Laplace(model, "classification", "last_layer", "kron", prior_precision=3.0)
    la.fit([data(N_TRAIN, 0)])
    calibrated(la, 2.0, 3.0, scale, [data(N_TRAIN, 0)])
    assert la.calibration.tilt.layers == ("layers.0", "layers.2")
    expected = la(x)
    calls.clear()
    assert torch.equal(la(x), expected)
    assert calls == [len(x)]
    other = calibrated(fitted("last_layer", "kron"), 2.0, 3.0, scale, [data(N_TRAIN, 0)])
    assert_close(expected, other(x), "algebra")
