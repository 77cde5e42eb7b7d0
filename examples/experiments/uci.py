"""Classification of two small data sets: MAP, sampled weights, and the linearised network with and without refinement.

Table B2 of Immer et al. (2021) on those of its data sets that come with scikit-learn, breast cancer and digits, by the
protocol of appendix B.3: training, validation and test sets of 70, 15 and 15 %, stratified; two tanh layers; a network
for every prior precision of a grid, the best of which every method chooses by its negative log likelihood on the
validation set; 1000 samples for every predictive; calibration error in ten bins. What is smaller here: hidden layers of
10 units instead of 50, 3 splits instead of 10, 5 or 4 prior precisions instead of 10 between the same ends, and 1500
steps of training at a larger rate instead of 10000, so that all takes minutes. The variational refinements, the most
expensive, are made at one prior precision only, the best of the refinement to the mode.

    python examples/experiments/uci.py            # 3 splits
    python examples/experiments/uci.py --small    # 1 split, a tiny network and few data, to try it out
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.metrics import accuracy, expected_calibration_error, nll
from laplace.plotting import COLOURS, new_figure

MEASURES = ("NLL", "accuracy", "ECE")
N_BINS = 10
Scores = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Attributes:
        n_hidden: Units of each of the two hidden layers.
        n_steps: Of full-batch Adam; the rate falls by ten after 70 % and after 90 % of them.
        n_samples: Of the outputs or the weights, per predictive.
        n_points: Of the expectations of the variational refinement, for softmax.
        n_subset: Data of the Gaussian process.
        n_data: The first of every data set only; None for all.
        precisions: Prior precisions, in place of those of the data set; None for those.
    """

    n_hidden: int = 10
    n_steps: int = 1500
    n_samples: int = 1000
    n_points: int = 20
    n_subset: int = 100
    n_data: int | None = None
    precisions: tuple[float, ...] | None = None


SMALL = Size(3, 40, 20, 4, 10, 100, (1.0,))


@dataclass(frozen=True)
class Task:
    """A data set.

    Attributes:
        load: Gives inputs and labels.
        likelihood: Of the library.
        n_outputs: Of the network.
        precisions: Prior precisions that are tried.
        paper: Table B2 of the paper, mean and standard error, by method and measure.
    """

    load: Callable[..., Any]
    likelihood: str
    n_outputs: int
    precisions: tuple[float, ...]
    paper: dict[str, tuple[str, str, str]]


