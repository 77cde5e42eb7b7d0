"""Gradients of the evidence with respect to every hyper-parameter equal finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from laplace import ParametricLaplace
from laplace.errors import LaplaceError
from tests import problems as catalogue
from tests.conformance.cases import Case, drawn, few, priors
from tests.reference.compare import assert_close

PROBLEMS = ("mlp_classification", "mlp_regression", "conv2d_grouped", "bare_parameter", "mlp_bernoulli_multi")
NOISY = ("mlp_regression", "conv2d_regression", "embedding_positions")


def finite_differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences of a scalar function of a vector in the logarithm of its entries, `[n]`."""
    flat = at.detach().reshape(-1)
    found: list[Tensor] = []
    for i in range(len(flat)):
        ahead, behind = flat.clone(), flat.clone()
        ahead[i], behind[i] = ahead[i] * (1 + step), behind[i] * (1 - step)
        difference = function(ahead.view_as(at)).detach() - function(behind.view_as(at)).detach()
        found.append(difference / (2 * step * flat[i]))
    return torch.stack(found).view_as(at)


def check(la: ParametricLaplace, name: str, value: Tensor, some: int = 6) -> None:
    """The gradient of the evidence with respect to one hyper-parameter, set as an attribute, at some entries."""
    leaf = value.clone().requires_grad_()
    setattr(la, name, leaf)
    (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(), leaf)
    chosen = torch.randperm(value.numel(), generator=torch.Generator().manual_seed(0))[:some]

    def at(entries: Tensor) -> Tensor:
        setattr(la, name, value.reshape(-1).index_copy(0, chosen, entries).view_as(value))
        return la.log_marginal_likelihood()

    expected = finite_differences(at, value.reshape(-1)[chosen])
    assert_close(gradient.reshape(-1)[chosen], expected, "finite_difference", label=name)


def options(case: Case) -> list[dict[str, bool]]:
    """Constructor options to go through: a Kron posterior also with damping."""
    return [{}, {"damping": True}] if case.structure == "kron" else [{}]


@pytest.mark.parametrize("case", few(names=PROBLEMS))
def test_prior_precision_and_temperature(case: Case) -> None:
    for chosen in options(case):
        la = case.fit(temperature=1.3, prior_mean=drawn(case, "mean", len(case.columns)), **chosen)
        for prior, _ in priors(case).values():
            check(la, "prior_precision", prior)
            la.prior_precision = prior
            check(la, "temperature", torch.tensor(0.8, dtype=torch.float64))


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=NOISY))
def test_noise(case: Case) -> None:
    for chosen in options(case):
        one = case.fit(temperature=1.2, **chosen)
        several = case.fit(sigma_noise=torch.ones(case.n_outputs, dtype=torch.float64), temperature=1.2, **chosen)
        sigma = drawn(case, "sigma", case.n_outputs).mul(0.3).exp()
        for prior, _ in priors(case).values():
            one.prior_precision = several.prior_precision = prior
            check(one, "sigma_noise", torch.tensor(0.7, dtype=torch.float64))
            check(several, "sigma_noise", sigma)
            check(several, "sigma_noise", torch.tensor(0.7, dtype=torch.float64))
            check(several, "temperature", torch.tensor(0.7, dtype=torch.float64))


@pytest.mark.parametrize("case", few("all", "mixed", names=["mlp_regression"]))
def test_empirical_fisher(case: Case) -> None:
    la = case.fit(kind="ef")
    check(la, "sigma_noise", torch.tensor(0.7, dtype=torch.float64))
    check(la, "prior_precision", torch.tensor([0.7], dtype=torch.float64))


