"""Finding a minimum with few measurements: Bayesian optimisation with a network in place of a Gaussian process.

The function is Branin's, with three global minima of 0.398 on [−5, 10] × [0, 15]; every measurement is exact but
counts as dear. After five random points a loop of three lines goes on: train a small network and fit its Laplace
approximation as a Gaussian process on the few data (`"gp"`: the full posterior of 2,751 weights by a matrix of at most
30 × 30), climb the expected improvement by its gradient in the input, measure there. It is compared with measuring at
random, over several seeds.

    python examples/bayesian_optimisation.py
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace import FunctionalLaplace, Laplace
from laplace.extensions.plotting import new_figure

MINIMUM, NOISE, N_START = 0.397887, 0.05, 5


def branin(u: Tensor) -> Tensor:
    """Branin's function at points `[B, 2]` of the unit square, `[B]`."""
    x, y = 15 * u[:, 0] - 5, 15 * u[:, 1]
    return (y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6) ** 2 + 10 * (1 - 1 / (8 * math.pi)) * x.cos() + 10


def fit(x: Tensor, y: Tensor, n_steps: int) -> FunctionalLaplace:
    """A network of the logarithm of the measurements, standardised, as a Gaussian process on all of the few data."""
    target = ((y.log() - y.log().mean()) / y.log().std()).unsqueeze(1)
    model = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    nn.init.normal_(model[0].weight, std=2.0)  # features that vary within the square
    nn.init.uniform_(model[0].bias, -2.0, 2.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(n_steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
    la = Laplace(model, "regression", "all", "gp", n_subset=len(x), sigma_noise=NOISE, enable_backprop=True)
    la.fit([(x, target)])
    la.optimize_prior_precision(n_steps=50)
    return la


def expected_improvement(la: FunctionalLaplace, x: Tensor, best: Tensor) -> Tensor:
    """E[max(best − f(x), 0)] = σ (z Φ(z) + φ(z)) with z = (best − μ)/σ, `[B]` (Jones et al., 1998)."""
    mean, variance = la(x, diagonal_output=True)
    spread = variance.flatten().clamp(min=1e-12).sqrt()
    z, normal = (best - mean.flatten()) / spread, torch.distributions.Normal(0.0, 1.0)
    return spread * (z * normal.cdf(z) + normal.log_prob(z).exp())


def next_point(la: FunctionalLaplace, x: Tensor, generator: torch.Generator, n_steps: int) -> Tensor:
    """Where the expected improvement is largest, `[1, 2]`: Adam from the best of many random points."""
    best = la(x)[0].min().detach()
    starts = torch.rand(1000, 2, generator=generator)
    starts = starts[expected_improvement(la, starts, best).argsort(descending=True)[:10]].clamp(0.01, 0.99)
    logit = starts.logit().requires_grad_()  # the sigmoid keeps points within the square
    optimizer = torch.optim.Adam([logit], lr=0.05)
    for _ in range(n_steps):
        optimizer.zero_grad()
        expected_improvement(la, logit.sigmoid(), best).log().sum().neg().backward()
        optimizer.step()
    found = logit.detach().sigmoid()
    return found[expected_improvement(la, found, best).argmax()].unsqueeze(0)


def optimise(seed: int, n_measurements: int, *, small: bool) -> tuple[Tensor, Tensor]:
    """Points and values of one run."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(N_START, 2, generator=generator)
    while len(x) < n_measurements:
        la = fit(x, branin(x), n_steps=20 if small else 200)
        x = torch.cat([x, next_point(la, x, generator, n_steps=5 if small else 30)])
    return x, branin(x)


def main(small: bool = False, output: Path = Path("outputs/bayesian_optimisation.png")) -> dict[str, Tensor]:
    """Runs everything and returns the regret after every measurement, `[seeds, measurements]`.

    Args:
        small: Two seeds with ten measurements each, to try the script out.
        output: Where the plot goes.
    """
    n_seeds, n_measurements = (2, 10) if small else (6, 30)
    runs = [optimise(seed, n_measurements, small=small) for seed in range(n_seeds)]
    values = {"expected improvement": torch.stack([y for _, y in runs])}
    generator = torch.Generator().manual_seed(711)
    points = [torch.cat([x[:N_START], torch.rand(n_measurements - N_START, 2, generator=generator)]) for x, _ in runs]
    values["random"] = torch.stack([branin(x) for x in points])  # from the same first points on
    regrets = {name: y.cummin(1).values - MINIMUM for name, y in values.items()}
    print(
        f"{'regret after':<20}" + "".join(f"{n:>10}" for n in range(10, n_measurements + 1, 5)) + "     (median; worst)"
    )
    for name, regret in regrets.items():
        row = "".join(f"{regret[:, n - 1].median().item():>10.4f}" for n in range(10, n_measurements + 1, 5))
        print(f"{name:<20}{row}     ({regret[:, -1].max().item():.4f})")
    wins = int((regrets["expected improvement"][:, -1] < regrets["random"][:, -1]).sum())
    print(f"\nexpected improvement ends lower than random points for {wins} of {n_seeds} seeds")
    figure, axes = new_figure(n_columns=2, width=4.4, height=3.6)
    for (name, regret), colour in zip(regrets.items(), ("C0", "C1"), strict=True):
        axes[0].plot(range(1, n_measurements + 1), regret.T, color=colour, linewidth=0.5, alpha=0.6)
        axes[0].plot(range(1, n_measurements + 1), regret.median(0).values, color=colour, linewidth=2, label=name)
    axes[0].set(yscale="log", xlabel="measurements", ylabel="regret", title="Smallest value found (thick: median)")
    axes[0].legend(frameon=False, fontsize=8)
    line = torch.linspace(0, 1, 80)
    grid = torch.cartesian_prod(line, line)
    axes[1].contourf(line, line, branin(grid).log().view(80, 80).T, levels=20, cmap="viridis")
    axes[1].scatter(*runs[0][0].T, c=range(n_measurements), cmap="autumn", s=14, edgecolor="k", linewidth=0.3)
    axes[1].set(title="Where seed 0 measured (yellow: last)", xticks=[], yticks=[])
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return regrets


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two seeds, ten measurements")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/bayesian_optimisation.png"), help="where the plot goes"
    )
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
