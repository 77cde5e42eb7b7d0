"""Curvature that is kept by its rows: which side is less work, what turns it, states and copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import laplace
from laplace import Laplace, load
from laplace.core.memory import Available
from laplace.curvature import NativeHessian
from laplace.errors import OutOfMemory
from laplace.large_structures import rows
from laplace.structures import full
from laplace.structures.base import SumPass
from laplace.structures.full import FullCurvature, is_less_work
from tests import problems as catalogue
from tests.conformance.cases import Case
from tests.large_structures.test_dual import data, held, matrix, network, rows_are_kept, same  # noqa: F401
from tests.problems import Problem
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable

# The side, and what turns it.


def test_the_side_of_fewer_multiplications(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not is_less_work(900, 5) and is_less_work(1100, 5) and is_less_work(10_248, 4200)
    assert not is_less_work(1100, 1100) and not is_less_work(2000, 4000)
    model, (x, y) = network(30, 40, 3), data(900)
    batches = [(x[i : i + 100], y[i : i + 100]) for i in range(0, 900, 100)]
    kept, summed = (Laplace(model, "classification", "all", "full") for _ in range(2))
    kept.fit(batches[:2])
    assert held(kept).n_rows == 400 and "factored over 400 rows of the data, fewer than the 1,363 weights" in repr(kept)
    assert "factored over 400 rows" in str(kept.plan(batches[:2])) and kept.plan(batches[:2]).kept_bytes < 2**20
    assert "factored" not in str(kept.plan(batches))
    kept.fit(batches[2:], override=False)
    assert type(kept.fitted().curvature) is FullCurvature, "1,800 rows of 1,363 weights"
    summed.fit(batches)
    assert type(summed.fitted().curvature) is FullCurvature and "factored" not in repr(summed)
    never = Laplace(model, "classification", "all", "full")
    monkeypatch.setattr(full, "is_less_work", lambda n_params, n_rows: False)
    never.fit(batches)
    assert torch.equal(summed.H, never.H), "a sum that began as rows is the sum"
    assert_close(kept.H, never.H, "algebra")


def test_two_fits_add_up_and_fade() -> None:
    case = Case(catalogue.get("mlp_classification"), "full", "all")
    x, y, la = case.problem.x, case.problem.y, case.build(prior_precision=0.5)
    la.fit([(x[:4], y[:4])])
    la.fit([(x[4:], y[4:])], override=False)
    assert held(la).n_rows == 2 * len(y)
    same(la, case.fit(prior_precision=0.5), x)
    first, forgotten = case.build(), copy.deepcopy(la)
    first.fit([(x[:4], y[:4])])
    forgotten.forget([(x[4:], y[4:])])
    assert_close(forgotten.H, first.H, "backend")
    whole = la.H
    la.fit([(x[:4], y[:4])], override=False, decay=0.5)
    assert_close(la.H, 0.5 * whole + first.H, "algebra")


def test_curvature_that_is_no_sum_of_rows_stays_a_matrix() -> None:
    case = Case(catalogue.get("mlp_classification"), "full", "all")
    la = case.build(backend=NativeHessian, structure_kwargs={"indefinite": "clamp"})
    la.fit(case.problem.batches(4))
    assert type(la.fitted().curvature) is FullCurvature
    assigned = case.fit()
    assigned.H = assigned.H
    assert type(assigned.fitted().curvature) is FullCurvature


def test_sums_that_are_exchanged_are_a_matrix() -> None:
    case = Case(catalogue.get("mlp_classification"), "full", "all")
    la = case.build()
    reading: SumPass[Any] = SumPass(FullCurvature, la.engine)
    reading.add(case.problem.x, case.problem.y)
    assert [tuple(tensor.shape[1:]) for tensor in reading.sums().values()] == [tuple(case.fit().H.shape)]


# States and copies.


def test_states_hold_the_matrix(tmp_path: Any) -> None:
    case = Case(catalogue.get("mlp_classification"), "full", "all")
    la, other = case.fit(prior_precision=0.2), case.build()
    other.load_state_dict(la.state_dict())
    la.save(tmp_path / "la.safetensors", inputs=False)
    loaded = load(tmp_path / "la.safetensors", case.problem.make_model())
    for one in (other, loaded, pickle.loads(pickle.dumps(la))):
        assert type(one.fitted().curvature) is FullCurvature
        same(one, la, case.problem.x)
    same(copy.deepcopy(la), la, case.problem.x)
    held(copy.deepcopy(la))


def test_moving_keeps_the_rows() -> None:
    case = Case(catalogue.get("mlp_regression"), "full", "last_layer")
    la = case.fit()
    expected = la.functional_variance(case.jacobian)
    la.to(dtype=torch.float64)
    held(la)
    assert_close(la.functional_variance(case.jacobian), expected, "exact")


def test_matrices_for_which_there_is_no_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(catalogue.get("mlp_classification"), "full", "all")
    la = case.fit()
    monkeypatch.setattr(rows, "available", lambda device: Available(1000, "a test"))
    for ask in (lambda: la.H, lambda: la.posterior_precision, lambda: la.posterior_covariance, la.state_dict):
        with pytest.raises(OutOfMemory, match="no such matrix"):
            ask()
    la(case.problem.x)
    la.sample(2)
    la.log_marginal_likelihood()


# What users do with a posterior.


def few_data(problem: Problem) -> list[tuple[Tensor, Tensor]]:
    return problem.batches(4)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_calls_that_ask_a_posterior(weights: str) -> None:
    """Leave-one-out, influence, refinement, tuning and draws give what the matrix gives."""
    case = Case(catalogue.get("mlp_classification"), "full", weights)
    x, y, loader = case.problem.x, case.problem.y, few_data(case.problem)
    la = case.fit(4, prior_precision=0.7)
    la.refine(loader)
    other = matrix(la)
    left, expected = la.leave_one_out(loader), other.leave_one_out(loader)
    assert_close(left.mean, expected.mean, "backend", label="left out: mean")
    assert_close(left.covariance, expected.covariance, "backend", label="left out: covariance")
    found, expected = (laplace.influence(one, loader, x, y).scores for one in (la, other))
    assert_close(found, expected, "backend", label="influence")
    assert_close(la.mean, other.mean, "exact", label="refined")
    for one in (la, other):
        one.optimize_prior_precision()
    assert_close(la.prior_precision, other.prior_precision, "float32", label="tuned")
    assert_close(la(x), other(x), "float32", label="prediction")
