"""Variational posteriors of inducing outputs, against dense algebra, quadrature and the posterior in closed form."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from laplace import Laplace, LLVaLLA, VaLLA
from laplace.core.gaussian import GaussianOutputs
from laplace.curvature import NativeEF
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, TuningWarning, UnsupportedError
from laplace.extensions.valla import Energy
from laplace.extensions.valla_training import Training, Variables, k_means, objective
from laplace.likelihoods import get_likelihood
from tests import problems as catalogue
from tests.reference import curvature as reference
from tests.reference import evidence, variational
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable

NAMES = [
    "mlp_regression", "mlp_classification", "mlp_bernoulli_multi", "mlp_poisson", "mlp_heteroscedastic",
    "mlp_ignored_labels", "dict_input", "tied_head",
]  # fmt: skip
HYPER = {"prior_precision": 0.3, "prior_mean": 0.1, "temperature": 1.6}


def hyper(problem: catalogue.Problem) -> dict[str, Any]:
    return HYPER | ({"sigma_noise": 0.45} if problem.likelihood == "regression" else {})


def some(x: Any, count: int) -> Any:
    return x[:count].clone() if isinstance(x, Tensor) else {key: value[:count] for key, value in x.items()}


def made(problem: catalogue.Problem, places: Any, *rest: Any, weights: str = "all", **options: Any) -> VaLLA:
    return Laplace(
        problem.make_model(), problem.likelihood, weights, "gp", places, *rest, functional_approximation="variational",
        **(hyper(problem) | options),
    )  # fmt: skip


class Dense:
    """Dense quantities of a trained posterior."""

    def __init__(self, problem: catalogue.Problem, la: VaLLA) -> None:
        model = problem.make_model()
        names = reference.trainable_names(model)
        self.jacobian, self.f = reference.flat_jacobian(model, problem.x, names)
        at, _ = reference.flat_jacobian(model, la.inducing_locations, names)
        self.rows = at[torch.arange(len(at)), la.inducing_classes]
        self.inner = reference.output_hessian(self.f, problem.likelihood, problem.y)
        self.theta = reference.flat_parameters(model, names)
        self.delta, sigma = la.prior_precision.item(), la.sigma_noise.item()
        self.scale = torch.tensor(1 / (sigma**2 * HYPER["temperature"]), dtype=torch.float64)
        self.covariance = variational.posterior_covariance(self.rows, la.L, self.delta)
        loss = reference.loss(self.f, problem.y, problem.likelihood)
        counted = int((problem.y != reference.IGNORED).sum()) if problem.y.ndim == 1 else len(problem.y)
        self.loglik = evidence.log_likelihood(
            loss, counted, self.f.shape[1], sigma, HYPER["temperature"], problem.likelihood
        )

    @property
    def divergence(self) -> Tensor:
        return variational.divergence(self.theta, self.covariance, HYPER["prior_mean"], self.delta)

    @property
    def elbo(self) -> Tensor:
        expected = variational.expected_log_likelihood(
            self.loglik, self.jacobian, self.inner, self.covariance, self.scale
        )
        return expected - self.divergence


@pytest.mark.parametrize("name", NAMES)
def test_the_posterior_and_its_bound(name: str) -> None:
    problem = catalogue.get(name)
    la = made(problem, some(problem.x, 4), inducing_classes=torch.tensor([0, 1, 1, 0]))
    la.fit(problem.batches(4), iterations=3, lr=0.05)
    assert torch.equal(la.L, la.L.tril()) and la.L.tril(-1).abs().sum() > 0
    dense = Dense(problem, la)
    expected = torch.einsum("ncp,pq,mdq->ncmd", dense.jacobian, dense.covariance, dense.jacobian)
    mean, covariance = la.predictive_moments(problem.x, joint=True)
    assert_close(mean, dense.f.flatten(), "backend")
    assert_close(covariance, expected.flatten(2).flatten(0, 1), "backend")
    blocks = expected.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    assert_close(la.predictive_moments(problem.x)[1], blocks, "backend")
    assert_close(la.functional_variance_fast(problem.x)[1], blocks.diagonal(dim1=1, dim2=2), "backend")
    assert_close(la.posterior_covariance, dense.covariance, "backend")
    assert_close(la.posterior_variance, dense.covariance.diagonal(), "backend")
    precision = torch.linalg.inv(dense.covariance)
    assert_close(la.posterior_precision, precision, "backend")
    assert_close(la.log_det_posterior_precision, torch.linalg.slogdet(precision).logabsdet, "backend")
    step = torch.linspace(-1, 1, len(precision), dtype=torch.float64)
    assert_close(la.square_norm(la.mean + step), step @ precision @ step, "backend")
    assert_close(la.log_likelihood, dense.loglik, "backend")
    assert_close(la.elbo, dense.elbo, "backend")
    full = Laplace(problem.make_model(), problem.likelihood, "all", "full", **hyper(problem))
    full.fit(problem.batches(4))
    noise = {"sigma_noise": la.sigma_noise} if problem.likelihood == "regression" else {}
    assert la.elbo < full.log_marginal_likelihood(la.prior_precision, **noise)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_all_data_as_inducing_outputs_are_the_full_posterior(weights: str) -> None:
    """L starts at its optimum, Λ/σ² on every output: the bound is tight, and training has nowhere to go."""
    problem = catalogue.get("mlp_regression_single")
    full = Laplace(problem.make_model(), "regression", weights, "full", **hyper(problem))
    full.fit(problem.batches(4))
    la = made(problem, problem.x, weights=weights, alpha=0.0)
    assert type(la) is (VaLLA if weights == "all" else LLVaLLA)
    la.fit(problem.batches(4), iterations=0)
    assert_close(
        la.predictive_moments(problem.x, joint=True)[1], full._latent(problem.x, "joint").covariance, "backend"
    )
    assert_close(la.elbo, full.log_marginal_likelihood(), "backend")
    settings = {"prior_precision": 2.0}  # of the prior L knows nothing
    assert_close(la.log_marginal_likelihood(**settings), full.log_marginal_likelihood(**settings), "backend")
    settings["sigma_noise"] = 0.6  # but of the noise
    assert la.log_marginal_likelihood(**settings) < full.log_marginal_likelihood(**settings) - 0.1


def settings(problem: catalogue.Problem, **options: Any) -> Training:
    la = made(problem, "random", 1, mc_softmax_samples=8, **options)
    return Training(
        1, None, 0.1, ("prior_precision", "sigma_noise", "inducing_locations"), la.prior_precision, la.sigma_noise,
        la.temperature, lambda p: (p.mean() - HYPER["prior_mean"]).square().sum(), 0,
    )  # fmt: skip


def test_the_objective_is_the_negative_bound() -> None:
    """At α = 0: of all data as one batch, and on average over batches of one size."""
    problem = catalogue.get("mlp_regression")
    la = made(problem, problem.x[:3], alpha=0.0)
    la.fit(problem.batches(), iterations=2, lr=0.05)
    training = settings(problem, prior_precision=la.prior_precision, sigma_noise=la.sigma_noise)
    variables = Variables(la.engine, la.fitted().curvature.places, la.L, training)
    energy, generator = Energy(la.likelihood_object, 0.0, 0), torch.Generator()
    count = len(problem.y)
    whole = objective(variables, energy, problem.x, problem.y, count, generator)
    assert_close(whole, -Dense(problem, la).elbo, "backend")
    parts = [objective(variables, energy, x, y, count, generator) for x, y in problem.batches(1)]
    assert_close(torch.stack(parts).mean(), whole, "algebra")


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.5])
def test_energies_of_a_regression(alpha: float) -> None:
    noise = 0.6
    energy = Energy(get_likelihood("regression"), alpha, 0)
    latent = GaussianOutputs(torch.tensor([[0.3, -1.0]]).double(), torch.tensor([[0.8, 0.05]]).double())
    y = torch.tensor([[1.1, -0.4]]).double()
    one = torch.ones((), dtype=torch.float64)
    expected = sum(
        variational.energy(
            lambda f, target=target: -0.5 * ((target - f) / noise) ** 2 - math.log(noise * math.sqrt(2 * math.pi)),
            mean, variance, alpha,
        )
        for target, mean, variance in zip(y[0].tolist(), latent.mean[0].tolist(), latent.covariance[0].tolist(),
                                          strict=True)
    )  # fmt: skip
    found = energy.log_terms(latent, y, noise * one, one, torch.Generator())
    assert_close(found, [expected], "algebra")
    tempered = energy.log_terms(latent, y, noise * one, 2 * one, torch.Generator())
    normaliser = -2 * math.log(noise * math.sqrt(2 * math.pi))
    assert_close(tempered, [(expected + normaliser) / 2], "algebra")


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_energies_by_samples(alpha: float) -> None:
    """Two classes: the difference of the latents is a Gaussian, over which quadrature is exact."""
    covariance = torch.tensor([[[0.9, 0.3], [0.3, 1.4]]]).double()
    latent = GaussianOutputs(torch.tensor([[0.4, -0.2]]).double(), covariance)
    one, count = torch.ones((), dtype=torch.float64), 200_000
    energy = Energy(get_likelihood("classification"), alpha, count)
    found = energy.log_terms(latent, torch.tensor([1]), one, 2 * one, torch.Generator().manual_seed(0))
    variance = 0.9 + 1.4 - 0.6
    expected = variational.energy(functional.logsigmoid, -0.6, variance, alpha)
    # The log likelihood varies by less than √variance, and p^α by less than that relative to its mean.
    assert_close(found, [expected / 2], "mc", standard_error=0.5 * math.sqrt(variance / count))


def test_the_probit_energy() -> None:
    latent = GaussianOutputs(torch.tensor([[0.4, -0.2, 1.0]]).double(), torch.tensor([[0.9, 2.0, 0.1]]).double())
    one = torch.ones((), dtype=torch.float64)
    found = Energy(get_likelihood("classification"), 1.0, 0).log_terms(
        latent, torch.tensor([1]), one, 2 * one, torch.Generator()
    )
    scaled = latent.mean / (1 + math.pi / 8 * latent.covariance).sqrt()
    assert_close(found, scaled.log_softmax(1)[:, 1] / 2, "algebra")


def test_the_bound_at_another_temperature() -> None:
    problem = catalogue.get("mlp_regression")
    la = made(problem, problem.x[:4])
    la.fit(problem.batches(4), iterations=2, lr=0.05)
    temperature = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(la.marglik(temperature=temperature), temperature)
    up, down = (la.marglik(temperature=1.4 + step).item() for step in (1e-5, -1e-5))
    assert_close(gradient, (up - down) / 2e-5, "finite_difference")


def test_gradients_and_tuning_of_the_bound() -> None:
    problem = catalogue.get("mlp_regression")
    noise = torch.tensor([0.4, 0.6], dtype=torch.float64)
    la = made(problem, problem.x[:4], sigma_noise=noise)
    la.fit(problem.batches(4), iterations=2, lr=0.05)
    assert la.sigma_noise.shape == (2,) and not torch.equal(la.sigma_noise, noise)
    delta = torch.tensor([0.3], dtype=torch.float64)
    leaves = [delta.clone().requires_grad_(), noise.clone().requires_grad_()]
    gradients = torch.cat(torch.autograd.grad(la.log_marginal_likelihood(*leaves), leaves))
    for k, gradient in enumerate(gradients):
        ends = []
        for step in (1e-5, -1e-5):
            moved = torch.cat([delta, noise])
            moved[k] += step
            ends.append(la.log_marginal_likelihood(moved[:1], moved[1:]).item())
        assert_close(gradient, (ends[0] - ends[1]) / 2e-5, "finite_difference")
    before = la.elbo
    with pytest.warns(TuningWarning, match="the evidence chose a noise of 1.99"):  # of few data
        la.optimize_hyperparameters(tune=("prior_precision", "sigma_noise"))
    assert la.elbo > before
    # Validation losses: Adam's, a grid's and that of predictions are one.
    grid = torch.logspace(-3, 3, 61, dtype=torch.float64)
    loader = problem.batches(4)
    coarse = la.optimize_hyperparameters(
        objective="nll", method="grid", val_loader=loader, grid={"prior_precision": grid}
    )
    mean, variance = la.functional_variance_fast(problem.x)
    expected = -torch.distributions.Normal(mean, (variance + la.sigma_noise**2).sqrt()).log_prob(problem.y).sum(1)
    assert_close(coarse.value, expected.mean(), "algebra")
    smooth = la.optimize_hyperparameters(objective="nll", method="lbfgs", val_loader=loader)
    assert smooth.value <= coarse.value + 1e-12


def test_candidates_of_other_noises_and_temperatures() -> None:
    """The posterior does not depend on them: only its prior precision changes a variance."""
    problem = catalogue.get("mlp_regression")
    la = made(problem, problem.x[:4])
    la.fit(problem.batches(4), iterations=2, lr=0.05)
    former = la.prior_precision.item(), la.sigma_noise.item()
    axes = {"prior_precision": [0.1, 0.7, 2.0], "sigma_noise": [0.4, 1.1, 3.0]}
    with pytest.warns(TuningWarning, match="edge"):
        result = la.optimize_hyperparameters(
            ("prior_precision", "sigma_noise"), "nll", "grid", val_loader=problem.batches(4), grid=axes
        )
    for i, delta in enumerate(axes["prior_precision"]):
        for j, sigma in enumerate(axes["sigma_noise"]):
            la.prior_precision, la.sigma_noise = delta, sigma
            mean, variance = la.functional_variance_fast(problem.x)
            density = torch.distributions.Normal(mean, (variance + sigma**2).sqrt()).log_prob(problem.y)
            assert_close(result.values[i, j], -density.sum(1).mean(), "algebra")
    la.prior_precision, la.sigma_noise = former
    before = la(problem.x)[1]
    la.temperature = 7.0
    assert torch.equal(la(problem.x)[1], before)


def test_what_is_learnt_and_what_starts_anew() -> None:
    problem = catalogue.get("mlp_regression")
    given = problem.x[:3].clone()
    la = made(problem, given)
    la.fit(problem.batches(4), iterations=4, lr=0.05)
    first = la.L, la.inducing_locations, la.prior_precision, la.sigma_noise
    assert torch.equal(given, problem.x[:3])
    assert not torch.equal(la.inducing_locations, given)
    assert la.prior_precision.item() != HYPER["prior_precision"] and la.sigma_noise.item() != 0.45
    again = made(problem, given)
    again.fit(problem.batches(4), n_epochs=2, lr=0.05)
    assert all(torch.equal(a, b) for a, b in zip(first, (again.L, again.inducing_locations, again.prior_precision,
                                                         again.sigma_noise), strict=True))  # fmt: skip
    assert len(la.fit_history_["objective"]) == len(again.fit_history_["objective"]) == 4
    la.fit(problem.batches(4), iterations=0)  # starts anew, at the hyper-parameters that were learnt
    assert torch.equal(la.inducing_locations, given) and torch.equal(la.L, la.L.diag().diag())
    assert torch.equal(la.prior_precision, first[2]) and torch.equal(la.sigma_noise, first[3])
    again.fit(problem.batches(4), override=False, iterations=0)
    assert torch.equal(again.L, first[0]) and torch.equal(again.inducing_locations, first[1])
    again.fit(problem.batches(4), iterations=4, lr=0.05, learn=("prior_precision",))
    assert torch.equal(again.inducing_locations, given) and torch.equal(again.sigma_noise, first[3])
    assert not torch.equal(again.prior_precision, first[2])


def test_validation_data_are_recorded() -> None:
    problem = catalogue.get("mlp_classification")
    la = made(problem, "random", 3, seed=1)
    la.fit(problem.batches(2), iterations=5, lr=0.1, val_loader=problem.batches(4), val_steps=2)
    assert la.fit_history_["val_step"] == [2, 4, 5]
    expected = functional.nll_loss(la(problem.x).log(), problem.y)
    assert_close(la.fit_history_["val_nll"][-1], expected, "algebra")
    regression = catalogue.get("mlp_regression")
    la = made(regression, regression.x[:2])
    la.fit(regression.batches(4), iterations=2, val_loader=regression.batches(4))
    mean, variance = la.functional_variance_fast(regression.x)
    expected = -torch.distributions.Normal(mean, (variance + la.sigma_noise**2).sqrt()).log_prob(regression.y).sum(1)
    assert la.fit_history_["val_step"] == [2]
    assert_close(la.fit_history_["val_nll"], [expected.mean()], "algebra")


def test_locations_that_are_chosen() -> None:
    problem = catalogue.get("mlp_classification")
    la = made(problem, "random", 4, seed=2)
    la.fit(problem.batches(4), iterations=0)
    rows = (la.inducing_locations[:, None] == problem.x).all(2)
    assert rows.sum(1).tolist() == [1] * 4 and rows.sum(0).amax() == 1
    assert torch.equal(la.inducing_classes, problem.y[rows.int().argmax(1)])
    regression = catalogue.get("mlp_regression")
    la = made(regression, "kmeans", 4)
    la.fit(regression.batches(4), iterations=0)
    assert la.inducing_classes.tolist() == [0, 1, 0, 1]
    whole = made(regression, "kmeans", len(regression.x))
    whole.fit(regression.batches(4), iterations=0)
    assert_close(whole.inducing_locations.sort(0).values, regression.x.sort(0).values, "algebra")


def test_k_means_finds_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]], dtype=torch.float64)
    points = centres.repeat(40, 1) + 0.3 * torch.randn(120, 2, dtype=torch.float64, generator=generator)
    found = k_means(points, 3, generator)
    order = torch.cdist(centres, found).argmin(1)
    expected = torch.stack([points[k::3].mean(0) for k in range(3)])
    assert_close(found[order], expected, "algebra")
    same = k_means(torch.ones(5, 2, dtype=torch.float64), 3, generator)
    assert torch.equal(same, torch.ones(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("name", ["mlp_classification", "dict_input"])
def test_a_state_needs_no_data(name: str) -> None:
    problem = catalogue.get(name)
    la = made(problem, some(problem.x, 3))
    la.fit(problem.batches(4), iterations=2, lr=0.05)
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    other = made(problem, "random", 3)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(problem.x), la(problem.x))
    assert torch.equal(other.elbo, la.elbo)
    assert torch.equal(other.L, la.L)
    other.fit(problem.batches(4), override=False, iterations=1)
    la.fit(problem.batches(4), override=False, iterations=1)
    assert torch.equal(other.L, la.L)


def test_the_model_is_lent_and_a_failure_changes_nothing() -> None:
    problem = catalogue.get("mlp_classification")
    model = problem.make_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    la = VaLLA(model, "classification", problem.x[:3].clone(), alpha=0.5, mc_softmax_samples=3)
    la.fit(problem.batches(4), iterations=3, lr=0.1)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    former, delta = la(problem.x), la.prior_precision
    broken = [*problem.batches(4), (problem.x * float("nan"), problem.y)]
    with pytest.raises(InvalidData, match="finite"):
        la.fit(broken, iterations=9)
    assert torch.equal(la(problem.x), former) and torch.equal(la.prior_precision, delta)


def test_a_lone_bias_and_inference_mode() -> None:
    """Its Jacobian knows no locations, which stay; what is computed in inference mode is differentiated later."""
    x = torch.linspace(-1, 1, 6).unsqueeze(1)
    model = nn.Linear(1, 1)
    model.weight.requires_grad_(False)
    la = VaLLA(model, "regression", x[:2])
    with torch.inference_mode():
        la.fit([(x, x.square())], iterations=2, lr=0.1)
        inside = la.elbo
    assert torch.equal(la.inducing_locations, x[:2])
    delta = torch.ones(1, requires_grad=True)
    value = la.log_marginal_likelihood(delta, la.sigma_noise)
    (gradient,) = torch.autograd.grad(value, delta)
    assert gradient.isfinite().all() and inside.isfinite()


def test_rewards() -> None:
    generator = torch.Generator().manual_seed(0)

    class Rewards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).squeeze(2) if x.ndim == 3 else self.body(x)

    model, x = Rewards().double(), torch.randn(8, 2, 2, dtype=torch.float64, generator=generator)
    y = torch.randint(2, (8,), generator=generator)
    full = Laplace(model, "reward_modeling", "all", "full")
    full.fit([(x, y)])
    la = VaLLA(model, "reward_modeling", "random", 4)
    la.fit([(x, y)], iterations=2)
    mean, variance = la(x[:, 0])
    assert_close(mean, full(x[:, 0])[0], "algebra")
    assert variance.shape == (8, 1, 1) and (variance > 0).all()
    assert la.elbo < full.log_marginal_likelihood(la.prior_precision)


def test_float32_models() -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    x, y = torch.randn(20, 2, generator=generator), torch.randint(3, (20,), generator=generator)
    la = VaLLA(model, "classification", x[:8], prior_precision=1e-4)
    la.fit([(x[:10], y[:10]), (x[10:], y[10:])], iterations=10, lr=0.01)
    assert la.elbo.isfinite() and la.elbo.dtype == la.inducing_locations.dtype == torch.float32
    probabilities = la(x)
    assert probabilities.dtype == torch.float32 and probabilities.isfinite().all()


def test_what_is_refused() -> None:
    model = nn.Linear(2, 2)
    x, y = torch.randn(5, 2), torch.randint(2, (5,))
    for likelihood, options, match in (
        ("classification", {"inducing_locations": "magic"}, "kmeans"),
        ("classification", {"inducing_locations": "random"}, "num_inducing"),
        ("classification", {"inducing_locations": "random", "num_inducing": 0}, "positive integer"),
        ("classification", {"inducing_locations": x, "num_inducing": 4}, "shape"),
        ("classification", {"inducing_locations": x, "inducing_classes": torch.zeros(5)}, "integers"),
        ("classification", {"inducing_locations": x, "alpha": 0.5}, "mc_softmax_samples"),
        ("regression", {"inducing_locations": x, "alpha": -1.0}, "alpha"),
        ("classification", {"inducing_locations": x, "mc_softmax_samples": -1}, "mc_softmax_samples"),
        ("classification", {"inducing_locations": x, "backend": NativeEF}, "'ef'"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            VaLLA(model, likelihood, **options)
    la = VaLLA(model, "classification", x)
    for options, match in (
        ({"iterations": -1}, "iterations"),
        ({"n_epochs": 0}, "n_epochs"),
        ({"val_steps": 0}, "val_steps"),
        ({"lr": 0.0}, "lr"),
        ({"learn": "prior_precision"}, "sequence"),
        ({"learn": ("temperature",)}, "temperature"),
        ({"decay": 0.5}, "decay"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            la.fit([(x, y)], **options)
    with pytest.raises(InvalidArgument, match="only once"):
        la.fit(iter([(x, y)]))
    with pytest.raises(InvalidArgument, match="2 outputs, 0 to 1"):
        VaLLA(model, "classification", x, inducing_classes=torch.full((5,), 2)).fit([(x, y)])
    with pytest.raises(InvalidArgument, match="4 entries for 5"):
        VaLLA(model, "classification", x, inducing_classes=torch.zeros(4).long()).fit([(x, y)])
    with pytest.raises(InvalidData, match="num_inducing"):
        VaLLA(model, "classification", "random", 9).fit([(x, y)])
    with pytest.raises(UnsupportedError, match="one prior precision"):
        VaLLA(model, "classification", x, prior_precision=torch.ones(2)).fit([(x, y)])
    la.fit([(x, y)], iterations=1)
    la.prior_precision = torch.ones(2)
    with pytest.raises(UnsupportedError, match="one prior precision"):
        la(x)
    la.prior_precision = 1.0
    for action in (la.refine, la.forget):
        with pytest.raises(UnsupportedError, match="training"):
            action([(x, y)])
    with pytest.raises(CurvatureError, match="added"):
        la.fitted().curvature + la.fitted().curvature
