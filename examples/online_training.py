"""How noisy are the data, and how complex may the network be? Both answered while it trains.

A network is fitted to a sine seen through noise, on two stretches of the axis. Its prior precision, one per tensor,
and the noise follow the evidence of a Laplace approximation (online Laplace, algorithm 1 of Laplace Redux); no
validation data are needed. The same network with the priors and the noise it started from is shown beside it.

    python examples/online_training.py
    python examples/online_training.py --structure kron
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import ParametricLaplace, marglik_training
from laplace.extensions.plotting import new_figure

NOISE = 0.3


class Data(NamedTuple):
    """Inputs `[N, 1]` and targets `[N, 1]` of training and test; nothing is seen between 3 and 5."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def make_data(n_data: int = 150) -> Data:
    """Targets sin(x) plus Gaussian noise of standard deviation 0.3; the test data lie where the training data do."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2 * n_data, 1, generator=generator) * 6
    x = torch.where(x > 3, x + 2, x)  # [0, 3] and [5, 8]
    y = x.sin() + NOISE * torch.randn(2 * n_data, 1, generator=generator)
    return Data(x[:n_data], y[:n_data], x[n_data:], y[n_data:])


def train(data: Data, structure: str, n_epochs: int, **options: Any) -> tuple[ParametricLaplace, list[float]]:
    """A small network trained from the same start; its posterior, and the negative log evidences on the way."""
    torch.manual_seed(711)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=len(data.x))
    la, _, margliks, _ = marglik_training(
        model, loader, likelihood="regression", hessian_structure=structure, n_epochs=n_epochs,
        optimizer_kwargs={"lr": 1e-2}, prior_structure="layerwise", **options,
    )  # fmt: skip
    return la, margliks


def negative_log_density(la: ParametricLaplace, data: Data) -> float:
    """Mean negative log predictive density of the test data, in nats, with the noise."""
    mean, variance = la(data.x_test, diagonal_output=True, observation_noise=True)
    return nn.functional.gaussian_nll_loss(mean, data.y_test, variance, full=True).item()


def draw(posteriors: dict[str, ParametricLaplace], margliks: list[float], data: Data, output: Path) -> None:
    """Saves the plot: predictions with both kinds of uncertainty, and the evidence during training."""
    figure, axes = new_figure(n_columns=3, n_rows=1, width=4.4, height=3.4)
    x = torch.linspace(-2, 10, 400).unsqueeze(1)
    for place, (name, la) in zip(axes, posteriors.items(), strict=False):
        mean, variance = (part.squeeze(1) for part in la(x, diagonal_output=True))
        epistemic, noise = variance.sqrt(), la.sigma_noise
        total = (variance + noise**2).sqrt()
        line = x.squeeze(1)
        place.fill_between(line, mean - 2 * total, mean + 2 * total, alpha=0.15, color="C0", label="with noise, ±2σ")
        place.fill_between(
            line, mean - 2 * epistemic, mean + 2 * epistemic, alpha=0.35, color="C0", label="epistemic, ±2σ"
        )
        place.plot(line, mean, color="C0", label="mean")
        place.plot(line, x.sin().squeeze(1), "--", color="0.3", linewidth=1, label="sin x")
        place.plot(data.x.squeeze(1), data.y.squeeze(1), ".", color="0.2", markersize=3)
        place.set(title=f"{name}: σ = {noise.item():.2f}", xlabel="x", ylim=(-4, 4), xlim=(-2, 10))
    axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    axes[2].plot(margliks, color="C1")
    axes[2].set(
        title="Training by the evidence", xlabel="step on the hyper-parameters", ylabel="negative log evidence (nats)"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main(
    small: bool = False, structure: str = "full", output: Path = Path("outputs/online_training.png")
) -> dict[str, float]:
    """Runs everything and returns the test NLL by model.

    Args:
        small: Train for a few epochs only, to try the script out.
        structure: Structure of the curvature, `"full"`, `"kron"` or `"diag"`.
        output: Where the plot goes.
    """
    data = make_data()
    n_epochs = 20 if small else 600
    online, margliks = train(data, structure, n_epochs, n_epochs_burnin=n_epochs // 10, marglik_frequency=5)
    fixed, _ = train(data, structure, n_epochs, n_epochs_burnin=n_epochs + 1)  # the evidence is never estimated
    posteriors = {"fixed": fixed, "online": online}
    spread = (data.y - data.x.sin()).square().mean().sqrt().item()
    scores = {name: negative_log_density(la, data) for name, la in posteriors.items()}
    print(f"{'':<8}{'noise':>8}{'log evidence':>14}{'test NLL':>10}   (noise of the training data: {spread:.3f})")
    for name, la in posteriors.items():
        evidence = la.log_marginal_likelihood().item()
        print(f"{name:<8}{la.sigma_noise.item():>8.3f}{evidence:>14.1f}{scores[name]:>10.3f}")
    names = [name for name, _ in online.model.named_parameters()]
    priors = (f"{name} {value:.3g}" for name, value in zip(names, online.prior_precision.tolist(), strict=True))
    print("\nprior precisions: " + ", ".join(priors))
    draw(posteriors, margliks, data, output)
    print(f"\nplot: {output}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="train for a few epochs only")
    parser.add_argument("--structure", default="full", help="structure of the curvature: full, kron or diag")
    parser.add_argument("--output", type=Path, default=Path("outputs/online_training.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.structure, arguments.output)
