"""The SWAG mask under every registered likelihood, and under users' own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InvalidArgument, InvalidData
from laplace.likelihoods import LIKELIHOODS, Categorical, LikelihoodFromLoss, get_likelihood
from laplace.weights.masks import LargestVarianceSWAGSubnetMask, MeanLoss, fit_diagonal_swag_var
from tests import problems as catalogue
from tests.problems import Problem
from tests.reference import likelihoods as reference
from tests.reference.compare import assert_close

# One problem of every registered likelihood: one that the catalogue lacks fails.
EVERY = [catalogue.problems(name, without=("positions",))[0] for name in LIKELIHOODS]

# Losses of the mean, by those who know nothing of likelihoods here.
KNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "regression": nn.MSELoss(),
    "classification": nn.CrossEntropyLoss(),
    "reward_modeling": nn.CrossEntropyLoss(),
    "bernoulli": nn.BCEWithLogitsLoss(),
    "poisson": nn.PoissonNLLLoss(full=False),
    "heteroscedastic": lambda f, y: reference.nll(f, y, "heteroscedastic").mean(),
    "mean_log_variance": lambda f, y: reference.nll(f, y, "mean_log_variance").mean(),
}


class Laplacian(LikelihoodFromLoss):
    """A smooth Laplace density, as a user writes one."""

    name = "laplacian"

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return ((f - y).square() + 0.1).sqrt().sum()

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        return f + torch.randn(n, *f.shape, dtype=f.dtype, generator=generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f


def outputs(problem: Problem) -> Tensor:
    return problem.make_model()(problem.x).detach()


def slope(loss: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor) -> Tensor:
    leaf = f.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf, y), leaf)[0]


@pytest.mark.parametrize("problem", EVERY, ids=str)
def test_criterion_is_the_mean_of_the_usual_loss(problem: Problem) -> None:
    f, likelihood = outputs(problem), get_likelihood(problem.likelihood)
    y = likelihood.check_targets(f, problem.y)
    assert_close(slope(MeanLoss(likelihood), f, problem.y), slope(KNOWN[likelihood.name], f, y), "algebra")


@pytest.mark.parametrize("problem", EVERY, ids=str)
def test_mask_of_every_likelihood(problem: Problem) -> None:
    """Deterministic by its generator; the model is left alone, and a posterior over the selection can be fitted."""
    model = problem.make_model()
    before = copy.deepcopy(model.state_dict())

    def chosen(likelihood: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        mask = LargestVarianceSWAGSubnetMask(
            model, 5, likelihood, swag_n_snapshots=3, swag_lr=1e-3, generator=generator
        )
        return mask.select(problem.batches(4))

    indices = chosen(problem.likelihood)
    assert len(indices) == 5 and torch.equal(indices, chosen(get_likelihood(problem.likelihood)))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    la = Laplace(model, problem.likelihood, "subnetwork", "full", subnetwork_indices=indices)
    la.fit(problem.batches(4))
    assert la.log_marginal_likelihood().isfinite()


@pytest.mark.parametrize("problem", EVERY, ids=str)
def test_variances_are_those_of_the_usual_loss(problem: Problem) -> None:
    likelihood = get_likelihood(problem.likelihood)

    def known(f: Tensor, y: Tensor) -> Tensor:
        return KNOWN[likelihood.name](f, likelihood.check_targets(f, y))

    found, expected = (
        fit_diagonal_swag_var(problem.make_model(), problem.batches(4), criterion, 3, lr=1e-3, min_var=0.0)
        for criterion in (MeanLoss(likelihood), known)
    )
    assert_close(found, expected, "backend")


def test_a_users_own_likelihood() -> None:
    problem = catalogue.get("mlp_regression")
    f, own = outputs(problem), Laplacian()
    expected = slope(lambda f, y: ((f - y).square() + 0.1).sqrt().sum(1).mean(), f, problem.y)
    assert_close(slope(MeanLoss(own), f, problem.y), expected, "algebra")
    mask = LargestVarianceSWAGSubnetMask(problem.make_model(), 4, own, swag_n_snapshots=2, swag_lr=1e-3)
    assert len(mask.select(problem.batches(4))) == 4


def test_ignored_labels_and_weights_of_classes_count_as_in_pytorch() -> None:
    f, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 2, -100, 1, 1, -100])
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    for likelihood, known in (
        (Categorical(), nn.CrossEntropyLoss()),
        (Categorical(class_weight=weights), nn.CrossEntropyLoss(weights)),
    ):
        assert_close(MeanLoss(likelihood)(f, y), known(f, y), "algebra")
        nothing = slope(MeanLoss(likelihood), f, torch.full_like(y, -100))
        assert torch.equal(nothing, torch.zeros_like(f))


@pytest.mark.parametrize("problem", catalogue.problems("positions")[:4], ids=str)
def test_outputs_with_positions(problem: Problem) -> None:
    mask = LargestVarianceSWAGSubnetMask(problem.make_model(), 3, problem.likelihood, swag_n_snapshots=2, swag_lr=1e-3)
    assert len(mask.select(problem.batches(4))) == 3


def test_numbers_of_mappings_are_columns() -> None:
    """Targets `[B]` beside outputs `[B, 1]` would be subtracted from every row."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1, dtype=torch.float64)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.linear(batch["x"])

    x, y, model = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, dtype=torch.float64), Head()
    regression = get_likelihood("regression")
    variances = [
        fit_diagonal_swag_var(model, [batch], MeanLoss(regression), 3, rules=regression)
        for batch in ({"x": x, "labels": y}, {"x": x, "labels": y[:, None]})
    ]
    assert torch.equal(*variances)


def test_refusals() -> None:
    problem = catalogue.get("mlp_classification")
    with pytest.raises(InvalidArgument, match="likelihood"):
        LargestVarianceSWAGSubnetMask(problem.make_model(), 4, likelihood="no such")  # pyright: ignore
    mask = LargestVarianceSWAGSubnetMask(problem.make_model(), 4, swag_n_snapshots=1)
    with pytest.raises(InvalidData):
        mask.select([(problem.x, problem.y + 7)])
