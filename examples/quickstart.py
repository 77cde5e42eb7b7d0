"""A Laplace approximation on handwritten digits, in under a minute.

A small network learns the digits 0 to 7 from noisy images, until it is certain of every training image. A Laplace
approximation of its last layer is then fitted to the same data, and calibrated on validation images. The two are
compared on test images, on rotated ones, and on the digits 8 and 9, which neither saw.

    python examples/quickstart.py
    python examples/quickstart.py --noise 0    # clean images, on which the network is calibrated already
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
from laplace.extensions.plotting import new_figure, reliability_diagram, score_histogram, shift_curve
from laplace.metrics import accuracy, auroc, expected_calibration_error, mean_confidence, nll

KNOWN_DIGITS = 8
ANGLES = (0, 15, 30, 45, 60, 75, 90)
Predict = Callable[[Tensor], Tensor]
Scores = dict[str, list[float]]


class Digits(NamedTuple):
    """Clean images `[N, 1, 8, 8]` in [0, 1] and labels `[N]`; `unseen` holds the digits that were left out.

    `noise` is the standard deviation of the noise that is added to every pixel.
    """

    x_train: Tensor
    y_train: Tensor
    x_val: Tensor
    y_val: Tensor
    x_test: Tensor
    y_test: Tensor
    unseen: Tensor
    noise: float

    def noisy(self, x: Tensor, seed: int = 0) -> Tensor:
        """Images with noise."""
        return x + self.noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def load_data(noise: float) -> Digits:
    """Splits scikit-learn's digits into training (50 %), validation (15 %), test (35 %) and left-out classes."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    known = (y < KNOWN_DIGITS).nonzero().squeeze(1)
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))]
    train, val, test = known.tensor_split((int(0.5 * len(known)), int(0.65 * len(known))))
    return Digits(x[train], y[train], x[val], y[val], x[test], y[test], x[y >= KNOWN_DIGITS], noise)


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
    """Confidence, the largest class probability, for known and for unseen digits."""
    known, unseen = data.noisy(data.x_test), data.noisy(data.unseen, seed=1)
    return predict(known).amax(1), predict(unseen).amax(1)


def evaluate(predict: Predict, data: Digits) -> Scores:
    """Scores of a model at every angle, and how well its confidence tells unseen digits from known ones."""
    scores: Scores = {"NLL": [], "ECE": [], "accuracy": [], "confidence": []}
    for angle in ANGLES:
        probs = predict(data.noisy(rotate(data.x_test, angle)))
        scores["NLL"].append(float(nll(probs, data.y_test)))
        scores["ECE"].append(float(expected_calibration_error(probs, data.y_test)))
        scores["accuracy"].append(float(accuracy(probs, data.y_test)))
        scores["confidence"].append(float(mean_confidence(probs)))
    scores["AUROC"] = [float(auroc(*confidences(predict, data)))]
    return scores


def print_table(results: dict[str, Scores]) -> None:
    """Prints one row per angle, with every score of both models next to each other."""
    columns = ("NLL", "ECE", "accuracy", "confidence")
    print("Test images, rotated by more and more. NLL: negative log likelihood, ECE: expected")
    print("calibration error; lower is better for both. The confidence should be as large as the accuracy.\n")
    print(f"{'':>8}" + "".join(f"{column:>20}" for column in columns))
    print(f"{'rotation':>8}" + f"{'network':>11}{'Laplace':>9}" * len(columns))
    for row, angle in enumerate(ANGLES):
        pairs = [[scores[column][row] for scores in results.values()] for column in columns]
        print(f"{angle:>7}°" + "".join(f"{network:>11.3f}{laplace:>9.3f}" for network, laplace in pairs))


def print_summary(network: Scores, laplace: Scores) -> None:
    """Prints what the numbers say, for the images as they are and for unseen digits."""
    nlls, errors = ([scores[name][0] for scores in (network, laplace)] for name in ("NLL", "ECE"))
    print(f"\nUpright images: the Laplace approximation changes the NLL from {nlls[0]:.3f} to {nlls[1]:.3f}")
    print(f"and the calibration error from {errors[0]:.3f} to {errors[1]:.3f}.")
    print("\nUnseen digits 8 and 9: the confidence tells them from known digits with an AUROC of")
    print(f"{network['AUROC'][0]:.3f} (network) and {laplace['AUROC'][0]:.3f} (Laplace); 1 is perfect, 0.5 is chance.")


def draw(results: dict[str, Scores], models: dict[str, Predict], data: Digits, output: Path) -> None:
    """Saves the plot: scores against rotation above, calibration and the unseen digits below."""
    figure, axes = new_figure(n_columns=3, n_rows=2, width=3.3, height=2.9)
    titles = {"NLL": "Rotated digits: NLL", "ECE": "… calibration error", "confidence": "… mean confidence"}
    for place, (column, title) in zip(axes, titles.items(), strict=False):
        shift_curve(place, ANGLES, {name: scores[column] for name, scores in results.items()}, column)
        place.set(title=title, xticks=ANGLES, ylim=(0, None if column == "NLL" else 1.02))
    accuracies = results["network"]["accuracy"]
    axes[2].plot(ANGLES, accuracies, "--", color="0.3", linewidth=1.2, label="accuracy")
    axes[2].legend(frameon=False, fontsize=8, loc="center right")
    test = data.noisy(data.x_test)
    reliability_diagram(axes[3], {name: predict(test) for name, predict in models.items()}, data.y_test)
    axes[3].set_title("Upright digits: calibration")
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
        noise: Standard deviation of the noise, for pixels in [0, 1].
        output: Where the plot goes.
    """
    data = load_data(noise)
    x_train = data.noisy(data.x_train, seed=2)
    model = train_network(x_train, data.y_train, n_epochs=2 if small else 60)

    la = Laplace(model, "classification")  # the defaults: last layer, Kronecker-factored
    la.fit(DataLoader(TensorDataset(x_train, data.y_train), batch_size=256))
    print(f"Fitted {la.n_params} weights of the last layer to {len(x_train)} noisy digits.\n")
    x_val = data.noisy(data.x_val, seed=3)
    print(la.calibrate(DataLoader(TensorDataset(x_val, data.y_val), batch_size=256)), end="\n\n")
    print(la.compare(DataLoader(TensorDataset(data.noisy(data.x_test), data.y_test), batch_size=256)), end="\n\n")

    def network(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x).softmax(1)

    models: dict[str, Predict] = {"network": network, "Laplace": la}
    results = {name: evaluate(predict, data) for name, predict in models.items()}
    print_table(results)
    print_summary(results["network"], results["Laplace"])
    draw(results, models, data, output)
    print(f"\nPicture: {output}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="train for two epochs only")
    parser.add_argument("--noise", type=float, default=0.4, help="standard deviation of the noise")
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.noise, arguments.output)
