"""Refinement of Gaussian processes on a subset, against weights of the linearised network by dense algebra."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import Laplace, ParametricLaplace
from laplace.errors import InvalidData, UnsupportedError
from tests import grid
from tests import problems as catalogue
from tests.conformance.cases import Case, truth
from tests.pairs import nightly
from tests.reference import curvature as reference
from tests.reference import predictive, refined
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable

DELTA, MU, T, M = 0.5, 0.1, 0.8, 4
NAMES = ("mlp_classification", "mlp_regression", "mlp_bernoulli_multi", "mlp_poisson", "shared_positions")


class Dense:
    """A process on M of N data as a linear model of weights: one set of them, or one for every output.

    The prior precision is δ N/M, and the subset that of the largest tr(Λ J Jᵀ).
    """

    def __init__(self, name: str, weights: str = "all", *, independent: bool = False, delta: Any = DELTA) -> None:
        case, known = Case(catalogue.get(name), "full", weights), truth(name)
        problem, star = case.problem, case.jacobian
        inner = reference.output_hessian(known.f, problem.likelihood, problem.y)
        scores = torch.einsum("ncd,ncp,ndp->n", inner, star, star)
        self.chosen = sorted(scores.topk(M).indices.tolist())
        self.case, self.likelihood, self.y = case, problem.likelihood, problem.y[self.chosen]
        self.copies = c = star.shape[1] if independent else 1
        if independent:  # J of an output acts on the weights of that output alone
            star = torch.einsum("bcp,cd->bcdp", star, torch.eye(c, dtype=torch.float64)).flatten(2)
        prior = torch.as_tensor(delta, dtype=torch.float64).expand(len(case.mean))
        self.star, self.star_f = star, known.f
        self.at, self.delta = (case.mean - MU).repeat(c), len(problem.y) / M * prior.repeat(c)
        self.scale = torch.tensor(1 / T, dtype=torch.float64)

    def fit(self, **options: Any) -> ParametricLaplace:
        settings = {"prior_precision": DELTA, "prior_mean": MU, "temperature": T} | options
        problem, weights = self.case.problem, self.case.weights
        la = Laplace(
            problem.make_model(), problem.likelihood, weights, "gp", n_subset=M, selection="leverage",
            independent_outputs=self.copies > 1, **settings,
        )  # fmt: skip
        la.fit(problem.batches(3))
        return la

    @cached_property
    def mode(self) -> Tensor:
        """θ̂ − μ₀, of all sets of weights."""
        f, jacobian = self.star_f[self.chosen], self.star[self.chosen]
        return refined.mode(self.at, f, jacobian, self.y, self.likelihood, self.scale, self.delta)

    def outputs(self, theta: Tensor) -> Tensor:
        return self.star_f + self.star @ (theta - self.at)

    def precision(self, inner: Tensor) -> Tensor:
        """P of Λ at the M data; processes of their own see its diagonal."""
        inner = self.scale * (torch.diag_embed(inner.diagonal(dim1=1, dim2=2)) if self.copies > 1 else inner)
        jacobian = self.star[self.chosen]
        return torch.einsum("bcp,bcd,bdq->pq", jacobian, inner, jacobian) + torch.diag(self.delta)

    def weights(self, theta: Tensor) -> Tensor:
        """As `la.mean` holds them."""
        return (theta if self.copies == 1 else theta.view(self.copies, -1)) + MU


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_mode_is_that_of_the_subset_over_weights(name: str, independent: bool) -> None:
    dense = Dense(name, independent=independent)
    la, x = dense.fit(), dense.case.problem.x
    found = la.refine(dense.case.problem.batches(4))
    assert found.converged
    theta, f = dense.mode, dense.outputs(dense.mode)
    assert_close(la.mean, dense.weights(theta), "backend", label="weights")
    prediction = la.predict(x)
    assert_close(prediction.latent_mean, f, "backend", label="mean alone")
    assert_close(prediction.latent.mean, f, "backend", label="mean")
    precision = dense.precision(reference.output_hessian(f[dense.chosen], dense.likelihood, dense.y))
    covariance = predictive.functional_variance(dense.star, torch.linalg.inv(precision))
    assert_close(prediction.latent_covariance, covariance, "backend", label="covariance")
    if dense.likelihood not in ("regression", "poisson"):  # no normaliser
        value = refined.objective(
            theta, dense.at, dense.star_f[dense.chosen], dense.star[dense.chosen], dense.y, dense.likelihood,
            dense.scale, dense.delta,
        )  # fmt: skip
        expected = -value - 0.5 * (torch.logdet(precision) - dense.delta.log().sum())
        assert_close(la.log_marginal_likelihood(), expected, "backend", label="evidence")


def test_a_prior_per_tensor() -> None:
    case = Case(catalogue.get("mlp_classification"), "full", "all")
    per_tensor = torch.linspace(0.5, 2, int(case.tensor_of.max()) + 1, dtype=torch.float64)
    for independent in (False, True):
        dense = Dense("mlp_classification", independent=independent, delta=per_tensor[case.tensor_of])
        la = dense.fit(prior_precision=per_tensor)
        la.refine(case.problem.batches())
        assert_close(la.mean, dense.weights(dense.mode), "backend")


def test_several_noises() -> None:
    sigma = torch.linspace(0.5, 1.5, 2, dtype=torch.float64)
    for independent in (False, True):
        dense = Dense("mlp_regression", independent=independent)
        dense.scale = sigma**-2 / T
        la = dense.fit(sigma_noise=sigma)
        la.refine(dense.case.problem.batches())
        assert_close(la.mean, dense.weights(dense.mode), "backend")


def test_all_data_are_the_mode_over_weights() -> None:
    case = Case(catalogue.get("mlp_classification"), "full", "all")
    full = case.fit(prior_precision=DELTA)
    full.refine(case.problem.batches())
    la = Laplace(case.problem.make_model(), "classification", "all", "gp", n_subset=6, prior_precision=DELTA)
    la.fit(case.problem.batches(4))
    la.refine(case.problem.batches(4))
    assert_close(la.mean, full.mean, "backend")
    assert_close(
        la.predict(case.problem.x).latent_covariance, full.predict(case.problem.x).latent_covariance, "backend"
    )
    assert_close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), "backend")


@pytest.mark.parametrize("independent", [False, True])
def test_the_variational_process_against_brute_force(independent: bool) -> None:
    """The bound of the M data, maximised over all Gaussians: where outputs share no weights the best one factorises."""
    dense = Dense("mlp_bernoulli_multi", "last_layer", independent=independent)
    la = dense.fit()
    data = dense.case.problem.batches(4)
    found = la.refine(data, method="variational", tolerance=1e-12, max_steps=500)
    assert found.converged
    value, mean, covariance = refined.best_elbo(
        dense.at, dense.star_f[dense.chosen], dense.star[dense.chosen], dense.y, 1 / T, dense.delta, diagonal=False
    )
    assert found.elbo is not None
    assert_close(found.elbo, value, "backend", label="bound")
    assert_close(la.mean, dense.weights(mean), "float32", label="mean")
    expected = predictive.functional_variance(dense.star, covariance)
    assert_close(la.predict(dense.case.problem.x).latent_covariance, expected, "float32", label="covariance")
    assert all(after > before for before, after in zip(found.values[:-1], found.values[1:], strict=True))


@pytest.mark.parametrize("independent", [False, *nightly(True)])
def test_the_variational_process_is_stationary(independent: bool) -> None:
    """Opper and Archambeau (2009): a = −E[∇(−log p)], and S⁻¹ is the prior's plus E[Λ] at the data alone."""
    dense = Dense("mlp_classification", independent=independent)
    la, x = dense.fit(), dense.case.problem.x
    found = la.refine(dense.case.problem.batches(), "variational", n_samples=1000, tolerance=1e-9)
    assert found.converged
    latent = la.predict(x).latent
    f, covariance = latent.mean[dense.chosen], latent.covariance[dense.chosen]
    gradient, inner = refined.expected_slopes(f, covariance, dense.y)
    c = dense.star.shape[1]
    theta = (la.mean - MU).flatten()
    residual = dense.scale * torch.einsum("bcp,bc->p", dense.star[dense.chosen], gradient) + dense.delta * theta
    assert residual.norm() < 0.02 * (dense.delta * theta).norm()
    expected = predictive.functional_variance(dense.star, torch.linalg.inv(dense.precision(inner)))
    assert expected.shape[1] == c
    torch.testing.assert_close(latent.covariance, expected, rtol=0.03, atol=0.03 * float(expected.abs().max()))


