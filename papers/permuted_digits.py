"""Continual learning on permuted digits: Daxberger et al. (2021), section 4.4, appendix C.4, figure 7.

Every task is the same handwritten digits with the pixels in another fixed order, on scikit-learn's 8 × 8 images. A
network with two hidden layers of 100 units learns ten tasks one after the other. After every task the accuracy on
held-out digits of all tasks seen is averaged. What is remembered:

- "none": nothing, MAP with the prior alone;
- "diag", "Kron": the Laplace approximation of the former tasks, Kronecker factors summed over tasks as in the paper;
- "products": the Kronecker products of every task in the penalty, the first form of Ritter et al. (2018);
- "VOGN": the variational posterior of Osawa et al. (2019).

The prior precision is fixed, or starts there and is adapted by the evidence during every task ("tuned").

    python papers/permuted_digits.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.metrics import accuracy
from laplace.plotting import new_figure
from laplace.training import TaskMemory
from laplace.training.continual import train_task
from protocol.baselines.vogn import Vogn, VognSettings
from protocol.claims import Claim
from protocol.data import Part, digits, split
from protocol.networks import mlp
from protocol.options import Options, parse
from protocol.records import Records, Scores
from protocol.report import Table, finish


@dataclass(frozen=True)
class Settings:
    """What is run, the same for every method.

    Attributes:
        n_tasks: One after the other.
        n_epochs: Of every task.
        batch_size: Of its batches.
        rate: Of Adam.
        priors: Fixed prior precisions, and where the tuned ones start; other methods than "kron" have the first.
        n_hypersteps: Of Adam on log δ, every ten epochs and after the last.
        hyper_rate: Their size.
        vogn: The settings of that baseline.
        vogn_prior: Its prior precision.
    """

    n_tasks: int
    n_epochs: int
    batch_size: int
    rate: float
    priors: tuple[float, ...]
    n_hypersteps: int
    hyper_rate: float
    vogn: VognSettings
    vogn_prior: float


FULL = Settings(10, 50, 128, 1e-2, (1.0, 0.1, 10.0), 1, 0.1, VognSettings(), 1.0)
SMALL = Settings(2, 1, 256, 1e-2, (1.0,), 1, 0.1, VognSettings(n_epochs=1, n_samples=1), 1.0)


@dataclass(frozen=True)
class Method:
    """A way to remember.

    Attributes:
        structure: Of the curvature; None for nothing.
        prior: The prior precision, or where it starts.
        tuned: By the evidence, one per tensor.
        products: The former tasks' products are kept.
    """

    structure: str | None
    prior: float
    tuned: bool = False
    products: bool = False

    @property
    def name(self) -> str:
        """As tables show it."""
        structure = "none" if self.structure is None else "products" if self.products else self.structure
        return f"{structure}, {'tuned from' if self.tuned else 'fixed'} {self.prior:g}"


def methods(settings: Settings) -> list[Method]:
    """All but VOGN."""
    first = settings.priors[0]
    kron = [Method("kron", prior, tuned) for prior in settings.priors for tuned in (False, True)]
    products = [Method("kron", first, tuned, products=True) for tuned in (False, True)]
    return [Method(None, first), Method("diag", first), Method("diag", first, tuned=True), *kron, *products]


@dataclass(frozen=True)
class Task:
    """Digits with permuted pixels, `[N, D]`."""

    train: Part
    test: Part


class Batches:
    """Batches in a new random order every time they are read."""

    def __init__(self, data: Part, size: int, seed: int) -> None:
        self.data, self.size, self.generator = data, size, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.data.batches(self.size, self.generator)


def make_tasks(n_tasks: int, path: Path | None, seed: int) -> list[Task]:
    """Tasks of one split (70 % training, 30 % test); the first has the pixels in order."""
    generator = torch.Generator().manual_seed(seed)
    images = digits(path)
    parts = split(Part(images.x.flatten(1), images.y), (0.7, 0.0), generator)
    n_pixels = parts.train.x.shape[1]
    orders = [torch.arange(n_pixels), *(torch.randperm(n_pixels, generator=generator) for _ in range(n_tasks - 1))]
    return [Task(*(Part(part.x[:, order], part.y) for part in (parts.train, parts.test))) for order in orders]


@torch.no_grad()
def mean_accuracy(model: nn.Module, tasks: list[Task]) -> float:
    """Over the test data of tasks."""
    return sum(float(accuracy(model(task.test.x).softmax(1), task.test.y)) for task in tasks) / len(tasks)


def remember(method: Method, tasks: list[Task], settings: Settings, seed: int) -> list[float]:
    """Learns the tasks in turn; the mean accuracy over the tasks seen, after each of them."""
    model = network(tasks, seed)
    prior = torch.full((len(list(model.parameters())) if method.tuned else 1,), method.prior)

    def posterior() -> Laplace:
        return Laplace(model, "classification", "all", method.structure or "diag", prior_precision=prior)

    la, memory, found = posterior(), TaskMemory() if method.products else None, []
    for number, task in enumerate(tasks, 1):
        if method.structure is None:
            la = posterior()  # a new one for every task: the prior alone is left of the former ones
        train_task(
            la, Batches(task.train, settings.batch_size, seed), n_epochs=settings.n_epochs,
            optimizer_kwargs={"lr": settings.rate}, fix_prior_precision=not method.tuned,
            n_hypersteps=settings.n_hypersteps, lr_hyp=settings.hyper_rate, memory=memory,
        )  # fmt: skip
        found.append(mean_accuracy(model, tasks[:number]))
    return found


def remember_by_vogn(tasks: list[Task], settings: Settings, seed: int) -> list[float]:
    """The same by VOGN, with predictions at its mean."""
    vogn = Vogn(network(tasks, seed), settings.vogn_prior, settings.vogn, seed)
    found = []
    for number, task in enumerate(tasks, 1):
        vogn.learn(Batches(task.train, settings.batch_size, seed), len(task.train))
        found.append(mean_accuracy(vogn.model, tasks[:number]))
    return found


def network(tasks: list[Task], seed: int) -> nn.Sequential:
    """Two hidden layers of 100 units."""
    flat = mlp((tasks[0].train.x.shape[1], 100, 100, int(tasks[0].train.y.max()) + 1), seed)
    return flat[1:]  # inputs are flat already


def seen(number: int) -> str:
    """Name of the condition."""
    return f"after {number} tasks"


def one_seed(settings: Settings, path: Path | None, seed: int) -> Scores:
    """All methods on the same tasks."""
    scores, tasks = Scores(), make_tasks(settings.n_tasks, path, seed)
    of_methods = {each.name: partial(remember, each) for each in methods(settings)} | {"VOGN": remember_by_vogn}
    for name, run in of_methods.items():
        for number, value in enumerate(run(tasks, settings, seed), 1):
            scores.add(seen(number), name, {"accuracy": value})
    return scores


def claims(settings: Settings) -> list[Claim]:
    """What section 4.4 and appendix C.4 say, and Ritter et al. of their two forms."""
    last, first = seen(settings.n_tasks), settings.priors[0]

    def gap(better: str, worse: str, scores: Scores) -> float:
        return scores[last, better, "accuracy"] - scores[last, worse, "accuracy"]

    def over(method: str, least: float, scores: Scores) -> float:
        return scores[last, method, "accuracy"] - least

    def compared(better: str, worse: str, theirs: str = "", item: str = "figure 7", note: str = "") -> Claim:
        return Claim(item, f"{last}: accuracy of {better} > {worse}", partial(gap, better, worse), theirs, note)

    none, kron, products = f"none, fixed {first:g}", f"kron, tuned from {first:g}", f"products, tuned from {first:g}"
    found = [compared(other, none, "fails catastrophically") for other in (f"diag, tuned from {first:g}", kron, "VOGN")]
    found += [compared(kron, f"diag, tuned from {first:g}"), compared(kron, "VOGN", "closely followed")]
    found += [compared(products, other, item="Ritter et al.") for other in (kron, "VOGN")]
    pairs = [("kron", prior) for prior in settings.priors] + [("products", first)]
    for structure, prior in pairs:
        tuned, fixed = (f"{structure}, {how} {prior:g}" for how in ("tuned from", "fixed"))
        found.append(compared(tuned, fixed, "tuning improves", note=LARGER))
    for method in (kron, products):
        text = f"{last}: accuracy of {method} > 0.85"
        found.append(Claim("4.4", text, partial(over, method, 0.85), "0.96 on MNIST", AT_ONCE))
    return found


def accuracy_table(records: Records, n_tasks: int) -> Table:
    """Methods × numbers of tasks."""
    numbers = sorted({*range(2, n_tasks + 1, 2), 1})
    rows = [
        (method, *(str(records.estimate(seen(number), method, "accuracy")) for number in numbers))
        for method in records.methods(seen(1))
    ]
    return Table("figure 7: mean accuracy on the tasks seen", ("tasks seen", *map(str, numbers)), tuple(rows))


def draw(records: Records, settings: Settings, output: Path) -> None:
    """Figure 7: mean accuracy against the number of tasks seen, with standard errors."""
    figure, (axes,) = new_figure(width=5.5, height=3.8)
    first, numbers = settings.priors[0], list(range(1, settings.n_tasks + 1))
    shown = ("none, fixed", "diag, tuned from", "kron, fixed", "kron, tuned from", "products, tuned from")
    for method in (*(f"{name} {first:g}" for name in shown), "VOGN"):
        found = [records.estimate(seen(number), method, "accuracy") for number in numbers]
        axes.errorbar(numbers, [e.mean for e in found], [e.error for e in found], marker="o", ms=3, label=method)
    axes.set(xlabel="tasks seen", ylabel="mean accuracy", ylim=(0, 1), title="Permuted digits")
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)


AT_ONCE = """The network is large enough: on seeds 100 and 101 it learnt all ten tasks at once to 0.97. What is lost \
is lost by Gaussians of the former tasks, each of 1,258 data."""
LARGER = """The evidence asks for larger δ, at every step of the first five tasks: on seed 100 from 1 to 1.65 after \
one task, 12 after five and 18 to 90, by tensor, after ten, where the accuracy was 0.77. A fixed 10 remembers less \
than a fixed 1, so that tuning can help from a small start alone."""
PROTOCOL = """The paper's protocol on scikit-learn's digits, 8 × 8 pixels and 1,258 to train on instead of MNIST's \
60,000. Settings were chosen on seeds from 100 on: those of Laplace approximations for a fixed prior and a tuned one, \
VOGN's rate, decay of squares, start and prior for itself. Of every method the weights predict at which a task ends. \
That products of every task are better than summed factors is expected from Ritter et al. (2018), not claimed by this \
paper; 0.85 is a level set for these small images, where the paper has 0.96 on MNIST."""


def main(options: Options) -> None:
    """Runs and reports.

    Args:
        options: Of the command line.
    """
    settings = SMALL if options.small else FULL
    records = options.run(settings, lambda seed: one_seed(settings, options.data, seed))
    finish(
        options, records, script="permuted_digits", paper="Daxberger et al. (2021), 4.4, C.4", protocol=PROTOCOL,
        tables=[accuracy_table(records, settings.n_tasks)], claims=claims(settings),
    )  # fmt: skip
    draw(records, settings, options.output)


if __name__ == "__main__":
    main(parse(__doc__, "permuted_digits"))
