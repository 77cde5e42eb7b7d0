"""Tables B2 and B3 of Immer et al. (2021): posteriors of small tanh networks and how they predict, on small data sets.

Of every method a prediction is made at every prior precision that it tries; the one that it keeps has the smallest
negative log likelihood on the validation data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.errors import ApproximationWarning
from laplace.metrics import accuracy, expected_calibration_error, nll
from protocol.baselines.mean_field import mean_field
from protocol.data import Part, Split
from protocol.measures import SMALLEST, class_probabilities
from protocol.records import Scores
from protocol.stacked import Steps, map_networks, n_outputs, probabilities, sizes_of, stacked_outputs

N_BINS = 10
STRUCTURES = {"full": "", "kron": " KFAC", "diag": " diag"}
"""Of the curvature, and what they add to the name of a method."""


@dataclass(frozen=True)
class Task:
    """A data set.

    Attributes:
        load: Gives inputs `[N, D]` and labels `[N]` for a seed, which matters where they are generated.
        n_classes: Of the labels.
        exponents: Powers of ten between which the prior precisions lie.
        n_data: At most so many of the data, a random part.
        tests_on_rest: Whether the others are test data, beside those of the part: where a generator makes as many as
            one asks for.
        seeds: So many of every hundred; None for all.
        tolerance: Of refinement.
        with_mode: Whether the refined mode is looked for, beside the refined Gaussian.
    """

    load: Callable[[int], Part]
    n_classes: int
    exponents: tuple[float, float] = (-2.0, 2.0)
    n_data: int = 1000
    tests_on_rest: bool = False
    seeds: int | None = None
    tolerance: float = 1e-2
    with_mode: bool = True


@dataclass(frozen=True)
class Settings:
    """How large everything is.

    Attributes:
        n_hidden: Units of a hidden layer.
        layers: Numbers of hidden layers.
        map_steps: Of full-batch Adam.
        mean_field_steps: Of Adam on batches.
        batch_size: Of these.
        n_precisions: Prior precisions that every method tries.
        n_samples: Of the outputs, per predictive.
        n_networks: Of sampled weights.
        n_points: Of the expectations of variational refinement, for softmax.
        n_refinements: Steps of a refinement, at most: of the covariance, and of the mean under each.
        n_subset: Data of the Gaussian process.
        n_data: At most so many of every data set; None for as many as it has.
    """

    n_hidden: int = 50
    layers: tuple[int, ...] = (2, 1)
    map_steps: int = 600
    mean_field_steps: int = 1000
    batch_size: int = 100
    n_precisions: int = 10
    n_samples: int = 1000
    n_networks: int = 50
    n_points: int = 64
    n_refinements: int = 3
    n_subset: int = 100
    n_data: int | None = None


SMALL = Settings(2, (2,), 10, 10, 20, 1, 20, 3, 24, 2, 10, 120)


def make_split(task: Task, settings: Settings, seed: int) -> Split:
    """70, 15 and 15 % of the data, stratified by the labels, in units of the training data's deviations."""
    data = task.load(seed)
    x, y = data.x.numpy(), data.y.numpy()
    n_data = min(len(y), task.n_data, settings.n_data or len(y))

    def parted(rows: np.ndarray, size: float) -> tuple[np.ndarray, np.ndarray]:
        """Two stratified parts: a number of the rows or a share of them, and the rest."""
        one, two = train_test_split(rows, train_size=size, stratify=y[rows], random_state=seed)
        return one, two

    rows = np.arange(len(y))
    rows, unused = parted(rows, n_data) if n_data < len(y) else (rows, rows[:0])
    train, others = parted(rows, 0.7)
    validation, test = parted(others, 0.5)
    if task.tests_on_rest:
        test = np.concatenate([test, unused])
    mean, spread = np.mean(x[train], axis=0), np.std(x[train], axis=0)
    spread[spread == 0] = 1
    x = torch.tensor((x - mean) / spread, dtype=torch.float64)
    return Split(*(Part(x[part], data.y[part]) for part in (train, validation, test)))


@dataclass
class Candidates:
    """Predictions of one method at the prior precisions that it tries.

    Attributes:
        losses: NLL of the validation data.
        predictions: Probabilities `[B, C]` of the test data.
        precisions: Which they are.
    """

    losses: list[float] = field(default_factory=list)
    predictions: list[Tensor] = field(default_factory=list)
    precisions: list[float] = field(default_factory=list)

    def add(self, p: Tensor, split: Split, precision: float) -> None:
        """Keeps probabilities of validation and test data, one after the other."""
        p = class_probabilities(p.double()).clamp(SMALLEST, 1)
        n_validation = len(split.validation)
        self.losses.append(float(nll(p[:n_validation], split.validation.y)))
        self.predictions.append(p[n_validation:])
        self.precisions.append(precision)

    def measures(self, y: Tensor) -> dict[str, float]:
        """Of the best on the validation data."""
        best = self.losses.index(min(self.losses))
        p = self.predictions[best]
        return {
            "NLL": float(nll(p, y)),
            "accuracy": float(accuracy(p, y)),
            "ECE": float(expected_calibration_error(p, y, N_BINS)),
            "log10 δ": float(np.log10(self.precisions[best])),
        }


