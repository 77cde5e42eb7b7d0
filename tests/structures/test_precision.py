"""Samples of the weights that are computed in parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.core import linalg
from laplace.structures import precision as precisions
from laplace.structures.precision import drawn

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
    monkeypatch.setattr(precisions, "_CHUNK_BYTES", 1)
    torch.testing.assert_close(sample(), whole, rtol=1e-12, atol=1e-12)
    la.prior_precision = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(sample().square().sum(), la.prior_precision)
    monkeypatch.setattr(precisions, "_CHUNK_BYTES", 2**23)
    torch.testing.assert_close(sample().detach(), whole, rtol=1e-12, atol=1e-12)
    (expected,) = torch.autograd.grad(sample().square().sum(), la.prior_precision)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_no_sample() -> None:
    la = Laplace(nn.Sequential(nn.Linear(3, 3)), "classification", "all", "diag")
    la.fit([(X.float(), torch.arange(12) % 3)])
    precision = la.snapshot().precision()
    assert drawn(la.mean, precision, 0, None).shape == (0, len(la.mean))


def test_a_full_posterior_is_sampled_by_one_cholesky_factor_without_its_inverse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal seeds give equal bits, whether or not a prediction has needed the inverse in between."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    la = Laplace(net, "classification", "all", "full", prior_precision=torch.tensor([0.5, 1.0, 2.0, 3.0]).double())
    la.fit([(X, torch.arange(12) % 3)])
    P = la.posterior_precision.flip(0, 1)
    root = torch.linalg.inv(torch.linalg.cholesky(P)).flip(0, 1).T
    noise = torch.randn(5, la.n_params, dtype=torch.float64)
    factorised = []
    real = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: factorised.append(len(matrix)) or real(matrix))
    with monkeypatch.context() as patch:
        patch.delattr(linalg, "inverse_of_lower")
        precision = la.posterior()
        torch.testing.assert_close(precision.logdet(), torch.logdet(P), rtol=1e-12, atol=0)
        sample = precision.sample(noise)
    torch.testing.assert_close(sample, noise @ root.T, rtol=1e-10, atol=1e-12)
    la(X)
    assert torch.equal(precision.sample(noise), sample)
    assert factorised == [la.n_params]
