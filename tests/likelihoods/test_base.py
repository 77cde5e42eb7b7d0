"""Gradients, Hessians and Fisher samples of every registered likelihood against torch.func and torch's own losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.nn import functional

from laplace.likelihoods import LIKELIHOODS, Categorical, get_likelihood
from tests.reference import likelihoods as reference
from tests.reference.compare import assert_close

B, C = 7, 2

# −log p(y | f) of one row, written with torch's losses, and targets for it
LOSSES = {
    "regression": lambda f, y: 0.5 * functional.mse_loss(f, y, reduction="sum"),
    "classification": lambda f, y: functional.cross_entropy(f, y),
    "reward_modeling": lambda f, y: functional.cross_entropy(f, y),
    "bernoulli": lambda f, y: functional.binary_cross_entropy_with_logits(f, y, reduction="sum"),
    "poisson": lambda f, y: reference.nll(f, y, "poisson"),
    "heteroscedastic": lambda f, y: reference.nll(f, y, "heteroscedastic"),
    "mean_log_variance": lambda f, y: reference.nll(f, y, "mean_log_variance"),
}

# Outputs of ±1e4 mean rates and variances that no float holds.
SATURATED = {"poisson": 20.0, "heteroscedastic": 20.0, "mean_log_variance": 20.0}


def batch(name: str, dtype: torch.dtype = torch.float64, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    f = scale * torch.randn(B, C, dtype=dtype)
    if name == "regression":
        return f, torch.randn(B, C, dtype=dtype)
    if name == "bernoulli":
        return f, torch.rand(B, C, dtype=dtype)
    if name == "poisson":
        return f, torch.poisson(torch.full((B, C), 3.0, dtype=dtype))
    if name in ("heteroscedastic", "mean_log_variance"):
        return f, torch.randn(B, C // 2, dtype=dtype)
    return f, torch.randint(C, (B,))


def test_every_registered_likelihood_has_an_oracle() -> None:
    assert set(LOSSES) == set(LIKELIHOODS)


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_loss_gradient_and_hessian(name: str) -> None:
    likelihood, (f, y) = get_likelihood(name), batch(name)
    y = likelihood.check_targets(f, y)
    assert_close(likelihood.loss(f, y), vmap(LOSSES[name])(f, y).sum(), "algebra")
    assert_close(likelihood.gradient(f, y), vmap(grad(LOSSES[name]))(f, y), "algebra")
    exact = vmap(jacrev(jacrev(LOSSES[name])))(f, y)
    expected = reference.fisher(f, name) if name in reference.DENSITIES else exact
    assert_close(likelihood.hessian(f, y).matrix(), expected, "algebra")
    assert_close(likelihood.hessian(f).matrix(), likelihood.hessian(f, y).matrix(), "exact")
    assert likelihood.count(f, y) == B
    assert likelihood.loss_terms(f, y).shape == ((C,) if likelihood.has_noise else (1,))


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_second_moment_of_sampled_gradients_is_the_hessian(name: str) -> None:
    likelihood, (f, y) = get_likelihood(name), batch(name)
    g = likelihood.sample_gradients(f, y, 20_000, torch.Generator().manual_seed(3))
    outer = torch.einsum("sbc,sbd->sbcd", g, g)
    assert_close(
        outer.mean(0), likelihood.hessian(f, y).matrix(), "mc", standard_error=outer.std(0) / math.sqrt(20_000)
    )
    assert_close(g.mean(0), torch.zeros_like(f), "mc", standard_error=g.std(0) / math.sqrt(20_000))


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_sampled_gradients_follow_the_generator(name: str) -> None:
    likelihood, (f, y) = get_likelihood(name), batch(name)
    draws = [likelihood.sample_gradients(f, y, 5, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert draws[0].shape == (5, B, C)


@pytest.mark.parametrize("name", list(LIKELIHOODS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_outputs(name: str, dtype: torch.dtype) -> None:
    """Outputs of ±1e4, or as large as floats hold: everything finite, the root exact."""
    likelihood, (f, y) = get_likelihood(name), batch(name, dtype, scale=SATURATED.get(name, 1e4))
    y = likelihood.check_targets(f, y)
    form = likelihood.hessian(f, y)
    root = form.root()
    for value in (likelihood.loss(f, y), likelihood.gradient(f, y), root, likelihood.sample_gradients(f, y, 3)):
        assert torch.isfinite(value).all()
        assert value.dtype == dtype
    kind = "algebra" if dtype == torch.float64 else "float32"
    assert_close(torch.einsum("kbc,kbd->bcd", root, root), form.matrix(), kind)


def test_confident_gradients_keep_their_digits_in_float32() -> None:
    """1 − p = e^{−20} rounds away in p, not in the gradient."""
    for name, f, y in (
        ("classification", torch.tensor([[20.0, 0.0]]), torch.tensor([0])),
        ("bernoulli", torch.tensor([[20.0]]), torch.tensor([[1.0]])),
    ):
        gradient = get_likelihood(name).gradient(f, y)
        assert_close(gradient[0, 0], -math.exp(-20) / (1 + math.exp(-20)), "float32")
        assert gradient[0, 0] != 0


def test_ignored_labels_count_nowhere() -> None:
    likelihood = Categorical()
    f, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, -100, 2, 1, -100, 0])
    kept = y != -100
    y = likelihood.check_targets(f, y)
    assert likelihood.count(f, y) == 4
    assert_close(likelihood.loss(f, y), likelihood.loss(f[kept], y[kept]), "algebra")
    assert_close(likelihood.hessian(f, y).total(), likelihood.hessian(f[kept], y[kept]).total(), "algebra")
    for rows in (
        likelihood.gradient(f, y),
        likelihood.hessian(f, y).matrix(),
        likelihood.hessian(f, y).root().transpose(0, 1),
        likelihood.sample_gradients(f, y, 4).transpose(0, 1),
    ):
        assert (rows[~kept] == 0).all()
        assert (rows[kept] != 0).any()
    probs = f.softmax(1)
    nll = likelihood.predictive_nll(probs, None, y, torch.ones(()))
    assert torch.equal(nll.isnan(), ~kept)
    assert_close(nll[kept], -probs[kept].gather(1, y[kept, None])[:, 0].log(), "algebra")


def test_another_ignored_label() -> None:
    f, y = torch.randn(3, 2), torch.tensor([0, -1, 1])
    likelihood = Categorical(ignore_index=-1)
    assert likelihood.count(f, likelihood.check_targets(f, y)) == 2
    assert_close(likelihood.loss(f, y), likelihood.loss(f[[0, 2]], y[[0, 2]]), "float32")


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_loss_is_differentiable(name: str) -> None:
    likelihood, (f, y) = get_likelihood(name), batch(name)
    f.requires_grad_()
    (gradient,) = torch.autograd.grad(likelihood.loss(f, y), f)
    assert_close(gradient, likelihood.gradient(f, y), "algebra")
    torch.autograd.gradcheck(lambda f: likelihood.gradient(f, y), f)
    torch.autograd.gradcheck(lambda f: likelihood.hessian(f, y).matrix(), f)


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_works_on_every_device(name: str, device: torch.device) -> None:
    likelihood, (f, y) = get_likelihood(name), batch(name, torch.float32)
    here = likelihood.check_targets(f.to(device), y)
    assert here.device.type == device.type
    drawn = likelihood.sample_gradients(f.to(device), here, 2, torch.Generator().manual_seed(0))
    assert drawn.device.type == device.type
    assert_close(drawn, likelihood.sample_gradients(f, y, 2, torch.Generator().manual_seed(0)), "float32")
