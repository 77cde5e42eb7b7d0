"""Knowing what the network does not know: a Laplace approximation on handwritten digits, in under a minute.

A small network learns the digits 0 to 7, seen through a noisy sensor, until it is certain of every training image. A
Laplace approximation of its last layer is then fitted to the same data and its prior precision chosen by the evidence,
without any validation data. The two are compared on held-out digits, on rotated ones, and on the digits 8 and 9, which
neither has seen.

    python examples/quickstart.py
    python examples/quickstart.py --noise 0    # clean images: so easy that the network is calibrated as it is
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.metrics import accuracy, auroc, expected_calibration_error, mean_confidence, nll
from laplace.plotting import new_figure, reliability_diagram, score_histogram, shift_curve

KNOWN_DIGITS = 8
ANGLES = (0, 15, 30, 45, 60, 75, 90)
Predict = Callable[[Tensor], Tensor]
Scores = dict[str, list[float]]


class Digits(NamedTuple):
    """Clean images `[N, 1, 8, 8]` in [0, 1] and labels `[N]`; `foreign` holds the digits that were left out.

    The sensor adds independent noise of standard deviation `noise` to every pixel.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    foreign: Tensor
    noise: float

    def seen(self, x: Tensor, seed: int = 0) -> Tensor:
        """Images as the sensor sees them."""
        return x + self.noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def load_data(noise: float) -> Digits:
    """Splits scikit-learn's digits into training (60 %), test (40 %) and left-out classes."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    known = (y < KNOWN_DIGITS).nonzero().squeeze(1)
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))]
    train, test = known.split([int(0.6 * len(known)), len(known) - int(0.6 * len(known))])
    return Digits(x[train], y[train], x[test], y[test], x[y >= KNOWN_DIGITS], noise)


def train_network(x: Tensor, y: Tensor, n_epochs: int) -> nn.Module:
    """Trains a small network with neither weight decay nor early stopping: it will be over-confident."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, KNOWN_DIGITS)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    for _ in range(n_epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model.eval()


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Rotates images `[B, 1, H, W]` counter-clockwise, bilinear, with zeros outside."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(x), 2, 3)
    grid = nn.functional.affine_grid(turn, list(x.shape), align_corners=False)
    return nn.functional.grid_sample(x, grid, align_corners=False)


def confidences(predict: Predict, data: Digits) -> tuple[Tensor, Tensor]:
    """Largest class probability for known and for unseen digits, the score that is to tell them apart."""
    known, unseen = data.seen(data.x_test), data.seen(data.foreign, seed=1)
    return predict(known).amax(1), predict(unseen).amax(1)


def evaluate(predict: Predict, data: Digits) -> Scores:
    """Scores of a model at every angle, and its ability to tell the left-out digits from the known ones."""
    scores: Scores = {"NLL": [], "ECE": [], "accuracy": [], "confidence": []}
    for angle in ANGLES:
        probs = predict(data.seen(rotate(data.x_test, angle)))
        scores["NLL"].append(float(nll(probs, data.y_test)))
        scores["ECE"].append(float(expected_calibration_error(probs, data.y_test)))
        scores["accuracy"].append(float(accuracy(probs, data.y_test)))
        scores["confidence"].append(float(mean_confidence(probs)))
    scores["AUROC"] = [float(auroc(*confidences(predict, data)))]
    return scores


def print_table(results: dict[str, Scores]) -> None:
    """Prints one row per angle and model."""
    columns = ("NLL", "ECE", "accuracy", "confidence")
    print(f"{'rotation':>8}  {'model':<8}" + "".join(f"{name:>12}" for name in columns))
    for row, angle in enumerate(ANGLES):
        for name, scores in results.items():
            print(f"{angle:>7}°  {name:<8}" + "".join(f"{scores[column][row]:>12.3f}" for column in columns))
    print(f"\nAUROC of the confidence, digits 0–{KNOWN_DIGITS - 1} against the unseen 8 and 9:")
    for name, scores in results.items():
        print(f"          {name:<8}{scores['AUROC'][0]:>12.3f}")


def draw(results: dict[str, Scores], models: dict[str, Predict], data: Digits, output: Path) -> None:
    """Saves the plot: scores against rotation above, calibration and the unseen digits below."""
    figure, axes = new_figure(n_columns=3, n_rows=2, width=4, height=3.2)
    titles = {"NLL": "Rotated digits: NLL (nats)", "ECE": "… calibration error", "confidence": "… mean confidence"}
    for place, (column, title) in zip(axes, titles.items(), strict=False):
        shift_curve(place, ANGLES, {name: scores[column] for name, scores in results.items()}, column)
        place.set(title=title, xticks=ANGLES, ylim=(0, None if column == "NLL" else 1.02))
    axes[2].plot(ANGLES, results["MAP"]["accuracy"], "--", color="0.3", linewidth=1.2, label="accuracy (MAP)")
    axes[2].legend(frameon=False, fontsize=8, loc="center right")
    test = data.seen(data.x_test)
    reliability_diagram(axes[3], {name: predict(test) for name, predict in models.items()}, data.y_test)
    axes[3].set_title("Held-out digits: reliability")
    for place, (name, predict) in zip(axes[4:], models.items(), strict=True):
        known, unseen = confidences(predict, data)
        score_histogram(place, {f"digits 0–{KNOWN_DIGITS - 1}": known, "unseen 8 and 9": unseen}, n_bins=10)
        place.legend(frameon=False, fontsize=8, loc="upper left")
        place.set(title=f"{name}: AUROC {results[name]['AUROC'][0]:.3f}", ylim=(0, 1))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main(small: bool = False, noise: float = 0.4, output: Path = Path("outputs/quickstart.png")) -> dict[str, Scores]:
    """Runs everything and returns the scores by model.

    Args:
        small: Train for two epochs only, to try the script out.
        noise: Standard deviation of the sensor's noise, for pixels in [0, 1].
        output: Where the plot goes.
    """
    data = load_data(noise)
    x_train = data.seen(data.x_train, seed=2)
    model = train_network(x_train, data.y_train, n_epochs=2 if small else 60)

    la = Laplace(model, "classification")  # the defaults: last layer, Kronecker-factored
    la.fit(DataLoader(TensorDataset(x_train, data.y_train), batch_size=256))
    la.optimize_prior_precision(method="marglik")
    print(f"prior precision {la.prior_precision.item():.3g}, log evidence {la.log_marginal_likelihood().item():.1f}\n")

    def predict_map(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x).softmax(1)

    models: dict[str, Predict] = {"MAP": predict_map, "Laplace": la}
    results = {name: evaluate(predict, data) for name, predict in models.items()}
    print_table(results)
    if results["Laplace"]["NLL"][0] > results["MAP"]["NLL"][0]:
        print("\nOn unrotated images the network alone is better. Use a Laplace approximation")
        print("where inputs will be noisy, shifted or of unknown kinds, or choose its prior on validation data.")
    draw(results, models, data, output)
    print(f"\nplot: {output}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="train for two epochs only")
    parser.add_argument("--noise", type=float, default=0.4, help="standard deviation of the sensor's noise")
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.noise, arguments.output)
