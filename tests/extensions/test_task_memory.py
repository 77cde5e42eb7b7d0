"""Penalties of tasks whose curvatures are kept apart, against dense sums of Kronecker products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, TaskFit, TaskMemory, continual_training, quadratic_penalty, train_task
from laplace.errors import InvalidArgument, InvalidData, StateError, UnsupportedError
from tests import grid
from tests.reference import curvature, kfac
from tests.reference.compare import assert_close

HELD = [name for name in grid.STRUCTURES if name != "matrix_free"]
Batches = list[tuple[Tensor, Tensor]]
PRIOR, TEMPERATURE, CENTRE = 0.4, 1.3, 0.1


def network(likelihood: str = "classification") -> nn.Module:
    model = grid.network(likelihood).double()
    model[2] = nn.Identity()  # no dropout, which the oracle would have to draw
    return model


def task(seed: int, likelihood: str = "classification") -> Batches:
    return [(x.double(), y.double() if y.is_floating_point() else y) for x, y in grid.batches(likelihood, seed=seed)]


def made(structure: str = "kron", weights: str = "all", likelihood: str = "classification", **options: Any) -> Any:
    if weights == "last_layer":
        options["last_layer_name"] = "3"
    noise = {"sigma_noise": 0.6} if likelihood == "regression" else {}
    return grid.make(
        weights, structure, likelihood, network(likelihood), prior_precision=PRIOR, temperature=TEMPERATURE,
        prior_mean=CENTRE, **noise, **options,
    )  # fmt: skip


def learnt(la: Any, memory: TaskMemory, n_tasks: int = 3, likelihood: str = "classification") -> None:
    """Tasks that end after some steps, so that all of their weights differ."""
    for seed in range(n_tasks):
        train_task(la, task(seed, likelihood), n_epochs=2, optimizer_kwargs={"lr": 0.05}, memory=memory,
                   fix_prior_precision=True)  # fmt: skip


def finite_difference(function: Any, theta: Tensor, step: float = 1e-5) -> Tensor:
    shifts = step * torch.eye(len(theta), dtype=theta.dtype)
    return torch.stack([(function(theta + s) - function(theta - s)) / (2 * step) for s in shifts])


def products(model: nn.Module, batches: Batches, likelihood: str) -> Tensor:
    """Dense Kronecker products of a task at the network's present weights, `[P, P]`."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    names = curvature.trainable_names(model)
    return kfac.dense_kfac(kfac.kfac(model, x, y, names, likelihood), names)


def truth(
    theta: Tensor, hessians: list[Tensor], means: list[Tensor], centre: str, scale: float, prior: float = PRIOR
) -> Tensor:
    """The penalty by dense sums."""
    if centre == "last" and means:
        v = theta - means[-1]
        total = sum((scale * h for h in hessians), prior * torch.eye(len(v), dtype=v.dtype))
        return 0.5 * v @ total @ v
    terms = ((theta - m) @ h @ (theta - m) * 0.5 * scale for h, m in zip(hessians, means, strict=True))
    return sum(terms, 0.5 * prior * (theta - CENTRE).square().sum())


