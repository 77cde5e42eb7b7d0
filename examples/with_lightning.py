"""Two callbacks of Lightning: a posterior after training, and hyper-parameters that follow the evidence during it.

A sine is seen through noise of standard deviation 0.3, by a network that is trained by the mean squared error, with a
posterior fitted at the end (`LaplaceCallback`, prior and then noise chosen by the evidence), and by the same network
under the loss of `OnlineLaplaceCallback`, whose prior precisions and noise move with the evidence while it trains.

    python examples/with_lightning.py
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as lightning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import ParametricLaplace
from laplace.extensions.plotting import new_figure
from laplace.integrations.lightning import LaplaceCallback, OnlineLaplaceCallback

NOISE, N_DATA = 0.3, 150


class Regression(lightning.LightningModule):
    """A network with a loss of outputs and targets.

    Args:
        net: The network.
        loss: `torch.nn.functional.mse_loss`, or the loss of a callback.
    """

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Loss of a batch."""
        x, y = batch
        return self.loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam without a weight decay, which would be a second prior."""
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


def make_data() -> tuple[Tensor, Tensor]:
    """Inputs `[300, 1]` in [0, 6] and targets sin(x) with noise; the first half is for training."""
    source = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(2 * N_DATA, 1, generator=source)
    return x, x.sin() + NOISE * torch.randn(x.shape, generator=source)


def network() -> nn.Module:
    """The same initial weights whenever it is called."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))


def train(module: lightning.LightningModule, callback: Any, data: TensorDataset, n_epochs: int) -> None:
    """Trains by a `Trainer` that writes no files and prints nothing."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and logging
        trainer = lightning.Trainer(
            max_epochs=n_epochs, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, batch_size=50, shuffle=True))


def posteriors(data: TensorDataset, n_epochs: int) -> dict[str, ParametricLaplace]:
    """Posteriors of both callbacks."""
    net = network()
    after = LaplaceCallback("regression", model=net, subset_of_weights="all", hessian_structure="full")
    train(Regression(net, nn.functional.mse_loss), after, data, n_epochs)
    after.la.optimize_hyperparameters(("prior_precision", "sigma_noise"))

    net = network()
    burn_in = n_epochs // 5
    online = OnlineLaplaceCallback("regression", "full", model=net, n_epochs_burnin=burn_in, marglik_frequency=5)
    train(Regression(net, online.loss), online, data, n_epochs)
    return {"after": after.la, "online": online.la}


def main(small: bool = False, output: Path = Path("outputs/with_lightning.png")) -> dict[str, float]:
    """Trains both, prints what they found, and returns the NLL of held-out data by callback.

    Args:
        small: Train for a few epochs only, to try the script out.
        output: Where the plot goes.
    """
    x, y = make_data()
    found = posteriors(TensorDataset(x[:N_DATA], y[:N_DATA]), 10 if small else 200)
    grid = torch.linspace(-2, 8, 200).unsqueeze(1)
    figure, axes = new_figure(n_columns=2, width=4.2, height=3.2)
    scores = {}
    print(f"{'':<8}{'noise':>8}{'log evidence':>14}{'test NLL':>10}")
    for axis, (name, la) in zip(axes, found.items(), strict=True):
        mean, variance = la(x[N_DATA:], diagonal_output=True, observation_noise=True)
        scores[name] = nn.functional.gaussian_nll_loss(mean, y[N_DATA:], variance, full=True).item()
        evidence, noise = la.log_marginal_likelihood().item(), la.sigma_noise.item()
        print(f"{name:<8}{noise:>8.3f}{evidence:>14.1f}{scores[name]:>10.3f}")
        mean, variance = (part.squeeze(1) for part in la(grid, diagonal_output=True, observation_noise=True))
        deviation = variance.sqrt()
        axis.fill_between(grid.squeeze(1), mean - 2 * deviation, mean + 2 * deviation, alpha=0.3, color="C0")
        axis.plot(grid.squeeze(1), mean, color="C0")
        axis.plot(x[:N_DATA].squeeze(1), y[:N_DATA].squeeze(1), ".", color="0.2", markersize=3)
        axis.set(title=f"{name}: σ = {noise:.2f}", xlabel="x", ylim=(-3, 3))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="hardly any training")
    parser.add_argument("--output", type=Path, default=Path("outputs/with_lightning.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
