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
from laplace import Laplace, MixtureLaplace, metrics
from laplace.extensions.ood import METHODS
from laplace.extensions.snapshots import Snapshots
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
SNAPSHOTS, CALIBRATED_ENSEMBLE = "snapshots and restarts, calibrate", "ensemble of five, calibrate"
N_RESTARTS, PATIENCE = 4, 5
"""Restarts of a training, and epochs without a smaller validation loss before one ends."""
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
        trainings: Trainings besides that of the network, in epochs of that.
    """

    method: str
    posterior: str
    predict: Predictor
    chosen: str = ""
    trainings: float = 0.0


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
    training = Training.of(row, split, seed)
    model, more = training.model, Epochs()
    members = [
        model,
        *(trained(make, split, 1000 * i + seed, **options, after_epoch=more) for i in range(1, N_MEMBERS)),
    ]
    four = more.count / training.n_epochs
    dropped = trained(make, split, seed, **options, dropout=DROPOUT_RATE)
    if split.is_regression:
        yield Column(NETWORK, "", with_noise(lambda x: [model(x)], split.val))
        yield Column(ENSEMBLE, "", with_noise(lambda x: [member(x) for member in members], split.val), trainings=four)
        yield Column(DROPOUT, "", with_noise(lambda x: _passes(dropped, x, seed), split.val))
    else:
        yield Column(NETWORK, "", lambda x: model(x).softmax(1))
        temperature = best_temperature(model, split.val)
        yield Column(TEMPERATURE, "", lambda x: (model(x) / temperature).softmax(1), f"T = {temperature:.3g}")
        mean = lambda x: torch.stack([member(x).softmax(1) for member in members]).mean(0)  # noqa: E731
        yield Column(ENSEMBLE, "", mean, trainings=four)
        yield Column(DROPOUT, "", lambda x: torch.stack([f.softmax(1) for f in _passes(dropped, x, seed)]).mean(0))
    before = copy.deepcopy(model.state_dict())
    for posterior in row.posteriors:
        yield from laplace_columns(model, split, posterior)
    if not split.is_regression:
        yield from mixtures(row, split, seed, training, members, four)
    if row.refits:
        yield calibrated(model, split, row.posteriors[0], None)
    after = model.state_dict()
    if not all(torch.equal(before[key], after[key]) for key in before):
        raise RuntimeError("the network was changed")


Fit = Callable[[nn.Module, list[Pair], list[Pair]], Predictor]
"""`fit(model, train, validation)` of a user's file: takes a trained network and batches, returns the predictor."""


def own_columns(name: str, fit: Fit, row: Row, split: Split, seed: int) -> Iterator[Column]:
    """The network, and a method of the user's own; nothing where that refuses the row by a `NotImplementedError`."""
    model = trained(row.make, split, seed, **row.options)
    try:
        predict = fit(copy.deepcopy(model), batches(split.train), batches(split.val))
    except NotImplementedError:
        return
    if isinstance(predict(split.val[0][:2]), tuple) is not split.is_regression:
        needed = "(mean, variance), [N, 1] each" if split.is_regression else "probabilities [N, C]"
        raise TypeError(f"{name}: predict(x) of row {row.name!r} must return {needed}; or refuse such rows in fit by a "
                        "NotImplementedError.")  # fmt: skip
    network = with_noise(lambda x: [model(x)], split.val) if split.is_regression else lambda x: model(x).softmax(1)
    yield Column(NETWORK, "", network)
    yield Column(name, "", predict)


@dataclass
class Epochs:
    """Counts them."""

    count: int = 0

    def __call__(self, model: nn.Module) -> None:
        """One more."""
        self.count += 1


@dataclass(frozen=True)
class Training:
    """A trained network, with the states that its training passed through.

    Attributes:
        model: The network.
        states: Those of the last epochs.
        n_epochs: How many there were.
    """

    model: nn.Module
    states: Snapshots
    n_epochs: int

    @classmethod
    def of(cls, row: Row, split: Split, seed: int) -> Training:
        """Trains the network of a row."""
        epochs, states = Epochs(), dict[str, Snapshots]()

        def after_epoch(model: nn.Module) -> None:
            epochs(model)
            states.setdefault("", laplace.snapshots(model)).keep()

        model = trained(row.make, split, seed, **row.options, after_epoch=after_epoch)
        return cls(model, states[""], epochs.count)


def mixtures(
    row: Row, split: Split, seed: int, training: Training, members: list[nn.Module], four: float
) -> Iterator[Column]:
    """Snapshots with short restarts of the one training, and the five networks, as calibrated mixtures.

    A restart takes half of the training's epochs at most, and ends early by the loss of the validation data. `four` are
    the epochs of the four further networks, in trainings.
    """
    posterior, epochs = row.posteriors[0], Epochs()
    short = {**row.options, "epochs": max(1, training.n_epochs // 2), "patience": PATIENCE}

    def train(network: nn.Module) -> None:
        trained(row.make, split, seed + epochs.count, **short, begin=network, after_epoch=epochs)

    training.states.restarts(train, N_RESTARTS, generator=torch.Generator().manual_seed(seed))
    pool = training.states.posterior(batches(split.val), "classification", *POSTERIORS[posterior])
    five = MixtureLaplace(members, "classification", *POSTERIORS[posterior])
    for method, la, more, note in (
        (SNAPSHOTS, pool, epochs.count / training.n_epochs, f"{pool.n_components} networks, "),
        (CALIBRATED_ENSEMBLE, five, four, ""),
    ):
        data = batches(split.train)
        la.fit(data)
        found = la.calibrate(batches(split.val), train_loader=data)
        yield Column(method, posterior, _of(la), note + in_words(found), more)


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
    found = la.calibrate(val, train_loader=train)
    return Column(CALIBRATE if val else REFITS, posterior, _of(la), in_words(found))


def in_words(found: Calibration) -> str:
    """What a calibration chose."""
    if found.is_network:
        return "network"
    chosen = f"c = {found.scale:.3g}, δ = {float(found.prior_precision):.3g}"
    return chosen if found.link_approx else f"{chosen}, σ = {float(found.sigma_noise):.3g}"


def _of(la: Any) -> Predictor:
    def predict(x: Tensor) -> Predicted:
        if not la.likelihood_object.has_noise:
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
