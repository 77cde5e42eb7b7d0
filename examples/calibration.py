"""Is a classifier as sure as it is right? A small convolutional network on noisy digits, calibrated in three ways.

The network is trained on the digits 0 to 7 until it is certain of every training image. It is compared with
temperature scaling, the usual remedy, and with Laplace approximations of its last layer and of all its weights. The
temperature and the prior precisions are chosen on the same validation images. Scores are of held-out images, and of
telling these from inputs of other kinds, by confidence alone: the unseen digits 8 and 9, rotated digits, and noise.
Scaling by a temperature is one number for all inputs; a posterior is less certain where the data said little.

    python examples/calibration.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from laplace import Laplace
from laplace.extensions.plotting import new_figure, reliability_diagram, score_histogram
from laplace.metrics import accuracy, auroc, brier, expected_calibration_error, nll

NOISE, KNOWN = 0.3, 8
METRICS = {"NLL": nll, "ECE": expected_calibration_error, "Brier": brier, "accuracy": accuracy}
Predict = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor]


class Data(NamedTuple):
    """Noisy images `[N, 1, 8, 8]` with labels `[N]`, and inputs of other kinds by name."""

    train: Pair
    validation: Pair
    test: Pair
    others: dict[str, Tensor]


def load_data() -> Data:
    """Splits the digits 0 to 7 into training (600), validation (300) and test images; noise is added to all."""
    generator = torch.Generator().manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    seen, y = x + NOISE * torch.randn(x.shape, generator=generator), torch.tensor(digits.target)
    known = (y < KNOWN).nonzero().squeeze(1)
    known = known[torch.randperm(len(known), generator=generator)]
    train, validation, test = ((seen[part], y[part]) for part in known.split([600, 300, len(known) - 900]))
    others = {
        "digits 8 and 9": seen[y >= KNOWN],
        "rotated by 90°": test[0].rot90(dims=(2, 3)),
        "noise": torch.rand(300, 1, 8, 8, generator=generator),
    }
    return Data(train, validation, test, others)


def train_network(x: Tensor, y: Tensor, n_epochs: int) -> nn.Module:
    """Trains with neither weight decay nor early stopping."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, KNOWN),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(n_epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


def network(model: nn.Module) -> Predict:
    """The network's own probabilities."""
    return torch.no_grad()(lambda x: model(x).softmax(1))


def temperature_scaled(model: nn.Module, x: Tensor, y: Tensor) -> Predict:
    """Softmax of f/T, with the T that is best on validation data (Guo et al., 2017)."""
    with torch.no_grad():
        f = model(x)
        candidates = torch.logspace(-1, 1.5, 200)
        best = min(candidates, key=lambda t: nn.functional.cross_entropy(f / t, y).item())
    return torch.no_grad()(lambda x: (model(x) / best).softmax(1))


def laplace(model: nn.Module, weights: str, data: Data) -> Predict:
    """A Kronecker-factored posterior; its prior precision is the best on validation data."""
    la = Laplace(model, "classification", weights, "kron")
    la.fit([data.train])
    la.optimize_prior_precision(method="gridsearch", val_loader=[data.validation], grid_size=41)
    return la


def main(small: bool = False, output: Path = Path("outputs/calibration.png")) -> dict[str, list[float]]:
    """Runs everything and returns the scores by model, in the order of the printed table.

    Args:
        small: Train for half of the epochs, to try the script out.
        output: Where the plot goes.
    """
    data = load_data()
    model = train_network(*data.train, n_epochs=30 if small else 60)
    models = {
        "network": network(model),
        "temperature": temperature_scaled(model, *data.validation),
        "Laplace, last": laplace(model, "last_layer", data),
        "Laplace, all": laplace(model, "all", data),
    }
    x, y = data.test
    print(f"{'':<16}" + "".join(f"{name:>10}" for name in METRICS) + "   AUROC of the confidence against")
    print(f"{'':<56}" + "".join(f"{name:>16}" for name in data.others))
    scores: dict[str, list[float]] = {}
    for name, predict in models.items():
        probs = predict(x)
        scores[name] = [float(metric(probs, y)) for metric in METRICS.values()]
        scores[name] += [float(auroc(probs.amax(1), predict(other).amax(1))) for other in data.others.values()]
        row = "".join(f"{score:>10.3f}" for score in scores[name][: len(METRICS)])
        print(f"{name:<16}{row}" + "".join(f"{score:>16.3f}" for score in scores[name][len(METRICS) :]))
    figure, axes = new_figure(n_columns=3, width=4, height=3.3)
    reliability_diagram(axes[0], {name: predict(x) for name, predict in models.items()}, y)
    axes[0].set_title("Held-out digits")
    for axis, name in zip(axes[1:], ("network", "Laplace, all"), strict=True):
        sets = {"digits 0 to 7": x, **data.others}
        score_histogram(axis, {kind: models[name](inputs).amax(1) for kind, inputs in sets.items()}, n_bins=10)
        axis.set_title(f"Confidence: {name}")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="train for half of the epochs")
    parser.add_argument("--output", type=Path, default=Path("outputs/calibration.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
