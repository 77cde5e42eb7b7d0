"""The Nyström approximation, against dense algebra in the span of its directions and the full Laplace approximation."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from laplace import ELLA, LLELLA, Laplace
from laplace.curvature import NativeEF
from laplace.errors import CurvatureError, InvalidArgument, UnsupportedError
from laplace.gp.nystrom import DirectionPass, NystromOptions
from tests import problems as catalogue
from tests.reference import curvature as reference
from tests.reference import evidence
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable

NAMES = ["mlp_regression", "mlp_classification", "mlp_ignored_labels", "shared_positions", "dict_input", "tied_head"]


def fitted(problem: catalogue.Problem, rows: int, directions: int, weights: str = "all", size: int = 4, **options):
    la = Laplace(
        problem.make_model(), problem.likelihood, weights, "gp", rows, directions, prior_precision=0.3, temperature=1.6,
        functional_approximation="nystrom", **options,
    )  # fmt: skip
    la.fit(problem.batches(size))
    return la


@pytest.mark.parametrize("name", NAMES)
def test_the_posterior_in_the_span(name: str) -> None:
    problem = catalogue.get(name)
    la = fitted(problem, 5, 3)
    model = problem.make_model()
    names = reference.trainable_names(model)
    jacobian, f = reference.flat_jacobian(model, problem.x, names)
    directions = la.dual_directions
    assert_close(directions.T @ directions, torch.eye(3), "algebra")
    hessian = reference.ggn(model, problem.x, problem.y, names, problem.likelihood) / 1.6
    assert_close(la.feature_gram / 1.6, directions.T @ hessian @ directions, "backend")
    inner = directions.T @ hessian @ directions + 0.3 * torch.eye(3, dtype=torch.float64)
    features = (jacobian @ directions).flatten(0, 1)
    expected = features @ torch.linalg.solve(inner, features.T)
    mean, covariance = la.predictive_moments(problem.x, joint=True)
    assert_close(mean, f.flatten(), "backend")
    assert_close(covariance, expected, "backend")
    count, outputs = f.shape
    blocks = expected.view(count, outputs, count, outputs).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    assert_close(la.predictive_moments(problem.x)[1], blocks, "backend")
    assert_close(la.functional_variance_fast(problem.x)[1], blocks.diagonal(dim1=1, dim2=2), "backend")
    ridge = 0.3 * torch.eye(len(directions), dtype=torch.float64)
    whole = directions @ directions.T @ hessian @ directions @ directions.T + ridge
    assert_close(la.log_det_posterior_precision, torch.linalg.slogdet(whole).logabsdet, "backend")
    loss = reference.loss(f, problem.y, problem.likelihood)
    expected = evidence.log_likelihood(loss, count, outputs, 1.0, 1.6, problem.likelihood)
    assert_close(la.log_likelihood, expected, "backend")


def test_directions_are_the_leading_ones_of_single_outputs() -> None:
    problem = catalogue.get("mlp_classification")
    model = problem.make_model()
    jacobian, f = reference.flat_jacobian(model, problem.x, reference.trainable_names(model))
    whole = fitted(problem, 6, 6).dual_directions
    outside = (jacobian - jacobian @ whole @ whole.T).norm(dim=2) / jacobian.norm(dim=2)
    assert (outside.min(1).values < 1e-10).all()  # of every datum one output lies in the span
    rows = jacobian[torch.arange(len(f)), outside.argmin(1)]
    leading = torch.linalg.svd(rows).Vh[:3].T
    some = fitted(problem, 6, 3).dual_directions
    assert_close(some @ some.T, leading @ leading.T, "backend")


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_span_of_all_jacobians_is_the_full_posterior(weights: str) -> None:
    problem = catalogue.get("mlp_regression_single")
    full = Laplace(problem.make_model(), "regression", weights, "full", prior_precision=0.3, temperature=1.6)
    full.fit(problem.batches(4))
    rows = torch.cat([jacobian.dense() for jacobian, _ in full.engine.jacobian(problem.x)])[:, 0]
    la = fitted(problem, 7, int(torch.linalg.matrix_rank(rows)), weights)
    assert type(la) is (ELLA if weights == "all" else LLELLA)
    assert_close(la(problem.x)[1], full(problem.x)[1], "backend")
    assert_close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), "backend")
    sigma = torch.tensor([0.3], dtype=torch.float64)
    assert_close(la.log_marginal_likelihood(2.0, sigma), full.log_marginal_likelihood(2.0, sigma), "backend")


def test_gradients_of_the_evidence_and_of_validation_losses() -> None:
    problem = catalogue.get("mlp_regression")
    values = torch.tensor([0.3, 0.4, 0.6, 1.4], dtype=torch.float64)  # δ, both σ, T
    la = fitted(problem, 6, 4, sigma_noise=values[1:3])
    leaf = values.clone().requires_grad_()
    (gradients,) = torch.autograd.grad(la.log_marginal_likelihood(leaf[:1], leaf[1:3], leaf[3]), leaf)
    for k, gradient in enumerate(gradients):
        ends = []
        for step in (1e-5, -1e-5):
            moved = values.clone()
            moved[k] += step
            ends.append(la.log_marginal_likelihood(moved[:1], moved[1:3], moved[3]).item())
        assert_close(gradient, (ends[0] - ends[1]) / 2e-5, "finite_difference")


def test_tuning() -> None:
    """Adam and a grid see the same loss, which is that of predictions at the chosen prior."""
    problem = catalogue.get("mlp_classification")
    la = fitted(problem, 6, 4)
    loader = problem.batches(4)
    grid = torch.logspace(-3, 3, 61, dtype=torch.float64)
    coarse = la.optimize_hyperparameters(
        objective="nll", method="grid", val_loader=loader, grid={"prior_precision": grid}
    )
    smooth = la.optimize_hyperparameters(objective="nll", method="lbfgs", val_loader=loader)
    assert smooth.value <= coarse.value + 1e-12
    expected = nn.functional.nll_loss(la(problem.x).log(), problem.y)
    assert_close(smooth.value, expected, "algebra")
    la.optimize_prior_precision(n_steps=20)
    assert la.prior_precision.isfinite().all()


def test_a_state_needs_no_data() -> None:
    problem = catalogue.get("mlp_classification")
    la = fitted(problem, 5, 3)
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    other = ELLA(problem.make_model(), "classification", 5, 3, temperature=1.6)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(problem.x), la(problem.x))
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())


def test_weights_lie_in_the_span() -> None:
    la = fitted(catalogue.get("mlp_classification"), 5, 3)
    samples = la.sample(2000, torch.Generator().manual_seed(0)) - la.mean
    directions = la.dual_directions
    assert_close(samples @ directions @ directions.T, samples, "algebra")
    expected = la.posterior_covariance
    variances = expected.diagonal()
    error = ((variances[:, None] * variances + expected.square()) / 2000).sqrt()
    assert_close(samples.T @ samples / 2000, expected, "mc", standard_error=error)
    assert_close(la.posterior_variance, variances, "algebra")


@pytest.mark.filterwarnings("ignore:the data that are added by override=False were fitted before")
def test_what_is_refused() -> None:
    model = nn.Linear(2, 2)
    x, y = torch.randn(5, 2), torch.randint(2, (5,))
    for options, match in (
        ((0, 1), "subsample_size"),
        ((3, 0), "n_eigenvalues"),
        ((3, 4), "exceeds"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            ELLA(model, "classification", *options)
    with pytest.raises(InvalidArgument, match="'ef'"):
        ELLA(model, "classification", 3, 2, backend=NativeEF)
    with pytest.raises(ValueError, match="accepted are"):
        Laplace(model, "classification", "subnetwork", "gp", 3, 2, functional_approximation="nystrom")
    la = ELLA(model, "classification", 5, 5)
    with pytest.raises(InvalidArgument, match="only once"):
        la.fit(iter([(x, y)]))
    same = ELLA(model, "classification", 5, 5)
    with pytest.raises(InvalidArgument, match="span"):
        same.fit([(x[:1].expand(5, 2), y)])
    la = ELLA(model, "classification", 4, 2)
    la.fit([(x, y)])
    with pytest.raises(CurvatureError, match="override=True"):
        la.fit([(x, y)], override=False)
    la.prior_precision = torch.ones(2)
    with pytest.raises(UnsupportedError, match="one prior precision"):
        la(x)


@pytest.mark.parametrize("size", [2, 5, 30])
def test_balanced_choices_take_turns(size: int) -> None:
    """Two data of the rarest class, three of each other, all of a class alike, however the loader cuts them."""
    generator = torch.Generator().manual_seed(0)
    y = torch.tensor([0] * 20 + [1] * 8 + [2] * 2)[torch.randperm(30, generator=generator)]
    x = torch.arange(30.0).unsqueeze(1)
    counts = torch.zeros(30)
    for seed in range(100):
        la = ELLA(nn.Linear(1, 3), "classification", 8, 1, seed=seed)
        data_pass = DirectionPass(la.engine, NystromOptions(8, 1, seed, balanced=True))
        for start in range(0, 30, size):
            data_pass.add(x[start : start + size], y[start : start + size])
        kept = torch.cat([rows.x for rows in data_pass.pool.chunks()])[:, 0].long()
        assert torch.bincount(y[kept]).tolist() == [3, 3, 2]
        counts[kept] += 1
    # Of 100 draws of 3 of 20 (or 8): np, with a standard deviation of √(np(1 − p)).
    for label, p in ((0, 3 / 20), (1, 3 / 8)):
        assert (counts[y == label] - 100 * p).abs().max() < 5 * (100 * p * (1 - p)) ** 0.5


def test_validation_data_are_recorded() -> None:
    problem = catalogue.get("mlp_classification")
    la = fitted(problem, 5, 3)
    plain = la(problem.x)
    la.fit(problem.batches(2), balanced=True, val_loader=problem.batches(4), val_steps=2)
    assert la.fit_history_["processed_examples"] == [4, 6]
    expected = nn.functional.nll_loss(la(problem.x).log(), problem.y)
    assert_close(la.fit_history_["val_nll"][-1], expected, "algebra")
    la.fit(problem.batches(4))
    assert torch.equal(la(problem.x), plain)
    assert la.fit_history_["val_nll"] == []
    with pytest.raises(InvalidArgument, match="val_steps"):
        la.fit(problem.batches(4), val_steps=0)
    regression = fitted(catalogue.get("mlp_regression"), 5, 3)
    with pytest.raises(InvalidArgument, match="class labels"):
        regression.fit(catalogue.get("mlp_regression").batches(4), balanced=True)


def test_listed_candidates() -> None:
    """The contract's `optimize_hyperparameters(val_loader, grid)`: each is scored as predictions at it are."""
    problem = catalogue.get("mlp_regression")
    la = fitted(problem, 6, 4)
    loader = problem.batches(4)
    pairs = [(0.1, 0.4), (3.0, 0.9), (30.0, 2.5), 7.0]
    losses = []
    for pair in pairs:
        la.prior_precision, la.sigma_noise = pair if isinstance(pair, tuple) else (pair, 1.0)
        mean, variance = la.functional_variance_fast(problem.x)
        spread = (variance + la.sigma_noise**2).sqrt()
        losses.append(-torch.distributions.Normal(mean, spread).log_prob(problem.y).sum(1).mean())
    la.sigma_noise = 1.0
    result = la.optimize_hyperparameters(loader, pairs)
    assert_close(result.values, torch.stack(losses), "algebra")
    best = pairs[int(torch.stack(losses).argmin())]
    assert_close(torch.stack([la.prior_precision[0], la.sigma_noise]), best if best != 7.0 else (7.0, 1.0), "exact")
    assert la.fit_history_["tuning"] == [result]
    la.sigma_noise = 1.0
    assert la.optimize_hyperparameters(val_loader=loader, grid=[2.0, 3.0]).value > 0
    before = la.prior_precision
    for grid, match in (([], "no candidate"), ([(1.0, 2.0, 3.0)], "pair"), ([-1.0], "positive")):
        with pytest.raises(InvalidArgument, match=match):
            la.optimize_hyperparameters(loader, grid)
    assert torch.equal(la.prior_precision, before)
    classes = fitted(catalogue.get("mlp_classification"), 5, 3)
    with pytest.raises(InvalidArgument, match="prior precision"):
        classes.optimize_hyperparameters(catalogue.get("mlp_classification").batches(4), [(1.0, 1.0)])
