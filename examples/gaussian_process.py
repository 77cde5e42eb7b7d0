"""The posterior as a Gaussian process over functions, on a part of the data.

The linearised network is a Gaussian process with the kernel J(x) J(x′)ᵀ/δ. `hessian_structure="gp"` keeps M of the N
data and takes a matrix of M·C × M·C, however large the network is. With M = N it is the full Laplace approximation,
which here has few enough weights to stand beside it. What a smaller M costs is measured on two bananas in the plane:
the distance of the probabilities from those of the full posterior, and the score of held-out data; for M data at
random, and for those with the largest tr Λ (`selection="top"`), which lie at the boundary between the classes.

    python examples/gaussian_process.py
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn

from laplace import BaseLaplace, Laplace
from laplace.extensions.plotting import new_figure
from laplace.metrics import expected_calibration_error, nll

N_DATA = 300
DELTA = 0.5


class Row(NamedTuple):
    """One posterior.

    Attributes:
        name: What it is.
        size: M, or the number of weights.
        nll: Of held-out data, in nats.
        ece: Of held-out data.
        distance: Mean distance of the probabilities on a grid from those of the full posterior.
        spread: Mean standard deviation of the logits on the grid.
        seconds: Fit and predictions.
    """

    name: str
    size: int
    nll: float
    ece: float
    distance: float
    spread: float
    seconds: float


def make_data(seed: int, n_data: int = N_DATA) -> tuple[Tensor, Tensor]:
    """Two bananas with noise: points `[N, 2]` and labels `[N]`."""
    x, y = make_moons(n_data, noise=0.25, random_state=seed)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def train(x: Tensor, y: Tensor, n_steps: int) -> nn.Module:
    """A network with two hidden layers at the mode of its posterior under the prior N(0, 1/δ)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=DELTA / len(x))
    for _ in range(n_steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def posteriors(model: nn.Module, sizes: list[int]) -> dict[tuple[str, int], BaseLaplace]:
    """The full posterior and Gaussian processes on M data, all with the prior that the network was trained with."""
    n_params = sum(p.numel() for p in model.parameters())
    common: dict[str, Any] = {"subset_of_weights": "all", "prior_precision": DELTA}
    found = {("full", n_params): Laplace(model, "classification", hessian_structure="full", **common)}
    for selection in ("random", "top"):
        for size in sizes:
            found[f"gp, {selection}", size] = Laplace(
                model, "classification", hessian_structure="gp", n_subset=size, selection=selection, **common
            )
    return found


def main(small: bool = False, output: Path = Path("outputs/gaussian_process.png")) -> list[Row]:
    """Runs everything and returns one row per posterior.

    Args:
        small: Train for a few steps only, two sizes of the subset, to try the script out.
        output: Where the plot goes.
    """
    x, y = make_data(0)
    x_test, y_test = make_data(1, 1000)
    model = train(x, y, n_steps=30 if small else 1000)
    line = torch.linspace(-3, 4, 30 if small else 50)
    grid = torch.cartesian_prod(line, line)
    rows: list[Row] = []
    with torch.no_grad():
        network = model(x_test).softmax(1)
    maps: dict[tuple[str, int], Tensor] = {}
    sizes = [20, N_DATA] if small else [20, 50, 100, N_DATA]
    for key, la in posteriors(model, sizes).items():
        start = time.perf_counter()
        la.fit([(x, y)])
        probs, maps[key] = la(x_test), la(grid)[:, 1]
        seconds = time.perf_counter() - start
        spread = la.predict(grid, diagonal_output=True).latent_variance.sqrt().mean().item()
        distance = (maps[key] - next(iter(maps.values()))).abs().mean().item()
        scores = float(nll(probs, y_test)), float(expected_calibration_error(probs, y_test))
        rows.append(Row(*key, *scores, distance, spread, seconds))
    print(f"network alone: NLL {float(nll(network, y_test)):.3f}, "
          f"ECE {float(expected_calibration_error(network, y_test)):.3f}\n")  # fmt: skip
    print(f"{'posterior':<14}{'M or P':>7}{'NLL':>8}{'ECE':>8}{'distance':>11}{'std of f':>10}{'seconds':>9}")
    for row in rows:
        numbers = f"{row.nll:>8.3f}{row.ece:>8.3f}{row.distance:>11.1e}{row.spread:>10.2f}{row.seconds:>9.2f}"
        print(f"{row.name:<14}{row.size:>7}{numbers}")
    figure, axes = new_figure(n_columns=3, n_rows=1, width=3.6, height=3.2)
    for axis, key in zip(axes, [next(iter(maps)), ("gp, random", sizes[0]), ("gp, top", sizes[0])], strict=True):
        axis.contourf(line, line, maps[key].view(len(line), -1).T, levels=20, cmap="coolwarm", vmin=0, vmax=1)
        axis.scatter(*x.T, c=y, cmap="coolwarm", s=6, edgecolor="k", linewidth=0.3)
        axis.set(title=f"{key[0]}, {key[1]} {'weights' if key[0] == 'full' else 'data'}", xticks=[], yticks=[])
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few steps, two sizes")
    parser.add_argument("--output", type=Path, default=Path("outputs/gaussian_process.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
