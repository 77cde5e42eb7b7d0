"""Choosing the prior precision: by the evidence, and by a loss on validation data."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import KronLaplace, PriorStructure, TuningMethod
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, TuningWarning
from laplace.metrics import RunningNLLMetric
from laplace.structures.precision import SpectralScan
from tests import grid
from tests.pairs import nightly
from tests.reference.likelihoods import count_density, noisy_density, sampled_moments

X, Y = grid.data(seed=11)
GRID = 10 ** torch.linspace(-4, 4, 9)
SEED = int(torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(0)))
"""What the candidates' noise is seeded with by default."""


# Every cell once, and every likelihood with every choice of weights and every structure.
CASES = sorted(
    {(*cell, "classification") for cell in grid.CELLS}
    | {(*cell, likelihood) for cell in grid.DIAGONAL for likelihood in grid.LIKELIHOODS}
)
MOST = [nightly(name)[0] if name in grid.PAIRS else name for name in grid.LIKELIHOODS]


def validation(likelihood: str, size: int = 5) -> list[tuple[Tensor, Tensor]]:
    return grid.batches(likelihood, size=size, seed=11)


def quiet(la: Any, **options: Any) -> None:
    """Tunes without a word about edges."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        la.optimize_prior_precision(method="gridsearch", **{"grid_size": len(GRID)} | options)


# By the evidence.


def evidence_at(la: Any, prior: Tensor) -> float:
    return la.evidence(prior_precision=prior).log_marginal_likelihood.item()


@pytest.mark.parametrize(("weights", "structure", "likelihood"), CASES)
@pytest.mark.turns
def test_scalar_evidence_against_a_fine_scan(weights: str, structure: str, likelihood: str) -> None:
    la = grid.fitted(weights, structure, likelihood)
    start = la.log_marginal_likelihood().item()
    la.optimize_prior_precision(n_steps=80, lr=0.2)
    scan = [evidence_at(la, torch.tensor([10.0**e])) for e in torch.linspace(-2, 3, 60).tolist()]
    found = la.log_marginal_likelihood().item()
    assert found > start
    assert found > max(scan) - 2e-3
    assert la.prior_precision.shape == (1,)
    assert not la.prior_precision.requires_grad


@pytest.mark.filterwarnings("ignore:.*leaves out eigenvalues:laplace.errors.TuningWarning")
@pytest.mark.parametrize("structure", ["layerwise", "diag"])
@pytest.mark.parametrize("weights", grid.WEIGHTS)
@pytest.mark.parametrize("curvature", grid.STRUCTURES)
@pytest.mark.turns
def test_more_precisions_give_more_evidence(curvature: str, weights: str, structure: str) -> None:
    """And no single one of them can be moved to do better."""
    la = grid.fitted(weights, curvature, "regression", sigma_noise=0.7)
    la.optimize_prior_precision(n_steps=60, lr=0.2)
    scalar = la.log_marginal_likelihood().item()
    la.optimize_prior_precision(prior_structure=structure, n_steps=100, lr=0.2)
    assert la.prior_precision.shape == (la.n_layers if structure == "layerwise" else la.n_params,)
    best = la.log_marginal_likelihood().item()
    assert best > scalar - 1e-3
    for i in range(0, la.prior_precision.numel(), 5):
        for factor in (0.8, 1.25):
            moved = la.prior_precision.clone()
            moved[i] *= factor
            assert evidence_at(la, moved) < best + 5e-3


def test_the_best_value_seen_is_kept() -> None:
    """A step size that overshoots cannot make things worse."""
    la = grid.fitted("all", "kron", "regression")
    la.optimize_prior_precision(n_steps=150)
    best, prior = la.log_marginal_likelihood().item(), la.prior_precision
    la.optimize_prior_precision(n_steps=7, lr=3.0, init_prior_prec=prior)
    assert la.log_marginal_likelihood().item() >= best


@pytest.mark.parametrize("weights", grid.WEIGHTS)
def test_where_the_search_starts(weights: str) -> None:
    la = grid.fitted(weights, "kron")
    for init, structure, length in (
        (1.0, PriorStructure.LAYERWISE, la.n_layers),
        (torch.tensor(2.0), "diag", la.n_params),
        (torch.ones(la.n_layers), "scalar", la.n_layers),
        (torch.ones(la.n_params), "scalar", la.n_params),
        (torch.ones(1, requires_grad=True), "scalar", 1),
    ):
        la.optimize_prior_precision(init_prior_prec=init, prior_structure=structure, n_steps=2)
        assert la.prior_precision.shape == (length,)
    assert torch.equal(la.prior_precision.sign(), torch.ones(1))


def test_validation_data_of_the_evidence_are_reported_as_unused() -> None:
    la = grid.fitted("all", "diag")
    with pytest.warns(TuningWarning, match="gridsearch") as caught:
        la.optimize_prior_precision(val_loader=validation("classification"), n_steps=2)
    assert [w.filename for w in caught] == [__file__]


def test_an_evidence_that_is_nowhere_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    la = grid.fitted("all", "diag", prior_precision=3.0)
    monkeypatch.setattr(type(la.evidence()), "scatter", property(lambda self: self.prior.quad(self.mean) * math.nan))
    with pytest.raises(InvalidArgument, match="not finite"):
        la.optimize_prior_precision(n_steps=3)
    assert la.prior_precision.item() == 3.0


# By validation data: against an evaluation of each candidate on its own.


def or_infinite(value: float) -> float:
    """Of moments that no float holds, which a wide prior gives, the density is not known."""
    return math.inf if math.isnan(value) else value


def nll(likelihood: str, prediction: Any, y: Tensor, sigma: Tensor) -> float:
    """Mean negative log predictive density, written independently."""
    if likelihood == "regression":
        mean, variance = prediction
        variance = variance.diagonal(dim1=1, dim2=2) if variance.ndim == 3 else variance
        density = torch.distributions.Normal(mean, (variance + sigma**2).sqrt())
        return -density.log_prob(y).sum(1).mean().item()
    if likelihood in grid.PAIRS:
        mean, variance = prediction
        density = torch.distributions.Normal(mean, variance.sqrt(), validate_args=False)
        return or_infinite(-density.log_prob(y).sum(1).mean().item())
    if likelihood == "poisson":
        mean, variance = (part.double() for part in prediction)
        spread = ((variance - mean) / mean.square()).clamp(min=1e-10).log1p()
        density = count_density(mean.log() - spread / 2, spread, y.double(), n=2001)
        return or_infinite(-density.sum(1).mean().item())
    if likelihood == "bernoulli":
        return nn.functional.binary_cross_entropy(prediction, y, reduction="none").sum(1).mean().item()
    return nn.functional.nll_loss(prediction.log(), y).item()


def scores_one_by_one(la: Any, likelihood: str, **options: Any) -> list[float]:
    """The loss of every candidate, by a prediction with that prior; infinite where it is beyond the dtype."""
    x, y = grid.data(likelihood, seed=11)
    scores, former = [], la.prior_precision
    for delta in GRID:
        la.prior_precision = delta
        try:
            prediction = la(x, fitting=True, generator=torch.Generator().manual_seed(SEED), **options)
        except InvalidData as error:
            assert "raise prior_precision" in str(error)
            scores.append(math.inf)
            continue
        scores.append(nll(likelihood, prediction, y, la.sigma_noise))
    la.prior_precision = former
    return scores


def exact_scores(la: Any, likelihood: str, pred_type: str = "glm", n_samples: int = 100) -> list[float]:
    """The same for a noise that depends on the input, by the density of y under the latents, not by its moments."""
    x, y = grid.data(likelihood, seed=11)
    scores, former = [], la.prior_precision
    for delta in GRID:
        la.prior_precision = delta
        if pred_type == "nn":
            generator = torch.Generator().manual_seed(SEED)
            samples = la.functional_samples(x, "nn", n_samples, generator=generator)
            mean, covariance = sampled_moments(samples)
        else:
            mean, covariance = la.predictive_moments(x)
        density = noisy_density(mean.double(), covariance.double(), y.double(), n=201, likelihood=likelihood)
        scores.append(or_infinite(-density.sum(1).mean().item()))
    la.prior_precision = former
    return scores


def assert_argmin(la: Any, scores: list[float]) -> None:
    chosen = int((GRID - la.prior_precision).abs().argmin())
    assert la.prior_precision.item() == pytest.approx(GRID[chosen].item(), rel=1e-5)
    assert scores[chosen] <= min(scores) + 1e-5 * abs(min(scores))


PREDICTIVES = {
    "classification": [
        ("glm", "probit"),
        ("glm", "probit_centred"),
        ("glm", "mc"),
        ("glm", "bridge"),
        ("glm", "bridge_norm"),
        ("nn", "probit"),
    ],
    "regression": [("glm", "probit"), ("nn", "mc")],
    "bernoulli": [("glm", "probit"), ("glm", "probit_centred"), ("glm", "mc"), ("nn", "probit")],
    "reward_modeling": [("glm", "probit"), ("glm", "mc"), ("glm", "bridge"), ("nn", "probit")],
    "poisson": [("glm", "probit"), ("glm", "mc"), ("nn", "probit")],
    "heteroscedastic": [("glm", "probit"), ("nn", "probit")],
    "mean_log_variance": [("glm", "probit"), ("nn", "probit")],
}


@pytest.mark.parametrize(("weights", "structure", "likelihood"), CASES)
@pytest.mark.turns
def test_every_candidate_on_its_own(weights: str, structure: str, likelihood: str) -> None:
    """Whatever the predictive: one pass of the network for all candidates does not change a loss."""
    la = grid.fitted(weights, structure, likelihood)
    for pred_type, link in PREDICTIVES[likelihood]:
        seen: list[float] = []

        def loss(*arguments: Tensor, seen: list[float] = seen) -> float:
            *prediction, y = arguments
            seen.append(nll(likelihood, prediction if len(prediction) > 1 else prediction[0], y, torch.ones(())))
            return seen[-1]

        options = {"pred_type": pred_type, "link_approx": link, "n_samples": 10}
        quiet(la, val_loader=validation(likelihood, 12), loss=loss, **options)
        scores = scores_one_by_one(la, likelihood, **options)
        # Once more for the network's own predictions, where the largest candidate is the best.
        assert len(seen) == len(scores) + (la.prior_precision.item() == pytest.approx(GRID.max().item()))
        # Moments of a rate near 0, in float32, leave few digits of the latent variance that their density is made of.
        rel = 5e-3 if likelihood == "poisson" else 5e-4
        assert seen[: len(scores)] == pytest.approx(scores, rel=rel), (pred_type, link)
        assert_argmin(la, scores)


@pytest.mark.parametrize("likelihood", MOST)
@pytest.mark.parametrize("weights", grid.WEIGHTS)
def test_the_default_objective(weights: str, likelihood: str) -> None:
    """The negative log predictive density over all batches, the noise included."""
    noise = {"sigma_noise": 0.6} if likelihood == "regression" else {}
    la = grid.fitted(weights, "kron", likelihood, **noise)
    for options in ({}, {"pred_type": "nn", "n_samples": 10}):
        quiet(la, val_loader=validation(likelihood), **options)
        scores = exact_scores if likelihood in grid.PAIRS else scores_one_by_one
        assert_argmin(la, scores(la, likelihood, **options))


class OwnSamples(KronLaplace):
    """A user's class, whose predictions are asked for one candidate after the other."""

    def functional_samples(self, *arguments: Any, **options: Any) -> Tensor:
        return super().functional_samples(*arguments, **options)