TASKS = {
    "breast cancer": Task(
        load_breast_cancer, "bernoulli", 1, (0.01, 0.1, 1.0, 10.0, 100.0),
        {
            "MAP": ("0.11±0.02", "0.971±0.004", "0.033±0.002"),
            "nn": ("0.19±0.00", "0.972±0.003", "0.127±0.003"),
            "GLM": ("0.10±0.01", "0.969±0.003", "0.033±0.002"),
            "GLM diag": ("0.11±0.01", "0.969±0.003", "0.053±0.003"),
            "GLM refined": ("0.11±0.01", "0.971±0.003", "0.027±0.003"),
            "GLM refined diag": ("0.12±0.02", "0.971±0.003", "0.027±0.003"),
        },
    ),
    "digits": Task(
        load_digits, "classification", 10, (0.1, 1.0, 10.0, 100.0),
        {
            "MAP": ("0.094±0.003", "0.974±0.001", "0.016±0.001"),
            "nn": ("0.875±0.002", "0.924±0.001", "0.478±0.001"),
            "GLM": ("0.250±0.002", "0.964±0.001", "0.141±0.000"),
            "GLM diag": ("0.409±0.002", "0.960±0.001", "0.256±0.001"),
            "GLM refined": ("0.150±0.002", "0.966±0.001", "0.054±0.001"),
            "GLM refined diag": ("0.149±0.008", "0.970±0.001", "0.027±0.000"),
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Inputs `[N, D]` and labels `[N]`."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Split:
    """Data in three parts, in units of the training data's deviations."""

    training: Part
    validation: Part
    test: Part


def make_split(task: Task, size: Size, seed: int) -> Split:
    """70, 15 and 15 % of the data, stratified by the labels."""
    x, y = task.load(return_X_y=True)
    x, y = x[: size.n_data], y[: size.n_data]
    x, x_rest, y, y_rest = train_test_split(x, y, train_size=0.7, stratify=y, random_state=seed)
    x_one, x_two, y_one, y_two = train_test_split(x_rest, y_rest, train_size=0.5, stratify=y_rest, random_state=seed)
    mean, spread = np.mean(x, axis=0), np.std(x, axis=0)
    spread[spread == 0] = 1
    parts = ((x, y), (x_one, y_one), (x_two, y_two))
    scaled = [Part(torch.tensor((a - mean) / spread, dtype=torch.float64), torch.tensor(b)) for a, b in parts]
    return Split(*scaled)


def targets(task: Task, y: Tensor) -> Tensor:
    """Labels as the likelihood takes them."""
    return y.double().unsqueeze(1) if task.n_outputs == 1 else y


def train(task: Task, data: Part, prior_precision: float, size: Size, seed: int) -> nn.Module:
    """The MAP network of a prior precision."""
    h = size.n_hidden
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(data.x.shape[1], h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, task.n_outputs)
        ).double()
    misfit = nn.BCEWithLogitsLoss(reduction="sum") if task.n_outputs == 1 else nn.CrossEntropyLoss(reduction="sum")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [int(0.7 * size.n_steps), int(0.9 * size.n_steps)])
    y = targets(task, data.y)
    for _ in range(size.n_steps):
        optimizer.zero_grad()
        penalty = 0.5 * prior_precision * sum(p.square().sum() for p in model.parameters())
        (misfit(model(data.x), y) + penalty).backward()
        optimizer.step()
        schedule.step()
    return model


def of_both(p: Tensor) -> Tensor:
    """Probabilities of the classes `[B, C]`, also where only that of class 1 is given, `[B, 1]`."""
    return torch.cat([1 - p, p], 1) if p.shape[1] == 1 else p


@dataclass(frozen=True)
class Method:
    """A posterior and how it predicts.

    Attributes:
        structure: Of the curvature.
        pred_type: "nn" or "glm".
        refine: Method of the refinement.
    """

    structure: str
    pred_type: str = "glm"
    refine: str | None = None


METHODS = {
    "nn": Method("full", "nn"),
    "GLM": Method("full"),
    "GLM diag": Method("diag"),
    "GLM mode": Method("full", refine="map"),
    "GLM mode diag": Method("diag", refine="map"),
    "GLM VI": Method("full", refine="variational"),
    "GLM VI diag": Method("diag", refine="variational"),
    "GP": Method("gp"),
}
CHOSEN_BY = {"GLM VI": "GLM mode", "GLM VI diag": "GLM mode diag"}
"""Whose prior precision the variational refinements take: they cost more than all else together."""
# The paper's table has one refined column per covariance and does not say which refinement it is.
IN_PAPER = {
    "GLM mode": "GLM refined", "GLM mode diag": "GLM refined diag",
    "GLM VI": "GLM refined", "GLM VI diag": "GLM refined diag",
}  # fmt: skip


def posterior(
    method: Method, model: nn.Module, task: Task, data: Part, prior_precision: float, size: Size
) -> ParametricLaplace:
    """The posterior of a method."""
    options = {"n_subset": min(size.n_subset, len(data.y)), "independent_outputs": True}
    la = Laplace(
        model, task.likelihood, "all", method.structure, prior_precision=prior_precision,
        **(options if method.structure == "gp" else {}),
    )  # fmt: skip
    loader = [(data.x, targets(task, data.y))]
    la.fit(loader)
    if method.refine == "map":
        la.refine(loader)
    if method.refine == "variational":
        la.refine(loader, "variational", n_samples=size.n_points, tolerance=1e-3)
    return la


def candidates(task: Task, split: Split, size: Size, seed: int) -> dict[str, list[tuple[float, Tensor]]]:
    """For every method and prior precision: NLL on the validation set, and probabilities `[B, C]` of the test set."""
    found: dict[str, list[tuple[float, Tensor]]] = {}
    n_validation = len(split.validation.y)
    x = torch.cat([split.validation.x, split.test.x])

    def keep(name: str, p: Tensor) -> None:
        found.setdefault(name, []).append((float(nll(p[:n_validation], split.validation.y)), p[n_validation:]))

    def predict(name: str, model: nn.Module, prior_precision: float) -> None:
        method = METHODS[name]
        la = posterior(method, model, task, split.training, prior_precision, size)
        generator = torch.Generator().manual_seed(seed)
        prediction = la.predict(x, method.pred_type, n_samples=size.n_samples, link_approx="mc", generator=generator)
        keep(name, of_both(prediction.probabilities.clamp(1e-7, 1)))

    trained: list[tuple[nn.Module, float]] = []
    for prior_precision in size.precisions or task.precisions:
        model = train(task, split.training, prior_precision, size, seed)
        trained.append((model, prior_precision))
        with torch.no_grad():
            f = model(x)
        keep("MAP", of_both(f.sigmoid() if task.n_outputs == 1 else f.softmax(1)))
        for name, method in METHODS.items():
            if method.refine != "variational":
                predict(name, model, prior_precision)
    for name, chosen_by in CHOSEN_BY.items():
        losses = [loss for loss, _ in found[chosen_by]]
        predict(name, *trained[losses.index(min(losses))])
    return found


def measures(p: Tensor, y: Tensor) -> dict[str, float]:
    """All `MEASURES` of probabilities `[B, C]`."""
    return {
        "NLL": float(nll(p, y)),
        "accuracy": float(accuracy(p, y)),
        "ECE": float(expected_calibration_error(p, y, N_BINS)),
    }


# What the paper claims.

CLAIMS: dict[str, list[tuple[str, str, str]]] = {
    # measure, the better one, the worse one; of table B2, where the paper's means differ
    "breast cancer": [
        ("NLL", "GLM", "MAP"), ("NLL", "GLM", "nn"), ("NLL", "GLM", "GLM diag"), ("NLL", "GLM diag", "nn"),
        ("NLL", "GLM mode", "nn"), ("NLL", "GLM VI", "nn"), ("ECE", "GLM", "nn"), ("ECE", "GLM", "GLM diag"),
        ("ECE", "GLM diag", "nn"), ("ECE", "GLM mode", "GLM"), ("ECE", "GLM VI", "GLM"),
        ("ECE", "GLM mode diag", "GLM diag"), ("ECE", "GLM VI diag", "GLM diag"),
    ],
    "digits": [
        ("NLL", "MAP", "GLM"), ("NLL", "GLM", "nn"), ("NLL", "GLM", "GLM diag"), ("NLL", "GLM diag", "nn"),
        ("NLL", "GLM mode", "GLM"), ("NLL", "GLM VI", "GLM"), ("NLL", "GLM mode diag", "GLM diag"),
        ("NLL", "GLM VI diag", "GLM diag"), ("accuracy", "MAP", "GLM"), ("accuracy", "GLM", "nn"),
        ("accuracy", "GLM", "GLM diag"), ("accuracy", "GLM mode", "GLM"), ("accuracy", "GLM VI", "GLM"),
        ("ECE", "MAP", "GLM"), ("ECE", "GLM", "nn"), ("ECE", "GLM", "GLM diag"), ("ECE", "GLM diag", "nn"),
        ("ECE", "GLM mode", "GLM"), ("ECE", "GLM VI", "GLM"), ("ECE", "MAP", "GLM mode"), ("ECE", "MAP", "GLM VI"),
    ],
}  # fmt: skip


def average(values: list[float]) -> float:
    """Mean over splits."""
    return sum(values) / len(values)


def check_claims(scores: dict[str, Scores]) -> list[str]:
    """One line per claim: whether the means over splits are in the paper's order."""
    lines = []
    for task, claims in CLAIMS.items():
        for measure, better, worse in claims:
            a, b = (average(scores[task][name][measure]) for name in (better, worse))
            holds = a > b if measure == "accuracy" else a < b
            sign = ">" if measure == "accuracy" else "<"
            verdict = "holds" if holds else "equal" if a == b else "FAILS"
            lines.append(f"{verdict}  {task}: {measure}, {better} {sign} {worse}: {a:.4g}, {b:.4g}")
    return lines


def print_tables(scores: dict[str, Scores]) -> None:
    """Means over splits and standard errors, beside the paper's."""
    for task, found in scores.items():
        print(f"\n{task:<17}" + "".join(f"{measure:>15}{'paper':>14}" for measure in MEASURES))
        for name, values in found.items():
            paper = TASKS[task].paper.get(IN_PAPER.get(name, name), ("–",) * len(MEASURES))
            cells = []
            for measure, theirs in zip(MEASURES, paper, strict=True):
                row = torch.tensor(values[measure])
                error = f"±{row.std() / len(row) ** 0.5:.3f}" if len(row) > 1 else ""
                cells.append(f"{f'{row.mean():.3f}{error}':>15}{theirs:>14}")
            print(f"{name:<17}" + "".join(cells))


def draw(scores: dict[str, Scores], output: Path) -> None:
    """Saves bars of every measure: one row per data set, our numbers beside the paper's."""
    figure, axes = new_figure(n_columns=len(MEASURES), n_rows=len(scores), width=4, height=3)
    for row, (task, found) in enumerate(scores.items()):
        for column, measure in enumerate(MEASURES):
            panel = axes[row * len(MEASURES) + column]
            for place, (name, values) in enumerate(found.items()):
                found_here = torch.tensor(values[measure])
                error = float(found_here.std() / len(found_here) ** 0.5) if len(found_here) > 1 else 0.0
                panel.bar(place - 0.2, float(found_here.mean()), 0.4, yerr=error, color=COLOURS[1])
                paper = TASKS[task].paper.get(IN_PAPER.get(name, name))
                if paper is not None:
                    panel.bar(place + 0.2, float(paper[column].split("±")[0]), 0.4, color="0.75")
            panel.set_xticks(range(len(found)), list(found), rotation=60, ha="right", fontsize=7)
            panel.set(ylabel=measure, title=f"{task} (grey: the paper)" if column == 0 else "")
            if measure == "accuracy":
                panel.set_ylim(0.85, 1)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=90)


