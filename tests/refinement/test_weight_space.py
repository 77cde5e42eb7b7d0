"""The mode of the linearised model against a dense Newton solution, and what becomes of it afterwards."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.curvature import NativeEF
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidData, UnsupportedError
from tests import grid
from tests import problems as catalogue
from tests.conformance.cases import Case, few, own_dense, truth
from tests.reference import curvature as reference
from tests.reference import predictive, refined
from tests.reference.compare import assert_close

NAMES = ("mlp_classification", "mlp_regression", "mlp_bernoulli_multi", "conv2d_grouped", "bare_parameter", "pair")


def dense_mode(case: Case, la: ParametricLaplace, scale: Tensor) -> Tensor:
    known = truth(case.problem.name)
    delta = la.prior_precision_diag
    return refined.mode(case.mean, known.f, case.jacobian, case.problem.y, _kind(case), scale, delta)


def _kind(case: Case) -> str:
    likelihood = case.problem.likelihood
    return "classification" if likelihood == "reward_modeling" else likelihood


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", structures=["full", "kron"], names=NAMES))
def test_mode(case: Case) -> None:
    la = case.fit(4, prior_precision=0.5, temperature=0.8)
    network = copy.deepcopy(la.model.state_dict())
    found = la.refine(case.problem.batches(5))
    expected = dense_mode(case, la, torch.tensor(1 / 0.8, dtype=torch.float64))
    assert found.converged
    assert_close(la.mean, expected, "backend", label="mode")
    known = truth(case.problem.name)
    f = known.f + case.jacobian @ (expected - case.mean)
    assert_close(la.loss, refined.loss(f, case.problem.y, _kind(case)), "backend", label="loss")
    covariance = torch.linalg.inv(la.evidence().precision.to_dense())
    prediction = la.predict(case.problem.x)
    assert_close(prediction.latent_mean, f, "backend", label="mean alone")
    assert_close(prediction.latent.mean, f, "backend", label="mean")
    variance = predictive.functional_variance(case.jacobian, covariance)
    assert_close(prediction.latent_covariance, variance, "backend", label="covariance")
    if case.structure == "full":
        inner = reference.output_hessian(f, _kind(case), case.problem.y)
        hessian = torch.einsum("bcp,bcd,bdq->pq", case.jacobian, inner, case.jacobian)
        assert_close(own_dense(la), hessian, "backend", label="curvature")
        precision = hessian / 0.8 + 0.5 * torch.eye(len(expected))
        loss = refined.loss(f, case.problem.y, _kind(case))
        ratio = torch.logdet(precision) - len(expected) * torch.tensor(0.5).double().log()
        if case.problem.likelihood != "regression":
            evidence = -loss / 0.8 - 0.5 * (ratio + 0.5 * expected @ expected)
            assert_close(la.log_marginal_likelihood(), evidence, "backend", label="evidence")
    for name, value in la.model.state_dict().items():
        assert torch.equal(value, network[name])


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_several_noises_and_a_prior_mean(structure: str) -> None:
    case = Case(catalogue.get("mlp_regression"), structure, "all")
    sigma = torch.linspace(0.5, 1.5, case.n_outputs, dtype=torch.float64)
    delta = torch.linspace(0.5, 2, len(case.columns), dtype=torch.float64)
    la = case.fit(sigma_noise=sigma, prior_precision=delta, prior_mean=0.3)
    la.refine(case.problem.batches())
    # θ' = θ − μ₀ has a prior around zero
    shifted = refined.mode(
        case.mean - 0.3, truth(case.problem.name).f, case.jacobian, case.problem.y, "regression", sigma**-2, delta
    )
    assert_close(la.mean, shifted + 0.3, "backend")
    mean, _ = la(case.problem.x)
    assert_close(mean, truth(case.problem.name).f + case.jacobian @ (la.mean - case.mean), "backend")


@pytest.mark.parametrize("case", few("all", "last_layer", names=["mlp_classification"]))
def test_every_structure(case: Case) -> None:
    """The mode does not depend on the structure, which the curvature at the mode has."""
    la = case.fit(prior_precision=0.5)
    la.refine(case.problem.batches())
    assert_close(la.mean, dense_mode(case, la, torch.ones((), dtype=torch.float64)), "backend")
    assert la.predict(case.problem.x).latent_variance.min() > 0
    assert "refined to the mode" in repr(la)


def fitted(likelihood: str = "classification", structure: str = "kron", **options: Any) -> ParametricLaplace:
    la = Laplace(grid.network(likelihood), likelihood, "all", structure, **options)
    la.fit(grid.batches(likelihood))
    return la


CONVEX = [name for name in grid.LIKELIHOODS if name != "mean_log_variance"]
"""Likelihoods with a convex loss."""


@pytest.mark.parametrize("likelihood", CONVEX)
def test_float32(likelihood: str) -> None:
    la = fitted(likelihood)
    before = la.log_likelihood - 0.5 * la.scatter
    assert la.refine(grid.batches(likelihood)).converged
    assert la.log_likelihood - 0.5 * la.scatter > before
    assert la.mean.dtype == torch.float32


def test_a_loss_that_is_not_convex() -> None:
    """That of a mean and a log variance is convex in each, not in both: it falls in every step, towards a mode."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 30).double().unsqueeze(1)
    y = x.sin() + 0.3 * x.abs() * torch.randn(30, 1).double()
    la = Laplace(nn.Linear(1, 2).double(), "mean_log_variance", "all", "full")
    la.fit([(x, y)])
    with pytest.warns(ApproximationWarning, match="by a factor only, so that hundreds"):
        first = la.refine([(x, y)], max_steps=5)
    found = la.refine([(x, y)], max_steps=1000)
    assert found.converged
    values = [*first.values, *found.values[1:]]
    assert all(later <= former + 1e-12 * abs(former) for former, later in pairwise(values))


