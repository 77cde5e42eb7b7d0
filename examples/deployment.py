"""A posterior served without this library: exported, saved, and run by PyTorch alone and by an ONNX runtime.

A regression network is trained on a wave with a gap, and its posterior predicts mean and variance. The prediction is
exported as a plain module and saved by `torch.export`. A process of its own, which has only PyTorch, loads it and
predicts at batches of other sizes; so does onnxruntime, without PyTorch. The plot shows the answers with those of the
posterior.

    python examples/deployment.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from onnxruntime import InferenceSession
from torch import Tensor, nn

import laplace
from laplace import Laplace
from laplace.extensions.plotting import new_figure
from laplace.parametric import ParametricLaplace

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


Prediction = tuple[Tensor, Tensor]
"""Mean and variance, `[B, 1]` each."""


def exported(la: ParametricLaplace, example: Tensor) -> torch.export.ExportedProgram:
    """The prediction as a program of PyTorch for batches of any size."""
    module = laplace.export(la, example, diagonal_output=True, observation_noise=True)
    return torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def served_by_torch(program: torch.export.ExportedProgram, batches: list[Tensor], folder: Path) -> list[Prediction]:
    """Mean and variance of every batch, by a process that has only PyTorch."""
    files = [str(folder / name) for name in ("prediction.pt2", "inputs.pt", "outputs.pt")]
    torch.export.save(program, files[0])
    torch.save(batches, files[1])
    subprocess.run([sys.executable, "-c", SERVER, *files], check=True)
    return torch.load(files[2])


def served_by_onnx(program: torch.export.ExportedProgram, batches: list[Tensor], folder: Path) -> list[Prediction]:
    """Mean and variance of every batch, by onnxruntime, which takes numpy arrays."""
    path = folder / "prediction.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages, about each other
        torch.onnx.export(program, f=path, dynamo=True, verbose=False)
    runtime = InferenceSession(path)
    name = runtime.get_inputs()[0].name
    answers = [runtime.run(None, {name: batch.numpy()}) for batch in batches]
    return [(torch.as_tensor(mean), torch.as_tensor(variance)) for mean, variance in answers]


def main(small: bool = False, output: Path = Path("outputs/deployment.png")) -> dict[str, float]:
    """Runs everything and returns the largest difference to the posterior's prediction, by runtime.

    Args:
        small: Train for a tenth of the epochs, to try the script out.
        output: Where the plot and the files go.
    """
    la, x, y = posterior(n_epochs=50 if small else 500)
    grid = torch.linspace(-6, 6, 150).unsqueeze(1)
    output.parent.mkdir(parents=True, exist_ok=True)
    batches = [grid[:40], grid[40:]]
    program = exported(la, batches[0])
    expected = la(grid, diagonal_output=True, observation_noise=True)
    answers: dict[str, Prediction] = {}
    for name, serve in {"PyTorch": served_by_torch, "onnxruntime": served_by_onnx}.items():
        mean, variance = zip(*serve(program, batches, output.parent), strict=True)
        answers[name] = torch.cat(mean), torch.cat(variance)
    differences = {
        name: max(float((a - b).abs().max()) for a, b in zip(answer, expected, strict=True))
        for name, answer in answers.items()
    }
    for name, difference in differences.items():
        print(f"largest difference between the posterior's prediction and that of {name}: {difference:.1e}")
    mean, variance = answers["onnxruntime"]
    figure, (axis,) = new_figure(n_columns=1, width=6, height=3.5)
    m, s = mean[:, 0], variance[:, 0].sqrt()
    axis.fill_between(grid[:, 0], m - 2 * s, m + 2 * s, alpha=0.3, label="served, ± 2 standard deviations")
    axis.plot(grid[:, 0], expected[0][:, 0], "k--", lw=1, label="mean of the posterior")
    axis.plot(x[:, 0], y[:, 0], ".", ms=3)
    axis.legend()
    figure.savefig(output, dpi=110)
    print(f"plot: {output}")
    return differences


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="train for a tenth of the epochs")
    parser.add_argument("--output", type=Path, default=Path("outputs/deployment.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
