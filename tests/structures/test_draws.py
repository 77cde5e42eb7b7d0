"""Samples of the weights that are computed in parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.structures import draws
from laplace.structures.draws import drawn

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    "structure", ["full", "block", "kron", "ekfac", "diag", "lowrank", "lowrank_kron", "matrix_free"]
)
def test_parts_make_no_difference(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    options = {"structure_kwargs": {"rank": 3}} if structure.startswith("lowrank") else {}
    la = Laplace(net, "classification", "all", structure, **options)
    la.fit([(X, torch.arange(12) % 3)])

    def sample() -> torch.Tensor:
        return la.sample(50, generator=torch.Generator().manual_seed(1))

    whole = sample()
    monkeypatch.setattr(draws, "_CHUNK_BYTES", 1)
    torch.testing.assert_close(sample(), whole, rtol=1e-12, atol=1e-12)
    la.prior_precision = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(sample().square().sum(), la.prior_precision)
    monkeypatch.setattr(draws, "_CHUNK_BYTES", 2**23)
    torch.testing.assert_close(sample().detach(), whole, rtol=1e-12, atol=1e-12)
    (expected,) = torch.autograd.grad(sample().square().sum(), la.prior_precision)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_no_sample() -> None:
    la = Laplace(nn.Sequential(nn.Linear(3, 3)), "classification", "all", "diag")
    la.fit([(X.float(), torch.arange(12) % 3)])
    precision = la.snapshot().precision()
    assert drawn(la.mean, precision, 0, None).shape == (0, len(la.mean))
