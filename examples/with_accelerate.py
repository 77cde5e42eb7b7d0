"""A network trained by accelerate, in mixed precision and by any number of processes, and its Laplace approximation.

What `Accelerator.prepare` gives, model and loader, is what a posterior takes. With `--precision bf16` the network runs
as it was trained, in half precision inside and with outputs in float32, and curvature is summed in float32. By several
processes every one fits its shard and has the posterior of all data; what accelerate repeats, to give all processes
equally many batches, counts once. The data are the digits of scikit-learn through a noisy sensor.

    python examples/with_accelerate.py --precision bf16
    accelerate launch --cpu --num_processes 2 examples/with_accelerate.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.extensions.plotting import new_figure, reliability_diagram
from laplace.metrics import accuracy, expected_calibration_error, nll

NOISE, N_TRAIN = 0.4, 501


def digits() -> tuple[Tensor, Tensor]:
    """Images `[N, 64]` with noise, and labels `[N]`, in an order at random."""
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    source = torch.Generator().manual_seed(0)
    x = x.float() / 16 + NOISE * torch.randn(x.shape, generator=source)
    order = torch.randperm(len(x), generator=source)
    return x[order], y[order]


def train(accelerator: Accelerator, data: TensorDataset, n_epochs: int) -> tuple[nn.Module, Any]:
    """The network and the loader that accelerate prepared, after training."""
    model = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 64, shuffle=True))
    for _ in range(n_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
    return model.eval(), loader


def main(
    small: bool = False, precision: str = "no", output: Path = Path("outputs/with_accelerate.png")
) -> dict[str, list[float]]:
    """Trains, fits, prints and returns NLL, ECE and accuracy by model.

    Args:
        small: Train for a few epochs only, to try the script out.
        precision: Mixed precision of accelerate: `"no"` or `"bf16"`, on accelerators `"fp16"` too.
        output: Where the plot goes.
    """
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=precision)
    x, y = digits()
    model, loader = train(accelerator, TensorDataset(x[:N_TRAIN], y[:N_TRAIN]), 3 if small else 60)

    la = Laplace(model, "classification", "all", "kron")
    la.fit(loader, group=distributed.group.WORLD if accelerator.num_processes > 1 else None)
    la.optimize_prior_precision()

    inputs, labels = x[N_TRAIN:].to(accelerator.device), y[N_TRAIN:].to(accelerator.device)
    with torch.no_grad():
        predicted = {"network": model(inputs).softmax(1), "laplace": la(inputs)}
    metrics = (nll, expected_calibration_error, accuracy)
    scores = {name: [float(score(p, labels)) for score in metrics] for name, p in predicted.items()}
    accelerator.print(f"{accelerator.num_processes} process(es), {la.n_data} data, mixed precision: {precision}")
    accelerator.print(f"{'':<10}{'NLL':>8}{'ECE':>8}{'accuracy':>10}")
    for name, row in scores.items():
        accelerator.print(f"{name:<10}{row[0]:>8.3f}{row[1]:>8.3f}{row[2]:>10.3f}")
    if accelerator.is_main_process:
        figure, (axis,) = new_figure(n_columns=1, width=3.6, height=3.4)
        reliability_diagram(axis, {name: p.cpu() for name, p in predicted.items()}, labels.cpu())
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=110)
        print(f"\nplot: {output}")
    accelerator.end_training()
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="hardly any training")
    parser.add_argument("--precision", default="no", help="mixed precision: no, bf16 or fp16")
    parser.add_argument("--output", type=Path, default=Path("outputs/with_accelerate.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.precision, arguments.output)
