"""The columns of the table: ways to get predictions with uncertainty from networks that are trained on one split.

A predictor takes inputs and returns class probabilities `[N, C]`, or mean and variance of the target, `[N, 1]` each.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import laplace
from benchmarks.quality.data import Pair, Split
from benchmarks.quality.networks import trained
from benchmarks.quality.rows import Row
from laplace import Laplace, metrics
from laplace.extensions.ood import METHODS
from laplace.posterior.calibration import Calibration

Predicted = Any
"""Probabilities `[N, C]`, or `(mean, variance)`."""
Predictor = Callable[[Any], Predicted]

POSTERIORS: dict[str, tuple[Any, Any]] = {
    "last layer, kron": ("last_layer", "kron"),
    "all weights, kron": ("all", "kron"),
    "last layer, full": ("last_layer", "full"),
    "all weights, full": ("all", "full"),
}
NETWORK, TEMPERATURE, ENSEMBLE, DROPOUT = "network", "temperature scaling", "ensemble of five", "MC dropout"
EVIDENCE, CALIBRATE, REFITS = "evidence", "calibrate", "calibrate without validation data"
OOD_METHODS: list[Any] = list(METHODS)
N_MEMBERS, N_PASSES, DROPOUT_RATE = 5, 50, 0.1


@dataclass(frozen=True)
class Column:
    """One way to predict.

    Attributes:
        method: Its name.
        posterior: Weights and structure, a key of `POSTERIORS`; empty where there is none.
        predict: The predictor.
        chosen: What was chosen, in words.
    """

    method: str
    posterior: str
    predict: Predictor
    chosen: str = ""


def batches(pair: Pair) -> list[Pair]:
    """A loader of batches of 256."""
    return list(zip(pair[0].split(256), pair[1].split(256), strict=True))


def columns(row: Row, split: Split, seed: int) -> Iterator[Column]:
    """All columns of one row, on one split.

    Args:
        row: The network, how it is trained, and its posteriors.
        split: The data.
        seed: Of the networks' first weights and batches.
    """
    make, options = row.make, row.options
    model = trained(make, split, seed, **options)
    members = [model, *(trained(make, split, 1000 * i + seed, **options) for i in range(1, N_MEMBERS))]
    dropped = trained(make, split, seed, **options, dropout=DROPOUT_RATE)
    if split.is_regression:
        yield Column(NETWORK, "", with_noise(lambda x: [model(x)], split.val))
        yield Column(ENSEMBLE, "", with_noise(lambda x: [member(x) for member in members], split.val))
        yield Column(DROPOUT, "", with_noise(lambda x: _passes(dropped, x, seed), split.val))
    else:
        yield Column(NETWORK, "", lambda x: model(x).softmax(1))
        temperature = best_temperature(model, split.val)
        yield Column(TEMPERATURE, "", lambda x: (model(x) / temperature).softmax(1), f"T = {temperature:.3g}")
        yield Column(ENSEMBLE, "", lambda x: torch.stack([member(x).softmax(1) for member in members]).mean(0))
        yield Column(DROPOUT, "", lambda x: torch.stack([f.softmax(1) for f in _passes(dropped, x, seed)]).mean(0))
    before = copy.deepcopy(model.state_dict())
    for posterior in row.posteriors:
        yield from laplace_columns(model, split, posterior)
    if row.refits:
        yield calibrated(model, split, row.posteriors[0], None)
    after = model.state_dict()
    if not all(torch.equal(before[key], after[key]) for key in before):
        raise RuntimeError("the network was changed")


def laplace_columns(model: nn.Module, split: Split, posterior: str) -> Iterator[Column]:
    """The posterior with what the evidence chooses, then calibrated on the validation data."""
    likelihood = "regression" if split.is_regression else "classification"
    tuned = Laplace(model, likelihood, *POSTERIORS[posterior])
    tuned.fit(batches(split.train))
    if split.is_regression:
        tuned.optimize_hyperparameters(("prior_precision", "sigma_noise"))
        note = f"δ = {float(tuned.prior_precision):.3g}, σ = {float(tuned.sigma_noise):.3g}"
    else:
        tuned.optimize_prior_precision()
        note = f"δ = {float(tuned.prior_precision):.3g}"
    yield Column(EVIDENCE, posterior, _of(tuned), note)
    yield calibrated(model, split, posterior, batches(split.val))


def unseen_scores(row: Row, split: Split, seed: int) -> dict[str, dict[str, tuple[float, float]]]:
    """AUROC and FPR95 of every `laplace.ood_score` between test data and unseen inputs, by posterior and score."""
    if split.unseen is None:
        return {}
    model, train = trained(row.make, split, seed, **row.options), batches(split.train)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for posterior in row.posteriors:
        la = Laplace(model, "classification", *POSTERIORS[posterior])
        la.fit(train)
        scorer = laplace.ood_scorer(la, OOD_METHODS, train_loader=train)
        inside, outside = scorer(split.test[0]), scorer(split.unseen)
        pairs = {name: (-inside[name], -outside[name]) for name in inside}
        found[posterior] = {n: (float(metrics.auroc(*p)), float(metrics.fpr95(*p))) for n, p in pairs.items()}
    return found


def calibrated(model: nn.Module, split: Split, posterior: str, val: list[Pair] | None) -> Column:
    """The posterior calibrated on validation data, or by refits of the head where there are none."""
    la = Laplace(model, "regression" if split.is_regression else "classification", *POSTERIORS[posterior])
    train = batches(split.train)
    la.fit(train)
    found = la.calibrate(val) if val else la.calibrate(train_loader=train)
    return Column(CALIBRATE if val else REFITS, posterior, _of(la), in_words(found))


def in_words(found: Calibration) -> str:
    """What a calibration chose."""
    if found.is_network:
        return "network"
    chosen = f"c = {found.scale:.3g}, δ = {float(found.prior_precision):.3g}"
    return chosen if found.link_approx else f"{chosen}, σ = {float(found.sigma_noise):.3g}"


def _of(la: Any) -> Predictor:
    def predict(x: Tensor) -> Predicted:
        if la.likelihood != "regression":
            return la(x)
        found = la.predict(x)
        return found.mean, found.variance

    return predict


def best_temperature(model: nn.Module, val: Pair) -> float:
    """The temperature with the smallest loss on validation data, between 0.05 and 20 (Guo et al., 2017)."""
    from scipy.optimize import minimize_scalar

    with torch.no_grad():
        logits = model(val[0]).double()

    def loss(log_temperature: float) -> float:
        return float(nn.functional.cross_entropy(logits / math.exp(log_temperature), val[1]))

    found: Any = minimize_scalar(loss, bounds=(math.log(0.05), math.log(20)), method="bounded")
    return math.exp(found.x)


def _passes(model: nn.Module, x: Tensor, seed: int) -> list[Tensor]:
    """Outputs with units dropped at random, the same at each call; batch normalisation stays in evaluation mode."""
    dropouts = [layer for layer in model.modules() if isinstance(layer, nn.Dropout)]
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        for layer in dropouts:
            layer.train()
        outputs = [model(x) for _ in range(N_PASSES)]
        for layer in dropouts:
            layer.eval()
    return outputs


def with_noise(outputs: Callable[[Any], list[Tensor]], val: tuple[Any, Tensor]) -> Predictor:
    """Mean and variance of several outputs, with the noise that gives the validation targets the best log score."""
    from scipy.optimize import minimize_scalar

    def moments(x: Any) -> Pair:
        stacked = torch.stack(outputs(x))
        return stacked.mean(0), stacked.var(0, unbiased=False)

    with torch.no_grad():
        mean, variance = moments(val[0])
    squared = (val[1] - mean).square()

    def loss(log_noise: float) -> float:
        total = variance + math.exp(log_noise)
        return float((total.log() + squared / total).mean())

    centre = math.log(float(squared.mean()))
    found: Any = minimize_scalar(loss, bounds=(centre - 6, centre + 1), method="bounded")
    noise = math.exp(found.x)

    def predict(x: Any) -> Predicted:
        mean, variance = moments(x)
        return mean, variance + noise

    return predict
