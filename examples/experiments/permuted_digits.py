"""Continual learning on permuted digits: how much of ten tasks a network remembers that sees each of them only once.

Every task is the same handwritten digits with the pixels in another fixed order, as in the permuted MNIST of Daxberger et
al. (2021, section 4.4, appendix C.4 and figure 7), on scikit-learn's 8×8 images. A network with two hidden layers of 100
units learns the tasks one after the other. Without a memory it forgets; with the Laplace approximation of the former
tasks for a prior it does not: diagonal, Kronecker-factored, and Kronecker-factored with a prior precision that the
evidence adapts during every task. After every task the accuracy on the held-out digits of all tasks seen is averaged.

    python examples/experiments/permuted_digits.py            # 10 tasks, 3 seeds
    python examples/experiments/permuted_digits.py --small    # 2 tasks, 1 seed, to try it out
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from laplace import Laplace
from laplace.metrics import accuracy
from laplace.plotting import new_figure
from laplace.training.continual import continual_training

LEARNING_RATE, BATCH_SIZE, PRIOR_PRECISION = 1e-3, 64, 1.0


@dataclass(frozen=True)
class Method:
    """A way to remember: a structure, or None for the prior alone, and whether the evidence adapts the prior."""

    structure: str | None
    tuned: bool = False


METHODS = {
    "none": Method(None),
    "diag": Method("diag"),
    "Kron": Method("kron"),
    "Kron, tuned prior": Method("kron", tuned=True),
}


@dataclass(frozen=True)
class Task:
    """Digits with permuted pixels: images `[N, 64]` in [0, 1], labels `[N]`."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    def loader(self, seed: int) -> Batches:
        """The training data in random order."""
        return Batches(self.x_train, self.y_train, torch.Generator().manual_seed(seed))


class Batches:
    """Batches in a new random order every time they are read; for data in memory much faster than a `DataLoader`."""

    def __init__(self, x: Tensor, y: Tensor, generator: torch.Generator) -> None:
        self.x, self.y, self.generator = x, y, generator

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(self.y), generator=self.generator).split(BATCH_SIZE):
            yield self.x[index], self.y[index]


def make_tasks(n_tasks: int, seed: int) -> list[Task]:
    """Tasks of one split (70 % training, 30 % test); the first has the pixels in order."""
    generator = torch.Generator().manual_seed(seed)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=generator)
    x, y = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
    cut = int(0.7 * len(x))
    pixels = [torch.arange(64)] + [torch.randperm(64, generator=generator) for _ in range(n_tasks - 1)]
    return [Task(x[:cut, p], y[:cut], x[cut:, p], y[cut:]) for p in pixels]


def make_network(seed: int) -> nn.Module:
    """64 pixels, two hidden layers of 100 units, ten classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
        )  # fmt: skip


def run(
    method: Method, tasks: list[Task], seed: int, n_epochs: int, prior_precision: float = PRIOR_PRECISION
) -> list[float]:
    """Learns the tasks in turn; the accuracy after each of them, averaged over the tasks seen."""
    model = make_network(seed)

    def posterior() -> Laplace:
        return Laplace(model, "classification", "all", method.structure or "diag", prior_precision=prior_precision)

    def score(n_seen: int, _: object) -> None:
        with torch.no_grad():
            seen = [float(accuracy(model(task.x_test).softmax(1), task.y_test)) for task in tasks[:n_seen]]
        scores.append(sum(seen) / n_seen)

    scores: list[float] = []
    options = {
        "n_epochs": n_epochs,
        "optimizer_kwargs": {"lr": LEARNING_RATE},
        "fix_prior_precision": not method.tuned,
        "marglik_frequency": 10,
        "n_hypersteps": 20,
    }
    loaders = [task.loader(seed) for task in tasks]
    if method.structure is not None:
        continual_training(posterior(), loaders, score, **options)
        return scores
    for n_seen, loader in enumerate(loaders, start=1):  # a new posterior per task: only the prior remains
        continual_training(posterior(), [loader], lambda _, result, n_seen=n_seen: score(n_seen, result), **options)
    return scores
