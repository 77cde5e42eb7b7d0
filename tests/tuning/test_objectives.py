"""Gradients of tuning against finite differences, jointly in all hyper-parameters, and where they lead."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import ParametricLaplace
from laplace.errors import InvalidArgument, TuningWarning
from laplace.metrics import RunningNLLMetric
from laplace.structures import STRUCTURES
from laplace.tuning.candidates import Predictive
from laplace.tuning.losses import Validation
from laplace.tuning.objectives import EvidenceObjective, SmoothLoss
from laplace.tuning.search import Coordinates, Evaluate
from tests import grid
from tests.reference.compare import assert_close

CELLS = [(weights, structure) for weights in grid.WEIGHTS for structure in STRUCTURES]
NOISE = torch.tensor([0.5, 0.9, 1.6], dtype=torch.float64)


def batches(likelihood: str, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """The data of `grid` in float64."""
    return [(x.double(), y.double() if y.is_floating_point() else y) for x, y in grid.batches(likelihood, seed=seed)]


def fitted(weights: str, structure: str, likelihood: str = "classification", **options: Any) -> ParametricLaplace:
    la = grid.make(weights, structure, likelihood, model=grid.network(likelihood).double(), **options)
    la.fit(batches(likelihood))
    return la


def check(evaluate: Evaluate, logs: Tensor) -> None:
    """The slope along a random direction, in which all entries take part, against a central difference."""
    _, gradient = evaluate(logs)
    direction = torch.randn(len(logs), dtype=logs.dtype, generator=torch.Generator().manual_seed(0))
    expected = (evaluate(logs + 1e-5 * direction)[0] - evaluate(logs - 1e-5 * direction)[0]) / 2e-5
    assert_close(direction @ gradient, expected, "finite_difference")


def priors(la: ParametricLaplace) -> list[Tensor]:
    """One of every structure, with different entries."""
    generator = torch.Generator().manual_seed(2)
    lengths = (1, la.n_layers or 0, la.n_params or 0)
    return [torch.randn(n, dtype=torch.float64, generator=generator).exp() for n in lengths]


def names(likelihood: str) -> tuple[str, ...]:
    return ("prior_precision", "sigma_noise", "temperature") if likelihood == "regression" else (
        "prior_precision", "temperature",
    )  # fmt: skip


# Gradients.


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_joint_gradient_of_the_evidence(weights: str, structure: str, likelihood: str) -> None:
    """In prior, noise and temperature at once (of the evidence as a function: T is not tuned by it)."""
    noises: list[Any] = [0.8, NOISE] if likelihood == "regression" else [1.0]
    for noise in noises:
        la = fitted(weights, structure, likelihood, sigma_noise=noise, temperature=1.3)
        for prior in priors(la):
            la.prior_precision = prior
            coordinates = Coordinates(names(likelihood), la._group.hypers(()))
            check(partial(EvidenceObjective(la._group).gradient, coordinates), coordinates.vector())


def smooth(
    la: ParametricLaplace, likelihood: str, objective: Any, link: str, *, foreign: bool
) -> tuple[Evaluate, Tensor]:
    """The loss, and where it begins."""
    outside = [torch.cat([x for x, _ in batches(likelihood, seed=5)])] if foreign else None
    data = Validation(batches(likelihood, seed=11), outside, 0.4)
    coordinates = Coordinates(names(likelihood), la._group.hypers(()))
    loss = SmoothLoss(la._group, objective, data, Predictive("glm", link, 20))
    return partial(loss.gradient, coordinates), coordinates.vector()


@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_joint_gradient_of_a_regression_loss(weights: str, structure: str) -> None:
    for noise, objective in ((0.8, "nll"), (NOISE, "crps")):
        la = fitted(weights, structure, "regression", sigma_noise=noise, temperature=1.3)
        # Of many terms the basis turns with their weights, under every prior; of one it does not.
        for prior in priors(la) if noise is NOISE else priors(la)[1:2]:
            la.prior_precision = prior
            check(*smooth(la, "regression", objective, "probit", foreign=True))


@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_joint_gradient_of_a_classification_loss(weights: str, structure: str) -> None:
    """Links that read variances, covariances, and samples that are the same at every setting."""
    la = fitted(weights, structure, temperature=1.3)
    for prior, objective, link in zip(priors(la), ("nll", "brier", "nll"), ("probit", "bridge", "mc"), strict=True):
        la.prior_precision = prior
        check(*smooth(la, "classification", objective, link, foreign=True))
    check(*smooth(la, "classification", "nll", "probit_centred", foreign=False))


@pytest.mark.parametrize(("weights", "structure"), grid.DIAGONAL)
@pytest.mark.parametrize("likelihood", ["bernoulli", "reward_modeling"])
def test_joint_gradient_of_other_likelihoods(weights: str, structure: str, likelihood: str) -> None:
    la = fitted(weights, structure, likelihood, temperature=1.3)
    for objective in ("nll", "brier"):
        check(*smooth(la, likelihood, objective, "probit", foreign=True))


def test_gradient_with_damping() -> None:
    la = fitted("all", "kron", damping=True, prior_precision=0.7)
    check(*smooth(la, "classification", "nll", "probit", foreign=False))


def test_gradient_of_the_calibration_error() -> None:
    """Between the jumps, where a prediction changes its bin."""
    la = fitted("all", "kron", prior_precision=0.7)
    check(*smooth(la, "classification", "ece", "probit", foreign=False))


def test_gradient_of_a_user_s_function() -> None:
    """Of whole covariances."""
    la = fitted("all", "full", "regression", prior_precision=0.7)

    def loss(mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        total = covariance + 0.3 * torch.eye(3, dtype=y.dtype)
        return -torch.distributions.MultivariateNormal(mean, total).log_prob(y).mean()

    check(*smooth(la, "regression", loss, "probit", foreign=False))


@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_the_value_is_that_of_the_grid(weights: str, structure: str) -> None:
    for likelihood, objective in (("classification", "brier"), ("regression", "crps")):
        la = fitted(weights, structure, likelihood, prior_precision=0.7, temperature=1.3)
        value, _ = smooth(la, likelihood, objective, "probit", foreign=True)[0](
            torch.cat([t.reshape(-1) for t in (la.prior_precision, la.sigma_noise, la.temperature)]).log()
            if likelihood == "regression"
            else torch.cat([t.reshape(-1) for t in (la.prior_precision, la.temperature)]).log()
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TuningWarning)
            result = la.optimize_hyperparameters(
                objective=objective, val_loader=batches(likelihood, seed=11), ood_weight=0.4,
                ood_loader=[x for x, _ in batches(likelihood, seed=5)], grid={"prior_precision": la.prior_precision},
            )  # fmt: skip
        assert_close(value, result.value, "algebra")


@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_solving_by_the_root_of_samples(weights: str, structure: str) -> None:
    la = fitted(weights, structure)
    for prior in priors(la):
        la.prior_precision = prior
        precision = la.posterior()
        rows = torch.randn(5, la.n_params or 0, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert_close(precision.solve(rows) @ precision.to_dense(), rows, "backend")


# Where they lead.


def evidence_at(la: ParametricLaplace, logs: Tensor, coordinates: Coordinates) -> float:
    return float(EvidenceObjective(la._group).gradient(coordinates, logs)[0])


@pytest.mark.parametrize(
    ("weights", "structure", "method"),
    [(*cell, "lbfgs") for cell in CELLS] + [(*cell, "adam") for cell in grid.DIAGONAL],
)
@pytest.mark.turns
def test_joint_maximum_of_the_evidence(weights: str, structure: str, method: str) -> None:
    """No hyper-parameter can be moved alone to do better, and tuning the noise does better than not."""
    several = torch.ones(3, dtype=torch.float64)
    for noise in (1.0, several) if (weights, structure) in grid.DIAGONAL else (several,):
        la = fitted(weights, structure, "regression", sigma_noise=noise)
        alone = la.optimize_hyperparameters(method=method, n_steps=300)
        tune = ("prior_precision", "sigma_noise")
        result = la.optimize_hyperparameters(tune, method=method, n_steps=300)
        assert result.converged
        assert not result.notes
        assert result.value > alone.value
        assert result.value == pytest.approx(la.log_marginal_likelihood().item(), rel=1e-10)
        assert la.sigma_noise.shape == torch.as_tensor(noise).shape
        coordinates = Coordinates(tune, la._group.hypers(()))
        best = coordinates.vector()
        for i in range(len(best)):
            for move in (-0.1, 0.1):
                moved = best.clone()
                moved[i] += move
                assert evidence_at(la, moved, coordinates) < result.value + 1e-6


@pytest.mark.parametrize("structure", ["layerwise", "diag"])
def test_more_precisions_give_more_evidence(structure: str) -> None:
    la = fitted("all", "kron", "regression")
    scalar = la.optimize_hyperparameters(("prior_precision", "sigma_noise"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)  # of many precisions some have no finite optimum
        result = la.optimize_hyperparameters(("prior_precision", "sigma_noise"), prior_structure=structure)
    assert result.value > scalar.value
    assert la.prior_precision.shape == (la.n_layers if structure == "layerwise" else la.n_params,)


def test_noise_of_a_linear_model_in_closed_form() -> None:
    """With a prior so wide that it says nothing, the best noise is Σ r²/(N − P) per output (MacKay, 1992)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 2, dtype=torch.float64, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    y = y + 0.3 * torch.randn(50, 1, dtype=torch.float64, generator=generator)
    model = torch.nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    la = grid.make("all", "full", "regression", model=model, prior_precision=1e-9)
    la.fit([(x, y)])
    la.optimize_hyperparameters("sigma_noise", tolerance=1e-9)
    residual = (y - model(x).detach()).square().sum()
    assert la.sigma_noise.item() ** 2 == pytest.approx(residual.item() / (50 - 2), rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "structure", "method"),
    [(*cell, "lbfgs") for cell in grid.DIAGONAL] + [("last_layer", "kron", "adam")],
)
@pytest.mark.parametrize(("likelihood", "objective"), [("classification", "nll"), ("regression", "crps")])
def test_better_than_a_fine_grid(weights: str, structure: str, likelihood: str, objective: str, method: str) -> None:
    loader = batches(likelihood, seed=3)
    tune = ("prior_precision", "sigma_noise" if likelihood == "regression" else "temperature")
    la = fitted(weights, structure, likelihood)
    options = {"objective": objective, "val_loader": loader}
    values = dict.fromkeys(tune, torch.logspace(-2, 2, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        coarse = la.optimize_hyperparameters(tune, **options, grid=values)
        fine = la.optimize_hyperparameters(tune, **options, method=method, n_steps=100)
    assert fine.value <= coarse.value + 1e-9


@pytest.mark.parametrize("structure", ["layerwise", "diag"])
def test_many_precisions_by_validation_data(structure: str) -> None:
    """Residuals somewhat larger than the noise: the best scalar is neither zero nor infinite."""
    la = fitted("all", "kron", "regression", sigma_noise=0.5)
    x = batches("regression", seed=11)[0][0]
    residuals = torch.randn(len(x), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loader = [(x, la(x)[0] + 0.7 * residuals)]
    options = {"objective": "nll", "val_loader": loader, "method": "lbfgs"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        scalar = la.optimize_hyperparameters(**options)
        assert 1e-3 < la.prior_precision.item() < 1e3
        result = la.optimize_hyperparameters(**options, prior_structure=structure)
    assert result.value < scalar.value
    assert la.prior_precision.unique().numel() > 1


# What is refused and reported.


def test_the_evidence_says_nothing_of_the_temperature() -> None:
    """It never falls in T."""
    la = fitted("all", "kron", prior_precision=3.0)
    with pytest.raises(InvalidArgument, match="never falls"):
        la.optimize_hyperparameters(("prior_precision", "temperature"))
    assert la.prior_precision.item() == 3.0
    values: list[float] = []
    for temperature in (0.1, 1.0, 10.0, 1000.0):
        la.temperature = temperature
        values.append(la.log_marginal_likelihood().item())
    assert values == sorted(values)


def test_too_few_steps_are_reported() -> None:
    la = fitted("all", "kron", "regression")
    with pytest.warns(TuningWarning, match="did not converge in 2 steps") as caught:
        result = la.optimize_hyperparameters(method="adam", n_steps=2)
    assert [w.filename for w in caught] == [__file__]
    assert not result.converged
    assert la.prior_precision.item() == result.prior_precision.item()


def test_a_loss_without_gradient() -> None:
    la = fitted("all", "kron", prior_precision=3.0)
    options = {"val_loader": batches("classification"), "method": "lbfgs"}
    for objective in (lambda p, y: 1.0, RunningNLLMetric()):
        with pytest.raises(InvalidArgument, match="method='grid'"):
            la.optimize_hyperparameters(objective=objective, **options)
    with pytest.raises(InvalidArgument, match="method='grid'"):
        la.optimize_hyperparameters(objective="nll", pred_type="nn", **options)
    with pytest.raises(InvalidArgument, match="gradients"):
        la.optimize_hyperparameters(method="grid")
    assert la.prior_precision.item() == 3.0


def test_a_loss_that_does_not_depend_on_the_prior() -> None:
    la = fitted("all", "kron", "regression")
    with pytest.warns(TuningWarning, match="does not depend on the prior precision"):
        la.optimize_hyperparameters(
            objective=lambda mean, variance, y: (mean - y).square().mean() + 0 * variance.sum(),
            val_loader=batches("regression"), method="adam", n_steps=3, tolerance=0.0,
        )  # fmt: skip


def test_a_loss_without_a_minimum_ends_at_the_bound() -> None:
    la = fitted("all", "kron", "regression")
    with pytest.warns(TuningWarning, match="bound of the search"):
        la.optimize_hyperparameters(
            objective=lambda mean, variance, y: variance.log().diagonal(dim1=1, dim2=2).mean(),
            val_loader=batches("regression"), method="adam", n_steps=30, lr=2.0,
        )  # fmt: skip
    assert la.prior_precision.item() == pytest.approx(torch.tensor(23.0).exp().item(), rel=1e-3)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients_around(mode: Any) -> None:
    la, other = fitted("all", "kron", "regression"), fitted("all", "kron", "regression")
    options = {"objective": "nll", "val_loader": batches("regression"), "method": "lbfgs"}
    with mode():
        la.optimize_hyperparameters(("prior_precision", "sigma_noise"))
        la.optimize_hyperparameters("sigma_noise", **options)
    other.optimize_hyperparameters(("prior_precision", "sigma_noise"))
    other.optimize_hyperparameters("sigma_noise", **options)
    assert torch.equal(la.prior_precision, other.prior_precision)
    assert torch.equal(la.sigma_noise, other.sigma_noise)
    assert not la.prior_precision.is_inference()


def test_the_model_is_lent() -> None:
    la = fitted("all", "kron", prior_precision=3.0)
    model = la.model.train()
    before = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(4)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        for method in ("grid", "lbfgs"):
            la.optimize_hyperparameters(
                objective="nll", val_loader=batches("classification"), method=method, link_approx="mc", n_samples=5
            )
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(p.grad is None and torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore:tuning. the subset's evidence:laplace.errors.TuningWarning")
def test_fixed_points_of_a_process_on_some_of_the_data_are_its_evidence_s() -> None:
    """Its prior precision counts N/M times, in the square of the mean too: steps without that factor swing for ever."""
    found = []
    for method in ("em", "marglik"):
        la = grid.make("all", "gp", n_subset=4, model=grid.network().double())
        la.fit(batches("classification"))
        la.optimize_prior_precision(method=method, n_steps=300)  # type: ignore[arg-type]
        found.append(float(la.prior_precision))
    assert found[0] == pytest.approx(found[1], rel=1e-2)
