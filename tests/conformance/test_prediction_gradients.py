"""Predictions, moments and samples are differentiable in prior precision, noise and temperature.

Gradients equal central differences in float64, for every structure and choice of weights of the registry.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, MixtureLaplace, ParametricLaplace
from laplace.curvature import NativeHessian
from tests import grid
from tests import problems as catalogue
from tests.conformance.cases import STRUCTURE_NAMES, Case, drawn, few, priors
from tests.conformance.test_backprop import directional, weighted
from tests.conformance.test_gradients import options
from tests.pairs import ALL
from tests.reference.compare import assert_close

STEP = 1e-5

Quantity = Callable[[ParametricLaplace, Tensor], Tensor]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


MOMENTS: dict[str, Quantity] = {
    "covariance": lambda la, x: la(x)[1],
    "variance": lambda la, x: la(x, diagonal_output=True)[1],
    "joint covariance": lambda la, x: la(x, joint=True)[1],
    "interval": lambda la, x: torch.stack(la.predict(x).interval()),
    "samples of weights": lambda la, x: la.sample(2, generator=seeded()),
    "sampled weights": lambda la, x: la(x, pred_type="nn", n_samples=2, generator=seeded())[1],
    "posterior_variance": lambda la, x: la.posterior_variance,
    "posterior_covariance": lambda la, x: la.posterior_covariance,
    "posterior_scale": lambda la, x: la.posterior_scale,
    "log_prob": lambda la, x: la.log_prob(la.mean + 0.1),
}
LINKS: dict[str, Quantity] = {
    link: lambda la, x, link=link: la(x, link_approx=link, n_samples=3, generator=seeded())
    for link in ("probit", "probit_centred", "bridge", "bridge_norm", "mc")
} | {
    "sampled weights": lambda la, x: la(x, pred_type="nn", n_samples=3, generator=seeded()),
    "entropy": lambda la, x: la.predict(x, n_samples=3, generator=seeded()).decomposition.expected_entropy,
}


def check(
    la: ParametricLaplace, name: str, value: Tensor, x: Tensor, quantities: dict[str, Quantity], some: int = 1
) -> None:
    """The gradients of all quantities with respect to one hyper-parameter, at some entries."""

    def read() -> Tensor:
        return torch.stack([weighted(quantity(la, x)) for quantity in quantities.values()])

    leaf = value.clone().requires_grad_()
    setattr(la, name, leaf)
    found = read()
    gradients = [
        torch.autograd.grad(one, leaf, retain_graph=True, allow_unused=True, materialize_grads=True)[0].reshape(-1)
        for one in found
    ]
    for entry in torch.randperm(value.numel(), generator=torch.Generator().manual_seed(0))[:some].tolist():
        sides: list[Tensor] = []
        for sign in (1, -1):
            moved = value.clone().reshape(-1)
            moved[entry] *= 1 + sign * STEP
            setattr(la, name, moved.view_as(value))
            sides.append(read())
        expected = (sides[0] - sides[1]).detach() / (2 * STEP * value.reshape(-1)[entry])
        for label, gradient, difference in zip(quantities, gradients, expected, strict=True):
            assert_close(gradient[entry], difference, "finite_difference", label=f"{label} by {name}")
    setattr(la, name, value)
    assert_close(found, read(), "algebra", label=f"values with {name} to differentiate")


@pytest.mark.parametrize("form", ["scalar", "layerwise", "diag"])
@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_regression"]))
@pytest.mark.turns
def test_moments_and_samples(case: Case, form: str) -> None:
    x, one = case.problem.x[:2], torch.tensor(0.9, dtype=torch.float64)
    sigma = drawn(case, "sigma", case.n_outputs).mul(0.3).exp()
    for chosen in options(case):
        single = case.fit(sigma_noise=0.8, temperature=1.2, **chosen)
        several = case.fit(sigma_noise=sigma, temperature=1.2, **chosen)
        single.prior_precision = several.prior_precision = prior = priors(case)[form][0]
        check(single, "prior_precision", prior, x, MOMENTS)
        check(several, "sigma_noise", sigma, x, MOMENTS)
        if form == "diag":
            check(several, "prior_precision", prior, x, MOMENTS)
        else:
            check(single, "temperature" if form == "scalar" else "sigma_noise", one, x, MOMENTS)


SOME = () if ALL else (*grid.FIRST, "lowrank")


@pytest.mark.parametrize("case", few("all", structures=SOME, names=["mlp_classification"]))
def test_probabilities(case: Case) -> None:
    la = case.fit(temperature=1.2)
    for prior, _ in priors(case).values():
        check(la, "prior_precision", prior, case.problem.x[:3], LINKS)


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
def test_an_indefinite_curvature(structure: str) -> None:
    """The exact Hessian with negative eigenvalues, which the prior exceeds."""
    case = Case(catalogue.get("mlp_regression"), structure, "all")
    la = case.build(backend=NativeHessian, sigma_noise=2.0)
    la.fit(case.problem.batches(None))
    for prior, _ in priors(case).values():
        prior = 30 * prior
        la.prior_precision = prior
        check(la, "prior_precision", prior, case.problem.x[:3], MOMENTS)


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_inputs_and_hyperparameters_at_once(structure: str) -> None:
    """`enable_backprop=True`: neither graph replaces the other."""
    case = Case(catalogue.get("mlp_regression"), structure, "all")
    la = case.fit(enable_backprop=True)
    x, leaf = case.problem.x[:3], torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    check(la, "prior_precision", leaf.detach(), x, {"covariance": MOMENTS["covariance"]})
    la.prior_precision = leaf
    directional(lambda z: weighted(la(z)[1]), x)


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_graphs_are_those_of_their_call(structure: str) -> None:
    """Nothing of a graph is kept: it can be walked again and again, and is not there where nobody asked."""
    case = Case(catalogue.get("mlp_regression"), structure, "last_layer")
    la, x = case.fit(), case.problem.x[:3]
    plain = la(x)[1]
    leaf = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        la.prior_precision = leaf.exp()
        la.log_marginal_likelihood().backward()
        la.prior_precision = leaf.exp()
        mean, variance = la(x)
        assert not mean.requires_grad
        (variance.sum() + la.functional_variance(la.backend.jacobians(x)[0]).sum()).backward()
    own = leaf.clone().detach().exp().requires_grad_()
    la.prior_precision = own
    for _ in range(2):  # without assigning anything in between
        la(x)[1].sum().backward()
    with torch.no_grad():
        assert not la(x)[1].requires_grad and not la.sample(2).requires_grad
        assert torch.equal(la(x)[1], plain)
    la.prior_precision = own.detach()
    assert not la(x)[1].requires_grad and torch.equal(la(x)[1], plain)
    assert not copy.deepcopy(la).prior_precision.requires_grad


def test_mixtures() -> None:
    case = Case(catalogue.get("mlp_classification"), "kron", "all")
    parts = [case.fit(), Case(case.problem, "full", "last_layer").fit(prior_precision=0.4)]
    mixture = MixtureLaplace(parts, weights=[0.3, 0.7])
    quantities: dict[str, Quantity] = {
        "probabilities": lambda la, x: mixture(x),
        "variances": lambda la, x: mixture.predict(x).latent_variance,
    }
    check(parts[0], "prior_precision", torch.tensor([0.7], dtype=torch.float64), case.problem.x[:3], quantities)


def test_a_prior_is_chosen_by_the_loss_of_validation_data() -> None:
    """What it is for: a loop of users' own, in float32, with an optimiser of theirs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(30, 2), torch.randint(0, 2, (30,))
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    log_prior = torch.tensor([-4.0], requires_grad=True)
    optimiser, losses = torch.optim.Adam([log_prior], lr=0.2), []
    for _ in range(8):
        optimiser.zero_grad()
        la.prior_precision = log_prior.exp()
        loss = nn.functional.nll_loss(la(x).log(), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
