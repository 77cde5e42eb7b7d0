"""Batches as TensorDicts: images of digits and their labels under keys, and the posterior of a network that reads them.

A `TensorDict` is a mapping of tensors that share their first dimension. It holds the training data and is sliced into
batches as a tensor is; the network gets a batch without its labels, which the loss reads under `"labels"`.

    python examples/with_tensordict.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from tensordict import TensorDict
from torch import Tensor, nn

from laplace import Laplace
from laplace.extensions.plotting import new_figure, reliability_diagram
from laplace.metrics import accuracy, expected_calibration_error, nll

NOISE, N_TRAIN = 0.4, 500


class Reader(nn.Module):
    """A perceptron on the pixels of a batch and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(65, 50), nn.Tanh(), nn.Linear(50, 10))

    def forward(self, batch: TensorDict) -> Tensor:
        """Logits, `[B, 10]`."""
        return self.layers(torch.cat([batch["pixels"], batch["brightness"]], 1))


def digits() -> TensorDict:
    """Pixels `[N, 64]` with noise, their mean `[N, 1]` and labels `[N]`, in an order at random."""
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    source = torch.Generator().manual_seed(0)
    x = x.float() / 16 + NOISE * torch.randn(x.shape, generator=source)
    data = TensorDict({"pixels": x, "brightness": x.mean(1, keepdim=True), "labels": y}, batch_size=[len(x)])
    return data[torch.randperm(len(x), generator=source)]


def train(data: TensorDict, n_epochs: int) -> nn.Module:
    """A network that knows the data by heart."""
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(n_epochs):
        for batch in data.split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), batch["labels"]).backward()
            optimizer.step()
    return model


def main(small: bool = False, output: Path = Path("outputs/with_tensordict.png")) -> dict[str, list[float]]:
    """Trains, fits, prints and returns NLL, ECE and accuracy by model.

    Args:
        small: Train for a few epochs only, to try the script out.
        output: Where the plot goes.
    """
    torch.manual_seed(0)
    data = digits()
    model = train(data[:N_TRAIN], 3 if small else 60)
    la = Laplace(model, "classification", "all", "kron", dict_key_x="pixels")
    la.fit(data[:N_TRAIN].split(100))
    la.optimize_prior_precision()

    test = data[N_TRAIN:]
    with torch.no_grad():
        predicted = {"network": model(test).softmax(1), "laplace": la(test)}
    metrics = (nll, expected_calibration_error, accuracy)
    scores = {name: [float(score(p, test["labels"])) for score in metrics] for name, p in predicted.items()}
    print(f"{'':<10}{'NLL':>8}{'ECE':>8}{'accuracy':>10}")
    for name, row in scores.items():
        print(f"{name:<10}{row[0]:>8.3f}{row[1]:>8.3f}{row[2]:>10.3f}")
    figure, (axis,) = new_figure(n_columns=1, width=3.6, height=3.4)
    reliability_diagram(axis, predicted, test["labels"])
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="hardly any training")
    parser.add_argument("--output", type=Path, default=Path("outputs/with_tensordict.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