def test_a_candidate_whose_moments_no_float_holds_loses() -> None:
    chosen = []
    for kind in (KronLaplace, OwnSamples):
        la = kind(grid.network("poisson"), "poisson")
        la.fit(grid.batches("poisson"))
        quiet(la, val_loader=validation("poisson"), pred_type="nn", n_samples=10)
        chosen.append(la.prior_precision)
    assert torch.equal(*chosen)
    la.prior_precision = GRID[0]
    with pytest.raises(InvalidData, match="raise prior_precision"):
        la(X, pred_type="nn", n_samples=10)


def test_a_user_s_loss_sees_the_shapes_of_predictions() -> None:
    la = grid.fitted("all", "kron", "regression")
    shapes = []

    def loss(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        shapes.append((mean.shape, variance.shape, y.shape))
        return variance.sum()

    quiet(la, val_loader=validation("regression"), loss=loss)
    assert set(shapes) == {((12, 3), (12, 3, 3), (12, 3))}
    shapes.clear()
    quiet(la, val_loader=validation("regression"), loss=loss, pred_type="nn", n_samples=3)
    assert set(shapes) == {((12, 3), (12, 3), (12, 3))}


@pytest.mark.parametrize(
    ("likelihood", "loss", "called"),
    [
        ("regression", lambda mean, y: (mean - y).square().mean(), "mean, variance, y"),
        ("classification", lambda mean, variance, y: variance.sum(), "prediction, y"),
    ],
)
def test_a_loss_of_other_arguments_is_refused(likelihood: str, loss: Any, called: str) -> None:
    la = grid.fitted("all", "diag", likelihood, prior_precision=3.0)
    with pytest.raises(InvalidArgument, match=rf"called with \({called}\)"):
        quiet(la, val_loader=validation(likelihood), loss=loss)
    assert la.prior_precision.item() == 3.0


def test_noise_counts_in_regression() -> None:
    """One noise per output too; the default objective is not the squared error, which knows no variance."""
    noise = torch.tensor([0.3, 0.6, 1.2])
    la = grid.fitted("all", "kron", "regression", sigma_noise=noise)
    quiet(la, val_loader=validation("regression"))
    assert_argmin(la, scores_one_by_one(la, "regression"))


def test_ignored_labels_do_not_count() -> None:
    la = grid.fitted("all", "kron")
    y = Y.index_fill(0, torch.tensor([0, 4, 7]), -100)
    keep = y != -100
    quiet(la, val_loader=[(X, y), (X[:1], torch.tensor([-100]))])
    chosen = la.prior_precision
    quiet(la, val_loader=[(X[keep], Y[keep])])
    assert torch.equal(la.prior_precision, chosen)


# Metrics.


class Brier:
    """A running metric of probabilities, with an option as third argument."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def update(self, probs: Tensor, y: Tensor, weight: float = 1.0) -> None:
        assert weight == 1.0
        self.total = self.total + (probs - nn.functional.one_hot(y, probs.shape[1])).square().sum()
        self.count += len(y)

    def compute(self) -> Tensor:
        return self.total / self.count

    def reset(self) -> None:
        self.total, self.count = torch.zeros(()), 0


class Density(Brier):
    """A running metric of means and variances."""

    def update(self, mean: Tensor, variance: Tensor, y: Tensor) -> None:  # type: ignore[override]
        spread = variance.diagonal(dim1=1, dim2=2) + 0.5
        self.total = self.total + 0.5 * ((y - mean).square() / spread + spread.log()).sum()
        self.count += len(y)


def scored(metric: Any, la: Any, likelihood: str) -> list[float]:
    """A fresh metric per candidate, by hand."""
    scores = []
    former = la.prior_precision
    for delta in GRID:
        fresh = copy.deepcopy(metric)
        la.prior_precision = delta
        fresh.reset()
        for x, y in validation(likelihood):
            prediction = la(x)
            fresh.update(*(prediction if isinstance(prediction, tuple) else (prediction,)), y)
        scores.append(float(fresh.compute()))
    la.prior_precision = former
    return scores


def torchmetric(name: str, **options: Any) -> Any:
    return getattr(pytest.importorskip("torchmetrics"), name)(**options)


METRICS: dict[str, tuple[Callable[[], Any], str]] = {
    "running nll": (RunningNLLMetric, "classification"),
    "brier": (Brier, "classification"),
    "density": (Density, "regression"),
    "calibration": (lambda: torchmetric("CalibrationError", task="multiclass", num_classes=3), "classification"),
}


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize(
    ("weights", "name"), list(zip(("all", "last_layer", "subnetwork", "all"), METRICS, strict=True))
)
def test_running_metrics(weights: str, name: str) -> None:
    """A fresh one per candidate; what the user's own has seen before does not count, and stays in it."""
    make, likelihood = METRICS[name]
    la = grid.fitted(weights, "kron", likelihood)
    metric = make()
    x, y = validation(likelihood)[0]
    prediction = la(x)
    metric.update(*(prediction if isinstance(prediction, tuple) else (prediction,)), y)
    before = float(metric.compute())
    quiet(la, val_loader=validation(likelihood), loss=metric)
    assert float(metric.compute()) == before
    assert_argmin(la, scored(make(), la, likelihood))


class Anything(Density):
    """A metric whose signature does not tell what it takes, as sums and wrappers of torchmetrics."""

    def update(self, *parts: Tensor) -> None:  # type: ignore[override]
        super().update(*parts)


class Error(Anything):
    """Another, of means alone."""

    def update(self, *parts: Tensor) -> None:  # type: ignore[override]
        mean, y = self._pair(*parts)
        self.total = self.total + (mean - y).square().sum()
        self.count += len(y)

    def _pair(self, mean: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return mean, y


def test_metrics_of_any_arguments() -> None:
    la = grid.fitted("all", "kron", "regression")
    quiet(la, val_loader=validation("regression"), loss=Anything())
    assert_argmin(la, scored(Density(), la, "regression"))
    with pytest.warns(TuningWarning, match="does not depend"):
        la.optimize_prior_precision(method="gridsearch", val_loader=validation("regression"), loss=Error(), grid_size=3)


def test_sums_and_wrappers_of_metrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    la = grid.fitted("all", "kron", "regression")
    mse = torchmetrics.MeanSquaredError()
    for loss in (mse + torchmetrics.MeanAbsoluteError(), torchmetrics.wrappers.MultioutputWrapper(mse, 3)):
        with pytest.warns(TuningWarning, match="does not depend"):
            la.optimize_prior_precision(
                method="gridsearch", val_loader=validation("regression"), loss=loss, grid_size=3
            )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, y: None, "returned None"),
        (lambda p, y: p.sum(1), r"shape \[12\]"),
        (RunningNLLMetric, "give an object, not a class"),
        (nn.NLLLoss, "give an object, not a class"),
        (type("Accuracy", (Brier,), {"higher_is_better": True})(), "1 - metric"),
        (type("Names", (Brier,), {"compute": lambda self: {"a": 1.0}})(), "Names.compute"),
    ],
)
def test_losses_that_are_none(loss: Any, message: str) -> None:
    la = grid.fitted("all", "diag", prior_precision=3.0)
    with pytest.raises(InvalidArgument, match=message):
        quiet(la, val_loader=validation("classification"), loss=loss)
    assert la.prior_precision.item() == 3.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"grid_size": 0}, "grid_size=0"),
        ({"grid_size": 2.5}, "grid_size=2.5"),
        ({"log_prior_prec_min": math.nan}, "log_prior_prec_min=nan"),
        ({"log_prior_prec_max": 400}, "log_prior_prec_max=400"),
        ({"log_prior_prec_min": -400}, "log_prior_prec_min=-400"),
        ({"log_prior_prec_base": -2.0}, "log_prior_prec_base=-2.0"),
    ],
)
def test_candidates_that_are_no_precisions(wrong: dict[str, Any], message: str) -> None:
    la = grid.fitted("all", "diag", prior_precision=3.0)
    with pytest.raises(InvalidArgument, match=message):
        quiet(la, val_loader=validation("classification"), **wrong)
    assert la.prior_precision.item() == 3.0


