"""A network that skorch has trained, and its Laplace approximation.

skorch trains a PyTorch module as an estimator of scikit-learn. What it trained is `net.module_`, and the batches it
trained with come from `net.get_iterator`: the two arguments of a posterior. The data are the digits of scikit-learn
through a noisy sensor, few of them for training, so that the network is certain where it should not be. The prior is
chosen by the evidence, from the training data alone.

    python examples/with_skorch.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from torch import nn

from laplace import Laplace
from laplace.extensions.plotting import new_figure, reliability_diagram
from laplace.metrics import accuracy, expected_calibration_error, nll

NOISE, N_TRAIN = 0.4, 500


def digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images `[N, 64]` with noise, and labels `[N]`, in an order at random."""
    x, y = load_digits(return_X_y=True)
    source = np.random.default_rng(0)
    x = x / 16 + NOISE * source.normal(size=x.shape)
    order = source.permutation(len(x))
    return x[order].astype(np.float32), y[order].astype(np.int64)


def main(small: bool = False, output: Path = Path("outputs/with_skorch.png")) -> dict[str, list[float]]:
    """Trains, fits, prints and returns NLL, ECE and accuracy by model.

    Args:
        small: Train for a few epochs only, to try the script out.
        output: Where the plot goes.
    """
    torch.manual_seed(0)
    x, y = digits()
    net = NeuralNetClassifier(
        nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10)),
        criterion=nn.CrossEntropyLoss,  # of logits: skorch's default takes probabilities, of which no posterior is made
        optimizer=torch.optim.Adam, lr=1e-2, max_epochs=3 if small else 60, train_split=None, verbose=0,
    )  # fmt: skip
    net.fit(x[:N_TRAIN], y[:N_TRAIN])

    la = Laplace(net.module_, "classification", "all", "kron")
    la.fit(net.get_iterator(net.get_dataset(x[:N_TRAIN], y[:N_TRAIN])))
    la.optimize_prior_precision()

    inputs, labels = torch.tensor(x[N_TRAIN:]), torch.tensor(y[N_TRAIN:])
    predicted = {"skorch": torch.tensor(net.predict_proba(x[N_TRAIN:])), "laplace": la(inputs)}
    metrics = (nll, expected_calibration_error, accuracy)
    scores = {name: [float(score(p, labels)) for score in metrics] for name, p in predicted.items()}
    print(f"{'':<10}{'NLL':>8}{'ECE':>8}{'accuracy':>10}")
    for name, row in scores.items():
        print(f"{name:<10}{row[0]:>8.3f}{row[1]:>8.3f}{row[2]:>10.3f}")
    figure, (axis,) = new_figure(n_columns=1, width=3.6, height=3.4)
    reliability_diagram(axis, predicted, labels)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="hardly any training")
    parser.add_argument("--output", type=Path, default=Path("outputs/with_skorch.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
