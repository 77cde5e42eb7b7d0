"""`torch.autocast`, the caller's and the network's own: weights in float32, a forward pass in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
LOADER = [(X[:15], Y[:15]), (X[15:], Y[15:])]


class ByItself(nn.Module):
    """Enters autocast in its forward pass, as a wrapper for mixed precision does."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "ekfac"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_fit_within_autocast_is_that_without(weights: str, structure: str) -> None:
    model = network()
    plain, within = (Laplace(model, "classification", weights, structure) for _ in range(2))
    plain.fit(LOADER)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within.fit(LOADER)
        assert torch.is_autocast_enabled("cpu")
    assert within.log_marginal_likelihood() == plain.log_marginal_likelihood()
    assert torch.equal(within(X), plain(X))


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "ekfac"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_network_with_autocast_of_its_own(weights: str, structure: str) -> None:
    """Its layers are explained by their rules, and the results are those of float32 to the digits of bfloat16."""
    plain = Laplace(network(), "classification", weights, structure)
    own = Laplace(ByItself(network()), "classification", weights, structure)
    plain.fit(LOADER)
    own.fit(LOADER)
    assert list(own.coverage().values()) == list(plain.coverage().values())
    torch.testing.assert_close(own(X), plain(X), rtol=0, atol=0.02)
    torch.testing.assert_close(own.log_marginal_likelihood(), plain.log_marginal_likelihood(), rtol=0.02, atol=0)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


CALLS: dict[str, Callable[[ParametricLaplace], Tensor]] = {
    "probit": lambda la: la(X),
    "mc": lambda la: la(X[:7], link_approx="mc", generator=seeded()),
    "nn": lambda la: la(X, "nn", n_samples=3, generator=seeded()),
    "covariance": lambda la: la.predict(X, joint=True).latent_covariance,
    "variances": lambda la: la.functional_variance_fast(X)[1],
    "outputs": lambda la: la.functional_samples(X, n_samples=3, generator=seeded()),
    "weights": lambda la: la.sample(3, seeded()),
    "evidence": lambda la: la.log_marginal_likelihood(2.0),
    "tuned by the evidence": lambda la: tuned(la),
    "tuned on a grid": lambda la: tuned(la, "gridsearch", val_loader=LOADER, grid_size=5),
}


def tuned(la: ParametricLaplace, method: str = "marglik", **options: Any) -> Tensor:
    la.optimize_prior_precision("glm", method, **options)
    return la.prior_precision


@pytest.mark.filterwarnings("ignore::laplace.errors.TuningWarning")
@pytest.mark.parametrize("structure", ["full", "kron", "lowrank"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.turns
def test_calls_within_autocast_are_those_without(weights: str, structure: str, call: str) -> None:
    """Of batches of any size; nothing that is kept for later is of lower precision."""
    expected, actual = [], []
    la = Laplace(network(), "classification", weights, structure)
    la.fit(LOADER)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual += [CALLS[call](la)]
    actual += [CALLS[call](la)]
    la.prior_precision = 1.0
    la.fit(LOADER)
    expected += [CALLS[call](la), CALLS[call](la)]
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