def main(
    small: bool = False,
    seeds: tuple[int, ...] = (0, 1, 2),
    output: Path = Path("outputs/uci.png"),
    n_hidden: int = Size.n_hidden,
) -> tuple[dict[str, Scores], list[str]]:
    """Runs everything; returns the scores by data set, method and measure, one per split, and the lines of the checks.

    Args:
        small: A tiny network, few data and the first split only, to try the script out.
        seeds: Of the splits, the networks and the samples.
        output: Where the plot goes.
        n_hidden: Units of each of the two hidden layers; 50 in the paper.
    """
    torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other
    size = SMALL if small else Size(n_hidden)
    scores: dict[str, Scores] = {task: {} for task in TASKS}
    for seed in seeds[:1] if small else seeds:
        for key, task in TASKS.items():
            split = make_split(task, size, seed)
            for name, found in candidates(task, split, size, seed).items():
                best = min(found, key=lambda pair: pair[0])[1]
                for measure, value in measures(best, split.test.y).items():
                    scores[key].setdefault(name, {}).setdefault(measure, []).append(value)
            print(f"split {seed}, {key}: done", flush=True)
    print_tables(scores)
    checks = check_claims(scores)
    print("\nThe order of the paper's table B2:", *checks, sep="\n")
    draw(scores, output)
    print(f"\nplot: {output}")
    return scores, checks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny network, few data, one split")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--hidden", type=int, default=Size.n_hidden, help="units of a hidden layer")
    parser.add_argument("--output", type=Path, default=Path("outputs/uci.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, tuple(arguments.seeds), arguments.output, arguments.hidden)
