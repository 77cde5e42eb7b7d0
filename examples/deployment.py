"""A posterior served without this library: exported, saved, and loaded by PyTorch alone.

A regression network is trained on a wave with a gap, and its posterior predicts mean and variance. The prediction is
exported as a plain module and saved by `torch.export`. A process of its own, which has only PyTorch, loads it and
predicts at batches of other sizes. The plot shows its answers with those of the posterior.

    python examples/deployment.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.parametric import ParametricLaplace
from laplace.plotting import new_figure

SERVER = """
import sys
import torch

program, inputs, outputs = sys.argv[1:]
module = torch.export.load(program).module()
torch.save([module(x) for x in torch.load(inputs)], outputs)
assert "laplace" not in sys.modules
"""


def posterior(n_epochs: int) -> tuple[ParametricLaplace, Tensor, Tensor]:
    """A trained network with its posterior, and the data."""
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-4, -1, 60), torch.linspace(1.5, 4, 60)]).unsqueeze(1)
    y = torch.sin(x) + 0.2 * torch.randn_like(x)
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(n_epochs):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    la = Laplace(model, "regression", "all", "kron", sigma_noise=0.2)
    la.fit([(x, y)])
    la.optimize_prior_precision()
    return la, x, y


def served(la: ParametricLaplace, batches: list[Tensor], folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Mean and variance of every batch, by a process that has only PyTorch."""
    program, inputs, outputs = (str(folder / name) for name in ("prediction.pt2", "inputs.pt", "outputs.pt"))
    module = la.export(batches[0], diagonal_output=True, observation_noise=True)
    dynamic = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(module, (batches[0],), dynamic_shapes=dynamic), program)
    torch.save(batches, inputs)
    subprocess.run([sys.executable, "-c", SERVER, program, inputs, outputs], check=True)
    return torch.load(outputs)


def main(small: bool = False, output: Path = Path("outputs/deployment.png")) -> float:
    """Runs everything and returns the largest difference between both predictions.

    Args:
        small: Train for a tenth of the epochs, to try the script out.
        output: Where the plot and the files go.
    """
    la, x, y = posterior(n_epochs=50 if small else 500)
    grid = torch.linspace(-6, 6, 150).unsqueeze(1)
    output.parent.mkdir(parents=True, exist_ok=True)
    batches = [grid[:40], grid[40:]]
    mean, variance = (torch.cat(parts) for parts in zip(*served(la, batches, output.parent), strict=True))
    expected = la(grid, diagonal_output=True, observation_noise=True)
    difference = max(float((a - b).abs().max()) for a, b in zip((mean, variance), expected, strict=True))
    print(f"largest difference between the served prediction and the posterior's: {difference:.1e}")
    figure, (axis,) = new_figure(n_columns=1, width=6, height=3.5)
    m, s = mean[:, 0], variance[:, 0].sqrt()
    axis.fill_between(grid[:, 0], m - 2 * s, m + 2 * s, alpha=0.3, label="served, ± 2 standard deviations")
    axis.plot(grid[:, 0], expected[0][:, 0], "k--", lw=1, label="mean of the posterior")
    axis.plot(x[:, 0], y[:, 0], ".", ms=3)
    axis.legend()
    figure.savefig(output, dpi=110)
    print(f"plot: {output}")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="train for a tenth of the epochs")
    parser.add_argument("--output", type=Path, default=Path("outputs/deployment.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
