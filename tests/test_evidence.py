"""What an evidence keeps for the next setting of the hyper-parameters: the distance of the mean from the prior's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace import Laplace, ParametricLaplace
from laplace.core import pieces
from laplace.core.hyperparameters import GaussianPrior
from tests import grid
from tests.reference.compare import assert_close

F64 = torch.float64


def _fitted(structure: str = "diag") -> ParametricLaplace:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(F64)
        la = Laplace(model, "regression", "all", structure, prior_precision=0.7)
        la.fit([(torch.randn(12, 3, dtype=F64), torch.randn(12, 2, dtype=F64))])
    return la


def _scatter(la: ParametricLaplace) -> Tensor:
    """By its definition."""
    return ((la.mean - la.prior_mean).square() * la.prior_precision_diag).sum()


def _count(monkeypatch: pytest.MonkeyPatch) -> list[GaussianPrior]:
    """The priors whose squares are computed from now on."""
    seen: list[GaussianPrior] = []
    squares = GaussianPrior.squares

    def counted(prior: GaussianPrior, theta: Tensor) -> Tensor:
        seen.append(prior)
        return squares(prior, theta)

    monkeypatch.setattr(GaussianPrior, "squares", counted)
    return seen


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_the_weights_are_read_once_for_all_prior_precisions(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    la = _fitted(structure)
    seen = _count(monkeypatch)
    for delta in torch.tensor([0.5, 1.0, 2.0], dtype=F64, requires_grad=True).unbind():
        la.log_marginal_likelihood(delta).backward(retain_graph=True)
    for delta in (3.0, 4.0):
        la.prior_precision = delta
        assert_close(la.scatter, _scatter(la), "algebra")
    la.optimize_prior_precision(n_steps=5)
    assert len(seen) == 1


def test_another_mean_is_another_distance() -> None:
    la = _fitted()
    for mean in (0.0, 0.3, torch.full((la.n_params or 0,), 0.2, dtype=F64)):
        la.prior_mean = mean
        assert_close(la.scatter, _scatter(la), "algebra")
    la.prior_mean.add_(1)  # written to in its place
    assert_close(la.scatter, _scatter(la), "algebra")
    la.mean = la.mean + 1
    assert_close(la.scatter, _scatter(la), "algebra")
    la.mean.mul_(2)
    assert_close(la.scatter, _scatter(la), "algebra")


def test_another_form_of_the_prior_is_another_sum() -> None:
    la = _fitted()
    n_layers, n_params = la.n_layers or 0, la.n_params or 0
    for n in (1, n_layers, n_params, n_layers, 1):
        la.prior_precision = 0.5 + torch.rand(n, dtype=F64)
        assert_close(la.scatter, _scatter(la), "algebra")


def test_a_prior_mean_keeps_its_graph() -> None:
    la, mean = _fitted(), torch.tensor(0.3, dtype=F64, requires_grad=True)
    la.log_marginal_likelihood()
    la.prior_mean = mean
    for _ in range(2):
        (slope,) = torch.autograd.grad(la.scatter, mean)
        assert_close(slope, -2 * (la.prior_precision_diag * (la.mean - 0.3)).sum(), "algebra")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch's own rules of forward mode
def test_transforms_and_modes_leave_nothing_of_theirs() -> None:
    la, delta = _fitted(), torch.ones(1, dtype=F64)

    def evidence(prior: Tensor) -> Tensor:
        return la.log_marginal_likelihood(prior)

    with torch.inference_mode():
        expected = evidence(delta).item()
    assert_close(torch.func.hessian(evidence)(delta).view(()), _second(la, delta), "algebra")
    slope = torch.func.grad(evidence)(delta)
    leaf = delta.clone().requires_grad_()
    value = evidence(leaf)
    assert_close(torch.autograd.grad(value, leaf)[0], slope, "algebra")
    assert_close(value.detach(), torch.tensor(expected, dtype=F64), "algebra")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch's own rules of forward mode
def test_directions_of_the_prior_mean_in_forward_mode() -> None:
    la, one = _fitted(), torch.ones((), dtype=F64)

    def scatter(mean: Tensor) -> Tensor:
        la.prior_mean = mean
        return la.scatter

    la.log_marginal_likelihood()
    _, rate = torch.func.jvp(scatter, (0.3 * one,), (one,))
    assert_close(rate, -2 * (la.prior_precision_diag * (la.mean - 0.3)).sum(), "algebra")
    assert_close(scatter(0.3 * one), _scatter(la), "algebra")


def _second(la: ParametricLaplace, delta: Tensor) -> Tensor:
    """The second derivative by differentiating twice in reverse mode."""
    leaf = delta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(la.log_marginal_likelihood(leaf), leaf, create_graph=True)
    return torch.autograd.grad(slope, leaf)[0].view(())


@pytest.mark.parametrize("device", ["cheap operations", "dear operations"])
def test_what_was_written_through_data_is_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By evidences and by searches: what a search keeps is its own."""
    if device == "dear operations":
        monkeypatch.setattr(pieces, "_CHEAP", frozenset({"meta"}))

    def fitted(noise: float, mean: float) -> ParametricLaplace:
        hypers = {"sigma_noise": torch.tensor(noise), "prior_mean": torch.tensor(mean)}
        return grid.fitted("all", "kron", "regression", **hypers)

    la, same = fitted(0.5, 0.0), fitted(0.9, 0.1)
    delta = la.prior_precision.clone()
    la.optimize_prior_precision(n_steps=3)
    la.log_marginal_likelihood(delta)
    la.sigma_noise.data.fill_(0.9)
    la.prior_mean.data.fill_(0.1)
    assert torch.equal(la.log_marginal_likelihood(), same.log_marginal_likelihood())
    for posterior in (la, same):
        posterior.optimize_prior_precision(n_steps=3)
    assert torch.equal(la.prior_precision, same.prior_precision)
