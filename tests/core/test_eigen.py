"""Eigendecompositions that a device does one by one, or fails at, and roots by products in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace
from laplace.core import eigen, gaussian
from laplace.core.gaussian import covariance_root
from laplace.errors import SlowWarning
from tests.reference.compare import assert_close

N = 40


def exact_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT


def covariances() -> dict[str, Tensor]:
    """Batches `[3, N, N]` of every kind that predictions have."""
    torch.manual_seed(0)
    wide, thin = (torch.randn(3, N, rank, dtype=torch.float64) for rank in (2 * N, 7))
    spread = torch.logspace(0, -6, N, dtype=torch.float64).unsqueeze(1)
    centred = wide - wide.mean(1, keepdim=True)
    still = wide.clone()
    still[:, ::3] = 0
    alike = torch.eye(N, dtype=torch.float64) + torch.ones(N, N, dtype=torch.float64)
    return {
        "regular": wide @ wide.mT,
        "of low rank": thin @ thin.mT,
        "without the mean of all outputs": centred @ centred.mT,
        "of unlike outputs": (spread * wide) @ (spread * wide).mT,
        "with outputs that do not vary": still @ still.mT,
        "of equal eigenvalues": alike.expand(3, N, N),
        "zero": torch.zeros(3, N, N, dtype=torch.float64),
        "of unlike sizes": torch.stack([1e-30 * (wide @ wide.mT)[0], (thin @ thin.mT)[1], torch.zeros(N, N).double()]),
    }


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose batches of matrices are decomposed one by one: an error here."""
    decompose = torch.linalg.eigh

    def eigh(matrix: Tensor) -> Any:
        assert matrix.shape[-1] <= 32 or matrix[..., 0, 0].numel() == 1, f"a batch {list(matrix.shape)}"
        return decompose(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    monkeypatch.setattr(gaussian, "goes_one_by_one", lambda m: m.shape[-1] > 32 and m[..., 0, 0].numel() > 1)


@pytest.mark.parametrize("kind", covariances())
def test_roots_by_products_are_the_symmetric_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In units of every output's deviation they are as near as roots of rounding are: 1e-8, and of long sums a few."""
    covariance = covariances()[kind]
    expected = covariance_root(covariance)
    monkeypatch.setattr(gaussian, "goes_one_by_one", lambda m: True)
    monkeypatch.setattr(torch.linalg, "eigh", None)
    found = covariance_root(covariance)
    deviations = covariance.diagonal(dim1=1, dim2=2).sqrt().unsqueeze(2)
    expected = expected.where((deviations > 0) & (deviations.mT > 0), 0.0)  # eigenvectors have rounding there
    assert bool(((found - expected).abs() <= 2e-7 * deviations).all())
    assert bool((found[deviations.squeeze(2) == 0] == 0).all())
    if kind in ("regular", "of equal eigenvalues"):
        assert_close(found, expected, "algebra")


def test_indefinite_covariances_count_negative_eigenvalues_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    covariance = covariances()["of low rank"] - 1e-6 * torch.eye(N, dtype=torch.float64)
    expected = covariance_root(covariance)
    assert eigen.root_by_products(covariance) is None
    monkeypatch.setattr(gaussian, "goes_one_by_one", lambda m: True)
    assert_close(covariance_root(covariance), expected, "exact")


def test_gradients_take_the_rule_of_eigenvectors(monkeypatch: pytest.MonkeyPatch) -> None:
    covariance = covariances()["of low rank"].requires_grad_()
    (expected,) = torch.autograd.grad(covariance_root(covariance).square().sum(), covariance)
    monkeypatch.setattr(gaussian, "goes_one_by_one", lambda m: True)
    (found,) = torch.autograd.grad(covariance_root(covariance).square().sum(), covariance)
    assert_close(found, expected, "exact")


READINGS: dict[str, Callable[[Any, Tensor], Any]] = {
    "mc": lambda la, x: la(x, link_approx="mc", generator=torch.Generator().manual_seed(0)),
    "latent": lambda la, x: la.functional_samples(x, n_samples=2, generator=torch.Generator().manual_seed(0)),
    "predictive": lambda la, x: la.predictive_samples(x, n_samples=2, generator=torch.Generator().manual_seed(0)),
    "draws": lambda la, x: laplace.draw(la, 1, generator=torch.Generator().manual_seed(0))[0](x),
}


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("name", READINGS)
def test_samples_of_many_outputs_take_no_eigendecomposition(
    name: str, structure: Any, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 4), torch.arange(5)
    la = Laplace(nn.Sequential(nn.Linear(4, N)), "classification", "last_layer", structure, last_layer_name="0")
    la.fit([(x, y)])
    expected = READINGS[name](la, x)
    request.getfixturevalue("slow")
    assert_close(READINGS[name](la, x), expected, "float32")


# Devices that fail.


def failing(decompose: Callable[[Tensor], Any], times: int) -> Callable[[Tensor], Any]:
    left = [times]

    def run(matrix: Tensor) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")
        return decompose(matrix)

    return run


@pytest.mark.parametrize("name", ["eigh", "eigvalsh"])
def test_a_failure_on_a_valid_matrix_is_tried_once_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, decompose = covariances()["regular"], getattr(torch.linalg, name)
    expected = decompose(matrix)
    monkeypatch.setattr(torch.linalg, name, failing(decompose, 1))
    with pytest.warns(SlowWarning, match="failed on cpu, and was computed once more"):
        found = getattr(eigen, name)(matrix)
    assert all(map(torch.equal, found, expected))
    monkeypatch.setattr(torch.linalg, name, failing(decompose, 2))
    with pytest.raises(torch.linalg.LinAlgError, match="failed to converge"):
        getattr(eigen, name)(matrix)
    monkeypatch.setattr(torch.linalg, name, failing(decompose, 1))
    with pytest.raises(torch.linalg.LinAlgError, match="failed to converge"):
        getattr(eigen, name)(matrix * torch.nan)


def test_a_fit_survives_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.arange(8) % 2

    def evidence() -> Tensor:
        la = Laplace(nn.Sequential(nn.Linear(3, 2)), "classification", "all", "kron")
        torch.manual_seed(1)
        la.fit([(x, y)])
        return la.log_marginal_likelihood()

    torch.manual_seed(2)
    expected = evidence()
    monkeypatch.setattr(torch.linalg, "eigh", failing(torch.linalg.eigh, 1))
    torch.manual_seed(2)
    with pytest.warns(SlowWarning, match="once more on the CPU"):
        found = evidence()
    assert_close(found, expected, "exact")


def test_no_error_of_memory_is_taken_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(matrix: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.linalg, "eigh", full)
    with pytest.raises(torch.OutOfMemoryError):
        eigen.eigh(torch.eye(3))
