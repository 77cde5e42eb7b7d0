"""How high is a function on average where nothing was measured? A question to all inputs at once.

A network is fitted to noisy measurements on two stretches of the axis, its prior precisions and its noise chosen by
the evidence on the way (online Laplace). Then two questions are asked. The value at a single x takes the marginal
variances. The mean over the gap takes the covariances between inputs, `joint=True`: errors at neighbouring inputs go
together and do not average out, so that standard deviations that are put together as if they were independent are far
too small. How often the truth lies within two standard deviations is counted over several data sets.

    python examples/regression.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from laplace import ParametricLaplace, marglik_training
from laplace.extensions.plotting import new_figure, regression_band

NOISE = 0.2
GAP = torch.linspace(2.5, 4.0, 31).unsqueeze(1)


class Answer(NamedTuple):
    """The mean of the function over the gap.

    Attributes:
        mean: Predicted.
        joint: Its standard deviation, by the covariances between inputs.
        independent: The same, if errors at different inputs were independent.
        truth: The mean of the true function.
    """

    mean: float
    joint: float
    independent: float
    truth: float

    def hits(self) -> tuple[bool, bool]:
        """Whether the truth lies within two standard deviations, joint and independent."""
        error = abs(self.mean - self.truth)
        return error < 2 * self.joint, error < 2 * self.independent


def make_data(seed: int, n_data: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and targets `[N, 1]` of a random sine through noise, and its phase; none between 2.5 and 4."""
    generator = torch.Generator().manual_seed(seed)
    phase = 6.3 * torch.rand((), generator=generator)
    x = 5 * torch.rand(n_data, 1, generator=generator)
    x = torch.where(x > 2.5, x + 1.5, x)
    return x, (x + phase).sin() + NOISE * torch.randn(n_data, 1, generator=generator), phase


def fit(x: Tensor, y: Tensor, n_epochs: int) -> ParametricLaplace:
    """A small network, trained with hyper-parameters that follow the evidence."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
    la, *_ = marglik_training(
        model, [(x, y)], likelihood="regression", hessian_structure="full", n_epochs=n_epochs,
        n_epochs_burnin=n_epochs // 10, marglik_frequency=5, prior_structure="layerwise", optimizer_kwargs={"lr": 1e-2},
    )  # fmt: skip
    return la


def ask(la: ParametricLaplace, phase: Tensor) -> Answer:
    """The mean over the gap: a linear functional aᵀ f of the joint Gaussian over f, with variance aᵀ Σ a."""
    mean, covariance = la(GAP, joint=True)  # [31], [31, 31]
    a = torch.full_like(mean, 1 / len(GAP))
    joint, independent = a @ covariance @ a, a.square() @ covariance.diagonal()
    return Answer((a @ mean).item(), joint.sqrt().item(), independent.sqrt().item(), (GAP + phase).sin().mean().item())


def draw(la: ParametricLaplace, x: Tensor, y: Tensor, phase: Tensor, answers: list[Answer], output: Path) -> None:
    """Saves the plot: predictions, functions drawn jointly, and the answers."""
    figure, axes = new_figure(n_columns=3, width=4.2, height=3.2)
    line = torch.linspace(-1, 7.5, 120).unsqueeze(1)
    mean, variance = la(line, diagonal_output=True)
    regression_band(axes[0], line, mean, variance, la.sigma_noise.item() ** 2, (x, y)).set_title("Marginals")
    samples = la.functional_samples(line, n_samples=12, joint=True, generator=torch.Generator().manual_seed(0))
    axes[1].plot(line, samples.squeeze(2).T, color="C0", linewidth=0.8, alpha=0.7)
    axes[1].plot(line, (line + phase).sin(), "--", color="0.2", label="truth")
    axes[1].axvspan(GAP.min().item(), GAP.max().item(), color="0.9", zorder=0, label="gap")
    axes[1].set(title="Functions drawn jointly", xlabel="x", ylim=axes[0].get_ylim())
    axes[1].legend(frameon=False, fontsize=8)
    for name, colour, shift in (("joint", "C0", -0.12), ("independent", "C3", 0.12)):
        places = [number + shift for number in range(len(answers))]
        spread = [2 * getattr(answer, name) for answer in answers]
        axes[2].errorbar(places, [a.mean - a.truth for a in answers], spread, fmt=".", color=colour, label=name)
    axes[2].axhline(0, color="0.6", linewidth=1)
    axes[2].set(title="Mean over the gap, ±2σ", xlabel="data set", ylabel="prediction − truth")
    axes[2].legend(frameon=False, fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main(small: bool = False, output: Path = Path("outputs/regression.png")) -> list[Answer]:
    """Runs everything and returns the answer of every data set.

    Args:
        small: Two data sets, trained for a few epochs only, to try the script out.
        output: Where the plot goes.
    """
    answers: list[Answer] = []
    drawn = ()
    names = {"noise": 8, "log evidence": 14, "mean over gap": 15, "truth": 9, "joint σ": 9, "indep. σ": 10}
    print(f"{'data set':<10}" + "".join(f"{name:>{width}}" for name, width in names.items()))
    for seed in range(2 if small else 10):
        x, y, phase = make_data(seed)
        la = fit(x, y, n_epochs=20 if small else 400)
        answer = ask(la, phase)
        answers.append(answer)
        drawn = drawn or (la, x, y, phase)
        evidence = la.log_marginal_likelihood().item()
        print(f"{seed:<10}{la.sigma_noise.item():>8.3f}{evidence:>14.1f}{answer.mean:>15.3f}"
              f"{answer.truth:>9.3f}{answer.joint:>9.3f}{answer.independent:>10.3f}")  # fmt: skip
    hits = [sum(column) for column in zip(*(answer.hits() for answer in answers), strict=True)]
    print(f"\ntruth within ±2σ: joint {hits[0]} of {len(answers)}, independent {hits[1]} of {len(answers)}")
    draw(*drawn, answers, output)
    print(f"\nplot: {output}")
    return answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two data sets, a few epochs")
    parser.add_argument("--output", type=Path, default=Path("outputs/regression.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
