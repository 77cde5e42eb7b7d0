"""One network, several processes: trained by `DistributedDataParallel`, fitted and tuned on shards of the data.

Every process reads its shard of noisy digits. Training averages gradients over the processes; the fit adds up curvature
over them, once, so that every process has the posterior of all data; the prior precision is the best one on validation
data of which each process has a shard, too. One of the processes prints the scores and draws the plot. Alone the script
is one of one process, with the same posterior.

    torchrun --nproc-per-node 2 examples/several_processes.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace import Laplace
from laplace.extensions.plotting import new_figure, reliability_diagram
from laplace.metrics import accuracy, expected_calibration_error, nll

NOISE = 0.3


def load_data() -> tuple[TensorDataset, TensorDataset, tuple[Tensor, Tensor]]:
    """Training (601), validation (301) and test images, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    x, y = x + NOISE * torch.randn(x.shape, generator=generator), torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=generator)
    train, validation, test = ((x[part], y[part]) for part in order.split([601, 301, len(x) - 902]))
    return TensorDataset(*train), TensorDataset(*validation), test


def shards(data: TensorDataset) -> DataLoader[tuple[Tensor, ...]]:
    """This process's part; what the sampler repeats to give all of them equally many is counted once by Laplace."""
    return DataLoader(data, 50, sampler=DistributedSampler(data))


def train_network(data: TensorDataset, n_epochs: int) -> nn.Module:
    """The same weights in every process: gradients are averaged over all of them."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer, loader = torch.optim.Adam(model.parameters(), lr=3e-3), shards(data)
    for _ in range(n_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def main(small: bool = False, output: Path = Path("outputs/several_processes.png")) -> dict[str, list[float]]:
    """Runs everything in a process of the group, and returns the scores of the network and of the posterior.

    Args:
        small: Train for fewer epochs, to try the script out.
        output: Where the plot goes.
    """
    group, (train, validation, (x, y)) = distributed.group.WORLD, load_data()
    model = train_network(train, n_epochs=20 if small else 60)
    la = Laplace(model, "classification", "all", "kron")
    la.fit(shards(train), group=group)
    la.optimize_prior_precision(method="gridsearch", val_loader=shards(validation), grid_size=41, group=group)
    with torch.no_grad():
        predictions = {"network": model(x).softmax(1), "Laplace": la(x)}
    metrics = {"NLL": nll, "ECE": expected_calibration_error, "accuracy": accuracy}
    scores = {name: [float(metric(p, y)) for metric in metrics.values()] for name, p in predictions.items()}
    if distributed.get_rank() == 0:
        size, prior = distributed.get_world_size(), la.prior_precision.item()
        print(f"{size} processes, {la.n_data} data, prior precision {prior:.3g}")
        print(f"{'':<10}" + "".join(f"{name:>10}" for name in metrics))
        for name, row in scores.items():
            print(f"{name:<10}" + "".join(f"{score:>10.3f}" for score in row))
        figure, axes = new_figure()
        reliability_diagram(axes[0], predictions, y)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=110)
        print(f"\nplot: {output}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="train for fewer epochs")
    parser.add_argument("--output", type=Path, default=Path("outputs/several_processes.png"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        distributed.init_process_group("gloo")
    else:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        main(arguments.small, arguments.output)
    finally:
        distributed.destroy_process_group()
