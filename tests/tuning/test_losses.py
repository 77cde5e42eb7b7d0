"""Scores of predictions against closed forms and quadrature, for one candidate and for many at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.likelihoods import get_likelihood
from laplace.metrics import brier, expected_calibration_error, gaussian_crps, gaussian_nll, nll
from laplace.tuning.losses import Running, entropy_of, find_score
from laplace.tuning.objectives import make_loss
from tests.reference.compare import assert_close

GENERATOR = torch.Generator().manual_seed(0)
N_CANDIDATES, N_DATA, N_OUTPUTS = 4, 9, 3
LABELS = torch.randint(N_OUTPUTS, (N_DATA,), generator=GENERATOR)
BITS = torch.randint(2, (N_DATA, N_OUTPUTS), generator=GENERATOR).double()
TARGETS = torch.randn(N_DATA, N_OUTPUTS, dtype=torch.float64, generator=GENERATOR)
LOGITS = torch.randn(N_CANDIDATES, N_DATA, N_OUTPUTS, dtype=torch.float64, generator=GENERATOR)
VARIANCES = LOGITS.roll(1, 0).exp()
SIGMA = torch.tensor([0.3, 0.7, 1.1], dtype=torch.float64)
ONE = torch.ones((), dtype=torch.float64)


def run(running: Running, prediction: Tensor | tuple[Tensor, Tensor], y: Tensor, sigma: Tensor = ONE) -> Tensor:
    """A running loss over two batches, cut along the data."""
    for rows in (slice(0, 5), slice(5, None)):
        if isinstance(prediction, tuple):
            mean, variance = prediction
            running.update((mean[..., rows, :], variance[..., rows, :]), y[rows], sigma)
        else:
            running.update(prediction[..., rows, :], y[rows], sigma)
    return running.result()


# The continuous ranked probability score.


def crps_by_quadrature(mean: float, scale: float, y: float) -> float:
    """∫ (F(t) − 1[t ≥ y])² dt, the definition (Gneiting & Raftery 2007, eq. 20), in two parts around the jump."""
    normal = torch.distributions.Normal(torch.tensor(mean, dtype=torch.float64), scale)
    low, high = min(mean - 12 * scale, y), max(mean + 12 * scale, y)
    below, above = (torch.linspace(a, b, 200_001, dtype=torch.float64) for a, b in ((low, y), (y, high)))
    left = torch.trapezoid(normal.cdf(below).square(), below)
    return float(left + torch.trapezoid((1 - normal.cdf(above)).square(), above))


@pytest.mark.parametrize(
    ("mean", "scale", "y"), [(0.0, 1.0, 0.0), (1.0, 0.3, -0.5), (-2.0, 4.0, 7.0), (0.0, 1.0, 30.0)]
)
def test_crps_is_its_integral(mean: float, scale: float, y: float) -> None:
    one = [torch.tensor([[value]], dtype=torch.float64) for value in (mean, scale**2, y)]
    assert gaussian_crps(*one).item() == pytest.approx(crps_by_quadrature(mean, scale, y), rel=1e-6)


def test_crps_by_its_definition_as_expectations() -> None:
    """E|X − y| − ½ E|X − X'| (Gneiting & Raftery 2007, eq. 21) with the moments of folded normals."""
    mean, var = LOGITS[0], VARIANCES[0]
    scale, offset = var.sqrt(), mean - TARGETS
    folded = scale * math.sqrt(2 / math.pi) * torch.exp(-(offset**2) / (2 * var))
    folded = folded + offset * torch.erf(offset / (math.sqrt(2) * scale))
    expected = (folded - 0.5 * (2 * scale / math.sqrt(math.pi))).sum(1).mean()
    assert_close(gaussian_crps(mean, var, TARGETS), expected, "algebra")