def test_state_copies_and_moves() -> None:
    la, x = fitted(), grid.data()[0]
    plain = la(x)
    la.refine(grid.batches())
    expected, evidence = la(x), la.log_marginal_likelihood()
    assert not torch.equal(plain, expected)
    other = Laplace(grid.network(), "classification", "all", "kron")
    other.load_state_dict(copy.deepcopy(la.state_dict()))
    for same in (other, copy.deepcopy(la)):
        assert torch.equal(same(x), expected)
        assert torch.equal(same.log_marginal_likelihood(), evidence)
        assert repr(same) == repr(la)
    la.to(dtype=torch.float64)
    assert_close(la(x.double()), expected, "float32")
    state = other.state_dict()
    state.pop("refinement")  # a state of before there were refinements
    other.load_state_dict(state)
    assert torch.equal(other(x), plain)


@pytest.mark.parametrize("structure", ["full", "kron", "gp"])
def test_a_loaded_posterior_keeps_a_term_per_output(structure: str) -> None:
    """Under several noises its engine, which is made anew, must split outputs as that of the fit does."""
    x, batches = grid.data("regression")[0], grid.batches("regression")
    sigma = torch.tensor([0.5, 1.0, 1.5])
    size: dict[str, Any] = {"n_subset": 6} if structure == "gp" else {}
    la = fitted("regression", structure, sigma_noise=sigma, **size)
    other = Laplace(grid.network("regression"), "regression", "all", structure, sigma_noise=sigma, **size)
    other.load_state_dict(copy.deepcopy(la.state_dict()))
    copied = copy.deepcopy(la)
    for each in (la, other, copied):
        each.refine(batches)
    for same in (other, copied):
        for value, expected in zip(same(x), la(x), strict=True):
            assert torch.equal(value, expected)
        assert torch.equal(same.log_marginal_likelihood(), la.log_marginal_likelihood())


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
def test_a_fit_that_follows_removes_it() -> None:
    la, x = fitted(), grid.data()[0]
    plain, data = la(x), grid.batches()
    for follow in (
        lambda: la.fit(data),
        lambda: (la.fit(data, override=False), la.forget(data)),
    ):
        la.refine(data)
        assert la.refinement is not None
        follow()
        assert la.refinement is None
        assert_close(la(x), plain, "float32")
        assert "refined" not in repr(la)
    la.refine(data)
    la.fit(data, override=False)  # the sum of unrefined fits
    twice = fitted()
    twice.fit(data, override=False)
    assert torch.equal(la(x), twice(x))


