"""Bayesian optimisation by BoTorch, with a network's Laplace approximation in place of a Gaussian process.

Branin's function (two inputs, minimum 0.398) and Hartmann's (six, −3.322) are minimised with few exact evaluations: a
model of those so far, the largest expected improvement, the next evaluation. `LaplaceModel` makes a model of a network
that is trained anew at each step: its linearisation is refined to its mode and has the posterior of all weights, as a
Gaussian process on all of the few data (`"gp"`). Beside it is BoTorch's `SingleTaskGP`, from the same points on.

    python examples/botorch_regret.py            # two seeds each
    python examples/botorch_regret.py --full     # the table of docs/botorch.md: ten seeds each

Every finished run is a file in `--results`, and is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin, Hartmann, SyntheticTestFunction
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from laplace import Laplace
from laplace.extensions.plotting import new_figure
from laplace.integrations.botorch import LaplaceModel

NOISE, WIDTH, N_STEPS = 0.02, 50, 200
ACTIVATION_AND_PRIOR: dict[int, tuple[type[nn.Module], float]] = {2: (nn.Tanh, 1.0), 6: (nn.SiLU, 10.0)}
"""By the number of inputs."""

PROBLEMS: dict[str, tuple[SyntheticTestFunction, int, int]] = {
    "Branin": (Branin(negate=True), 5, 40),
    "Hartmann-6": (Hartmann(6, negate=True), 12, 60),
}
"""The function, the random points at first, and all evaluations."""


def network(n_inputs: int) -> nn.Sequential:
    """A perceptron whose first features vary within the unit cube, around its middle."""
    first = nn.Linear(n_inputs, WIDTH)
    nn.init.normal_(first.weight, std=2 / math.sqrt(n_inputs))
    with torch.no_grad():
        first.bias.uniform_(-1.0, 1.0).sub_(0.5 * first.weight.sum(1))
    activation, _ = ACTIVATION_AND_PRIOR[n_inputs]
    return nn.Sequential(first, activation(), nn.Linear(WIDTH, WIDTH), activation(), nn.Linear(WIDTH, 1)).double()


def laplace_model(x: Tensor, y: Tensor, bounds: Tensor) -> LaplaceModel:
    """The posterior of a network of standardised outcomes."""
    into, out = Normalize(x.shape[1], bounds=bounds), Standardize(1)
    inputs, targets = into(x), out(y)[0]
    model = network(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, N_STEPS)
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    _, prior = ACTIVATION_AND_PRIOR[x.shape[1]]
    la = Laplace(model, "regression", "all", "gp", n_subset=len(x), sigma_noise=NOISE, prior_precision=prior)
    la.fit([(inputs, targets)])
    la.refine([(inputs, targets)])
    return LaplaceModel(la, input_transform=into, outcome_transform=out)


def single_task_gp(x: Tensor, y: Tensor, bounds: Tensor) -> SingleTaskGP:
    """BoTorch's Gaussian process, as it comes."""
    model = SingleTaskGP(x, y, input_transform=Normalize(x.shape[1], bounds=bounds))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


MODELS: dict[str, Callable[[Tensor, Tensor, Tensor], Model]] = {
    "LaplaceModel": laplace_model,
    "SingleTaskGP": single_task_gp,
}


def regret(problem: str, model: str, seed: int, n_evaluations: int, n_iterations: int = 30) -> list[float]:
    """The smallest value so far less the minimum, after every evaluation."""
    function, n_start, _ = PROBLEMS[problem]
    function.double()
    bounds = function.bounds.double()
    torch.manual_seed(seed)
    unit = SobolEngine(function.dim, scramble=True, seed=seed).draw(n_start, dtype=torch.float64)
    x = bounds[0] + (bounds[1] - bounds[0]) * unit
    while len(x) < n_evaluations:
        y = function(x).unsqueeze(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of BoTorch: jitter, and searches that end at their last iteration
            improvement = LogExpectedImprovement(MODELS[model](x, y, bounds), best_f=y.max())
            options = {"maxiter": n_iterations}
            found, _ = optimize_acqf(improvement, bounds, 1, num_restarts=4, raw_samples=128, options=options)
        x = torch.cat([x, found])
    return (function.optimal_value - function(x)).cummin(0).values.tolist()


def finished(results: Path, problem: str, model: str, seed: int, n_evaluations: int, n_iterations: int) -> list[float]:
    """Regrets of a run, from its file where there is one."""
    path = results / f"{problem}_{model}_{seed}_{n_evaluations}.json"
    if not path.exists():
        values = regret(problem, model, seed, n_evaluations, n_iterations)
        results.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), "utf-8")
    return json.loads(path.read_text("utf-8"))


def main(
    seeds: Sequence[int],
    output: Path,
    results: Path,
    *,
    small: bool = False,
    problems: tuple[str, ...] = tuple(PROBLEMS),
    models: tuple[str, ...] = tuple(MODELS),
) -> None:
    """Runs everything that is not there yet, and prints and plots medians over the seeds.

    Args:
        seeds: Of the runs of each model on each problem.
        output: Where the plot goes.
        results: Where runs are kept.
        small: Two evaluations after the first points, to try the script out.
        problems: Which functions.
        models: Which models.
    """
    figure, axes = new_figure(n_columns=len(problems), width=4, height=3.2)
    for axis, problem in zip(axes, problems, strict=True):
        _, n_start, n_all = PROBLEMS[problem]
        count = n_start + 2 if small else n_all
        for model in models:
            runs = [finished(results, problem, model, seed, count, 3 if small else 30) for seed in seeds]
            regrets = torch.tensor(runs).clamp(min=1e-6)
            ends = regrets[:, -1]
            print(
                f"{problem:<12}{model:<14} regret after {count} evaluations: median {ends.median().item():.4f}, "
                f"from {ends.min().item():.4f} to {ends.max().item():.4f} ({len(seeds)} seeds)"
            )
            axis.plot(range(1, count + 1), regrets.median(0).values, label=model)
        axis.set(title=problem, yscale="log", xlabel="evaluations", ylabel="regret (median)")
        axis.legend(frameon=False, fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one seed, two evaluations after the first points")
    parser.add_argument("--full", action="store_true", help="ten seeds: about half an hour of one core")
    parser.add_argument("--output", type=Path, default=Path("outputs/botorch_regret.png"), help="where the plot goes")
    parser.add_argument("--results", type=Path, default=Path("outputs/botorch_regret"), help="where runs are kept")
    parser.add_argument("--seeds", nargs="+", type=int, help="these runs alone")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    main(
        arguments.seeds or range(1 if arguments.small else 10 if arguments.full else 2),
        arguments.output,
        arguments.results,
        small=arguments.small,
        problems=tuple(arguments.problems),
        models=tuple(arguments.models),
    )
