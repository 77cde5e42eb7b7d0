"""Statistics of features by class: as dense algebra has them, of few features and of many."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace
from laplace import Laplace
from tests.extensions.test_ood import OF_FEATURES, at_evidence, data, others
from tests.reference import ood as reference
from tests.reference.compare import assert_close


@pytest.mark.parametrize("n", [7, 300])
def test_statistics_of_few_features_and_of_many(n: int) -> None:
    """Fewer than dimensions: rows; many: a triangle of the same sum of squares. The largest class is left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    la = Laplace(model, "classification", "last_layer", "kron")
    x, y = data(n)
    y[0] = 1  # which leaves class 0 with one input less than class 1
    la.fit([(x, y)])
    batches = list(zip(x.split(11), y.split(11), strict=True))
    found = laplace.ood_score(la, others(), OF_FEATURES, train_loader=batches)
    inside, at = model[:2](x).detach(), model[:2](others()).detach()
    for name, classwise in (("mahalanobis", False), ("classwise_mahalanobis", True)):
        assert_close(found[name], reference.mahalanobis(inside, y, at, classwise=classwise), "backend", label=name)
    ridge = float(at_evidence(la).prior_precision)
    assert_close(found["classwise_leverage"], reference.leverage(inside, y, at, ridge), "backend")


def test_a_shifted_mean_of_the_features_costs_no_digits() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Identity(), nn.Linear(5, 3)).double()
    x, y = data(200)
    la = Laplace(model, "classification", "last_layer", "kron")
    la.fit([(x + 1e4, y)])
    found = laplace.ood_score(la, others() + 1e4, OF_FEATURES, train_loader=[(x + 1e4, y)])
    inside, at = model[:2](x + 1e4).detach(), model[:2](others() + 1e4).detach()
    expected = reference.mahalanobis(inside, y, at, classwise=True)
    assert float((found["classwise_mahalanobis"] / expected - 1).abs().max()) < 1e-6
    expected = reference.mahalanobis(inside, y, at, classwise=False)
    assert float((found["mahalanobis"] / expected - 1).abs().max()) < 1e-6
