"""Prior precisions that vary within a Kronecker block: no answer depends on the basis of equal eigenvalues."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.core import linalg

STRUCTURES = ("kron", "ekfac")


def fitted(structure: str, dtype: torch.dtype, size: int) -> Any:
    """Of 14 data that are six: both sides of the first layer have a null space, and neither is held by few rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 4)).to(dtype)
    x, y = torch.randn(6, 20, dtype=dtype).repeat(3, 1)[:14], torch.randint(4, (14,))
    prior = 10 * torch.rand(sum(p.numel() for p in model.parameters()), dtype=dtype) + 0.1
    la = Laplace(model, "classification", "all", structure, prior_precision=prior)
    la.fit(list(zip(x.split(size), y.split(size), strict=True)))
    return la


def answers(la: Any) -> list[Tensor]:
    x = torch.linspace(-1, 1, 40, dtype=la.mean.dtype).view(2, 20)
    return [la.log_marginal_likelihood(), la._glm_predictive_distribution(x)[1], la.posterior_variance]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batches_of_other_sizes_give_the_same(structure: str, dtype: torch.dtype) -> None:
    close = {torch.float64: 1e-11, torch.float32: 2e-4}[dtype]
    expected = answers(fitted(structure, dtype, 14))
    for size in (1, 3, 5):
        for found, one in zip(answers(fitted(structure, dtype, size)), expected, strict=True):
            torch.testing.assert_close(found, one, rtol=close, atol=close * float(one.abs().max()))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_another_basis_of_a_null_space_gives_the_same(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(fitted(structure, torch.float64, 14))
    real, turned = linalg.eigh, []

    def another(matrix: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        values, vectors = real(matrix, **options)
        vectors, n = vectors.clone(), values.shape[-1]
        for own, basis in zip(values.reshape(-1, n), vectors.view(-1, n, n), strict=True) if values.ndim > 1 else ():
            null = own <= 1e-13 * own.amax()
            if (count := int(null.sum())) > 1:
                turn = torch.linalg.qr(torch.randn(count, count, dtype=vectors.dtype))[0]
                basis[:, null] = basis[:, null] @ turn
                turned.append(count)
        return values, vectors

    monkeypatch.setattr(linalg, "eigh", another)
    for found, one in zip(answers(fitted(structure, torch.float64, 14)), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-10 * float(one.abs().max()))
    assert turned
    monkeypatch.undo()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_number_in_every_entry_is_exact(structure: str) -> None:
    la = fitted(structure, torch.float64, 14)
    la.prior_precision = torch.full_like(la.mean, 0.3)
    found = answers(la)
    la.prior_precision = 0.3
    for one, other in zip(found, answers(la), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
