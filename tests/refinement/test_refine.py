"""Natural-gradient variational inference against the bound maximised by brute force."""

from __future__ import annotations

import warnings

import pytest
import torch

from laplace import Laplace, ParametricLaplace
from laplace.errors import ApproximationWarning
from tests import grid
from tests import problems as catalogue
from tests.conformance.cases import Case, own_dense, truth
from tests.pairs import nightly
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


def test_bound_takes_the_factor_that_is_there_and_no_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(catalogue.get("mlp_bernoulli_multi"), "full", "all")
    expected = case.fit(prior_precision=0.7).refine(case.problem.batches(4), method="variational").elbo
    la = case.fit(prior_precision=0.7)

    def eigenvalues(*_: object, **__: object) -> None:
        raise AssertionError("eigenvalues cost ten times a Cholesky factorisation")

    monkeypatch.setattr("laplace.core.linalg.eigvalsh", eigenvalues)
    assert_close(la.refine(case.problem.batches(4), method="variational").elbo, expected, "backend")


def case_of(structure: str, weights: str, name: str = "mlp_bernoulli_multi") -> Case:
    return Case(catalogue.get(name), structure, weights)


def true_bound(case: Case, la: ParametricLaplace) -> float:
    """The bound of a refined posterior by the oracle's quadrature."""
    covariance = torch.linalg.inv(la.evidence().precision.to_dense())
    root = torch.linalg.cholesky(covariance)
    f, delta, scale = truth(case.problem.name).f, la.prior_precision_diag, 1 / float(la.temperature)
    return float(refined.elbo(la.mean, root, case.mean, f, case.jacobian, case.problem.y, scale, delta))


@pytest.mark.parametrize(
    ("structure", "weights"),
    [("block", "mixed"), ("kron", "last_layer"),
     *nightly(("block", "last_layer"), ("block", "all"), ("kron", "all"), ("kron", "mixed"))],
)  # fmt: skip
def test_blocks_and_kronecker_factors(structure: str, weights: str) -> None:
    """The bound is that of the Gaussian that is found, grows, and lies between those of diagonals and of all Gaussians.

    Of blocks the end is stationary (Opper and Archambeau, 2009): S⁻¹ is δ plus the blocks of Σ Jᵀ E[Λ] J / T.
    """
    case, found = case_of(structure, weights), {}
    for name in ("diag", structure, "full"):
        la = case_of(name, weights).fit(prior_precision=0.7, temperature=0.9)
        found[name] = la.refine(case.problem.batches(4), "variational", tolerance=1e-12, max_steps=300)
        if name == structure:
            own = la
    result = found[structure]
    assert result.converged and result.standard_error == 0
    assert all(after > before for before, after in zip(result.values[:-1], result.values[1:], strict=True))
    assert_close(result.elbo, true_bound(case, own), "backend")
    assert result.elbo <= found["full"].elbo + 1e-9
    if structure == "block":
        assert result.elbo >= found["diag"].elbo - 1e-9
        f, y = truth(case.problem.name).f + case.jacobian @ (own.mean - case.mean), case.problem.y
        precision = own.evidence().precision.to_dense()
        variance = torch.einsum("bcp,pq,bcq->bc", case.jacobian, torch.linalg.inv(precision), case.jacobian)
        _, inner = refined.expected_slopes_of_binary(f, variance, y)
        dense = torch.einsum("bcp,bc,bcq->pq", case.jacobian, inner / 0.9, case.jacobian)
        kept = dense * (case.layer_of[:, None] == case.layer_of) + 0.7 * torch.eye(len(dense))
        assert_close(precision, kept, "float32")


@pytest.mark.parametrize(
    ("weights", "likelihood"),
    [
        ("last_layer", "poisson"),
        *nightly(("all", "poisson"), ("last_layer", "classification"), ("all", "classification")),
    ],
)
def test_kronecker_factors_of_other_likelihoods(likelihood: str, weights: str) -> None:
    la = Laplace(grid.network(likelihood).double(), likelihood, weights, "kron", prior_precision=0.3)
    data = [(x.double(), y.double() if y.is_floating_point() else y) for x, y in grid.batches(likelihood)]
    la.fit(data)
    found = la.refine(data, "variational")
    assert found.converged
    assert found.steps > 0
    assert all(after > before for before, after in zip(found.values[:-1], found.values[1:], strict=True))


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_few_points_do_not_lower_the_bound(structure: str) -> None:
    """Every step raises the bound by the oracle's quadrature too, up to the error that the points are known to have."""
    case = case_of(structure, "last_layer", "mlp_classification")
    la = case.fit(prior_precision=0.1)
    first = la.snapshot()
    bounds, errors = [], []
    for steps in range(1, 6):
        la.set_posterior(first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ApproximationWarning)
            found = la.refine(case.problem.batches(), "variational", n_samples=30, max_steps=steps)
        assert all(after > before for before, after in zip(found.values[:-1], found.values[1:], strict=True))
        bounds.append(true_bound(case, la))
        errors.append(found.standard_error)
        assert abs(bounds[-1] - found.elbo) < 5 * found.standard_error
    assert all(after > before - 2 * error for before, after, error in zip(bounds, bounds[1:], errors, strict=False))
    assert bounds[-1] > max(bounds) - 1e-3


@pytest.mark.nightly
def test_softmax_against_brute_force() -> None:
    """With many points the best Gaussian is found up to their error."""
    case = case_of("full", "last_layer", "mlp_classification")
    la = case.fit(prior_precision=0.3)
    found = la.refine(case.problem.batches(), "variational", n_samples=2000)
    value, _, _ = refined.best_elbo(
        case.mean, truth(case.problem.name).f, case.jacobian, case.problem.y, 1.0, la.prior_precision_diag, False
    )
    assert found.converged and found.standard_error < 0.05
    assert abs(found.elbo - value) < 5 * found.standard_error
    assert value - true_bound(case, la) < 0.01  # the end itself is far closer than its bound is known


@pytest.mark.parametrize("structure", ["full", *nightly("diag")])
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


@pytest.mark.parametrize("structure", ["diag", *nightly("full")])
def test_softmax_converges_in_double_precision(structure: str) -> None:
    """Few random points: their bound is largest elsewhere than where the natural gradient vanishes."""
    la = Laplace(grid.network().double(), "classification", "last_layer", structure)
    data = [(x.double(), y) for x, y in grid.batches()]
    la.fit(data)
    found = la.refine(data, method="variational", n_samples=60)
    assert found.converged
    assert found.steps > 1


def _classifier(structure: str) -> ParametricLaplace:
    la = Laplace(grid.network(), "classification", "last_layer", structure, prior_precision=1.5)
    la.fit(grid.batches())
    return la
