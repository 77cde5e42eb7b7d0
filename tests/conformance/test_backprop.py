"""`enable_backprop=True`: predictions can be differentiated with respect to the inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from laplace.errors import GradientWarning
from tests import problems as catalogue
from tests.conformance.cases import STRUCTURE_NAMES, Case, by_turns, few
from tests.conformance.test_predictions import latent_of
from tests.pairs import ALL
from tests.reference.compare import assert_close

# Dense, convolutional, normalised, with attention (batch first and time first), recurrent, tied, bypassed.
SMOOTH = (
    "mlp_classification",
    "mlp_regression",
    "conv2d_reflect",
    "conv_transpose2d",
    "residual_cnn",
    "layer_norm",
    "transformer",
    "attention_time_major",
    "bare_parameter",
    "functional_reuse",
    "gru",
)


def directional(function: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-5) -> None:
    """The gradient of a scalar function along a random direction equals a central difference."""
    leaf = x.clone().requires_grad_()
    value = function(leaf)
    assert value.requires_grad, "the prediction has no graph"
    (gradient,) = torch.autograd.grad(value, leaf)
    direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(3))
    expected = (function(x + step * direction) - function(x - step * direction)).detach() / (2 * step)
    assert expected.abs() > 1e-6, "the direction says nothing"
    assert_close((gradient * direction).sum(), expected, "finite_difference")


def weighted(tensor: Tensor) -> Tensor:
    """A scalar in which every entry has another weight."""
    generator = torch.Generator().manual_seed(4)
    return (tensor * torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)).sum()


@pytest.mark.parametrize(
    "case",
    few("all", names=SMOOTH if ALL else SMOOTH[:2])
    + ([] if ALL else by_turns(names=SMOOTH[2:]) + by_turns(STRUCTURE_NAMES[::-1], names=SMOOTH[2:]))
    + few("last_layer", names=SMOOTH[:1])
    + few("mixed", names=SMOOTH[1:2]),
)
def test_latent_gaussian(case: Case) -> None:
    la = case.fit(enable_backprop=True, prior_precision=0.4)
    assert not la.mean.requires_grad and not la.log_marginal_likelihood().requires_grad
    x = case.problem.x

    def variance_of(form: str) -> Callable[[Tensor], Tensor]:
        return lambda z: weighted(_latent(z, form)[1])

    def _latent(z: Tensor, form: str) -> tuple[Tensor, Tensor]:
        gaussian = la._latent(z, form)
        return gaussian.mean, gaussian.covariance

    directional(lambda z: weighted(_latent(z, "diagonal")[0]), x)
    for form in ("full", "diagonal", "joint"):
        directional(variance_of(form), x)
    plain = case.fit(prior_precision=0.4)
    assert_close(_latent(x, "full")[1], latent_of(plain, x, "full").covariance, "backend", label="same numbers")


@pytest.mark.parametrize("case", few("all", "last_layer", "random", names=["mlp_classification", "mlp_regression"]))
@pytest.mark.turns
def test_predictions(case: Case) -> None:
    """Through every link and through samples, with equal seeds."""
    la = case.fit(enable_backprop=True, prior_precision=0.4)
    x = case.problem.x

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    functions: list[Callable[[Tensor], Tensor]] = [
        lambda z: weighted(la.functional_samples(z, "nn", n_samples=3, generator=seeded())),
        lambda z: weighted(la.functional_samples(z, n_samples=3, generator=seeded())),
    ]
    if case.problem.likelihood == "regression":
        functions += [lambda z: weighted(la(z)[0]), lambda z: weighted(la(z)[1])]
    else:
        links = ("probit", "probit_centred", "bridge", "bridge_norm", "mc")
        functions += [lambda z, k=k: weighted(la(z, link_approx=k, n_samples=3, generator=seeded())) for k in links]
    for function in functions:
        directional(function, x)


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_no_graph_without_it_and_none_lost_under_no_grad(weights: str, structure: str) -> None:
    case = Case(catalogue.get("mlp_regression"), structure, weights)
    x = case.problem.x.clone().requires_grad_()
    la = case.fit()
    with pytest.warns(GradientWarning, match="enable_backprop"):
        assert not any(part.requires_grad for part in la(x))
    with torch.no_grad():
        la(x)  # nobody asked for a gradient
        assert all(part.requires_grad for part in case.fit(enable_backprop=True)(x))
    assert x.grad is None


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_input_by_gradient_descent(structure: str) -> None:
    """What it is for: an input of low variance is found by descent, and the model gets no gradients."""
    case = Case(catalogue.get("transformer"), structure, "all")
    la = case.fit(enable_backprop=True)
    x = case.problem.x[:1].clone().requires_grad_()
    optimiser = torch.optim.SGD([x], lr=0.05)
    values: list[float] = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = la._latent(x, "diagonal").covariance.sum()
        loss.backward()
        optimiser.step()
        values.append(loss.item())
    assert values == sorted(values, reverse=True)
    assert all(p.grad is None for p in la.model.parameters())
