"""A posterior saved to one file of safetensors, and made again from it.

A classifier of noisy digits is trained; its posterior, tuned, is saved beside the network's weights. What follows could
be another process: it makes the network, reads both files and predicts, to the bit as before. Neither file is a pickle,
which could run code. The plot shows the reliability of the network and of the posterior that was loaded.

    python examples/saving.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

import laplace
from laplace import Laplace
from laplace.extensions.plotting import new_figure, reliability_diagram
from laplace.metrics import nll
from laplace.parametric import ParametricLaplace

NOISE, N_TRAIN = 0.4, 500


def digits() -> list[tuple[Tensor, Tensor]]:
    """Pixels with noise, `[N, 64]`, and labels `[N]`: to train with, and to test."""
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    source = torch.Generator().manual_seed(0)
    x = x.float() / 16 + NOISE * torch.randn(x.shape, generator=source)
    order = torch.randperm(len(x), generator=source)
    return [(x[rows], y[rows]) for rows in (order[:N_TRAIN], order[N_TRAIN:])]


def network() -> nn.Module:
    """The network, with weights at random."""
    return nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))


def train(x: Tensor, y: Tensor, n_epochs: int) -> nn.Module:
    """A network that knows the data by heart."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(n_epochs):
        for inputs, labels in zip(x.split(50), y.split(50), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model


def save(la: ParametricLaplace, model: nn.Module, folder: Path) -> None:
    """Writes the posterior to one file and its network to another one."""
    la.save(folder / "posterior.safetensors")
    save_file(model.state_dict(), folder / "network.safetensors")


def load(folder: Path) -> ParametricLaplace:
    """The posterior that both files hold."""
    model = network()
    model.load_state_dict(load_file(folder / "network.safetensors"))
    return laplace.load(folder / "posterior.safetensors", model)


def main(small: bool = False, output: Path = Path("outputs/saving.png")) -> float:
    """Runs everything and returns the largest difference between the predictions before and after.

    Args:
        small: Train for a tenth of the epochs, to try the script out.
        output: Where the plot and the files go.
    """
    torch.manual_seed(0)
    (x, y), (test, labels) = digits()
    model = train(x, y, n_epochs=4 if small else 40)
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    la.optimize_prior_precision()
    output.parent.mkdir(parents=True, exist_ok=True)
    save(la, model, output.parent)
    again = load(output.parent)
    print(again)
    before, after = la(test), again(test)
    difference = float((before - after).abs().max())
    print(f"NLL {nll(before, labels):.3f} before saving, {nll(after, labels):.3f} after loading")
    print(f"largest difference between both predictions: {difference:.1e}")
    figure, (axis,) = new_figure(n_columns=1, width=4, height=4)
    reliability_diagram(axis, {"network": model(test).softmax(1).detach(), "loaded posterior": after}, labels)
    figure.savefig(output, dpi=110)
    print(f"plot: {output}")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="train for a tenth of the epochs")
    parser.add_argument("--output", type=Path, default=Path("outputs/saving.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
