"""Continual learning on permuted digits: how much of ten tasks a network remembers that sees each of them only once.

Every task is the same handwritten digits with the pixels in another fixed order, as in the permuted MNIST of Daxberger
et al. (2021, section 4.4, appendix C.4 and figure 7), on scikit-learn's 8×8 images. A network with two hidden layers of
100 units learns the tasks one after the other. Without a memory it forgets; with a Laplace approximation of the former
tasks for a prior it does not: diagonal, Kronecker-factored, and Kronecker-factored with a prior precision that the
evidence adapts during every task. After every task the accuracy on the held-out digits of all tasks seen is averaged.

    python examples/experiments/permuted_digits.py            # 10 tasks, 3 seeds
    python examples/experiments/permuted_digits.py --products # with the Kronecker products of every task, too
    python examples/experiments/permuted_digits.py --small    # 2 tasks, 1 seed, to try it out
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.metrics import accuracy
from laplace.plotting import new_figure
from laplace.training.continual import train_task
from laplace.training.task_memory import TaskMemory

# Chosen on seeds that are not reported (docs/continual_learning.md), the same for every method.
LEARNING_RATE, BATCH_SIZE = 1e-2, 128
# Slow steps on log δ: one of this size every ten epochs, and one more after the last.
HYPER_STEPS, HYPER_RATE = 1, 0.1
Results = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Method:
    """A way to remember: a structure, or None for the prior alone, and whether the evidence adapts the prior.

    A fixed prior has one precision, an adapted one starts there and has a precision per tensor. The curvatures of all
    tasks are summed by the posterior, or kept apart for the penalty, around the last weights or those of each task.
    """

    structure: str | None
    tuned: bool = False
    memory: Literal["last", "own"] | None = None


METHODS = {
    "none": Method(None),
    "diag": Method("diag"),
    "Kron": Method("kron"),
    "Kron, tuned prior": Method("kron", tuned=True),
}
# Sums of Kronecker products, which take a product per former task in every step.
OF_PRODUCTS = {
    "products": Method("kron", memory="last"),
    "products, tuned": Method("kron", tuned=True, memory="last"),
    "products, own": Method("kron", memory="own"),
    "products, own, tuned": Method("kron", tuned=True, memory="own"),
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


def run(method: Method, tasks: list[Task], seed: int, n_epochs: int, prior_precision: float = 0.1) -> list[float]:
    """Learns the tasks in turn; the accuracy after each of them, averaged over the tasks seen."""
    model = make_network(seed)
    scores: list[float] = []

    def score(*_: object) -> None:
        seen = tasks[: len(scores) + 1]
        with torch.no_grad():
            accuracies = [float(accuracy(model(task.x_test).softmax(1), task.y_test)) for task in seen]
        scores.append(sum(accuracies) / len(seen))

    def posterior() -> ParametricLaplace:
        n_values = len(list(model.parameters())) if method.tuned else 1  # the evidence tells the tensors apart
        prior = torch.full((n_values,), prior_precision)
        return Laplace(model, "classification", "all", method.structure or "diag", prior_precision=prior)

    la, memory = posterior(), None if method.memory is None else TaskMemory(method.memory)
    for task in tasks:
        if method.structure is None:
            la = posterior()  # a new one for every task: the prior alone is left of the former ones
        train_task(
            la,
            task.loader(seed),
            n_epochs=n_epochs,
            optimizer_kwargs={"lr": LEARNING_RATE},
            fix_prior_precision=not method.tuned,
            n_hypersteps=HYPER_STEPS,
            lr_hyp=HYPER_RATE,
            memory=memory,
        )
        score()
    return scores


def print_table(results: Results) -> None:
    """Prints the mean over seeds after every task, and mean and standard deviation after the last."""
    n_tasks = len(next(iter(results.values()))[0])
    print(f"{'tasks seen':<20}" + "".join(f"{n:>7}" for n in range(1, n_tasks + 1)) + "   (standard deviation)")
    for name, runs in results.items():
        scores = torch.tensor(runs)
        spread = f"   ({scores[:, -1].std():.3f})" if len(runs) > 1 else ""
        print(f"{name:<20}" + "".join(f"{value:>7.3f}" for value in scores.mean(0).tolist()) + spread)


def draw(results: Results, output: Path) -> None:
    """Saves the plot of figure 7: average accuracy against the number of tasks seen, a band of one deviation."""
    figure, (axes,) = new_figure(n_columns=1, width=5.5, height=3.6)
    for name, runs in results.items():
        scores = torch.tensor(runs)
        mean, spread = scores.mean(0), scores.std(0) if len(runs) > 1 else torch.zeros(scores.shape[1])
        n_seen = list(range(1, scores.shape[1] + 1))
        (line,) = axes.plot(n_seen, mean.tolist(), marker="o", markersize=3, label=name)
        axes.fill_between(
            n_seen, (mean - spread).tolist(), (mean + spread).tolist(), color=line.get_color(), alpha=0.2, linewidth=0
        )
    axes.set(xlabel="tasks seen", ylabel="average accuracy", ylim=(0, 1), title="Permuted digits")
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main(
    small: bool = False,
    seeds: tuple[int, ...] = (0, 1, 2),
    prior_precision: float = 0.1,
    output: Path = Path("outputs/permuted_digits.png"),
    products: bool = False,
) -> Results:
    """Runs everything and returns the average accuracies by method: one list per seed, one entry per task.

    Args:
        small: Two tasks of two epochs and the first seed only, to try the script out.
        seeds: Of the split, the permutations, the network and the order of the batches.
        prior_precision: The fixed prior precision, and where the adapted one starts.
        output: Where the plot goes.
        products: Also with the Kronecker products of every task in the penalty.
    """
    torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other
    methods = METHODS | OF_PRODUCTS if products else METHODS
    results: Results = {name: [] for name in methods}
    for seed in seeds[:1] if small else seeds:
        tasks = make_tasks(2 if small else 10, seed)
        for name, method in methods.items():
            results[name].append(run(method, tasks, seed, 2 if small else 50, prior_precision))
            print(f"seed {seed}, {name}: {results[name][-1][-1]:.3f} after the last task", flush=True)
    print()
    print_table(results)
    draw(results, output)
    print(f"\nplot: {output}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two tasks, two epochs, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prior-precision", type=float, default=0.1, help="fixed, or where the adapted one starts")
    parser.add_argument("--output", type=Path, default=Path("outputs/permuted_digits.png"), help="where the plot goes")
    parser.add_argument("--products", action="store_true", help="also keep the Kronecker products of every task")
    arguments = parser.parse_args()
    main(arguments.small, tuple(arguments.seeds), arguments.prior_precision, arguments.output, arguments.products)
