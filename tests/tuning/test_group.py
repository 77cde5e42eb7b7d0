"""Hyper-parameters that all components of a mixture share, by every objective and method of the tuning engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import Laplace, MixtureLaplace
from laplace.errors import InvalidArgument, NotFittedError
from laplace.metrics import gaussian_nll, nll
from laplace.tuning import Predictive
from laplace.tuning.losses import Validation
from laplace.tuning.objectives import EvidenceObjective, SmoothLoss
from laplace.tuning.search import Coordinates
from tests import grid
from tests.mixture.test_mixture import RULES, batches, fitted, networks, parts
from tests.reference.compare import assert_close

CANDIDATES = [0.01, 0.3, 2.0, 50.0]
random_labels = pytest.mark.filterwarnings("ignore:.*(edge|largest) of the grid:laplace.errors.TuningWarning")
"""Their best prior precision is as large as can be, on the edge of every grid."""


def validation(likelihood: str) -> list[tuple[Tensor, Tensor]]:
    found = grid.batches(likelihood, seed=11)
    return [(x.double(), y.double() if y.is_floating_point() else y) for x, y in found]


def loss_at(mixture: MixtureLaplace, likelihood: str, **options: Any) -> Tensor:
    """Mean negative log density of the mixture's own predictions."""
    found, n = torch.tensor(0.0, dtype=torch.float64), 0
    for x, y in validation(likelihood):
        if likelihood == "regression":
            mean, variance = mixture(x, diagonal_output=True, observation_noise=True, **options)
            found += gaussian_nll(mean, variance, y) * len(y)
        else:
            found += nll(mixture(x, **options), y) * len(y)
        n += len(y)
    return found / n


def slopes(function: Callable[[Tensor], float], at: Tensor) -> Tensor:
    step = 1e-5
    found = [function(at + step * e) - function(at - step * e) for e in torch.eye(len(at)).to(at)]
    return torch.tensor(found, dtype=torch.float64) / (2 * step)


@random_labels
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_grid_scores_the_mixture(likelihood: str, rule: Any) -> None:
    """Every value is the loss of the mixture's own predictions at that prior precision, and the best is assigned."""
    mixture = fitted(likelihood, rule)
    result = mixture.optimize_hyperparameters(
        objective="nll", val_loader=validation(likelihood), grid={"prior_precision": CANDIDATES}
    )
    best = mixture.prior_precision.item()
    values = []
    for candidate in CANDIDATES:
        mixture.prior_precision = candidate
        values.append(loss_at(mixture, likelihood))
    assert_close(result.values, torch.stack(values), "algebra")
    assert best == CANDIDATES[int(torch.stack(values).argmin())]


@random_labels
def test_grid_of_sampled_predictions_and_users_losses() -> None:
    mixture = fitted()
    for options in ({"pred_type": "nn", "n_samples": 20}, {"link_approx": "mc", "n_samples": 20}):
        result = mixture.optimize_hyperparameters(
            objective=lambda p, y: (p.argmax(1) != y).double().mean() + p.square().sum(1).mean(),
            val_loader=validation("classification"), grid={"prior_precision": CANDIDATES}, **options,
        )  # fmt: skip
        assert result.values.isfinite().all()
        assert result.prior_precision.item() in CANDIDATES


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    ("likelihood", "objective", "link"),
    [("regression", "crps", "probit"), ("classification", "nll", "probit"), ("classification", "brier", "bridge")],
)
def test_gradient_of_a_validation_loss(likelihood: str, objective: str, link: str, rule: Any) -> None:
    """Against finite differences; by the evidence the weights have a gradient too."""
    mixture = fitted(likelihood, rule)
    mixture.prior_precision = 0.9
    names = ("prior_precision", "sigma_noise") if likelihood == "regression" else ("prior_precision", "temperature")
    group = mixture._group
    data = Validation(validation(likelihood), [x for x, _ in validation(likelihood)], 0.4)
    coordinates = Coordinates(names, group.hypers(()))
    loss = partial(SmoothLoss(group, objective, data, Predictive("glm", link, 20)).gradient, coordinates)
    at = torch.tensor([0.3, -0.2], dtype=torch.float64)
    assert_close(loss(at)[1], slopes(lambda logs: loss(logs)[0], at), "finite_difference")


def test_smooth_loss_is_that_of_the_mixture() -> None:
    mixture = fitted(weights="evidence")
    result = mixture.optimize_hyperparameters(
        objective="nll", method="lbfgs", val_loader=validation("classification"), n_steps=5, tolerance=0.5
    )
    assert_close(result.value, loss_at(mixture, "classification"), "algebra")


