"""Distances between posteriors against dense Gaussians, and what single weights are worth."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace
from laplace.errors import InvalidArgument, InvalidType, NotFittedError, UnsupportedError
from tests.extensions.test_merging import fitted, linear_data


@pytest.mark.parametrize("one", ["full", "kron", "ekfac", "diag", "block", "lowrank", "lowrank_kron"])
@pytest.mark.parametrize("other", ["full", "kron", "diag"])
def test_kl_is_that_of_dense_gaussians(one: str, other: str) -> None:
    x, y = linear_data()
    la, reference = fitted(x[:20], y[:20], one), fitted(x, y, other)
    p, q = la.posterior().to_dense(), reference.posterior().to_dense()
    d = reference.mean - la.mean
    expected = 0.5 * (torch.linalg.solve(p, q).trace() - len(d) + d @ q @ d + torch.logdet(p) - torch.logdet(q))
    torch.testing.assert_close(laplace.kl(la, reference), expected, rtol=1e-7, atol=1e-8)
    assert abs(float(laplace.kl(la, la))) < 1e-8


def root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.sqrt()) @ vectors.T


@pytest.mark.parametrize("one", ["full", "kron", "ekfac", "diag", "block", "lowrank", "lowrank_kron"])
@pytest.mark.parametrize("other", ["full", "kron", "diag"])
def test_wasserstein_is_that_of_dense_gaussians(one: str, other: str) -> None:
    x, y = linear_data()
    la, reference = fitted(x[:20], y[:20], one), fitted(x, y, other)
    p, q = (torch.linalg.inv(posterior.posterior().to_dense()) for posterior in (la, reference))
    between = root(root(p) @ q @ root(p)).trace()
    expected = ((reference.mean - la.mean).square().sum() + p.trace() + q.trace() - 2 * between).sqrt()
    torch.testing.assert_close(laplace.wasserstein(la, reference), expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(laplace.wasserstein(reference, la), expected, rtol=1e-7, atol=1e-8)
    assert float(laplace.wasserstein(la, la)) < 1e-12  # a difference of traces would leave a root of rounding, 1e-8


def test_wasserstein_of_blocks_that_are_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laplace.extensions.distances._LARGEST_ROOT", 5)
    x, y = linear_data()
    with pytest.raises(UnsupportedError, match="10 weights, more than 5"):
        laplace.wasserstein(fitted(x, y), fitted(x, y))
    assert float(laplace.wasserstein(fitted(x, y, "diag"), fitted(x, y, "diag"))) == 0.0


@pytest.mark.parametrize("distance", ["kl", "wasserstein"])
def test_a_distance_to_other_weights_is_refused(distance: str) -> None:
    x, y = linear_data()
    measure = partial(getattr(laplace, distance), fitted(x, y))
    with pytest.raises(InvalidArgument, match="same weights"):
        measure(fitted(x, y[:, :1]))
    with pytest.raises(InvalidType):
        measure(fitted(x, y).model)
    with pytest.raises(NotFittedError):
        measure(Laplace(nn.Linear(4, 2).double(), "regression", "all", "full"))


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag", "block", "lowrank", "lowrank_kron"])
def test_saliency_is_squared_weights_times_the_diagonal(structure: str) -> None:
    x, y = linear_data()
    la = fitted(x, y, structure)
    expected = la.mean.square() * la.posterior().to_dense().diagonal()
    torch.testing.assert_close(laplace.saliency(la), expected, rtol=1e-8, atol=1e-10)


def test_saliency_of_a_calibrated_posterior_is_that_of_its_prior() -> None:
    x, y = linear_data(80)
    la = fitted(x[:40], y[:40])
    chosen = la.calibrate([(x[40:], y[40:])], keep_noise=True)
    found = laplace.saliency(la)
    chosen = la.calibration
    la.calibration.undo()
    la.prior_precision = chosen.prior_precision
    torch.testing.assert_close(found, laplace.saliency(la))