@pytest.mark.portable
@pytest.mark.parametrize("centre", ["last", "own"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_training_is_that_of_dense_sums(centre: Any, likelihood: str) -> None:
    """Three tasks by plain gradient descent on the objective written out, with dense Kronecker products."""
    scale = 1 / (TEMPERATURE * (0.36 if likelihood == "regression" else 1.0))
    la, memory = made(likelihood=likelihood), TaskMemory(centre)
    model, hessians, means = network(likelihood), [], []
    for seed in range(3):
        batches = task(seed, likelihood)
        train_task(la, batches, n_epochs=3, optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 0.02}, memory=memory,
                   fix_prior_precision=True)  # fmt: skip
        parameters = list(model.parameters())
        for _ in range(3):
            for x, y in batches:
                data = scale * curvature.loss(model(x), y, likelihood) / len(y)
                theta = nn.utils.parameters_to_vector(parameters)
                objective = data + truth(theta, hessians, means, centre, scale) / grid.N_DATA
                gradients = torch.autograd.grad(objective, parameters)
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter -= 0.02 * gradient
        means.append(nn.utils.parameters_to_vector(parameters).detach().clone())
        hessians.append(products(model, batches, likelihood))
        assert_close(la.mean, means[-1], "backend", label=f"weights after task {seed}")
        theta = means[-1] + torch.linspace(-1, 1, len(means[-1]), dtype=torch.float64)
        found = memory.penalty(la)
        assert_close(found(theta), truth(theta, hessians, means, centre, scale), "backend", label="penalty")
        leaf = theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(3 * found(leaf), leaf)
        leaf = theta.clone().requires_grad_()
        (expected,) = torch.autograd.grad(3 * truth(leaf, hessians, means, centre, scale), leaf)
        assert_close(gradient, expected, "backend", label="gradient")
    assert len(memory.fits) == 3


@pytest.mark.parametrize(("weights", "structure"), [cell for cell in grid.CELLS if cell[1] in HELD])
@pytest.mark.parametrize("centre", ["last", "own"])
def test_every_structure(weights: str, structure: str, centre: Any) -> None:
    """The curvature of every task as a posterior of that task alone has it."""
    la, memory = made(structure, weights), TaskMemory(centre)
    learnt(la, memory)
    eye = PRIOR * torch.eye(la.n_params, dtype=torch.float64)
    hessians = [replace(la.evidence(), fit=fit).precision.to_dense() - eye for fit in memory.fits]
    theta = la.mean + torch.linspace(-1, 1, la.n_params, dtype=torch.float64)
    penalty = memory.penalty(la)
    assert_close(penalty(theta), truth(theta, hessians, memory.means, centre, 1.0), "algebra")
    leaf = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(penalty(leaf), leaf)
    assert_close(gradient, finite_difference(penalty, theta), "finite_difference")


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
def test_sums_that_are_exact_need_no_tasks_apart(structure: str) -> None:
    la, memory = made(structure), TaskMemory()
    learnt(la, memory)
    theta = la.mean + 0.3
    assert_close(memory.penalty(la)(theta), quadratic_penalty(la, theta), "algebra")
    plain = made(structure)
    for seed in range(3):
        train_task(plain, task(seed), n_epochs=2, optimizer_kwargs={"lr": 0.05}, fix_prior_precision=True)
    assert_close(la.mean, plain.mean, "algebra")


def test_products_are_less_than_sums_of_factors() -> None:
    """Cross terms of summed factors are positive, and predictions are those of the summed ones."""
    la, memory = made(), TaskMemory()
    learnt(la, memory)
    theta = la.mean + 0.3
    assert 0 < memory.penalty(la)(theta) < quadratic_penalty(la, theta)
    summed = made()
    summed.set_posterior(la.snapshot())
    assert torch.equal(la(task(0)[0][0]), summed(task(0)[0][0]))
    assert la.n_data == 3 * grid.N_DATA


def test_the_prior_of_the_moment_and_the_evidence() -> None:
    """δ is adapted by the evidence of the posterior; the penalty follows it."""
    la, memory = made(), TaskMemory()
    learnt(la, memory, 2)
    penalty, theta = memory.penalty(la), la.mean + 0.5
    before = penalty(theta)
    la.prior_precision = PRIOR + 2
    assert_close(penalty(theta) - before, (theta - la.mean).square().sum(), "algebra")
    tuned, memory = made(), TaskMemory()
    results = continual_training(tuned, [task(0), task(1)], n_epochs=3, marglik_frequency=2, memory=memory)
    assert results[0].prior_precision != results[1].prior_precision
    assert len(memory.means) == 2
    assert torch.equal(memory.means[-1], tuned.mean)


def test_a_loop_of_one_s_own() -> None:
    la, memory = made(), TaskMemory()
    for seed in range(2):
        penalty, optimizer = memory.penalty(la), torch.optim.SGD(la.params, lr=0.01)
        (x, y), *_ = task(seed)
        (nn.functional.cross_entropy(la.model(x), y) + penalty() / grid.N_DATA).backward()
        optimizer.step()
        ended = TaskFit.from_data(la, task(seed))
        memory.add(ended.fit, ended.posterior.mean)
        ended.finish()
    assert len(memory.fits) == 2
    assert memory.penalty(la)().item() == pytest.approx(0, abs=1e-12)  # at the last weights


def test_refusals() -> None:
    with pytest.raises(InvalidArgument, match="centre='first'"):
        TaskMemory("first")  # pyright: ignore[reportArgumentType]
    la = made()
    train_task(la, task(0), n_epochs=1)
    with pytest.raises(InvalidArgument, match="0 data, the posterior 12"):
        train_task(la, task(1), n_epochs=1, memory=TaskMemory())
    memory = TaskMemory()
    learnt(made(), memory, 1)
    with pytest.raises(InvalidArgument, match="12 data, the posterior 0"):
        train_task(made(), task(1), n_epochs=1, memory=memory)
    with pytest.raises(UnsupportedError, match="matrix_free"):
        train_task(Laplace(network(), "classification", "all", "matrix_free"), task(0), n_epochs=1, memory=TaskMemory())


def test_a_task_that_fails_is_not_kept() -> None:
    la, memory = made(), TaskMemory()
    learnt(la, memory, 1)
    bad = [(x * float("nan"), y) for x, y in task(1)]
    with pytest.raises(InvalidData):
        train_task(la, [*task(1), *bad], n_epochs=1, memory=memory)
    assert len(memory.fits) == 1


@pytest.mark.parametrize("structure", HELD)
def test_training_goes_on_from_saved_states(structure: str, tmp_path: Path) -> None:
    la, memory = made(structure), TaskMemory()
    learnt(la, memory, 2)
    torch.save((la.weights.model.state_dict(), la.state_dict(), memory.state_dict()), tmp_path / "states.pt")
    weights, of_la, of_memory = torch.load(tmp_path / "states.pt", weights_only=True)
    other, loaded = made(structure), TaskMemory()
    other.weights.model.load_state_dict(weights)
    other.load_state_dict(of_la)
    loaded.load_state_dict(of_memory, other)
    theta = la.mean + 0.3
    assert_close(loaded.penalty(other)(theta), memory.penalty(la)(theta), "algebra")
    for posterior, kept in ((la, memory), (other, loaded)):
        train_task(posterior, task(2), n_epochs=1, memory=kept)
        assert len(kept.fits) == 3
    assert_close(other.mean, la.mean, "algebra")


def test_a_memory_is_moved_with_its_posterior() -> None:
    la, memory = made(), TaskMemory("own")
    learnt(la, memory, 2)
    before = memory.penalty(la)(la.mean + 0.3)
    la.to(dtype=torch.float32)
    assert memory.to(dtype=torch.float32).means[0].dtype is torch.float32
    after = memory.penalty(la)(la.mean + 0.3)
    assert after.dtype is torch.float32
    torch.testing.assert_close(after.double(), before, rtol=1e-5, atol=0)


def test_states_of_other_memories_are_refused() -> None:
    la, memory = made(), TaskMemory()
    learnt(la, memory, 1)
    state = memory.state_dict()
    broken = {"version": 1, "centre": "last", "tasks": [{"structure": "kron", "mean": la.mean}]}
    short = {**state, "tasks": [{**state["tasks"][0], "mean": la.mean[:1]}]}
    other_layout = {**state, "layout": {**state["layout"], "names": ["0.weight"]}}
    for given, other, message in (
        (state, TaskMemory("own"), "centre is 'last'"),
        ([state], TaskMemory(), "type list"),
        ({}, TaskMemory(), "version is None"),
        (broken, TaskMemory(), "malformed"),
        (short, TaskMemory(), "n_params is 1"),
        (other_layout, TaskMemory(), "names is"),
    ):
        with pytest.raises(StateError, match=message):
            other.load_state_dict(given, la)  # pyright: ignore[reportArgumentType]
        assert not other.fits
    with pytest.raises(StateError, match="structure is 'kron'"):
        memory.load_state_dict(state, made("diag"))
    assert len(memory.fits) == 1


def test_a_memory_of_another_network_is_refused() -> None:
    la, memory = made("diag"), TaskMemory()
    learnt(la, memory, 1)
    same_size = Laplace(nn.Sequential(nn.Linear(la.n_params - 1, 1)).double(), "regression", "all", "diag")
    same_size.fit([(torch.randn(12, la.n_params - 1).double(), torch.randn(12, 1).double())])
    assert same_size.n_params == la.n_params
    with pytest.raises(InvalidArgument, match="other random weights"):
        memory.penalty(same_size)


@pytest.mark.parametrize("structure", HELD)
def test_a_state_is_read_in_the_posterior_s_dtype(structure: str) -> None:
    la, memory = made(structure), TaskMemory()
    learnt(la, memory, 2)
    state, theta = memory.state_dict(), la.mean + 0.3
    before = memory.penalty(la)(theta)
    la.to(dtype=torch.float32)
    loaded = TaskMemory()
    loaded.load_state_dict(state, la)
    after = loaded.penalty(la)(theta.float())
    torch.testing.assert_close(after.double(), before, rtol=1e-4, atol=0)
    state["tasks"][0]["mean"].zero_()  # the memory has its own
    assert torch.equal(loaded.penalty(la)(theta.float()), after)
