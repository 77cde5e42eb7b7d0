"""Training of VaLLA: gradients of its objective, and where it leads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace.extensions.valla import Energy
from laplace.extensions.valla_training import Variables, objective
from tests import problems as catalogue
from tests.extensions.test_valla import Dense, made, settings, some
from tests.pairs import nightly
from tests.reference import variational
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable


@pytest.mark.parametrize(("name", "count"), [("mlp_regression_single", 7), *nightly(("mlp_regression", 3))])
def test_training_approaches_the_optimum(name: str, count: int) -> None:
    """From an L of another noise to the one in closed form, that of all data in the span of the inducing outputs."""
    problem = catalogue.get(name)
    la = made(problem, problem.x[:count], None, torch.arange(count) % problem.y.shape[1], alpha=0.0)
    la.sigma_noise = 1.5
    la.fit(problem.batches(), iterations=0)
    la.sigma_noise = 0.45
    dense = Dense(problem, la)
    best = variational.best_curvature(dense.rows, dense.jacobian, dense.inner, dense.scale)
    bound = torch.tensor(float("-inf"), dtype=torch.float64)
    for lr, iterations in ((0.3, 80), (0.03, 70), (0.003, 30)):
        assert la.elbo > bound
        bound = la.elbo
        la.fit(problem.batches(), iterations=iterations, lr=lr, override=False, learn=())
    assert (la.prior_precision.item(), la.sigma_noise.item()) == (0.3, 0.45)
    root = torch.linalg.cholesky(best)
    covariance = variational.posterior_covariance(dense.rows, root, 0.3)
    expected = (dense.jacobian @ covariance @ dense.jacobian.mT).diagonal(dim1=1, dim2=2)
    assert_close(la.functional_variance_fast(problem.x)[1], expected, "float32_solve")
    dense.covariance = covariance
    assert -1e-9 < dense.elbo - la.elbo < 1e-4


@pytest.mark.parametrize(
    ("name", "alpha", "samples", "weights"),
    [
        ("mlp_regression", 0.0, 0, "all"),
        ("mlp_regression", 0.5, 0, "all"),
        ("mlp_classification", 1.0, 0, "all"),
        ("mlp_classification", 0.0, 5, "all"),
        ("mlp_classification", 0.7, 5, "all"),
        ("mlp_bernoulli_multi", 1.0, 0, "all"),
        ("mlp_poisson", 1.0, 0, "all"),
        ("mlp_poisson", 0.5, 5, "all"),
        ("mlp_heteroscedastic", 1.0, 0, "all"),
        ("mlp_heteroscedastic", 0.0, 5, "all"),
        ("mlp_regression", 0.5, 0, "last_layer"),
    ],
)
def test_gradients_of_the_objective(name: str, alpha: float, samples: int, weights: str) -> None:
    """In L, δ, σ and the locations, by central differences along random directions."""
    problem = catalogue.get(name)
    la = made(problem, some(problem.x, 3), inducing_classes=torch.tensor([0, 1, 1]), weights=weights)
    la.fit(problem.batches(), iterations=2, lr=0.05, learn=())
    places, root = la.fitted().curvature.places, la.L
    energy = Energy(la.likelihood_object, alpha, samples)
    generator = torch.Generator()

    def value(variables: Variables) -> Tensor:
        return objective(variables, energy, problem.x, problem.y, 11, generator.manual_seed(0))

    variables = Variables(la.engine, places, root, settings(problem))
    assert len(variables.leaves) == (4 if problem.likelihood == "regression" else 3)
    gradients = torch.autograd.grad(value(variables), variables.leaves)
    for i, (leaf, gradient) in enumerate(zip(variables.leaves, gradients, strict=True)):
        step = torch.randn(leaf.shape, dtype=leaf.dtype, generator=torch.Generator().manual_seed(i))
        ends = []
        for size in (1e-5, -1e-5):
            with torch.no_grad():
                leaf.add_(step, alpha=size)
            ends.append(value(variables).item())
            with torch.no_grad():
                leaf.sub_(step, alpha=size)
        assert_close((gradient * step).sum(), (ends[0] - ends[1]) / 2e-5, "finite_difference")
