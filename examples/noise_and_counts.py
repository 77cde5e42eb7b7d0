"""Targets whose spread depends on the input: noise that grows along the axis, and counts.

The same small network is trained twice on noisy measurements and on counts, its hyper-parameters chosen by the
evidence on the way (online Laplace): with one noise for all inputs (`regression`), and with a likelihood that says how
the spread follows from the outputs, natural parameters [η | s] (`heteroscedastic`, Immer et al., 2023) or logarithms of
rates (`poisson`). `la(x)` is then (E[y], Var(y)), the noise included, and `la.predict(x)` has intervals of y itself.
What one noise costs is seen where there is less or more than on average: in the density of new data, and in how many of
them the 90 % intervals hold on either half of the axis.

    python examples/noise_and_counts.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laplace import ParametricLaplace, marglik_training
from laplace.extensions.plotting import new_figure

LEVEL = 0.9


class Data(NamedTuple):
    """A problem on [0, 4].

    Attributes:
        name: What is measured.
        likelihood: Name of the likelihood that knows the spread.
        n_outputs: Outputs of the network that it needs.
        draw: Targets `[N, 1]` at inputs `[N, 1]`, from a source of randomness.
    """

    name: str
    likelihood: str
    n_outputs: int
    draw: Callable[[Tensor, torch.Generator], Tensor]


class Scores(NamedTuple):
    """How a posterior predicts new data.

    Attributes:
        nll: Mean negative log predictive density, in nats.
        low: Share of the data below x = 2 in their intervals.
        high: Share of the others.
    """

    nll: float
    low: float
    high: float


def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    """A sine with a noise from 0.05 to 0.85."""
    return (2 * x).sin() + (0.05 + 0.2 * x) * torch.randn(x.shape, generator=generator)


def counted(x: Tensor, generator: torch.Generator) -> Tensor:
    """Counts with a rate from 0.4 to 22."""
    return torch.poisson((x - 1).exp() * (1 + 0.3 * (4 * x).sin()), generator=generator)


PROBLEMS = [Data("noise", "heteroscedastic", 2, noisy), Data("counts", "poisson", 1, counted)]


def fit(x: Tensor, y: Tensor, likelihood: str, n_outputs: int, n_epochs: int) -> ParametricLaplace:
    """A small network, trained with hyper-parameters that follow the evidence."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, n_outputs))
    la, *_ = marglik_training(
        model, [(x, y)], likelihood=likelihood, hessian_structure="full", n_epochs=n_epochs,
        n_epochs_burnin=n_epochs // 10, marglik_frequency=5, prior_structure="layerwise", optimizer_kwargs={"lr": 1e-2},
    )  # fmt: skip
    return la


def log_density(la: ParametricLaplace, x: Tensor, y: Tensor) -> Tensor:
    """Log p(y | x, D) of every datum, in nats: of distributions of PyTorch."""
    generator = torch.Generator().manual_seed(0)
    return la.predict(x, n_samples=400, generator=generator).distribution().log_prob(y)


def score(la: ParametricLaplace, x: Tensor, y: Tensor) -> Scores:
    """Scores on new data."""
    prediction = la.predict(x, n_samples=400, generator=torch.Generator().manual_seed(0))
    lower, upper = prediction.interval(LEVEL)
    inside = ((y >= lower) & (y <= upper)).float()
    nll = -log_density(la, x, y).mean()
    return Scores(nll.item(), inside[x < 2].mean().item(), inside[x >= 2].mean().item())


def draw(axes: list[Any], posteriors: list[ParametricLaplace], x: Tensor, y: Tensor, title: str) -> None:
    """Intervals of both posteriors, one below the other."""
    line = torch.linspace(0, 4, 150).unsqueeze(1)
    for axis, la in zip(axes, posteriors, strict=True):
        prediction = la.predict(line, n_samples=2000, generator=torch.Generator().manual_seed(0))
        lower, upper = prediction.interval(LEVEL)
        axis.plot(x, y, ".", color="0.6", markersize=3)
        axis.plot(line, prediction.mean, color="C0")
        axis.fill_between(line[:, 0], lower[:, 0], upper[:, 0], color="C0", alpha=0.25, linewidth=0)
        axis.set_title(f"{title}: {la.likelihood_object.name}")


def main(small: bool = False, output: Path = Path("outputs/noise_and_counts.png")) -> dict[tuple[str, str], Scores]:
    """Runs everything and returns the scores by problem and likelihood.

    Args:
        small: A few epochs only, to try the script out.
        output: Where the plot goes.
    """
    figure, axes = new_figure(n_columns=4, width=3.4, height=3.0)
    found: dict[tuple[str, str], Scores] = {}
    print(f"{'data':<8}{'likelihood':<17}{'NLL':>8}{'in 90 % below 2':>17}{'above 2':>9}")
    for place, problem in enumerate(PROBLEMS):
        generator = torch.Generator().manual_seed(1)
        x, new = (4 * torch.rand(n, 1, generator=generator) for n in (200, 2000))
        y, targets = problem.draw(x, generator), problem.draw(new, generator)
        posteriors = [
            fit(x, y, likelihood, n_outputs, n_epochs=20 if small else 500)
            for likelihood, n_outputs in (("regression", 1), (problem.likelihood, problem.n_outputs))
        ]
        for la in posteriors:
            name = la.likelihood_object.name
            scores = found[problem.name, name] = score(la, new, targets)
            print(f"{problem.name:<8}{name:<17}{scores.nll:>8.3f}{scores.low:>17.2f}{scores.high:>9.2f}")
        draw(list(axes[2 * place : 2 * place + 2]), posteriors, x, y, problem.name)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few epochs")
    parser.add_argument("--output", type=Path, default=Path("outputs/noise_and_counts.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