def fitted(independent: bool = False, **options: Any) -> ParametricLaplace:
    la = Laplace(grid.network(), "classification", "all", "gp", n_subset=6, independent_outputs=independent, **options)
    la.fit(grid.batches())
    return la


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("method", ["map", "variational"])
def test_state_copies_and_moves(independent: bool, method: Any) -> None:
    la, x = fitted(independent), grid.data()[0]
    plain = la(x)
    la.refine(grid.batches(), method)
    expected, evidence = la(x), la.log_marginal_likelihood()
    assert not torch.equal(plain, expected)
    other = Laplace(grid.network(), "classification", "all", "gp", n_subset=6, independent_outputs=independent)
    other.load_state_dict(copy.deepcopy(la.state_dict()))
    for same in (other, copy.deepcopy(la)):
        assert torch.equal(same(x), expected)
        assert torch.equal(same.log_marginal_likelihood(), evidence)
        assert repr(same) == repr(la)
        assert repr(same.refinement) == repr(la.refinement)
    la.to(dtype=torch.float64)
    assert_close(la(x.double()), expected, "float32")
    la.fit([(x.double(), y) for x, y in grid.batches()])
    assert la.refinement is None
    assert_close(la(x.double()), plain, "float32")


@pytest.mark.parametrize("independent", [False, True])
def test_a_second_search_begins_at_the_end(independent: bool) -> None:
    la = fitted(independent)
    la.refine(grid.batches(), tolerance=1e-9)
    mean = la.mean.clone()
    again = la.refine(grid.batches(), tolerance=1e-5)
    assert again.steps == 0
    assert_close(la.mean, mean, "float32")


def test_tuning_and_mixtures_see_the_refined_means() -> None:
    la, (x, y) = fitted(independent=True), grid.data()
    la.refine(grid.batches())
    means = []

    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        means.append(prediction)
        return -prediction.gather(1, target.unsqueeze(1)).log().mean()

    la.optimize_prior_precision(method="gridsearch", val_loader=[(x, y)], loss=loss, grid_size=2)
    assert means
    assert_close(la.predict(x).latent.mean, la.predict(x).latent_mean, "float32")


def test_refusals() -> None:
    la, x = fitted(independent=True), grid.data()[0]
    plain = la(x)
    with pytest.raises(InvalidData, match="10 data"):
        la.refine(grid.batches()[:2])
    assert torch.equal(la(x), plain)
    la.refine(grid.batches())
    with pytest.raises(UnsupportedError, match="independent_outputs"):
        la.sample(2)
    with pytest.raises(UnsupportedError, match="independent_outputs"):
        _ = la.predict(x, outputs=[0]).latent_mean
    ella = Laplace(grid.network(), "classification", "all", "gp", 8, 4, functional_approximation="nystrom")
    ella.fit(grid.batches())
    with pytest.raises(UnsupportedError, match="functional_approximation='sod'"):
        ella.refine(grid.batches(), "variational")