@pytest.mark.parametrize("structure", ["layerwise", "diag"])
def test_the_best_scalar_is_written_in_the_asked_structure(structure: str) -> None:
    la = grid.fitted("all", "kron")
    quiet(la, val_loader=validation("classification"))
    scalar, probabilities = la.prior_precision, la(X)
    quiet(la, val_loader=validation("classification"), prior_structure=structure)
    assert la.prior_precision.numel() == (la.n_layers if structure == "layerwise" else la.n_params)
    assert torch.equal(la.prior_precision, scalar.expand_as(la.prior_precision))
    torch.testing.assert_close(la(X), probabilities)


def test_order_of_the_grid_does_not_matter() -> None:
    """With a metric that is never reset the first candidates would count in all later ones."""
    la = grid.fitted("all", "kron")
    quiet(la, val_loader=validation("classification"), loss=RunningNLLMetric())
    up = la.prior_precision
    quiet(
        la,
        val_loader=validation("classification"),
        loss=RunningNLLMetric(),
        log_prior_prec_min=4,
        log_prior_prec_max=-4,
    )
    torch.testing.assert_close(la.prior_precision, up)


@pytest.mark.parametrize("likelihood", ["regression"])
def test_a_metric_of_the_mean_alone_is_flat(likelihood: str) -> None:
    """The squared error of the mean does not depend on the prior; that is said, not hidden."""
    la = grid.fitted("all", "diag", likelihood)
    metric = torchmetric("MeanSquaredError", num_outputs=3)
    with pytest.warns(TuningWarning, match="does not depend on the prior precision") as caught:
        la.optimize_prior_precision(method="gridsearch", val_loader=validation(likelihood), loss=metric, grid_size=5)
    assert [w.filename for w in caught] == [__file__]


