"""Eigendecompositions that take minutes: a warning before they begin, never another number."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.core import linalg
from laplace.errors import SlowWarning

STRUCTURES = ("kron", "block", "full")


CPU = torch.device("cpu")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(10, 3), torch.randint(4, (10,)))]


def evidence(structure: str, **fit: Any) -> tuple[Any, float]:
    la = Laplace(model(), "classification", "all", structure)
    la.fit(data(), **fit)
    return la, la.log_marginal_likelihood().item()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_long_ones_are_warned_of_where_they_are_done(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = evidence(structure)
    monkeypatch.setattr(linalg, "RATE", 1e-3)
    la = Laplace(model(), "classification", "all", structure)
    la.fit(data())
    with pytest.warns(SlowWarning, match=r"will take about .* once per fit") as caught:
        assert la.log_marginal_likelihood().item() == expected
    assert all(warning.filename == __file__ for warning in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.prior_precision = 3.0
        la.log_marginal_likelihood()


def test_short_ones_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for structure in (*STRUCTURES, "ekfac"):
            evidence(structure, progress_bar=True)


def test_work_is_told_by_sizes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linalg._warn_if_long(1, 3000, CPU)
    with pytest.warns(SlowWarning, match=r"2 matrices 5,000 × 5,000 will take about 50 s"):
        linalg._warn_if_long(2, 5000, CPU)
    with pytest.warns(SlowWarning, match="7 minutes"):
        linalg._warn_if_long(1, 12800, CPU)
    with pytest.warns(SlowWarning, match=r"will take a few times n³ = 2e\+11 operations"):
        linalg._warn_if_long(2, 5000, torch.device("cuda"))
