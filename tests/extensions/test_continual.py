"""Recursive Bayes over tasks: penalty, evidence and loop, against dense oracles and the exact linear-Gaussian case."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, TaskFit, continual_training, quadratic_penalty, train_task
from laplace.errors import InvalidArgument, InvalidData, NotFittedError, UnsupportedError
from laplace.parametric import ParametricLaplace
from laplace.structures.base import Precision
from tests import grid
from tests.pairs import nightly
from tests.reference import curvature as reference
from tests.reference import evidence
from tests.reference.compare import assert_close

HELD = [name for name in grid.STRUCTURES if name != "matrix_free"]
each_cell = pytest.mark.parametrize(("weights", "structure"), [cell for cell in grid.CELLS if cell[1] in HELD])
SOME = [name if name in grid.FIRST else nightly(name)[0] for name in HELD]
"""Those that differ most, and by night all."""
each_structure = pytest.mark.parametrize("structure", HELD)
Batches = list[tuple[Tensor, Tensor]]


def double(batches: Batches) -> Batches:
    return [(x.double(), y.double() if y.is_floating_point() else y) for x, y in batches]


def posterior(weights: str, structure: str, likelihood: str = "classification", **options: Any) -> ParametricLaplace:
    if weights == "last_layer":
        options["last_layer_name"] = "3"
    return grid.make(weights, structure, likelihood, grid.network(likelihood).double().eval(), **options)


def task(likelihood: str = "classification", seed: int = 3) -> Batches:
    return double(grid.batches(likelihood, seed=seed))


def move(la: ParametricLaplace, by: float = 0.1) -> None:
    """Other weights, as after some training."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in la.model.parameters():
            tensor.add_(by * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))


