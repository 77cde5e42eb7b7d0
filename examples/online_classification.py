"""Weight decay that is chosen while the network trains, and a posterior that is calibrated afterwards.

A network learns digits from noisy images: once without weight decay, and once by online Laplace (algorithm 1 of Laplace
Redux), whose evidence chooses a weight decay for every tensor from the training images alone. The posterior that the
evidence leads to is too wide for probabilities; a warning says so. On validation images `la.calibrate` narrows it, down
to the network itself where that predicts best.

    python examples/online_classification.py
    python examples/online_classification.py --noise 0.5
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from laplace import ParametricLaplace, marglik_training
from laplace.errors import CalibrationWarning
from laplace.extensions.plotting import new_figure, reliability_diagram
from laplace.metrics import accuracy, expected_calibration_error, nll


class Digits(NamedTuple):
    """Noisy images `[N, 64]` and labels `[N]`."""

    x: Tensor
    y: Tensor
    x_val: Tensor
    y_val: Tensor
    x_test: Tensor
    y_test: Tensor


def load_data(noise: float) -> Digits:
    """400 training, 200 validation and 1,197 test images, with Gaussian noise on every pixel."""
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(0)
    x = x.float() / 16 + noise * torch.randn(x.shape, generator=generator)
    train, val, test = torch.randperm(len(x), generator=generator).tensor_split((400, 600))
    return Digits(x[train], y[train], x[val], y[val], x[test], y[test])


def train(data: Digits, n_epochs: int, *, online: bool) -> tuple[ParametricLaplace, list[str]]:
    """A network trained from the same start, with a weight decay by the evidence or without one; what it warned of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    loader = list(zip(data.x.split(100), data.y.split(100), strict=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CalibrationWarning)
        la, *_ = marglik_training(
            model, loader, "classification", optimizer_kwargs={"lr": 5e-3}, n_epochs=n_epochs, marglik_frequency=5,
            prior_prec_init=1.0 if online else 1e-6, n_epochs_burnin=n_epochs // 5 if online else n_epochs + 1,
        )  # fmt: skip
    return la, [str(warning.message) for warning in caught]


def main(
    small: bool = False, noise: float = 0.3, output: Path = Path("outputs/online_classification.png")
) -> dict[str, float]:
    """Runs everything and returns the test NLL by model.

    Args:
        small: Train for a few epochs only, to try the script out.
        noise: Standard deviation of the noise of every pixel.
        output: Where the plot goes.
    """
    data, n_epochs = load_data(noise), 25 if small else 100
    plain, _ = train(data, n_epochs, online=False)
    la, warned = train(data, n_epochs, online=True)
    print("\n".join(warned))
    with torch.no_grad():
        predictions = {
            "network, no weight decay": plain.model(data.x_test).softmax(1),
            "network, by the evidence": la.model(data.x_test).softmax(1),
            "its posterior": la(data.x_test),
        }
    print(f"\n{la.calibrate([(data.x_val, data.y_val)])}\n")
    predictions["its posterior, calibrated"] = la(data.x_test)
    print(f"{'':<26}{'NLL':>7}{'ECE':>7}{'accuracy':>10}")
    scores = {name: float(nll(probs, data.y_test)) for name, probs in predictions.items()}
    for name, probs in predictions.items():
        error, correct = expected_calibration_error(probs, data.y_test), accuracy(probs, data.y_test)
        print(f"{name:<26}{scores[name]:>7.3f}{float(error):>7.3f}{float(correct):>10.3f}")
    figure, axes = new_figure(n_columns=1, n_rows=1, width=4.4, height=3.8)
    reliability_diagram(axes[0], predictions, data.y_test)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="train for a few epochs only")
    parser.add_argument("--noise", type=float, default=0.3, help="standard deviation of the noise of every pixel")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/online_classification.png"), help="where the plot goes"
    )
    arguments = parser.parse_args()
    main(arguments.small, arguments.noise, arguments.output)