def test_sampled_weights_of_a_refined_posterior() -> None:
    la, x = fitted(), grid.data()[0]
    la.refine(grid.batches())
    with pytest.raises(UnsupportedError, match="glm"):
        la(x, "nn")
    last = Laplace(grid.network(), "classification", "last_layer", "full")
    last.fit(grid.batches())
    last.refine(grid.batches())
    samples = last.functional_samples(x, "nn", 20_000, generator=torch.Generator().manual_seed(0))
    error = samples.std(0) / 20_000**0.5
    assert_close(samples.mean(0), last.predict(x).latent_mean, "mc", standard_error=error)


def test_tuning_sees_the_refined_means() -> None:
    la, (x, y) = fitted("regression"), grid.data("regression")
    la.refine(grid.batches("regression"))
    means = []

    def loss(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
        means.append(mean)
        return (mean - target).square().mean() + variance.diagonal(dim1=1, dim2=2).mean()

    expected = la.predict(x).mean
    la.optimize_prior_precision(method="gridsearch", val_loader=[(x, y)], loss=loss, grid_size=2)
    assert_close(means[0].reshape(-1, *expected.shape)[0], expected, "float32")


def test_refusals_change_nothing() -> None:
    la, x = fitted(), grid.data()[0]
    plain = la(x)
    with pytest.raises(InvalidArgument, match="variational"):
        la.refine(grid.batches(), method="vi")
    with pytest.raises(UnsupportedError, match="'full', 'block'"):
        fitted(structure="ekfac").refine(grid.batches(), method="variational")
    with pytest.raises(InvalidData, match="5 data"):
        la.refine(grid.batches()[:1])
    with pytest.raises(InvalidData, match="batch 0"):
        la.refine([(x, torch.full((12,), 9))])
    for options in ({"max_steps": 0}, {"tolerance": -1.0}, {"n_samples": 1}):
        with pytest.raises(InvalidArgument):
            la.refine(grid.batches(), **options)
    assert torch.equal(la(x), plain)
    other = fitted(backend=NativeEF)
    with pytest.raises(UnsupportedError, match="NativeGGN"):
        other.refine(grid.batches())
    with pytest.warns(ApproximationWarning, match="NOT converged"):
        la.refine(grid.batches(), max_steps=1, tolerance=1e-6)


def test_graphs_that_are_not_kept_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from laplace.refinement import weight_space

    first, second = fitted(), fitted()
    first.refine(grid.batches())
    monkeypatch.setattr(weight_space, "KEPT_BYTES", 0)
    second.refine(iter(grid.batches()))  # read once: an iterator will do
    assert torch.equal(first.mean, second.mean)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_positions_are_refused_with_what_takes_them(weights: str) -> None:
    """Refinement and function space take outputs of one position; the messages say how to ask for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(8, 5, 3), torch.randint(0, 2, (8, 5))
    la = Laplace(model, "classification", weights, "kron")
    la.fit([(x, y)])
    with pytest.raises(UnsupportedError, match=r"refine.*positions, \[5\].*forward_fn="):
        la.refine([(x, y)])
    for options in ({"n_subset": 4}, {"n_subset": 4, "selection": "top"}):
        process = Laplace(model, "classification", weights, "gp", **options)
        with pytest.raises(UnsupportedError, match=r"hessian_structure='gp'.*'full'.*forward_fn="):
            process.fit([(x, y)])
    for structure, options in (("kron", {}), ("gp", {"n_subset": 4})):
        one = Laplace(model, "classification", weights, structure, forward_fn=lambda m, x: m(x)[:, 2], **options)
        one.fit([(x, y[:, 2])])
        assert one.refine([(x, y[:, 2])]).converged
        assert one(x).shape == (8, 2)