def finite_difference(function: Any, theta: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences of a scalar function, `[P]`."""
    shifts = step * torch.eye(len(theta), dtype=theta.dtype)
    return torch.stack([(function(theta + s) - function(theta - s)) / (2 * step) for s in shifts])


# The penalty.


@each_cell
def test_penalty_is_half_the_quadratic_form(weights: str, structure: str) -> None:
    la = posterior(weights, structure, prior_precision=0.4, prior_mean=0.2, temperature=1.7)
    for fitted in (False, True):
        if fitted:
            la.fit(task())
            move(la)
        P = la.posterior().to_dense() if fitted else 0.4 * torch.eye(la.n_params, dtype=torch.float64)
        mean = la.mean if fitted else torch.tensor(0.2, dtype=torch.float64)
        theta = la.problem.mean()
        truth = 0.5 * (theta - mean) @ P @ (theta - mean)
        assert truth > 0.01
        assert_close(quadratic_penalty(la), truth, "algebra", label="at the weights")
        assert_close(quadratic_penalty(la, theta + 1), 0.5 * (theta + 1 - mean) @ P @ (theta + 1 - mean), "algebra")


@each_cell
def test_gradient_of_the_penalty(weights: str, structure: str) -> None:
    la = posterior(weights, structure, prior_precision=0.4)
    la.fit(task())
    move(la)
    theta = la.problem.mean().requires_grad_()
    (gradient,) = torch.autograd.grad(3 * quadratic_penalty(la, theta), theta)
    assert_close(gradient, finite_difference(lambda t: 3 * quadratic_penalty(la, t), theta.detach()),
                 "finite_difference")  # fmt: skip
    quadratic_penalty(la).backward()
    grads = [slot.take(tensor.grad) for slot, tensor in zip(la.problem.slots, la.params, strict=True)]
    assert_close(3 * torch.cat(grads), gradient, "algebra", label="at the weights")


def test_products_at_former_weights_are_refused_at_once() -> None:
    la = posterior("all", "matrix_free")
    for refused in (lambda: quadratic_penalty(la), lambda: train_task(la, task(), n_epochs=1)):
        with pytest.raises(UnsupportedError, match=r"train on.*matrix_free.*'kron'"):
            refused()


@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
def test_second_derivative_of_the_penalty(structure: str) -> None:
    la = posterior("all", structure)
    la.fit(task())
    theta = (la.mean + 0.1).requires_grad_()
    vector = torch.linspace(-1, 1, len(theta), dtype=theta.dtype)
    (gradient,) = torch.autograd.grad(quadratic_penalty(la, theta), theta, create_graph=True)
    (product,) = torch.autograd.grad(gradient @ vector, theta)
    assert_close(product, la.posterior().to_dense() @ vector, "algebra")


def test_penalty_follows_the_prior() -> None:
    """A changed prior precision is a changed penalty: nothing stale is kept."""
    la = posterior("all", "kron", prior_precision=1.0)
    la.fit(task())
    move(la)
    before = quadratic_penalty(la)
    la.prior_precision = 3.0
    distance = (la.problem.mean() - la.mean).square().sum()
    assert_close(quadratic_penalty(la) - before, distance, "algebra")


@each_cell
def test_products_with_the_precision(weights: str, structure: str) -> None:
    la = posterior(weights, structure, prior_precision=0.4)
    la.fit(task())
    precision = la.posterior()
    vectors = torch.randn(2, 3, la.n_params, dtype=torch.float64)
    truth = vectors @ precision.to_dense()
    assert_close(precision.product(vectors), truth, "algebra")
    assert_close(Precision.product(precision, vectors), truth, "algebra", label="the default")


# The evidence of a task.


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@each_structure
def test_evidence_of_a_task(structure: str, likelihood: str) -> None:
    """The former posterior is a Gaussian prior: log N(y | …) by dense determinants, and its gradient in δ."""
    noise = {"sigma_noise": 0.6} if likelihood == "regression" else {}
    la = posterior("all", structure, likelihood, prior_precision=0.4, temperature=1.3, **noise)
    la.fit(task(likelihood, 1))
    former, eye = la.posterior().to_dense(), torch.eye(la.n_params, dtype=torch.float64)
    move(la)
    new = TaskFit.from_data(la, task(likelihood, 2))
    joint = new.posterior.posterior().to_dense()
    alone = grid.make("all", structure, likelihood, la.model, prior_precision=0.4, temperature=1.3, **noise)
    alone.fit(task(likelihood, 2))
    shift = la.problem.mean() - la.mean

    def truth(delta: Tensor) -> Tensor:
        before, after = former + (delta - 0.4) * eye, joint + (delta - 0.4) * eye
        return alone.log_likelihood - 0.5 * (torch.logdet(after) - torch.logdet(before) + shift @ before @ shift)

    delta = torch.tensor([0.9], dtype=torch.float64, requires_grad=True)
    value = new.log_marginal_likelihood(delta)
    assert_close(value, truth(delta.detach()), "algebra")
    (gradient,) = torch.autograd.grad(value, delta)
    assert_close(gradient, finite_difference(truth, delta.detach()), "finite_difference")
    assert_close(new.log_marginal_likelihood(), truth(la.prior_precision), "algebra")
    if structure in ("full", "diag", "block"):  # of the others a sum of two curvatures is an approximation
        assert_close(joint - 0.4 * eye, former + alone.posterior().to_dense() - 0.8 * eye, "algebra")


def test_the_first_task_has_the_evidence_of_a_fit() -> None:
    la, whole = posterior("all", "kron"), posterior("all", "kron")
    whole.fit(task())
    assert_close(TaskFit.from_data(la, task()).log_marginal_likelihood(), whole.log_marginal_likelihood(), "algebra")
    assert not la.is_fitted


@pytest.mark.parametrize("structure", SOME)
def test_tuning_finds_the_maximum(structure: str) -> None:
    la = posterior("all", structure, prior_precision=torch.full((4,), 0.4))
    la.fit(task(seed=1))
    move(la)
    new = TaskFit.from_data(la, task(seed=2))
    best = new.tuned_prior_precision(n_steps=400, lr=0.05).requires_grad_()
    assert best.shape == (4,)
    assert new.log_marginal_likelihood(best) > new.log_marginal_likelihood()
    (slope,) = torch.autograd.grad(new.log_marginal_likelihood(best), best)
    assert_close(1 + 1e-3 * slope * best.detach(), torch.ones(4), "float32", label="slope in log δ")


@each_structure
def test_finishing_a_task_is_a_fit_on_top(structure: str) -> None:
    la, plain = posterior("all", structure), posterior("all", structure)
    for each in (la, plain):
        each.fit(task(seed=1))
        move(each)
    plain.fit(task(seed=2), override=False)
    TaskFit.from_data(la, task(seed=2)).finish()
    assert torch.equal(la.mean, plain.mean)
    assert torch.equal(la.posterior().to_dense(), plain.posterior().to_dense())
    assert_close(la(task()[0][0]), plain(task()[0][0]), "exact")


# The loop.


def test_recursion_is_exact_for_a_linear_network() -> None:
    """Three tasks one after the other are all data at once: mean, covariance, evidence and its factors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 2).double()
    la = Laplace(model, "regression", "all", "full", sigma_noise=0.7, prior_precision=0.5, prior_mean=0.1)
    tasks = [[(x[i : i + 10], y[i : i + 10])] for i in (0, 10, 20)]
    seen: list[tuple[int, int]] = []
    results = continual_training(
        la, tasks, lambda n, result: seen.append((n, len(result.losses))), n_epochs=3,
        optimizer_cls=torch.optim.LBFGS, fix_prior_precision=True,
        optimizer_kwargs={"line_search_fn": "strong_wolfe", "max_iter": 100, "tolerance_grad": 1e-13,
                          "tolerance_change": 1e-16},
    )  # fmt: skip
    assert seen == [(1, 3), (2, 3), (3, 3)]
    rows = torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], 1)
    design = torch.cat([torch.kron(torch.eye(2, dtype=torch.float64)[c : c + 1], rows) for c in (0, 1)])
    design = torch.cat([design[:, :4], design[:, 5:9], design[:, [4, 9]]], 1)  # weight [2, 4], then bias
    mean, covariance, log_evidence = evidence.bayesian_linear_regression(
        design, torch.cat([y[:, 0], y[:, 1]]), torch.full((60,), 0.7, dtype=torch.float64),
        torch.full((10,), 0.5, dtype=torch.float64), torch.full((10,), 0.1, dtype=torch.float64),
    )  # fmt: skip
    assert_close(la.mean, mean, "backend")
    assert_close(la.posterior_covariance, covariance, "algebra")
    assert_close(sum(result.log_marginal_likelihood for result in results), log_evidence, "backend")
    assert la.n_data == 30


