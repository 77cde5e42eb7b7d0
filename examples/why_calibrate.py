"""Why a Laplace approximation can be far too uncertain, in a case so small that the true posterior can be sampled.

A logistic regression tells two digits apart: 65 weights and 40 images, which a plane separates. Any weights on the
right side of every image, however large, explain the labels, so that the posterior is one-sided. Hamiltonian Monte
Carlo (HMC), in double precision, samples it. The Laplace approximation is a Gaussian at the mode. The mode lies at the
edge of the posterior, and much of the Gaussian is where labels are wrong. For every prior precision δ there are a
network (the mode), its Laplace approximation, that refined to the best Gaussian (`la.refine(..., "variational")`), and
HMC.

    python examples/why_calibrate.py [--seed N] [--digits 4 9]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from scipy.optimize import minimize
from sklearn.datasets import load_digits
from torch import Tensor, nn

from laplace import Laplace
from laplace.extensions.plotting import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DELTAS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SHOWN = 0.01  # the prior precision of the margins in the plot
N_TRAIN = 40


class Data(NamedTuple):
    """Images `[N, 65]` in [0, 1], the last column of which is 1, and labels `[N]` in {0, 1}, in double precision."""

    x: Tensor
    y: Tensor

    @property
    def signs(self) -> Tensor:
        """Labels as −1 and 1 `[N]`."""
        return 2 * self.y - 1

    def margins(self, weights: Tensor) -> Tensor:
        """Logits times signs, positive where the label is right: weights `[..., D]` → `[..., N]`."""
        return weights @ self.x.T * self.signs


class Draws(NamedTuple):
    """Draws `[K, S, D]` of K chains, their mean acceptance rate, worst split R-hat and least effective sample size."""

    weights: Tensor
    acceptance: float
    r_hat: float
    ess: float


def load_data(digits: tuple[int, int], seed: int) -> tuple[Data, Data]:
    """Training and test data: two of scikit-learn's digits."""
    images, target = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    rows = ((target == digits[0]) | (target == digits[1])).nonzero().squeeze(1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    x = torch.cat([images[rows] / 16, torch.ones(len(rows), 1, dtype=torch.float64)], 1)
    y = (target[rows] == digits[1]).double()
    return Data(x[:N_TRAIN], y[:N_TRAIN]), Data(x[N_TRAIN:], y[N_TRAIN:])


def potential(data: Data, delta: float, weights: Tensor) -> Tensor:
    """−log p(y, θ) up to a constant: weights `[..., D]` → `[...]`."""
    return nn.functional.softplus(-data.margins(weights)).sum(-1) + delta / 2 * weights.square().sum(-1)


def gradient(data: Data, delta: float, weights: Tensor) -> Tensor:
    """Of the potential: weights `[..., D]` → `[..., D]`."""
    return -(torch.sigmoid(-data.margins(weights)) * data.signs) @ data.x + delta * weights


def curvature(data: Data, delta: float, weights: Tensor) -> Tensor:
    """Hessian of the potential at weights `[D]`, `[D, D]`."""
    p = torch.sigmoid(data.margins(weights))
    prior = delta * torch.eye(len(weights), dtype=torch.float64)
    return data.x.T @ ((p * (1 - p)).unsqueeze(1) * data.x) + prior


def mode(data: Data, delta: float) -> tuple[Tensor, Tensor]:
    """The weights `[D]` of the least potential, by SciPy's Newton steps in a trust region, and the Hessian there."""
    potential_, gradient_, curvature_ = (
        lambda weights, of=of: of(data, delta, torch.as_tensor(weights)).numpy()
        for of in (potential, gradient, curvature)
    )
    start = data.x.new_zeros(data.x.shape[1]).numpy()
    options = {"gtol": 1e-8, "maxiter": 100}
    found = minimize(potential_, start, jac=gradient_, hess=curvature_, method="trust-exact", options=options)
    weights = torch.as_tensor(found.x)
    return weights, curvature(data, delta, weights)


def hmc(data: Data, delta: float, n_chains: int, n_warmup: int, n_draws: int) -> Draws:
    """Hamiltonian Monte Carlo (Neal, 2011), all chains at once.

    Positions z are whitened by the Hessian at the mode, θ = θ* + L⁻ᵀ z with H = L Lᵀ. A trajectory has length 1.5 or
    somewhat less. The warm-up, which starts from the Gaussian at the mode, moves the step size until 0.8 are accepted.
    """
    start, hessian = mode(data, delta)
    spread = torch.linalg.inv(torch.linalg.cholesky(hessian))  # row vectors: θ = θ* + z L⁻¹

    def energy(z: Tensor) -> Tensor:
        return potential(data, delta, start + z @ spread)

    def slope(z: Tensor) -> Tensor:
        return gradient(data, delta, start + z @ spread) @ spread.T

    generator = torch.Generator().manual_seed(0)
    z = torch.randn(n_chains, len(start), generator=generator, dtype=torch.float64)
    size, here, kept, accepted = 0.1, energy(z), [], []
    for i in range(n_warmup + n_draws):
        momentum = torch.randn(z.shape, generator=generator, dtype=torch.float64)
        step = size * (0.7 + 0.3 * torch.rand(n_chains, 1, generator=generator, dtype=torch.float64))
        to, p = z, momentum - step / 2 * slope(z)
        n_steps = max(1, round(1.5 / size))
        for j in range(n_steps):
            to = to + step * p
            p = p - (step if j + 1 < n_steps else step / 2) * slope(to)
        there = energy(to)
        change = here - there + (momentum.square().sum(1) - p.square().sum(1)) / 2
        chance = change.clamp(max=0).exp()
        taken = torch.rand(n_chains, generator=generator, dtype=torch.float64) < chance
        z, here = torch.where(taken.unsqueeze(1), to, z), torch.where(taken, there, here)
        if i < n_warmup:
            size *= math.exp(0.05 * (float(chance.mean()) - 0.8))
        else:
            kept.append(start + z @ spread)
            accepted.append(float(chance.mean()))
    weights = torch.stack(kept, 1)
    return Draws(weights, sum(accepted) / len(accepted), split_r_hat(weights), effective_size(weights))


def split_r_hat(draws: Tensor) -> float:
    """The largest over weights of the potential scale reduction of half chains (Gelman et al., 2013, section 11.4)."""
    n = draws.shape[1] // 2
    halves = torch.cat([draws[:, :n], draws[:, n : 2 * n]])
    within, between = halves.var(1).mean(0), halves.mean(1).var(0)
    return float(((n - 1) / n + between / within).sqrt().max())


def effective_size(draws: Tensor) -> float:
    """The least over weights of the effective sample size, by Geyer's initial positive sequence (1992)."""
    n_chains, n, _ = draws.shape
    centred = draws - draws.mean((0, 1))
    power = torch.fft.rfft(centred, 2 * n, dim=1).abs().square()
    correlation = torch.fft.irfft(power, dim=1)[:, :n].mean(0) / n
    correlation = correlation / correlation[0]
    pairs = correlation[1 : n - n % 2 - 1].unflatten(0, (-1, 2)).sum(1)
    positive = (pairs > 0).cumprod(0)
    return float((n_chains * n / (1 + 2 * (pairs * positive).sum(0))).min())


def network(weights: Tensor) -> nn.Module:
    """A logistic regression with these weights `[D]`."""
    model = nn.Linear(len(weights), 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(weights.unsqueeze(0))
    return model


def nll(p: Tensor, y: Tensor) -> float:
    """Mean negative log likelihood of probabilities `[N]`."""
    return float(nn.functional.binary_cross_entropy(p, y))


class Row(NamedTuple):
    """What one prior precision gives: scores on test data, and how one-sided the posterior is."""

    delta: float
    network: float
    laplace: float
    refined: float
    hmc: float
    laplace_wrong: float
    hmc_wrong: float
    log_evidence: float
    evidence_slope: float


def measure(train: Data, test: Data, delta: float, draws: Draws) -> Row:
    """Scores of the mode, of both Gaussians and of HMC."""
    best, _ = mode(train, delta)
    la = Laplace(network(best), "bernoulli", "all", "full", prior_precision=delta)
    loader = [(train.x, train.y.unsqueeze(1))]
    la.fit(loader)
    laplace, log_evidence = nll(la(test.x).squeeze(1), test.y), float(la.log_marginal_likelihood())
    f = la.predict(train.x)
    wrong = torch.special.ndtr(-f.latent_mean.flatten() * train.signs / f.latent_variance.flatten().sqrt())
    la.refine(loader, "variational")
    weights = draws.weights.flatten(0, 1)
    return Row(
        delta,
        nll(torch.sigmoid(test.x @ best), test.y),
        laplace,
        nll(la(test.x).squeeze(1), test.y),
        nll(torch.sigmoid(weights @ test.x.T).mean(0), test.y),
        float(wrong.mean()),
        float((train.margins(weights) < 0).double().mean()),
        log_evidence,
        # d log p(y) / d log δ = (D − δ E‖θ‖²) / 2 of the exact posterior
        float(len(best) - delta * weights.square().sum(1).mean()) / 2,
    )


def density(ax: Axes, mean: Tensor, variance: Tensor, grid: Tensor, name: str, colour: str) -> None:
    """Draws a Gaussian of one variable."""
    values = (-(grid - mean).square() / (2 * variance)).exp() / (2 * math.pi * variance).sqrt()
    ax.plot(grid.tolist(), values.tolist(), color=colour, label=name)


def draw_one_weight(ax: Axes, n_data: int = 10, delta: float = SHOWN) -> None:
    """The posterior of one weight, with x = 1 and y = 1 for every datum, on a grid, and the Gaussian at its mode."""
    data = Data(torch.ones(n_data, 1, dtype=torch.float64), torch.ones(n_data, dtype=torch.float64))
    grid = torch.linspace(-15, 40, 1101, dtype=torch.float64)
    exact = (-potential(data, delta, grid.unsqueeze(1))).exp()
    exact = exact / (exact.sum() * (grid[1] - grid[0]))
    ax.fill_between(grid.tolist(), exact.tolist(), color="0.8", label="true posterior")
    best, hessian = mode(data, delta)
    density(ax, best[0], 1 / hessian[0, 0], grid, "Laplace", COLOURS[1])
    ax.axvline(float(best), color=COLOURS[0], linewidth=1, label="network")
    ax.set(title=f"one weight, {n_data} data of one class", xlabel="weight", ylabel="density", ylim=(0, None))


def draw_margin(ax: Axes, train: Data, test: Data, draws: Draws, delta: float) -> None:
    """Margins of the test image in the middle: HMC, and both Gaussians."""
    margins = test.margins(draws.weights.flatten(0, 1))
    image = int(margins.mean(0).argsort()[len(test.y) // 2])
    one = margins[:, image]
    ax.hist(one.tolist(), bins=60, density=True, color="0.8", label="HMC")
    best, _ = mode(train, delta)
    la = Laplace(network(best), "bernoulli", "all", "full", prior_precision=delta)
    la.fit([(train.x, train.y.unsqueeze(1))])
    grid = torch.linspace(float(one.min()) - 30, float(one.max()), 400, dtype=torch.float64)
    for name, colour in (("Laplace", COLOURS[1]), ("variational", COLOURS[2])):
        if name == "variational":
            la.refine([(train.x, train.y.unsqueeze(1))], "variational")
        f = la.predict(test.x[image : image + 1])
        density(ax, f.latent_mean.squeeze() * test.signs[image], f.latent_variance.squeeze(), grid, name, colour)
    ax.axvline(float(test.margins(best)[image]), color=COLOURS[0], linewidth=1, label="network")
    ax.set(title=f"a test image, δ = {delta:g}", xlabel="margin (positive: right class)", ylabel="density")


def main(seed: int, digits: tuple[int, int], small: bool, output: Path) -> list[Row]:
    """Prints a row for every prior precision, draws, and returns the rows.

    Args:
        seed: Which images are for training.
        digits: The two classes.
        small: Few prior precisions and draws, to try the script out.
        output: Where the plot goes.
    """
    train, test = load_data(digits, seed)
    rows, draws = [], {}
    print(f"{len(train.y)} images for training, {len(test.y)} for the test, {train.x.shape[1]} weights\n")
    print(f"{'':>7}|{'NLL of test images':^40}|{'wrong training labels':^24}|{'log evidence':^20}|{'HMC':^24}")
    print(
        f"{'δ':>7}|{'network':>10}{'Laplace':>10}{'variat.':>10}{'HMC':>10}|{'Laplace':>12}{'HMC':>12}|"
        f"{'Laplace':>8}{'HMC, slope':>12}|{'accepted':>9}{'R-hat':>7}{'ESS':>8}"
    )
    for delta in (SHOWN, 1.0) if small else DELTAS:
        draws[delta] = drawn = hmc(train, delta, *((8, 40, 40) if small else (16, 300, 1000)))
        row = measure(train, test, delta, drawn)
        rows.append(row)
        print(
            f"{delta:>7g}|{row.network:>10.3f}{row.laplace:>10.3f}{row.refined:>10.3f}{row.hmc:>10.3f}|"
            f"{row.laplace_wrong:>12.3f}{row.hmc_wrong:>12.3f}|{row.log_evidence:>8.2f}{row.evidence_slope:>12.2f}|"
            f"{drawn.acceptance:>9.2f}{drawn.r_hat:>7.3f}{drawn.ess:>8.0f}"
        )
    best, hessian = mode(train, SHOWN)
    deviations = (test.x @ torch.linalg.inv(hessian) * test.x).sum(1).sqrt()
    logits = draws[SHOWN].weights.flatten(0, 1) @ test.x.T
    print(
        f"\nlogits of test images at δ = {SHOWN:g}: network ± {float((test.x @ best).abs().mean()):.1f}, "
        f"mean of HMC ± {float(logits.mean(0).abs().mean()):.1f}; "
        f"standard deviation of Laplace {float(deviations.mean()):.1f}, of HMC {float(logits.std(0).mean()):.1f}"
    )
    figure, axes = new_figure(n_columns=3, width=4.0, height=3.4)
    draw_one_weight(axes[0])
    draw_margin(axes[1], train, test, draws[SHOWN], SHOWN)
    names = {"network": COLOURS[0], "laplace": COLOURS[1], "refined": COLOURS[2], "hmc": "0.5"}
    for (name, colour), label in zip(names.items(), ("network", "Laplace", "variational", "HMC"), strict=True):
        axes[2].plot(
            [row.delta for row in rows], [getattr(row, name) for row in rows], "o-", ms=4, color=colour, label=label
        )
    chosen = max(rows, key=lambda row: row.log_evidence).delta
    axes[2].axvline(chosen, color="0.3", linestyle=":", linewidth=1, label="chosen by the evidence")
    axes[2].set(
        title="test images", xscale="log", xlabel="prior precision δ", ylabel="NLL (lower is better)", ylim=(0, 0.7)
    )
    for ax, place in zip(axes, ("upper right", "upper left", "upper right"), strict=True):
        ax.legend(fontsize=8, loc=place)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few prior precisions and draws")
    parser.add_argument("--seed", type=int, default=0, help="which images are for training")
    parser.add_argument("--digits", type=int, nargs=2, default=(3, 8), help="the two classes")
    parser.add_argument("--output", type=Path, default=Path("outputs/why_calibrate.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.seed, tuple(arguments.digits), arguments.small, arguments.output)
