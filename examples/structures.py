"""Every structure of the curvature side by side, on handwritten digits: what each costs and what it gives.

A small network is trained on noisy digits. Every structure is then fitted to all of its weights, the prior precision
chosen by the evidence, and the posterior scored on held-out digits: negative log likelihood, calibration error, log
evidence, time, and the memory that the posterior keeps.

The evidence of a truncated curvature is no bound on the others: directions that were cut off count as if the data said
nothing of them, so that it is too large, and chooses too small a prior precision. Hence the rank below.

    python examples/structures.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.extensions.plotting import new_figure
from laplace.metrics import expected_calibration_error, nll
from laplace.structures import STRUCTURES

NOISE = 0.4
OPTIONS: dict[str, dict[str, Any]] = {"lowrank": {"structure_kwargs": {"rank": 0.95}}}
"""Arguments of some structures: low rank keeps 95 % of the trace."""


class Row(NamedTuple):
    """What is known of one structure.

    Attributes:
        name: The structure, or "MAP".
        nll: Negative log likelihood of held-out digits, nats.
        ece: Expected calibration error.
        evidence: Log evidence of the training data, nats; NaN for MAP.
        seconds: Fit, tuning of the prior and prediction.
        mebibytes: Curvature that is kept.
    """

    name: str
    nll: float
    ece: float
    evidence: float
    seconds: float
    mebibytes: float


def load_data() -> tuple[TensorDataset, Tensor, Tensor]:
    """Digits through a noisy sensor: training data, and images and labels to test on."""
    generator = torch.Generator().manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    x = x + NOISE * torch.randn(x.shape, generator=generator)
    y = torch.tensor(digits.target)
    train, test = torch.randperm(len(x), generator=generator).split([1000, len(x) - 1000])
    return TensorDataset(x[train], y[train]), x[test], y[test]


def train_network(data: TensorDataset, width: int, n_epochs: int) -> nn.Module:
    """A network with one hidden layer, trained without regularisation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(n_epochs):
        for x, y in DataLoader(data, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def tensors(state: Any) -> Iterator[Tensor]:
    """All tensors of a nested state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors(value)


def measure(structure: str, model: nn.Module, data: TensorDataset, x: Tensor, y: Tensor) -> Row:
    """Fits, tunes and scores one structure."""
    start = time.perf_counter()
    la = Laplace(model, "classification", "all", structure, **OPTIONS.get(structure, {}))
    la.fit(DataLoader(data, batch_size=250))
    la.optimize_prior_precision(n_steps=50)
    probs = la(x)
    seconds = time.perf_counter() - start
    kept = sum(tensor.numel() * tensor.element_size() for tensor in tensors(la.state_dict()["H"]))
    evidence = la.log_marginal_likelihood().item()
    error = float(expected_calibration_error(probs, y))
    return Row(structure, float(nll(probs, y)), error, evidence, seconds, kept / 2**20)


def print_table(rows: list[Row]) -> None:
    """Prints one line per structure."""
    print(f"{'structure':<14}{'NLL':>8}{'ECE':>8}{'log evidence':>14}{'seconds':>9}{'MiB':>8}")
    for row in rows:
        numbers = f"{row.nll:>8.3f}{row.ece:>8.3f}{row.evidence:>14.1f}{row.seconds:>9.2f}{row.mebibytes:>8.2f}"
        print(f"{row.name:<14}{numbers}")


def draw(rows: list[Row], output: Path) -> None:
    """Saves a bar chart of every column."""
    figure, axes = new_figure(n_columns=3, n_rows=2, width=3.6, height=2.6)
    titles = ["NLL (nats)", "calibration error", "log evidence (nats)", "seconds", "MiB kept"]
    for axis, title, column in zip(axes, titles, range(1, 6), strict=False):
        shown = [row for row in rows if row[column] == row[column]]
        axis.barh([row.name for row in shown], [row[column] for row in shown], color="0.45")
        axis.invert_yaxis()
        axis.set_title(title)
        if title in ("seconds", "MiB kept"):
            axis.set_xscale("log")
    axes[5].axis("off")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main(small: bool = False, output: Path = Path("outputs/structures.png")) -> list[Row]:
    """Runs everything and returns one row per structure.

    Args:
        small: A narrow network, trained for two epochs only, to try the script out.
        output: Where the plot goes.
    """
    data, x, y = load_data()
    model = train_network(data, width=8 if small else 20, n_epochs=2 if small else 60)
    with torch.no_grad():
        probs = model(x).softmax(1)
    rows = [Row("MAP", float(nll(probs, y)), float(expected_calibration_error(probs, y)), float("nan"), 0.0, 0.0)]
    rows += [measure(structure, model, data, x, y) for structure in STRUCTURES]
    print_table(rows)
    draw([row for row in rows if row.name != "MAP"], output)
    print(f"\nplot: {output}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a narrow network, two epochs")
    parser.add_argument("--output", type=Path, default=Path("outputs/structures.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