def two_tasks() -> tuple[Batches, Batches]:
    """The same classes by different inputs: the second task says nothing of the first one's."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 4, generator=generator), torch.randint(2, (200,), generator=generator)
    first, second = torch.zeros(200, 8), torch.zeros(200, 8)
    first[:, :4], second[:, 4:] = x + 2.5 * y[:, None] - 1.25, x - 2.5 * y[:, None] + 1.25
    return [(a[i : i + 50], y[i : i + 50]) for a in (first,) for i in range(0, 200, 50)], [
        (a[i : i + 50], y[i : i + 50]) for a in (second,) for i in range(0, 200, 50)
    ]


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def mean_loss(model: nn.Module, batches: Batches) -> float:
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        return float(reference.loss(model(x), y, "classification")) / len(y)


@pytest.mark.parametrize("structure", ["kron", *nightly(*(name for name in HELD if name != "kron"))])
def test_the_first_task_is_remembered(structure: str) -> None:
    first, second = two_tasks()
    options: dict[str, Any] = {"n_epochs": 40, "optimizer_kwargs": {"lr": 1e-2}, "fix_prior_precision": True}
    chosen: dict[str, Any] = {"prior_precision": 0.01}
    if structure == "lowrank":
        chosen["structure_kwargs"] = {"rank": 60}  # directions beyond the rank are free to be forgotten
    model = small_network()
    la = Laplace(model, "classification", "all", structure, **chosen)
    train_task(la, first, **options)
    alone = copy.deepcopy(model)
    train_task(Laplace(alone, "classification", "all", structure, **chosen), second, **options)
    train_task(la, second, **options)
    assert mean_loss(model, first) < 0.5 * mean_loss(alone, first)
    assert mean_loss(model, second) < 0.2


def test_the_prior_is_adapted_and_equal_runs_are_equal() -> None:
    runs = []
    for _ in range(2):
        la = Laplace(small_network(), "classification", "all", "kron")
        results = continual_training(la, two_tasks(), n_epochs=12, marglik_frequency=5, n_epochs_burnin=4)
        runs.append((la, results))
    (la, results), (other, _) = runs
    assert torch.equal(la.mean, other.mean)
    assert torch.equal(la.posterior().to_dense(), other.posterior().to_dense())
    assert torch.equal(results[1].prior_precision, la.prior_precision)
    assert not torch.equal(results[0].prior_precision, results[1].prior_precision)
    assert results[0].prior_precision != 1
    assert results[0].losses[-1] < results[0].losses[0]


@pytest.mark.parametrize("weights", ["last_layer", "subnetwork"])
def test_what_is_not_random_is_not_trained(weights: str) -> None:
    la = posterior(weights, "kron")
    before = copy.deepcopy(la.model.state_dict())
    flags = [module.training for module in la.model.modules()]
    train_task(la, task(), n_epochs=3, optimizer_kwargs={"lr": 0.1})
    assert flags == [module.training for module in la.model.modules()]
    changed = torch.cat([(before[n] != t).flatten() for n, t in la.model.state_dict().items()])
    treated = torch.zeros(len(changed), dtype=torch.bool)
    if weights == "subnetwork":
        treated[grid.INDICES] = True
    else:
        treated[-la.n_params :] = True
    assert torch.equal(changed, treated)


def test_mappings_and_ignored_labels() -> None:
    """Ignored labels count nowhere: not in the loss, not in the number of data."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, features: Tensor) -> Tensor:
            return self.linear(features)

    x, y = grid.data()
    ignored = torch.cat([y, torch.full((12,), -100)])
    runs = []
    for features, labels in ((x, y), (torch.cat([x, 9 * x]), ignored)):
        torch.manual_seed(0)
        la = Laplace(Named(), "classification", "all", "diag", dict_key_x="features", dict_key_y="labels")
        train_task(la, [{"features": features, "labels": labels}], n_epochs=5)
        runs.append(la)
    assert runs[0].n_data == runs[1].n_data == 12
    assert_close(runs[1].mean, runs[0].mean, "float32")


