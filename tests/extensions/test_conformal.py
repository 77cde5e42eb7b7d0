"""Conformal intervals of linear models against brute force, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import laplace
from laplace import Laplace
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidData, NotFittedError, UnsupportedError

SIGMA, DELTA, N = 0.3, 2.0, 30


def data(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    coefficients = torch.tensor([[1.0, -0.5], [0.3, 0.8], [0.0, 0.2], [0.5, 0.5]], dtype=torch.float64)
    return x, x @ coefficients + 0.4 * torch.randn(n, 2, generator=g, dtype=torch.float64)


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """Weights of the features (x, 1), `[5, C]`."""
    phi = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    gram = phi.T @ phi / SIGMA**2 + DELTA * torch.eye(5, dtype=x.dtype)
    return torch.linalg.solve(gram, phi.T @ y / SIGMA**2)


def at(weights: Tensor, x: Tensor) -> Tensor:
    return x @ weights[:-1] + weights[-1]


def fitted(x: Tensor, y: Tensor, structure: str = "full") -> Laplace:
    model, weights = nn.Linear(4, 2).double(), ridge(x, y)
    with torch.no_grad():
        model.weight.copy_(weights[:-1].T)
        model.bias.copy_(weights[-1])
    la = Laplace(model, "regression", "all", structure, sigma_noise=SIGMA, prior_precision=DELTA)
    la.fit(DataLoader(TensorDataset(x, y), 7))
    return la


def loader(x: Tensor, y: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(x, y), 8)


def ends(moved: Tensor, residuals: Tensor, level: float) -> tuple[Tensor, Tensor]:
    n = len(residuals)
    low, high = math.floor((1 - level) * (n + 1) + 1e-9), math.ceil(level * (n + 1) - 1e-9)
    return (moved - residuals).sort(1).values[:, low - 1], (moved + residuals).sort(1).values[:, high - 1]


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_jackknife_plus_of_ridge_is_that_of_refits(level: float) -> None:
    (x, y), (star, _) = data(), data(6, 1)
    weights = [ridge(torch.cat([x[:i], x[i + 1 :]]), torch.cat([y[:i], y[i + 1 :]])) for i in range(N)]
    moved = torch.stack([at(w, star) for w in weights], 1)
    residuals = torch.stack([(y[i] - at(w, x[i : i + 1])[0]).abs() for i, w in enumerate(weights)])
    found = laplace.conformal(fitted(x, y), loader(x, y))
    assert found.exact and found.n_data == N and "exact" in repr(found)
    for value, expected in zip(found.interval(star, level), ends(moved, residuals, level), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


def test_a_linear_model_off_its_mode_gives_the_intervals_of_refits() -> None:
    (x, y), (star, _) = data(), data(6, 1)
    la = fitted(x, y)
    expected = {
        method: laplace.conformal(la, loader(x, y), method=method).interval(star) for method in ("jackknife+", "full")
    }
    with torch.no_grad():
        la.model.weight.add_(0.05)
    la.fit(loader(x, y))
    for method, ends_ in expected.items():
        for value, end in zip(laplace.conformal(la, loader(x, y), method=method).interval(star), ends_, strict=True):
            torch.testing.assert_close(value, end, rtol=1e-9, atol=1e-9)


def test_a_calibrated_posterior_has_the_intervals_of_its_prior() -> None:
    (x, y), (star, _) = data(60), data(6, 1)
    la = fitted(x[:30], y[:30])
    la.calibrate(loader(x[30:], y[30:]))
    lower, upper = laplace.conformal(la, loader(x[:30], y[:30])).interval(star)
    assert bool(((upper - lower) < 5).all())


def test_cv_plus_of_ridge_is_that_of_refits() -> None:
    (x, y), (star, _) = data(), data(6, 1)
    la = fitted(x, y)
    with torch.no_grad():
        la.model.weight.add_(0.05)  # not at the mode: the folds are refits all the same
    la.fit(loader(x, y))
    found = laplace.conformal(la, loader(x, y), method="cv+", folds=4, generator=torch.Generator().manual_seed(3))
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    fold = torch.empty(N, dtype=torch.long)
    fold[order] = torch.arange(N) % 4
    weights = [ridge(x[fold != k], y[fold != k]) for k in range(4)]
    moved = torch.stack([at(weights[k], star) for k in fold.tolist()], 1)
    residuals = torch.stack([(y[i] - at(weights[k], x[i : i + 1])[0]).abs() for i, k in enumerate(fold.tolist())])
    for value, expected in zip(found.interval(star, 0.8), ends(moved, residuals, 0.8), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_the_full_set_of_ridge_ends_where_the_brute_force_ends(level: float) -> None:
    (x, y), (star, _) = data(), data(5, 1)
    star = torch.cat([star, 30 * star[:1]])  # of so much leverage that the set has no end

    def holds(row: Tensor, output: int, value: float) -> bool:
        """Whether a target is in the set, by a refit with it."""
        more = torch.cat([x, row[None]])
        extended = torch.cat([y, torch.full((1, 2), value, dtype=y.dtype)])
        weights = ridge(more, extended)
        residuals = (
            torch.cat([y[:, output], torch.tensor([value], dtype=y.dtype)]) - at(weights, more)[:, output]
        ).abs()
        return int((residuals >= residuals[-1]).sum()) > (1 - level) * (N + 1) + 1e-9

    lower, upper = laplace.conformal(fitted(x, y), loader(x, y), method="full").interval(star, level)
    width = (upper - lower).where((upper - lower).isfinite(), 1.0)
    for b, c in torch.cartesian_prod(torch.arange(len(star)), torch.arange(2)).tolist():
        for end, outside in ((float(lower[b, c]), -1.0), (float(upper[b, c]), 1.0)):
            if math.isinf(end):
                assert holds(star[b], c, outside * 1e7)
                continue
            assert holds(star[b], c, end - outside * 1e-10)
            assert not holds(star[b], c, end + outside * 1e-10)
            for further in (0.1, 1.0, 10.0, 1e4):
                assert not holds(star[b], c, end + outside * further * float(width[b, c]))


def test_a_frozen_backbone_is_exact_and_a_trained_one_is_told() -> None:
    x, y = data()
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    la = Laplace(model, "regression", "last_layer", "full", sigma_noise=SIGMA)
    la.fit(loader(x, y))
    la.refine(loader(x, y))
    with pytest.warns(ApproximationWarning, match="trained network"):
        assert not laplace.conformal(la, loader(x, y)).exact
    with pytest.raises(UnsupportedError, match=r"cv\+"):
        laplace.conformal(la, loader(x, y), method="cv+")
    model[0].requires_grad_(False)
    la = Laplace(model, "regression", "last_layer", "full", sigma_noise=SIGMA)
    la.fit(loader(x, y))
    la.refine(loader(x, y))
    found = laplace.conformal(la, loader(x, y))
    assert found.exact and "80 %" in found.guarantee(0.9)
    assert laplace.conformal(la, loader(x, y), method="cv+").exact


@pytest.mark.nightly
def test_the_levels_hold_whatever_the_noise_says() -> None:
    (x, y), (star, truth) = data(200, 5), data(2000, 6)
    la = fitted(x, y)
    la.sigma_noise = 3 * SIGMA
    la.refine(loader(x, y))
    for method in ("jackknife+", "full", "cv+"):
        lower, upper = laplace.conformal(la, loader(x, y), method=method).interval(star, 0.9)
        share = ((truth >= lower) & (truth <= upper)).double().mean()
        assert abs(float(share) - 0.9) < 0.03


def test_split_conformal_counts_residuals_of_held_out_data() -> None:
    (x, y), (val, y_val), (star, _) = data(), data(25, 1), data(7, 2)
    la = fitted(x, y)
    found = laplace.conformal(la, val_loader=loader(val, y_val))
    la.sigma_noise = 5.0  # afterwards: what was counted stays
    la.sigma_noise = SIGMA
    mean, variance = la(val, diagonal_output=True, observation_noise=True)
    scores = ((y_val - mean).abs() / variance.sqrt()).sort(0).values
    mean, variance = la(star, diagonal_output=True, observation_noise=True)
    expected = variance.sqrt() * scores[math.ceil(0.8 * 26) - 1]
    lower, upper = found.interval(star, 0.8)
    torch.testing.assert_close(lower, mean - expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(upper, mean + expected, rtol=1e-12, atol=1e-12)
    assert torch.isinf(found.interval(star, 0.99)[1]).all()


def test_what_is_refused() -> None:
    x, y = data()
    la = fitted(x, y)
    with pytest.raises(NotFittedError):
        laplace.conformal(Laplace(nn.Linear(4, 2).double(), "regression", "all", "full"), loader(x, y))
    with pytest.raises(InvalidArgument, match="either"):
        laplace.conformal(la)
    with pytest.raises(InvalidArgument, match="method"):
        laplace.conformal(la, loader(x, y), method="bootstrap")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="method"):
        laplace.conformal(la, val_loader=loader(x, y), method="bootstrap")  # type: ignore[arg-type]
    with pytest.raises(InvalidData, match="NaN"):
        laplace.conformal(la, val_loader=[(x, y * torch.nan)])
    with pytest.raises(InvalidArgument, match="folds"):
        laplace.conformal(la, loader(x, y), method="cv+", folds=N + 1)
    with pytest.raises(InvalidArgument, match="level"):
        laplace.conformal(la, loader(x, y)).interval(x, 90)
    with pytest.raises(InvalidData, match="loss of these data"):
        laplace.conformal(la, loader(x, y + 1))
    with pytest.raises(InvalidData, match="the fit has seen"):
        laplace.conformal(la, loader(x[1:], y[1:]))
    with pytest.raises(UnsupportedError, match="diag"):
        laplace.conformal(fitted(x, y, "diag"), loader(x, y))
    classes = Laplace(nn.Linear(4, 2).double(), "classification", "all", "full")
    classes.fit(loader(x, (y[:, 0] > 0).long()))
    with pytest.raises(UnsupportedError, match="MAPIE"):
        laplace.conformal(classes, loader(x, (y[:, 0] > 0).long()))
