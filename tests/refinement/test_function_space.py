"""The mode in function space against the mode in weight space, and against closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace.errors import InvalidArgument
from laplace.likelihoods import get_likelihood
from laplace.refinement.function_space import FunctionMode, dense_kernel, mode
from tests import problems as catalogue
from tests.conformance.cases import Case, truth
from tests.reference import curvature as reference
from tests.reference import refined
from tests.reference.compare import assert_close

NAMES = ["mlp_classification", "mlp_regression", "mlp_bernoulli_multi"]
SCALE, DELTA = torch.tensor(1.3, dtype=torch.float64), 0.8


def dual_of(case: Case) -> tuple[FunctionMode, Tensor, Tensor]:
    """The mode under the kernel of the linearised network, whose prior mean f(x, θ*) − J θ* is not zero."""
    jacobian, f = case.jacobian, truth(case.problem.name).f
    rows = jacobian.flatten(0, 1)
    prior_mean = f - jacobian @ case.mean
    likelihood = get_likelihood(case.problem.likelihood)
    return mode(rows @ rows.T / DELTA, prior_mean, likelihood, case.problem.y, SCALE), rows, prior_mean


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_mode_in_weight_space(name: str) -> None:
    case = Case(catalogue.get(name), "full", "all")
    found, rows, prior_mean = dual_of(case)
    assert found.converged
    problem, f = case.problem, truth(name).f
    delta = torch.full_like(case.mean, DELTA)
    theta = refined.mode(case.mean, f, case.jacobian, problem.y, problem.likelihood, SCALE, delta)
    assert_close(found.f, f + case.jacobian @ (theta - case.mean), "backend", label="mode")
    assert_close(rows.T @ found.dual.flatten() / DELTA, theta, "backend", label="weights")
    inner = SCALE * reference.output_hessian(found.f, problem.likelihood, problem.y)
    precision = torch.einsum("bcp,bcd,bdq->pq", case.jacobian, inner, case.jacobian) + torch.diag(delta)
    # at other data, here a part of the same
    cross, prior = rows[:6] @ rows.T / DELTA, rows[:6] @ rows[:6].T / DELTA
    part = slice(0, 6 // f.shape[1])
    if 6 % f.shape[1] == 0:
        assert_close(found.mean(prior_mean[part], cross), found.f[part], "backend", label="mean")
    expected = rows[:6] @ torch.linalg.solve(precision, rows[:6].T)
    assert_close(found.covariance(prior, cross), expected, "backend", label="covariance")
    assert_close(2 * found.half_logdet, torch.logdet(precision) - delta.log().sum(), "backend", label="log det")
    value = -refined.objective(theta, case.mean, f, case.jacobian, problem.y, problem.likelihood, SCALE, delta)
    assert_close(found.value, value, "backend", label="value")


def test_independent_outputs_and_a_start() -> None:
    case = Case(catalogue.get("mlp_classification"), "full", "all")
    problem, likelihood = case.problem, get_likelihood("classification")
    n, c = truth(problem.name).f.shape
    factors = torch.randn(c, n, n, dtype=torch.float64)
    kernel = dense_kernel(factors @ factors.mT)
    for output in range(c):
        block = kernel.view(n, c, n, c)[:, output, :, output]
        assert_close(block, factors[output] @ factors[output].T, "exact")
    prior_mean = torch.randn(n, c, dtype=torch.float64)
    found = mode(kernel, prior_mean, likelihood, problem.y, SCALE)
    assert_close(-SCALE * likelihood.gradient(found.f, problem.y), found.dual, "backend")  # K⁻¹ times ∇Ψ is zero
    again = mode(kernel, prior_mean, likelihood, problem.y, SCALE, start=found.dual)
    assert again.steps <= 1
    assert_close(again.f, found.f, "algebra")
    with pytest.raises(InvalidArgument, match="kernel"):
        mode(kernel[:2], prior_mean, likelihood, problem.y, SCALE)
