"""What a grid search says of a best prior precision on the edge: whether the network itself predicts as well."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import Laplace, MixtureLaplace
from laplace.errors import TuningWarning
from laplace.metrics import brier, gaussian_nll, nll
from tests import grid

UPWARDS = torch.logspace(-2, 4, 13)
AS_GOOD = re.compile(r"largest of the grid, and the network's own predictions are as good \(a loss of (\S+), with")
X = 2 * torch.randn(40, grid.WIDTH, generator=torch.Generator().manual_seed(2))


def sure(seed: int = 0) -> Any:
    """A posterior of a network that is sure of its predictions, and the network's outputs at X."""
    model = grid.network()
    with torch.no_grad():
        list(model.parameters())[-2].mul_(12).add_(0.1 * seed)
        model.eval()
        f = model(X)
    la = Laplace(model, "classification", "all", "kron")
    la.fit(grid.batches())
    return la, f


def notes_of(la: Any, *arguments: Any, **options: Any) -> str:
    with pytest.warns(TuningWarning) as caught:
        la.optimize_hyperparameters(*arguments, method="grid", **options)
    assert len(caught) == 1
    return str(caught[0].message)


def as_good(note: str) -> float:
    """The loss of the network that a note names."""
    found = AS_GOOD.search(note)
    assert found is not None, note
    assert "widen it" not in note
    return float(found[1])


def own_mse(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """A user's loss that reads a covariance, too."""
    return (mean - y).square().mean() + variance.diagonal(dim1=1, dim2=2).mean()


@pytest.mark.parametrize("options", [{}, {"link_approx": "mc"}, {"pred_type": "nn"}])
def test_where_nothing_beats_the_network(options: dict[str, Any]) -> None:
    """Labels are as the network says: whatever makes it less sure is worse."""
    la, f = sure()
    y = f.argmax(1)
    note = notes_of(la, "prior_precision", "nll", val_loader=[(X[:25], y[:25]), (X[25:], y[25:])],
                    grid={"prior_precision": UPWARDS}, **options)  # fmt: skip
    assert as_good(note) == pytest.approx(nll(f.softmax(1), y).item(), rel=2e-3)
    assert la.prior_precision.item() == UPWARDS[-1].item()


def test_the_contract_s_search_says_so_too() -> None:
    la, f = sure()
    with pytest.warns(TuningWarning) as caught:
        la.optimize_prior_precision(method="gridsearch", val_loader=[(X, f.argmax(1))])
    assert as_good(str(caught[0].message)) == pytest.approx(nll(f.softmax(1), f.argmax(1)).item(), rel=2e-3)


@pytest.mark.parametrize("objective", ["brier", lambda p, y: brier(p, y)])
def test_other_losses(objective: Any) -> None:
    la, f = sure()
    y = f.argmax(1)
    note = notes_of(la, "prior_precision", objective, val_loader=[(X, y)], grid={"prior_precision": UPWARDS})
    assert as_good(note) == pytest.approx(brier(f.softmax(1), y).item(), rel=2e-3)


def test_where_more_is_to_be_gained_beyond() -> None:
    """A fifth of the labels is wrong: somewhere between a wide posterior and the network lies the best."""
    la, f = sure()
    y = f.argmax(1)
    y[::5] = (y[::5] + 1) % 3
    data = [(X, y)]
    result = la.optimize_hyperparameters(val_loader=data, objective="nll", grid={"prior_precision": UPWARDS})
    assert UPWARDS[4] < la.prior_precision.item() < UPWARDS[-1]
    assert result.value < nll(f.softmax(1), y).item()
    note = notes_of(la, "prior_precision", "nll", val_loader=data, grid={"prior_precision": UPWARDS[:5]})
    assert "is on the edge of the grid; widen it" in note
    assert "as good" not in note


def test_the_lower_edge() -> None:
    """Labels are as the network does not say: the wider the better."""
    la, f = sure()
    note = notes_of(la, "prior_precision", "nll", val_loader=[(X, f.argmin(1))], grid={"prior_precision": UPWARDS})
    assert "is on the edge of the grid; widen it" in note


@pytest.mark.parametrize("objective", ["nll", own_mse])
def test_a_regression_with_its_noise(objective: Any) -> None:
    """The network's loss is that at the best noise, wherever the axis of the noise is."""
    la = grid.fitted("all", "kron", "regression")
    with torch.no_grad():
        f = la.model.eval()(X)
    y = f + 0.3 * torch.randn(f.shape, generator=torch.Generator().manual_seed(4)).sign()  # residuals are of one size
    axes = {"sigma_noise": [0.1, 0.3, 0.9], "prior_precision": UPWARDS}
    if callable(objective):
        axes = {"prior_precision": UPWARDS}
    note = notes_of(la, tuple(axes), objective, val_loader=[(X, y)], grid=axes)
    if callable(objective):
        assert as_good(note) == pytest.approx((f - y).square().mean().item(), rel=2e-3)
    else:
        assert la.sigma_noise.item() == pytest.approx(0.3)
        assert as_good(note) == pytest.approx(gaussian_nll(f, torch.full_like(f, 0.09), y).item(), rel=2e-3)


def test_a_mixture() -> None:
    parts = [sure(seed) for seed in range(2)]
    mixture = MixtureLaplace([la for la, _ in parts], weights=[0.25, 0.75])
    own = 0.25 * parts[0][1].softmax(1) + 0.75 * parts[1][1].softmax(1)
    note = notes_of(mixture, "prior_precision", "nll", val_loader=[(X, own.argmax(1))],
                    grid={"prior_precision": UPWARDS})  # fmt: skip
    assert as_good(note) == pytest.approx(nll(own, own.argmax(1)).item(), rel=2e-3)


def test_less_the_entropy_elsewhere() -> None:
    la, f = sure()
    y, foreign = f.argmax(1), 0.1 * X[:7]
    note = notes_of(la, "prior_precision", "nll", val_loader=[(X, y)], ood_loader=[foreign], ood_weight=0.01,
                    grid={"prior_precision": UPWARDS})  # fmt: skip
    with torch.no_grad():
        p = la.model.eval()(foreign).softmax(1)
    entropy = -(p * p.log()).sum(1).mean()
    assert as_good(note) == pytest.approx((nll(f.softmax(1), y) - 0.01 * 7 / 40 * entropy).item(), rel=2e-3)