def test_crps_without_variance_is_the_absolute_error() -> None:
    tiny = torch.full_like(TARGETS, 1e-24)
    assert_close(gaussian_crps(LOGITS[0], tiny, TARGETS), (LOGITS[0] - TARGETS).abs().sum(1).mean(), "algebra")


@pytest.mark.parametrize("var", [torch.zeros(2, 1), torch.ones(2, 2), torch.ones(2)])
def test_crps_refuses(var: Tensor) -> None:
    with pytest.raises(InvalidData):
        gaussian_crps(torch.zeros(2, 1), var, torch.zeros(2, 1))


# Objectives against the metrics of whole data sets, candidate by candidate.


@pytest.mark.parametrize("name", ["nll", "brier", "ece"])
@pytest.mark.parametrize("ignored", [False, True])
def test_classes(name: str, ignored: bool) -> None:
    probs = LOGITS.softmax(-1)
    y = LABELS.index_fill(0, torch.tensor([2, 7]), -100) if ignored else LABELS
    metric = {"nll": nll, "brier": brier, "ece": expected_calibration_error}[name]
    expected = torch.stack([metric(p, y) for p in probs])
    objective = make_loss(name, get_likelihood("classification"))
    assert_close(run(objective.fresh(), probs, y), expected, "algebra")
    alone = torch.stack([run(objective.fresh(), p, y) for p in probs])
    assert_close(alone, expected, "algebra")


def test_binary_targets() -> None:
    probs, likelihood = LOGITS.sigmoid(), get_likelihood("bernoulli")
    brier_score = (probs - BITS).square().sum(-1).mean(-1)
    assert_close(run(make_loss("brier", likelihood).fresh(), probs, BITS), brier_score, "algebra")
    entropy = torch.distributions.Bernoulli(probs).entropy().sum(-1).mean(-1)
    assert_close(run(entropy_of(likelihood).fresh(), probs, BITS), entropy, "algebra")


def test_real_targets() -> None:
    likelihood, total = get_likelihood("regression"), VARIANCES + SIGMA**2
    for name, metric in (("crps", gaussian_crps), ("nll", gaussian_nll)):
        expected = torch.stack([metric(m, v, TARGETS) for m, v in zip(LOGITS, total, strict=True)])
        running = make_loss(name, likelihood).fresh()
        assert_close(run(running, (LOGITS, VARIANCES), TARGETS, SIGMA), expected, "algebra", label=name)
    entropy = torch.distributions.Normal(LOGITS, total.sqrt()).entropy().sum(-1).mean(-1)
    running = entropy_of(likelihood).fresh()
    assert_close(run(running, (LOGITS, VARIANCES), TARGETS, SIGMA), entropy, "algebra")


def test_entropy_of_classes() -> None:
    probs = LOGITS.softmax(-1)
    entropy = torch.distributions.Categorical(probs).entropy().mean(-1)
    assert_close(run(entropy_of(get_likelihood("classification")).fresh(), probs, LABELS), entropy, "algebra")


def test_a_certain_prediction_has_a_finite_slope_of_the_entropy() -> None:
    for name in ("classification", "bernoulli"):
        likelihood = get_likelihood(name)
        p = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
        value = find_score("entropy", likelihood)(likelihood, p, torch.zeros(1), ONE)
        assert value.item() == pytest.approx(0, abs=1e-12)
        (gradient,) = torch.autograd.grad(value.sum(), p)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    ("name", "likelihood"),
    [("crps", "classification"), ("brier", "regression"), ("ece", "bernoulli")],
)
def test_scores_without_a_meaning(name: object, likelihood: str) -> None:
    with pytest.raises(UnsupportedError, match=likelihood):
        make_loss(name, get_likelihood(likelihood))


@pytest.mark.parametrize("loss", ["accuracy", 3, [1]])
def test_what_is_no_objective(loss: object) -> None:
    with pytest.raises(InvalidArgument, match="'crps'"):
        make_loss(loss, get_likelihood("classification"))
