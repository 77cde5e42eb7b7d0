"""Where to measure next? Acquisition functions that are climbed by their gradient with respect to the input.

Both are written with nothing but `la.functional_samples`, of a posterior with `enable_backprop=True`. Sampled weights
(`pred_type="nn"`) are whole functions, and a generator with the same seed gives the same functions at every x; of a
last layer, in which the network is linear, they are functions of the linearised network too.

- Expected improvement, E[max(f(x) − best, 0)]: an average over many functions. It is compared with the closed form.
- Thompson sampling: each of eight functions is climbed on its own.

Gradients are checked against finite differences (to about one of the samples, where the maximum has its kinks), maxima
against a fine grid.

    python examples/acquisition.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.extensions.plotting import new_figure, regression_band

NOISE, N_FUNCTIONS = 0.1, 8
Acquisition = Callable[[Tensor], Tensor]
"""Inputs `[B, 1]` to the values of S functions there, `[B, S]`."""


def points(low: float, high: float, n: int) -> Tensor:
    """Points `[n, 1]` at equal distances, in double precision as all of the script."""
    return torch.linspace(low, high, n, dtype=torch.float64).unsqueeze(1)


def fit(n_steps: int) -> tuple[ParametricLaplace, Tensor, Tensor]:
    """A network trained on a few noisy measurements of a function on [0, 1], and its posterior."""
    torch.manual_seed(0)
    x = torch.tensor([0.03, 0.1, 0.22, 0.28, 0.5, 0.56, 0.83, 0.9, 0.97], dtype=torch.float64).unsqueeze(1)
    y = (9 * x).sin() * x + NOISE * torch.randn(x.shape, dtype=x.dtype)
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    nn.init.normal_(model[0].weight, std=6.0)  # features that vary within [0, 1]
    nn.init.uniform_(model[0].bias, -6.0, 6.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(n_steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    la = Laplace(model, "regression", "last_layer", "full", sigma_noise=NOISE, enable_backprop=True)
    la.fit([(x, y)])
    la.optimize_prior_precision()
    return la, x, y


def expected_improvement(la: ParametricLaplace, best: Tensor, n_samples: int) -> Acquisition:
    """E[max(f(x) − best, 0)] by samples, `[B, 1]`."""

    def value(x: Tensor) -> Tensor:
        seeded = torch.Generator().manual_seed(0)
        return (la.functional_samples(x, "nn", n_samples=n_samples, generator=seeded) - best).clamp(min=0).mean(0)

    return value


def closed_form(la: ParametricLaplace, x: Tensor, best: Tensor) -> Tensor:
    """The same expectation, σ (z Φ(z) + φ(z)) with z = (μ − best)/σ (Jones et al., 1998)."""
    mean, variance = la(x, diagonal_output=True)
    z, normal = (mean - best) / variance.sqrt(), torch.distributions.Normal(0.0, 1.0)
    return variance.sqrt() * (z * normal.cdf(z) + normal.log_prob(z).exp())


def thompson(la: ParametricLaplace) -> Acquisition:
    """Functions of the posterior, `[B, S]`, the same ones at every call."""

    def value(x: Tensor) -> Tensor:
        seeded = torch.Generator().manual_seed(1)
        return la.functional_samples(x, "nn", n_samples=N_FUNCTIONS, generator=seeded).squeeze(2).T

    return value


def climb(acquisition: Acquisition, n_steps: int) -> tuple[Tensor, Tensor]:
    """The largest value of every function on [0, 1] and where it is, `[S]` each: Adam from twenty starts."""
    n_functions = acquisition(points(0, 1, 1)).shape[1]
    logit = points(-4, 4, 20).repeat_interleave(n_functions, 0).requires_grad_()
    which = torch.arange(n_functions).repeat(20).unsqueeze(1)  # the function that a start climbs
    optimizer = torch.optim.Adam([logit], lr=0.05)
    for _ in range(n_steps):
        optimizer.zero_grad()
        acquisition(logit.sigmoid()).gather(1, which).sum().neg().backward()
        optimizer.step()
    x = logit.detach().sigmoid()
    best = acquisition(x).detach().gather(1, which).view(20, n_functions).max(0)
    return best.values, x.view(20, n_functions).gather(0, best.indices.unsqueeze(0))[0]


def gradient_error(acquisition: Acquisition, step: float = 1e-6) -> float:
    """Largest difference between autograd and central differences, relative to the largest derivative."""
    x = points(0.05, 0.95, 40).requires_grad_()
    (exact,) = torch.autograd.grad(acquisition(x).sum(), x)
    numeric = (acquisition(x + step) - acquisition(x - step)).sum(1, keepdim=True) / (2 * step)
    return ((exact - numeric).abs().max() / numeric.abs().max()).item()


def main(small: bool = False, output: Path = Path("outputs/acquisition.png")) -> dict[str, Tensor]:
    """Runs everything and returns where every acquisition function is largest.

    Args:
        small: Train and climb for a few steps only, to try the script out.
        output: Where the plot goes.
    """
    la, x, y = fit(n_steps=50 if small else 2000)
    line, best = points(0, 1, 400), la(x)[0].max().detach()
    figure, axes = new_figure(n_columns=3, width=4, height=3.2)
    mean, variance = la(line, diagonal_output=True)
    regression_band(axes[0], line, mean, variance, NOISE**2, (x, y)).set_title("Posterior")
    found: dict[str, Tensor] = {}
    functions = {
        "expected improvement": expected_improvement(la, best, 100 if small else 5000),
        "Thompson sampling": thompson(la),
    }
    for axis, (name, function) in zip(axes[1:], functions.items(), strict=True):
        curves = function(line).detach()
        value, found[name] = climb(function, n_steps=5 if small else 150)
        short = (curves.amax(0) - value).max().item()
        print(f"{name}: next x " + ", ".join(f"{place:.3f}" for place in found[name].tolist()))
        print(f"  gradient against finite differences {gradient_error(function):.0e}, below the grid by {short:+.0e}")
        axis.plot(line, curves, linewidth=1)
        axis.plot(found[name], value, "*", color="0.1", ms=10, label="climbed")
        axis.set(title=name, xlabel="x")
        axis.legend(frameon=False, fontsize=8)
    exact = closed_form(la, line, best)
    error = (functions["expected improvement"](line) - exact).abs().max() / exact.max()
    print(f"samples against the closed form of expected improvement: {error.item():.1%} of its maximum")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few steps only")
    parser.add_argument("--output", type=Path, default=Path("outputs/acquisition.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