@pytest.mark.parametrize("case", few("all", "last_layer", "random", names=["mlp_regression"]))
def test_both_at_once_as_arguments(case: Case) -> None:
    """The pattern of users' training loops: logarithms of both as leaves, handed over by position."""
    la = case.fit()
    log_prior = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    log_sigma = torch.tensor(-0.2, dtype=torch.float64, requires_grad=True)
    (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
    assert not la.prior_precision.requires_grad and not la.sigma_noise.requires_grad

    def at(pair: Tensor) -> Tensor:
        return -la.log_marginal_likelihood(pair[:1], pair[1])

    pair = torch.cat([log_prior, log_sigma[None]]).detach().exp()
    by_log = finite_differences(at, pair) * pair
    actual = torch.stack([log_prior.grad[0], log_sigma.grad])  # pyright: ignore
    assert_close(actual, by_log, "finite_difference")


@pytest.mark.parametrize("case", few("all", "last_layer", names=["mlp_regression", "mlp_classification"]))
def test_temperature_as_an_argument(case: Case) -> None:
    """The evidence of the tempered posterior by either name, its gradients, and T assigned without its graph."""
    la = case.fit(prior_precision=0.6)
    for evidence in (la.log_marginal_likelihood, la.marglik):
        pair = torch.tensor([0.7, 1.6], dtype=torch.float64, requires_grad=True)
        value = evidence(pair[:1], temperature=pair[1])
        (gradient,) = torch.autograd.grad(value, pair)
        assert la.temperature == 1.6 and not la.temperature.requires_grad
        assert_close(la.log_marginal_likelihood(), value.detach(), "algebra")

        def at(pair: Tensor, evidence: Callable[..., Tensor] = evidence) -> Tensor:
            return evidence(pair[:1], None, pair[1])

        assert_close(gradient, finite_differences(at, pair), "finite_difference")
    whole = case.fit(prior_precision=0.7, temperature=1.6)
    assert_close(whole.log_marginal_likelihood(), la.marglik(0.7, temperature=1.6), "algebra")
    with pytest.raises(LaplaceError, match="temperature must be positive"):
        la.marglik(temperature=0.0)
    assert la.temperature == 1.6


@pytest.mark.parametrize("term", ["log_likelihood", "scatter", "log_det_ratio", "log_det_posterior_precision"])
@pytest.mark.parametrize("case", few("all", "last_layer", "rectangle", names=["mlp_regression"]))
def test_terms(case: Case, term: str) -> None:
    la = case.fit()
    leaves = {
        "prior_precision": torch.tensor([0.7], dtype=torch.float64, requires_grad=True),
        "sigma_noise": torch.tensor(0.6, dtype=torch.float64, requires_grad=True),
    }
    for name, leaf in leaves.items():
        setattr(la, name, leaf)
    actual = torch.autograd.grad(getattr(la, term), list(leaves.values()), allow_unused=True, materialize_grads=True)
    for (name, leaf), gradient in zip(leaves.items(), actual, strict=True):

        def at(value: Tensor, name: str = name) -> Tensor:
            setattr(la, name, value)
            return getattr(la, term)

        assert_close(gradient, finite_differences(at, leaf), "finite_difference", label=name)
        setattr(la, name, leaf.detach())


@pytest.mark.parametrize("case", few("all", "last_layer", names=["mlp_regression"]))
def test_several_noises_after_a_fit_with_one(case: Case) -> None:
    """The curvature of one output is not known then: equal values are one noise, but have no gradient of their own."""
    la = case.fit()
    la.sigma_noise = torch.full((case.n_outputs,), 0.7, dtype=torch.float64)
    la.log_marginal_likelihood()
    la.sigma_noise = torch.full((case.n_outputs,), 0.7, dtype=torch.float64, requires_grad=True)
    with pytest.raises(LaplaceError, match="before fit"):
        la.log_marginal_likelihood()


@pytest.mark.parametrize("case", few("all", "mixed", names=["mlp_classification"]))
def test_density_and_posterior_precision_keep_the_graph(case: Case) -> None:
    la = case.fit()
    theta = case.mean + drawn(case, "theta", len(case.mean))

    def at(value: Tensor) -> Tensor:
        la.prior_precision = value
        return la.log_prob(theta)

    leaf = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(at(leaf), leaf)
    assert_close(gradient, finite_differences(at, leaf), "finite_difference")


def test_second_step_of_an_optimiser_needs_no_retained_graph() -> None:
    """A graph that the object kept would fail at the second backward pass."""
    for structure in ("full", "kron", "diag"):
        la = Case(catalogue.get("mlp_regression"), structure, "all").fit()
        log_prior = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        values = []
        optimiser = torch.optim.Adam([log_prior], lr=0.1)
        for _ in range(5):
            optimiser.zero_grad()
            loss = -la.log_marginal_likelihood(log_prior.exp())
            loss.backward()
            optimiser.step()
            values.append(loss.item())
        assert values[-1] < values[0]
