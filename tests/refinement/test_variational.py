"""Natural-gradient variational inference against the bound maximised by brute force."""

from __future__ import annotations

import pytest
import torch

from laplace import Laplace, ParametricLaplace
from tests import grid
from tests import problems as catalogue
from tests.conformance.cases import Case, own_dense, truth
from tests.reference import refined
from tests.reference.compare import assert_close


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("weights", ["last_layer", "rectangle"])
def test_bernoulli_against_brute_force(structure: str, weights: str) -> None:
    case = Case(catalogue.get("mlp_bernoulli_multi"), structure, weights)
    la = case.fit(prior_precision=0.7, temperature=0.9)
    found = la.refine(case.problem.batches(4), method="variational", tolerance=1e-12, max_steps=500)
    delta = la.prior_precision_diag
    value, mean, covariance = refined.best_elbo(
        case.mean, truth(case.problem.name).f, case.jacobian, case.problem.y, 1 / 0.9, delta, structure == "diag"
    )
    assert found.elbo is not None
    assert_close(found.elbo, value, "backend", label="bound")
    assert_close(la.mean, mean, "float32", label="mean")
    assert_close(torch.linalg.inv(la.evidence().precision.to_dense()), covariance, "float32", label="covariance")
    climbs = zip(found.values[:-1], found.values[1:], strict=True)
    assert all(after >= before - 1e-12 * abs(before) for before, after in climbs)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_regression_in_closed_form(structure: str) -> None:
    """The exact posterior, or the diagonal Gaussian closest to it: its mean, and the diagonal of its precision."""
    case = Case(catalogue.get("mlp_regression"), structure, "all")
    la = case.fit(sigma_noise=0.6, prior_precision=0.5)
    before = own_dense(la)
    found = la.refine(case.problem.batches(), method="variational")
    assert found.converged
    f, y = truth(case.problem.name).f, case.problem.y
    scale = torch.tensor(0.6**-2, dtype=torch.float64)
    expected = refined.mode(case.mean, f, case.jacobian, y, "regression", scale, la.prior_precision_diag)
    assert_close(la.mean, expected, "backend")
    assert_close(own_dense(la), before, "backend")
    if structure == "full":  # the bound is tight
        assert_close(found.elbo, la.log_marginal_likelihood(), "backend")


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_softmax_is_a_fixed_point(structure: str) -> None:
    """At the end neither the covariance nor the mean moves any more, and equal seeds give equal bits."""
    torch.manual_seed(0)
    la = _classifier(structure)
    options = {"method": "variational", "n_samples": 150, "max_steps": 300}
    first = la.refine(grid.batches(), generator=torch.Generator().manual_seed(1), **options)
    assert first.converged
    assert first.elbo is not None
    assert first.elbo > first.values[0]
    mean, variance = la.mean.clone(), la.posterior_variance.clone()
    again = la.refine(grid.batches(), generator=torch.Generator().manual_seed(1), **options)
    assert again.steps <= 3
    assert_close(la.mean, mean, "float32_solve")
    assert_close(la.posterior_variance, variance, "float32_solve")
    twin = _classifier(structure)
    twin.refine(grid.batches(), generator=torch.Generator().manual_seed(1), **options)
    assert torch.equal(twin.mean, mean)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_softmax_converges_in_double_precision(structure: str) -> None:
    """Few random points: their bound is largest elsewhere than where the natural gradient vanishes."""
    la = Laplace(grid.network().double(), "classification", "last_layer", structure)
    data = [(x.double(), y) for x, y in grid.batches()]
    la.fit(data)
    found = la.refine(data, method="variational", n_samples=60)
    assert found.converged
    assert found.steps > 2


def _classifier(structure: str) -> ParametricLaplace:
    la = Laplace(grid.network(), "classification", "last_layer", structure, prior_precision=1.5)
    la.fit(grid.batches())
    return la