@dataclass(frozen=True)
class Posteriors:
    """The posteriors of one network.

    Attributes:
        model: Its network, at the mode.
        precision: δ.
        task: Its data set.
        split: Its data.
        settings: How large everything is.
        seed: Of the samples.
    """

    model: nn.Sequential
    precision: float
    task: Task
    split: Split
    settings: Settings
    seed: int

    @property
    def n_weights(self) -> int:
        """P."""
        return sum(each.numel() for each in self.model.parameters())

    @property
    def inputs(self) -> Tensor:
        """Validation and test data."""
        return torch.cat([self.split.validation.x, self.split.test.x])

    def loader(self) -> list[tuple[Tensor, Tensor]]:
        """The training data, targets as the likelihood takes them."""
        data = self.split.train
        return [(data.x, data.y.double().unsqueeze(1) if self.task.n_classes == 2 else data.y)]

    def fitted(self, structure: str) -> ParametricLaplace:
        """A posterior; that of a full covariance in whichever space is smaller, of weights or of functions."""
        options: dict[str, int | bool] = {}
        n_data = len(self.split.train)
        if structure == "full" and n_data * n_outputs(self.task.n_classes) < self.n_weights:
            structure, options = "gp", {"n_subset": n_data}
        elif structure == "gp":
            options = {"n_subset": min(self.settings.n_subset, n_data), "independent_outputs": True}
        likelihood = "bernoulli" if self.task.n_classes == 2 else "classification"
        la = Laplace(self.model, likelihood, "all", structure, prior_precision=self.precision, **options)
        la.fit(self.loader())
        return la

    def linearised(self, la: ParametricLaplace) -> Tensor:
        """Probabilities of the linearised network."""
        generator = torch.Generator().manual_seed(self.seed)
        n_samples = self.settings.n_samples
        return la.predict(self.inputs, n_samples=n_samples, link_approx="mc", generator=generator).probabilities

    def sampled(self, la: ParametricLaplace) -> Tensor:
        """Probabilities by networks of sampled weights."""
        weights = la.sample(self.settings.n_networks, generator=torch.Generator().manual_seed(self.seed)).float()
        tensors, at = [], 0
        for each in self.model.parameters():
            flat = weights[:, at : at + each.numel()]
            tensors.append(flat.view(-1, *each.shape).mT if each.ndim == 2 else flat.unsqueeze(1))
            at += each.numel()
        return probabilities(stacked_outputs(tensors, self.inputs.float())).mean(0)

    def refined(self, la: ParametricLaplace, method: Literal["map", "variational"]) -> Tensor:
        """Probabilities of the linearised network after refinement."""
        settings = self.settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ApproximationWarning)  # at small prior precisions it takes long to converge
            la.refine(
                self.loader(), method, max_steps=settings.n_refinements, n_samples=settings.n_points,
                tolerance=self.task.tolerance,
            )  # fmt: skip
        return self.linearised(la)

    def predictions(self) -> Iterator[tuple[str, Tensor]]:
        """Every method and its prediction at this prior precision."""
        with torch.no_grad():
            yield "MAP", probabilities(self.model(self.inputs))
        for structure, name in STRUCTURES.items():
            la = self.fitted(structure)
            yield f"BNN{name}", self.sampled(la)
            yield f"GLM{name}", self.linearised(la)
            if structure != "kron":
                yield f"GLM refined{name}", self.refined(la, "variational")
                if self.task.with_mode:
                    yield f"GLM mode{name}", self.refined(self.fitted(structure), "map")
        yield "GP", self.linearised(self.fitted("gp"))


def compared(task: Task, settings: Settings, split: Split, n_layers: int, seed: int) -> dict[str, Candidates]:
    """All methods at all prior precisions that they try."""
    sizes = sizes_of(split.train.x.shape[1], settings.n_hidden, n_layers, task.n_classes)
    precisions = torch.logspace(*task.exponents, settings.n_precisions).tolist()
    models = map_networks(sizes, split.train, precisions, Steps(settings.map_steps, 1e-2, (0.7, 0.9)), seed)
    found: dict[str, Candidates] = {"MAP": Candidates(), "MFVI": Candidates()}
    for model, precision in zip(models, precisions, strict=True):
        posteriors = Posteriors(model, precision, task, split, settings, seed)
        for name, p in posteriors.predictions():
            found.setdefault(name, Candidates()).add(p, split, precision)
    how = Steps(settings.mean_field_steps, 1e-2, (0.7, 0.9))
    q = mean_field(sizes, split.train, precisions, how, seed, settings.batch_size)
    inputs = torch.cat([split.validation.x, split.test.x])
    every_p = q.predict(inputs, settings.n_networks, torch.Generator().manual_seed(seed))
    for p, precision in zip(every_p, precisions, strict=True):
        found["MFVI"].add(p, split, precision)
    return found


def depth(task: str, n_layers: int) -> str:
    """The name of a condition."""
    return f"{task}, {n_layers} layer" + ("s" if n_layers > 1 else "")


def scores_of(tasks: dict[str, Task], settings: Settings, seed: int) -> Scores:
    """All methods on all data sets that have this split."""
    scores = Scores()
    for name, task in tasks.items():
        if task.seeds is not None and seed % 100 >= task.seeds:
            continue
        split = make_split(task, settings, seed)
        for n_layers in settings.layers:
            found = compared(task, settings, split, n_layers, seed)
            for method, candidates in found.items():
                scores.add(depth(name, n_layers), method, candidates.measures(split.test.y))
    return scores


def conditions(tasks: Sequence[str], settings: Settings) -> list[tuple[str, int]]:
    """Data set and number of layers of every condition."""
    return [(task, n_layers) for n_layers in settings.layers for task in tasks]