def test_evidence_climbs_that_of_the_mixture() -> None:
    mixture = fitted("regression")
    before = mixture.log_marginal_likelihood()
    mixture.sigma_noise = 0.7
    result = mixture.optimize_hyperparameters(tune=("prior_precision", "sigma_noise"))
    assert result.converged
    assert_close(mixture.log_marginal_likelihood(), result.value, "algebra")
    assert mixture.log_marginal_likelihood() > before
    coordinates = Coordinates(("prior_precision", "sigma_noise"), mixture._group.hypers(()))
    evaluate = partial(EvidenceObjective(mixture._group).gradient, coordinates)
    at = coordinates.vector() + 0.3
    assert_close(evaluate(at)[1], slopes(lambda logs: evaluate(logs)[0], at), "finite_difference")
    for la in mixture.components:
        assert torch.equal(la.prior_precision, mixture.prior_precision)


@pytest.mark.parametrize("method", ["marglik", "gridsearch"])
def test_optimize_prior_precision(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The search by the evidence starts at 1, whatever the components had; the best value is kept."""
    mixture = fitted()
    options = {"val_loader": validation("classification"), "grid_size": 9} if method == "gridsearch" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best candidate of random labels is on the edge
        mixture.optimize_prior_precision(method=method, verbose=True, progress_bar=True, **options)
    assert "Optimized prior precision" in capsys.readouterr().out
    found = mixture.prior_precision.item()
    score = mixture.log_marginal_likelihood if method == "marglik" else lambda: -loss_at(mixture, "classification")
    best = score()
    for other in (1.0, found * 1.5, found / 1.5):
        mixture.prior_precision = min(max(other, 1e-4), 1e4)
        assert score() <= best + 1e-12


def test_search_of_appendix_f4() -> None:
    """The smallest prior precision whose mean confidence reaches the threshold."""
    mixture = fitted()
    values = torch.logspace(-3, 3, 20)
    means = []
    for value in values:
        mixture.prior_precision = value.item()
        means.append(torch.cat([mixture(x) for x, _ in validation("classification")]).max(1).values.mean().item())
    threshold = 0.5 * (means[8] + means[9])
    mixture.optimize_hyperparameters(
        objective=lambda p, _y: (threshold - p.amax(1).mean()).clamp(min=0), val_loader=validation("classification"),
        grid={"prior_precision": values},
    )  # fmt: skip
    first = next(i for i, mean in enumerate(means) if mean >= threshold)
    assert_close(mixture.prior_precision, values[first].reshape(1), "float32")


def test_equal_networks_share_a_prior_per_tensor() -> None:
    """And it is that of one of them: the evidence of a mixture of equals has the same optimum."""
    network = networks()[0]
    mixture = MixtureLaplace([network, network], "classification", "all", "kron")
    alone = Laplace(network, "classification", "all", "kron")
    for la in (mixture, alone):
        la.fit(batches("classification"))
        la.optimize_prior_precision(prior_structure="layerwise", n_steps=3)
    assert len(alone.prior_precision) == 4
    assert_close(mixture.prior_precision, alone.prior_precision, "algebra")


def test_a_tuned_parameter_that_differs_starts_at_the_geometric_mean() -> None:
    mixture = fitted()
    start = mixture._group.hypers(("prior_precision",)).prior_precision
    assert_close(start, [(0.7 * 1.0 * 2.0) ** (1 / 3)], "algebra")


def test_refusals() -> None:
    mixture = MixtureLaplace(parts())
    with pytest.raises(NotFittedError):
        mixture.optimize_hyperparameters()
    mixture = fitted()
    with pytest.raises(InvalidArgument, match="different parameters"):
        mixture.optimize_prior_precision(prior_structure="diag")
    with pytest.raises(InvalidArgument, match="differ in prior_precision"):
        mixture.optimize_hyperparameters("temperature", "nll", val_loader=validation("classification"))
    with pytest.raises(InvalidArgument, match="val_loader"):
        mixture.optimize_hyperparameters(objective="nll")


def test_evidences_of_different_data_are_not_averaged() -> None:
    mixture = fitted("classification", "uniform")
    mixture.components[0].fit(batches("classification")[:1])
    before = [la.prior_precision.clone() for la in mixture.components]
    with pytest.raises(InvalidArgument, match="same data"):
        mixture.optimize_hyperparameters()
    with pytest.raises(InvalidArgument, match="same data"):
        mixture.optimize_prior_precision(method="marglik")
    assert all(torch.equal(la.prior_precision, one) for la, one in zip(mixture.components, before, strict=True))
