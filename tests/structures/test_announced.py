"""Eigendecompositions that take minutes: a bar where progress was asked for, else one warning; never another number."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import SlowWarning
from laplace.structures import algebra
from laplace.structures.algebra import Decompositions

STRUCTURES = ("kron", "block", "full")


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


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which everything takes long."""
    monkeypatch.setattr(algebra, "RATE", 1e-3)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_long_ones_are_warned_of_once_per_fit(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = evidence(structure)
    monkeypatch.setattr(algebra, "RATE", 1e-3)
    la = Laplace(model(), "classification", "all", structure)
    la.fit(data())
    with pytest.warns(SlowWarning, match=r"will take about .*progress_bar=True") as caught:
        assert la.log_marginal_likelihood().item() == expected
    assert len(caught) == 1 and caught[0].filename == __file__
    la(data()[0][0])
    la.prior_precision = 3.0
    la.log_marginal_likelihood()
    la(data()[0][0])
    la.fit(data())
    with pytest.warns(SlowWarning):
        la.log_marginal_likelihood()


@pytest.mark.parametrize("structure", ["kron", "block", "ekfac"])
def test_a_bar_shows_them_during_the_fit(
    structure: str, slow: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    la = Laplace(model(), "classification", "all", structure)
    la.fit(data(), progress_bar=True)
    shown = capsys.readouterr().err
    assert "eigendecompositions: 100%" in shown
    # They are done: nothing is left that could be slow.
    monkeypatch.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("decomposed again"))
    la(data()[0][0])
    la.log_marginal_likelihood()
    assert "eigendecompositions" not in capsys.readouterr().err


def test_a_fit_that_reads_the_data_again_in_their_basis(slow: None) -> None:
    with pytest.warns(SlowWarning) as caught:
        evidence("ekfac")
    assert len(caught) == 1


def test_one_warning_under_a_vector_noise(slow: None) -> None:
    """Terms that are weighted anew are factorised anew; that is said once."""
    la = Laplace(model(), "regression", "all", "kron", sigma_noise=torch.ones(4))
    la.fit([(torch.randn(10, 3), torch.randn(10, 4))], progress_bar=True)
    with pytest.warns(SlowWarning) as caught:
        for noise in (0.5, 0.7):
            la.log_marginal_likelihood(sigma_noise=noise * torch.ones(4))
    assert len(caught) == 1


def test_short_ones_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for structure in (*STRUCTURES, "ekfac"):
            evidence(structure, progress_bar=True)
    assert "eigendecompositions" not in capsys.readouterr().err


def test_work_is_counted_by_sizes() -> None:
    assert not Decompositions([[(1, 3000)]]).is_long
    assert Decompositions([[(1, 4000)]]).is_long
    assert Decompositions([[(1, 3000)], [], [(2, 2000), (1, 2500)]]).is_long
    message = Decompositions([[(1, 5000)], [(2, 700)]])._message()
    assert "3 matrices" in message and "5,000 × 5,000" in message and "25 s" in message
    assert "7 minutes" in Decompositions([[(1, 12800)]])._message()


def test_sides_that_are_shared_count_once() -> None:
    la, _ = evidence("kron")
    curvature = la.fitted().curvature
    assert curvature._ahead.sizes == [[(1, 5), (1, 5)], [(1, 3)], [(1, 4)], *[[]] * 4]  # equal ones in one step
