"""The full curvature of a head is added up in pieces of rows, however small they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.jacobian import pairs
from tests.conformance.cases import own_dense
from tests.conformance.test_layers import SoftmaxByHand
from tests.reference import curvature as reference
from tests.reference.compare import assert_close

OTHER = {"regression": torch.ones(9, 3).double(), "bernoulli": torch.ones(9, 3).double()}
"""Targets that are no labels; no GGN depends on them."""


@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli", "by hand"])
@pytest.mark.parametrize("size", [1, 600, 5000], ids="{} bytes".format)
def test_rows_in_pieces(likelihood: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an output Hessian without structure, `"by hand"`."""
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(9, 4).double(), OTHER.get(likelihood, torch.arange(9) % 3)
    name = "classification" if likelihood == "by hand" else likelihood
    expected = reference.ggn(network, x, y, ["2.weight", "2.bias"], name)
    monkeypatch.setattr(pairs, "CHUNK_BYTES", size)
    la = Laplace(network, SoftmaxByHand() if likelihood == "by hand" else likelihood, "last_layer", "full")
    la.fit([(x[:7], y[:7]), (x[7:], y[7:])])
    assert_close(own_dense(la), expected, "backend")