# What can go wrong.


def bad_where(bad: Callable[[int], bool], value: float) -> Callable[..., float]:
    """A loss with a minimum in the middle of the grid, spoilt at some candidates."""
    number = iter(range(1000))

    def loss(*_: Tensor) -> float:
        i = next(number)
        return value if bad(i) else (i - 4.0) ** 2 - 10

    return loss


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_loss_is_the_worst(value: float) -> None:
    la = grid.fitted("all", "kron")
    with pytest.warns(TuningWarning, match="5 of 9 candidates had no finite loss") as caught:
        la.optimize_prior_precision(
            method="gridsearch",
            val_loader=validation("classification"),
            grid_size=9,
            loss=bad_where(lambda i: i % 2 == 0, value),
        )
    assert [w.filename for w in caught] == [__file__]
    assert la.prior_precision.item() in (pytest.approx(GRID[3].item()), pytest.approx(GRID[5].item()))


def test_minus_infinity_is_no_success() -> None:
    la = grid.fitted("all", "kron")
    with pytest.warns(TuningWarning, match="1 of 9"):
        la.optimize_prior_precision(
            method="CV",
            val_loader=validation("classification"),
            grid_size=9,
            loss=bad_where(lambda i: i == 3, -math.inf),
        )
    assert la.prior_precision.item() == pytest.approx(1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_but_bad_losses(value: float) -> None:
    for weights in grid.WEIGHTS:
        la = grid.fitted(weights, "kron", prior_precision=3.0)
        with pytest.raises(InvalidArgument, match="no candidate"):
            quiet(la, val_loader=validation("classification"), loss=lambda *_: value)
        assert la.prior_precision.item() == 3.0


def test_a_posterior_that_does_not_exist_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    la = grid.fitted("all", "full")
    whole = SpectralScan.variances

    def partly(self: SpectralScan, jacobian: Any, **options: Any) -> Callable[[Tensor], Tensor]:
        variances = whole(self, jacobian, **options)

        def at(precisions: Tensor) -> Tensor:
            if bool((precisions < 5e-3).any()):
                raise CurvatureError("not positive definite")
            return variances(precisions)

        return at

    monkeypatch.setattr(SpectralScan, "variances", partly)
    with pytest.warns(TuningWarning, match="had no finite loss"):
        la.optimize_prior_precision(method="gridsearch", val_loader=validation("classification"), grid_size=9)
    assert la.prior_precision.item() > 5e-3


@pytest.mark.parametrize(("sign", "edge"), [(1, 1e-4), (-1, 1e4)])
def test_the_edge_of_the_grid_is_reported(sign: int, edge: float) -> None:
    la = grid.fitted("all", "kron")
    number = iter(range(100))
    with pytest.warns(TuningWarning, match="edge of the grid") as caught:
        la.optimize_prior_precision(
            method=TuningMethod.GRIDSEARCH,
            val_loader=validation("classification"),
            loss=lambda *_: sign * next(number, 0),
        )
    assert [w.filename for w in caught] == [__file__]
    assert la.prior_precision.item() == pytest.approx(edge)


@pytest.mark.parametrize("loader", [[], iter(()), [(X, torch.full((12,), -100))]], ids=["list", "iterator", "ignored"])
def test_no_validation_data(loader: Any) -> None:
    la = grid.fitted("all", "kron", prior_precision=3.0)
    with pytest.raises(InvalidData, match="no data"):
        la.optimize_prior_precision(method="gridsearch", val_loader=loader)
    assert la.prior_precision.item() == 3.0


def test_a_loss_that_raises_leaves_the_prior() -> None:
    la = grid.fitted("all", "kron", prior_precision=3.0)

    def loss(*_: Tensor) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quiet(la, val_loader=validation("classification"), loss=loss)
    assert la.prior_precision.item() == 3.0


# Cost, options, words.


class Counting(nn.Module):
    """Counts its calls where no call can undo it."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.net = grid.network()
        self.note = calls.append  # not the list itself, whose entries are put back

    def forward(self, x: Tensor) -> Tensor:
        self.note(len(x))
        return self.net(x)


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_the_network_runs_once_per_batch(weights: str, structure: str, link: str) -> None:
    calls: list[int] = []
    la = grid.make(weights, structure, model=Counting(calls))
    la.fit(grid.batches())
    la.check_unchanged()  # which looks at data of the fit once
    calls.clear()
    quiet(la, val_loader=iter(validation("classification")), link_approx=link)
    passes = 2 if structure == "matrix_free" else 1  # the data of the fit as well
    assert sorted(calls) == sorted(passes * [5, 5, 2])  # those of the fit when a candidate asks first


def test_sampled_heads_need_one_pass_of_the_trunk_per_candidate_at_most() -> None:
    calls: list[int] = []
    la = grid.make("last_layer", "kron", model=Counting(calls))
    la.fit(grid.batches())
    calls.clear()
    quiet(la, val_loader=validation("classification"), pred_type="nn", n_samples=10)
    assert len(calls) <= 3 * (len(GRID) + 1)


def test_the_grid() -> None:
    la = grid.fitted("all", "kron")
    number = iter(range(100))
    options: dict[str, Any] = {"method": "gridsearch", "val_loader": validation("classification")}
    la.optimize_prior_precision(
        **options,
        loss=lambda *_: abs(next(number) - 2),
        log_prior_prec_min=-2,
        log_prior_prec_max=2,
        grid_size=5,
        log_prior_prec_base=math.e,
    )
    assert la.prior_precision.item() == pytest.approx(1.0)
    la.optimize_prior_precision(**options, grid_size=1, log_prior_prec_min=2)
    assert la.prior_precision.item() == pytest.approx(100.0)


def test_cv_is_another_name() -> None:
    la = grid.fitted("all", "kron")
    chosen = []
    for method in ("CV", TuningMethod.CV, "gridsearch", TuningMethod.GRIDSEARCH):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TuningWarning)
            la.optimize_prior_precision("glm", method, val_loader=validation("classification"), grid_size=9)
        chosen.append(la.prior_precision.item())
    assert len(set(chosen)) == 1


def test_the_generator_decides_the_draws() -> None:
    la = grid.fitted("all", "kron")
    runs = []
    for seed in (1, 1, 2):
        seen: list[float] = []

        def loss(probs: Tensor, y: Tensor, seen: list[float] = seen) -> float:
            seen.append(nn.functional.nll_loss(probs.log(), y).item())
            return seen[-1]

        generator = torch.Generator().manual_seed(seed)
        quiet(
            la, val_loader=validation("classification"), link_approx="mc", n_samples=5, loss=loss, generator=generator
        )
        runs.append(seen)
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    la = grid.fitted("all", "kron")
    la.optimize_prior_precision(n_steps=2)
    assert capsys.readouterr() == ("", "")
    la.optimize_prior_precision(n_steps=2, verbose=True, progress_bar=True)
    out, err = capsys.readouterr()
    assert "prior precision" in out
    assert f"{la.prior_precision.item():.4f}"[:5] in out
    assert "evidence" in err
    quiet(la, val_loader=validation("classification"), progress_bar=True, grid_size=3)
    assert "grid search" in capsys.readouterr().err


def test_a_cut_above_the_prior_is_told_of() -> None:
    """A truncated evidence favours priors that are too weak: log det P / P₀ lacks what was cut off."""
    la = grid.fitted("all", "lowrank", structure_kwargs={"rank": 3})
    _, values = la.H
    with pytest.warns(TuningWarning, match="leaves out eigenvalues up to .* raise structure_kwargs"):
        la.optimize_prior_precision(init_prior_prec=0.01, n_steps=1)
    assert values.min() >= la.fitted().curvature.tail > la.prior_precision.item()
    with pytest.warns(TuningWarning, match="leaves out eigenvalues"):
        la.optimize_hyperparameters(method="adam", n_steps=1)
    la.optimize_prior_precision(init_prior_prec=1e3, n_steps=1)  # what was cut is small beside it
    whole = grid.fitted("all", "lowrank", structure_kwargs={"rank": 1000})
    whole.optimize_prior_precision(init_prior_prec=0.01, n_steps=1)