def test_refusals() -> None:
    la = posterior("all", "diag")
    for options, message in (
        ({"optimizer_kwargs": {"weight_decay": 0.1}}, "weight_decay=0.1"),
        ({"optimizer_cls": torch.optim.AdamW}, "weight_decay=0.01 of AdamW"),
        ({"n_epochs": 0}, "n_epochs=0"),
        ({"n_hypersteps": 0}, "n_hypersteps=0"),
        ({"lr_hyp": -1.0}, "lr_hyp=-1.0"),
        ({"marglik_frequency": 0}, "marglik_frequency=0"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            train_task(la, task(), **options)
    with pytest.raises(InvalidArgument, match="only once"):
        train_task(la, iter(task()))
    with pytest.raises(InvalidData, match="no data"):
        train_task(la, [])
    with pytest.raises(NotFittedError, match="last_layer_name="):
        train_task(grid.make("last_layer", "kron"), grid.batches())


def test_a_task_that_fails_leaves_the_posterior() -> None:
    la = posterior("all", "kron")
    train_task(la, task(seed=1), n_epochs=2)
    fit, mean, prior = la.fitted(), la.mean.clone(), la.prior_precision.clone()
    bad = [(x * float("nan"), y) for x, y in task(seed=2)]
    with pytest.raises(InvalidData, match="NaN"):
        train_task(la, [*task(seed=2), *bad], n_epochs=2)
    assert la.fitted() is fit
    assert torch.equal(la.mean, mean)
    assert torch.equal(la.prior_precision, prior)


def test_a_scheduler_is_stepped_and_options_are_not_written_to() -> None:
    """A rate of zero after the first batch leaves one step, however many epochs follow."""
    options, rates = {"lr": 0.1}, {"gamma": 0.0, "step_size": 1}
    means = []
    for n_epochs, scheduler in ((1, torch.optim.lr_scheduler.StepLR), (4, torch.optim.lr_scheduler.StepLR), (4, None)):
        torch.manual_seed(0)
        la = posterior("all", "diag")
        start = la.problem.mean()
        train_task(la, task(), n_epochs=n_epochs, optimizer_cls=torch.optim.SGD, optimizer_kwargs=options,
                   scheduler_cls=scheduler, scheduler_kwargs=rates)  # fmt: skip
        assert not torch.equal(la.mean, start)
        means.append(la.mean)
    assert torch.equal(means[0], means[1])
    assert not torch.equal(means[1], means[2])
    assert options == {"lr": 0.1}
    assert rates == {"gamma": 0.0, "step_size": 1}
