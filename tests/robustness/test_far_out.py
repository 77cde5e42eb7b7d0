"""Numbers that are far out: answers are finite, variances not negative, and all else is an error of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace.errors import InvalidArgument, LaplaceError
from laplace.grid import from_names
from laplace.likelihoods.links import LINKS
from laplace.structures import STRUCTURES
from tests import grid

FAR: dict[str, dict[str, float]] = {
    "inputs × 1e15": {"x": 1e15},
    "inputs × 1e25": {"x": 1e25},
    "inputs × 1e-25": {"x": 1e-25},
    "predicted at × 1e15": {"x_test": 1e15},
    "targets × 1e25": {"y": 1e25},
    "weights × 1e15": {"weights": 1e15},
    "weights × 1e20": {"weights": 1e20},
    "σ = 1e-10": {"sigma_noise": 1e-10},
    "σ = 1e-19": {"sigma_noise": 1e-19},
    "prior 3e38": {"prior_precision": 3e38},
    "prior 1e-38": {"prior_precision": 1e-38},
    "prior 1e-30": {"prior_precision": 1e-30},
    "prior mean 1e30": {"prior_mean": 1e30},
    "T = 1e-38": {"temperature": 1e-38},
    "T = 1e30": {"temperature": 1e30},
}


def fitted(weights: str, structure: str, likelihood: str, far: dict[str, float]) -> tuple[Any, Tensor]:
    """A posterior and inputs to predict at."""
    given, model = dict(far), grid.network(likelihood)
    with torch.no_grad():
        list(model.parameters())[-2].mul_(given.pop("weights", 1.0))
    x, y = grid.data(likelihood)
    x, scale, n_test = x * given.pop("x", 1.0), given.pop("y", 1.0), given.pop("x_test", 1.0)
    y = y * scale if likelihood == "regression" else y
    if likelihood != "regression":
        given.pop("sigma_noise", None)
    la = grid.make(weights, structure, likelihood, model=model, **given)
    la.fit([(x, y)])
    return la, n_test * x


def asked(la: Any, x: Tensor, likelihood: str) -> Iterator[Callable[[], Any]]:
    """What is asked of a posterior, each by itself."""
    yield la.log_marginal_likelihood
    yield lambda: la.sample(2)
    yield lambda: la.posterior_variance
    yield lambda: la.predict(x).latent_variance
    yield lambda: la.predict(x).variance
    yield lambda: la(x, "nn", link_approx="mc", n_samples=2)
    links = [name for name in LINKS if name in la.likelihood_object.links] if likelihood == "classification" else [None]
    for link in links:
        yield lambda link=link: la(x, **({} if link is None else {"link_approx": link, "n_samples": 3}))


def assert_no_negative_variance(la: Any, x: Tensor) -> None:
    """Of outputs, by themselves and with their covariances, and of weights."""
    outputs = la.predict(x)
    for variance in (
        lambda: outputs.latent_variance,
        lambda: outputs.latent_covariance.diagonal(dim1=1, dim2=2),
        lambda: la.predict(x, joint=True).latent_covariance.diagonal(),
        lambda: la.posterior_variance,
        lambda: la.posterior_covariance.diagonal(),
    ):
        try:
            found = variance()
        except LaplaceError:
            continue
        assert (found >= 0).all()


@pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", [*STRUCTURES, "gp"])
@pytest.mark.parametrize("far", [{"sigma_noise": 1e-10}, {"temperature": 1e-30}], ids=str)
def test_data_that_leave_nothing_of_the_prior(far: dict[str, float], structure: str, weights: str) -> None:
    """What is left of a variance is the difference of nearly equal numbers, also of one output and few data."""
    for n_data, n_outputs in ((5, 1), (12, 2)):
        torch.manual_seed(n_data)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, n_outputs))
        x, y = torch.randn(n_data, 3), torch.randn(n_data, n_outputs)
        options: dict[str, Any] = far | {"n_subset": n_data} if structure == "gp" else far
        la: Any = from_names(net, "regression", weights, structure, **options)
        try:
            la.fit([(x, y)])
        except LaplaceError:
            continue
        assert_no_negative_variance(la, torch.cat([x, x]))


@pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")
@pytest.mark.parametrize("likelihood", ["classification", "regression", "poisson"])
@pytest.mark.parametrize(("weights", "structure"), grid.TURNS)
@pytest.mark.parametrize("name", FAR)
@pytest.mark.turns
def test_far_out_numbers(name: str, weights: str, structure: str, likelihood: str) -> None:
    try:
        la, x = fitted(weights, structure, likelihood, FAR[name])
    except LaplaceError:
        return
    for ask in asked(la, x, likelihood):
        try:
            found = ask()
        except LaplaceError:
            continue
        for value in [found] if isinstance(found, Tensor) else found:
            assert value.isfinite().all(), (name, ask)
    assert_no_negative_variance(la, x)


@pytest.mark.parametrize("sigma", [1e-20, 1e-30, 1e20])
def test_a_noise_whose_square_is_no_number_is_refused(sigma: float) -> None:
    """By name, with the mend, and in float64 it is none."""
    la = grid.make("all", "kron", "regression")
    with pytest.raises(InvalidArgument, match=r"sigma_noise=.*beyond 3.4e\+38.*float64"):
        la.sigma_noise = sigma
    assert la.sigma_noise.item() == 1
    with pytest.raises(InvalidArgument, match="temperature"):
        grid.make("all", "kron", "regression", sigma_noise=1e-15, temperature=1e-15)
    wide = grid.make("all", "kron", "regression", model=grid.network("regression").double(), sigma_noise=sigma)
    assert wide.sigma_noise.item() == pytest.approx(sigma)


def test_an_evidence_that_is_not_finite_is_an_error() -> None:
    la = grid.fitted("all", "diag", prior_mean=1e30)
    with pytest.raises(LaplaceError, match=r"the log evidence is -inf.*beyond the range of torch.float32.*float64"):
        la.log_marginal_likelihood()
