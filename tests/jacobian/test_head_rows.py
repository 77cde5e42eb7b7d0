"""The full curvature of a head is added up in pieces of rows, however small they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.jacobian import full_sum
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
    monkeypatch.setattr(full_sum, "CHUNK_BYTES", size)
    la = Laplace(network, SoftmaxByHand() if likelihood == "by hand" else likelihood, "last_layer", "full")
    la.fit([(x[:7], y[:7]), (x[7:], y[7:])])
    assert_close(own_dense(la), expected, "backend")


def test_repeated_data_under_a_weak_prior() -> None:
    """Directions that no datum has hold no rounding, with which a small prior precision would compete."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(40, 4)
    with torch.no_grad():
        head.weight.copy_(torch.randn(4, 40, generator=generator) / 2)
    x, y = torch.randn(20, 40, generator=generator).repeat(20, 1), torch.arange(400) % 4
    la = Laplace(head, "classification", "last_layer", "full", prior_precision=1e-4)
    la.fit([(x[i : i + 50], y[i : i + 50]) for i in range(0, 400, 50)])
    exact = nn.Linear(40, 4).double()
    exact.load_state_dict(head.state_dict())
    curvature = reference.ggn(exact, x.double(), y, ["weight", "bias"], "classification")
    precision = curvature + 1e-4 * torch.eye(len(curvature), dtype=torch.float64)
    new = torch.randn(5, 40, generator=generator)
    rows = torch.autograd.functional.jacobian(
        lambda w, b: nn.functional.linear(new.double(), w, b), (exact.weight.detach(), exact.bias.detach())
    )
    jacobian = torch.cat([part.flatten(2) for part in rows], 2)
    expected = jacobian @ torch.linalg.solve(precision, jacobian.mT)
    actual = la.predictive_moments(new)[1].double()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
