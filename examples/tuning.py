"""How certain should it be? The prior precision of one posterior, chosen in five ways after training.

A small network learns the digits 0 to 7, seen through a noisy sensor. A last-layer Laplace approximation is fitted
once; then its prior precision is chosen by the evidence, which needs no further data, by the log likelihood of
validation data, the same together with the temperature, the same with the digit 8 as an out-of-distribution input to be
uncertain of (Daxberger et al., 2021, equation 12), and by a threshold on the mean confidence. The choices are compared
on held-out digits and on the digit 9, which no step has seen.

    python examples/tuning.py
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.errors import LaplaceWarning
from laplace.extensions.plotting import new_figure, shift_curve
from laplace.metrics import accuracy, auroc, brier, expected_calibration_error, mean_confidence, nll
from laplace.tuning import TuningResult

KNOWN_DIGITS, FOREIGN_DIGIT, UNSEEN_DIGIT = 8, 8, 9
COLUMNS = ("NLL", "Brier", "ECE", "accuracy", "confidence", "on 9s", "AUROC")
Rows = dict[str, list[float]]


class Split(NamedTuple):
    """Images as the sensor sees them `[N, 64]`, and labels `[N]`."""

    x: Tensor
    y: Tensor


class Digits(NamedTuple):
    """Known digits for training, validation and test; the digit 8 to tune on, and the digit 9 to test on."""

    train: Split
    validation: Split
    test: Split
    foreign: Tensor
    unseen: Tensor


def load_data(noise: float = 0.4) -> Digits:
    """Splits scikit-learn's digits into training (50 %), validation (20 %) and test, and two left-out classes.

    Args:
        noise: Standard deviation of the sensor's noise, for pixels in [0, 1].
    """
    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.as_tensor(images).float() / 16
    x = x + noise * torch.randn(x.shape, generator=generator)
    y = torch.as_tensor(labels)
    known = (y < KNOWN_DIGITS).nonzero().squeeze(1)
    known = known[torch.randperm(len(known), generator=generator)]
    sizes = [int(0.5 * len(known)), int(0.2 * len(known))]
    train, validation, test = (Split(x[i], y[i]) for i in known.split([*sizes, len(known) - sum(sizes)]))
    return Digits(train, validation, test, x[y == FOREIGN_DIGIT], x[y == UNSEEN_DIGIT])


def train_network(data: Split, n_epochs: int) -> nn.Module:
    """Trains a small network with neither weight decay nor early stopping: it will be over-confident."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, KNOWN_DIGITS))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(n_epochs):
        for rows in torch.randperm(len(data.x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
            optimizer.step()
    return model.eval()


def tune(la: ParametricLaplace, data: Digits, network_accuracy: float) -> dict[str, Callable[[], TuningResult]]:
    """Ways to choose the hyper-parameters of one fitted posterior, by name."""
    by_validation = partial(la.optimize_hyperparameters, val_loader=[tuple(data.validation)])
    on_grid = partial(by_validation, grid={"prior_precision": torch.logspace(-2, 4, 61)})

    def missed(probs: Tensor, _y: Tensor) -> Tensor:
        """What the mean confidence misses of slightly less than the network's accuracy."""
        return (0.99 * network_accuracy - mean_confidence(probs)).clamp(min=0)

    return {
        "evidence": la.optimize_hyperparameters,
        "NLL": partial(on_grid, objective="nll"),
        "NLL, δ and T": partial(by_validation, ("prior_precision", "temperature"), "nll", "lbfgs"),
        "NLL and 8s": partial(on_grid, objective="nll", ood_loader=[data.foreign], ood_weight=0.5),
        "confidence": partial(on_grid, objective=missed),
    }


def evaluate(predict: Callable[[Tensor], Tensor], data: Digits) -> list[float]:
    """Scores on held-out digits, and how well the confidence tells them from the unseen one."""
    probs, unseen = predict(data.test.x), predict(data.unseen)
    y = data.test.y
    scores = [metric(probs, y) for metric in (nll, brier, expected_calibration_error, accuracy)]
    separation = auroc(probs.amax(1), unseen.amax(1))
    return [float(score) for score in (*scores, mean_confidence(probs), mean_confidence(unseen), separation)]


def print_table(rows: Rows, chosen: dict[str, tuple[float, float]]) -> None:
    """Prints one row per choice."""
    print(f"{'chosen by':<16}{'δ':>9}{'T':>8}" + "".join(f"{name:>12}" for name in COLUMNS))
    for name, scores in rows.items():
        hypers = "".join(f"{value:>{width}.3g}" for value, width in zip(chosen.get(name, ()), (9, 8), strict=False))
        print(f"{name:<16}{hypers:>17}" + "".join(f"{score:>12.3f}" for score in scores))


def draw(results: dict[str, TuningResult], rows: Rows, output: Path) -> None:
    """Saves the plot: the two validation objectives over the grid, and what came of every choice."""
    figure, axes = new_figure(n_columns=2, width=5, height=3.6)
    curves = {name: results[name] for name in ("NLL", "NLL and 8s")}
    precisions = curves["NLL"].grid["prior_precision"].tolist()
    shift_curve(
        axes[0], precisions, {name: result.values.tolist() for name, result in curves.items()},
        "nats per validation image", xlabel="prior precision δ",
    )  # fmt: skip
    for result in curves.values():
        axes[0].plot(result.prior_precision.item(), result.value, "*", color="0.2", ms=12, zorder=4)
    axes[0].set(xscale="log", title="Validation objectives and their minima")
    for name, scores in rows.items():
        ece, on_unseen = scores[COLUMNS.index("ECE")], scores[COLUMNS.index("on 9s")]
        axes[1].plot(ece, on_unseen, "o", label=name)
    axes[1].set(xlabel="ECE on held-out digits", ylabel="confidence on the unseen 9", title="What came of the choices")
    axes[1].legend(frameon=False, fontsize=8)
    axes[1].grid(alpha=0.25)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main(small: bool = False, output: Path = Path("outputs/tuning.png")) -> Rows:
    """Runs everything and returns the scores by choice.

    Args:
        small: Train for fifteen epochs only, to try the script out.
        output: Where the plot goes.
    """
    data = load_data()
    model = train_network(data.train, n_epochs=15 if small else 60)

    def predict_map(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x).softmax(1)

    la = Laplace(model, "classification")  # the defaults: last layer, Kronecker-factored
    la.fit([tuple(data.train)])
    rows: Rows = {"network": evaluate(predict_map, data), "δ = 1": evaluate(la, data)}
    chosen, results = {"δ = 1": (1.0, 1.0)}, {}
    network_accuracy = float(accuracy(predict_map(data.validation.x), data.validation.y))
    for name, optimize in tune(la, data, network_accuracy).items():
        la.prior_precision, la.temperature = torch.ones(1), torch.ones(())  # each search begins anew, the fit stays
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LaplaceWarning)
            results[name] = optimize()
        for warning in caught:
            print(f"{name}: {warning.message}")
        rows[name] = evaluate(la, data)
        chosen[name] = (la.prior_precision.item(), la.temperature.item())
    print_table(rows, chosen)
    draw(results, rows, output)
    print(f"\nplot: {output}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="train for fifteen epochs only")
    parser.add_argument("--output", type=Path, default=Path("outputs/tuning.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
