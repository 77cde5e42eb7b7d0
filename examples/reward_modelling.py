"""Rewards from preferences, and which of them to trust.

A reward network learns from pairs of items which of the two was preferred (Bradley and Terry, 1952). Its Laplace
approximation, `likelihood="reward_modeling"`, is fitted to the same pairs, inputs `[B, 2, D]`. Of pairs it predicts
preference probabilities, of single items `[B, D]` their reward with its variance.

The best of many candidates by the predicted reward is often one whose reward is overestimated, far from all that was
compared. Choosing by a lower bound, mean − 2σ, avoids those. Both are judged by the true utility, over several seeds.

    python examples/reward_modelling.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.extensions.plotting import new_figure, reliability_diagram
from laplace.metrics import accuracy, expected_calibration_error, nll

DIMENSIONS = 4
Table = dict[str, list[float]]


def utility(items: Tensor) -> Tensor:
    """What people want, of items `[..., D]`: rising in the first feature, until there is too much of anything."""
    return 2 * items[..., 0] + items[..., 1] * items[..., 2] - 0.5 * items.square().sum(-1)


def compare(n_pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs of items `[B, 2, D]` and the index of the preferred one, drawn by Bradley and Terry's model."""
    pairs = torch.randn(n_pairs, 2, DIMENSIONS, generator=generator)
    gap = utility(pairs[:, 1]) - utility(pairs[:, 0])
    return pairs, (torch.rand(n_pairs, generator=generator) < gap.sigmoid()).long()


def train(pairs: Tensor, preferred: Tensor, n_epochs: int, seed: int) -> nn.Module:
    """A network from an item to its reward; on pairs `[B, 2, D]` it returns `[B, 2]`, on items `[B, D]` `[B, 1]`."""
    torch.manual_seed(seed)

    class RewardModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(DIMENSIONS, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1, bias=False)
            )

        def forward(self, items: Tensor) -> Tensor:
            rewards = self.net(items)
            return rewards.squeeze(-1) if items.ndim == 3 else rewards

    model = RewardModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    for _ in range(n_epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pairs), preferred).backward()
        optimizer.step()
    return model.eval()


def chosen_utilities(la: ParametricLaplace, generator: torch.Generator, n_candidates: int = 200) -> Table:
    """True utility of the candidate that is chosen by the mean reward, by its lower bound, and of the best one."""
    found: Table = {"mean": [], "mean − 2σ": [], "best": []}
    for _ in range(20):
        candidates = 3 * torch.randn(n_candidates, DIMENSIONS, generator=generator)  # most are unlike those compared
        mean, variance = (part.flatten() for part in la(candidates))
        truth = utility(candidates)
        found["mean"].append(truth[mean.argmax()].item())
        found["mean − 2σ"].append(truth[(mean - 2 * variance.sqrt()).argmax()].item())
        found["best"].append(truth.max().item())
    return found


def main(small: bool = False, output: Path = Path("outputs/reward_modelling.png")) -> dict[str, Table]:
    """Runs everything and returns scores of preferences by model, and utilities of what was chosen.

    Args:
        small: One seed, trained for a few epochs only, to try the script out.
        output: Where the plot goes.
    """
    scores: dict[str, Table] = {name: {"NLL": [], "ECE": [], "accuracy": []} for name in ("network", "Laplace")}
    utilities: Table = {"mean": [], "mean − 2σ": [], "best": []}
    probabilities: dict[str, list[Tensor]] = {name: [] for name in scores}
    labels: list[Tensor] = []
    for seed in range(1 if small else 5):
        generator = torch.Generator().manual_seed(seed)
        pairs, preferred = compare(300, generator)
        model = train(pairs, preferred, 20 if small else 400, seed)
        la = Laplace(model, "reward_modeling", "all", "kron")
        la.fit([(pairs, preferred)])
        la.optimize_prior_precision()
        test, y = compare(1000, generator)
        labels.append(y)
        with torch.no_grad():
            predicted = {"network": model(test).softmax(1), "Laplace": la(test, fitting=True)}
        for name, probs in predicted.items():
            probabilities[name].append(probs)
            for score, metric in (("NLL", nll), ("ECE", expected_calibration_error), ("accuracy", accuracy)):
                scores[name][score].append(float(metric(probs, y)))
        for name, values in chosen_utilities(la, generator).items():
            utilities[name] += values
    print(f"{'preferences':<14}" + "".join(f"{score:>10}" for score in scores["Laplace"]))
    for name, row in scores.items():
        print(f"{name:<14}" + "".join(f"{sum(values) / len(values):>10.3f}" for values in row.values()))
    print("\ntrue utility of the chosen candidate, mean (worst):")
    for name, values in utilities.items():
        print(f"  by {name:<12}{sum(values) / len(values):>8.2f} ({min(values):.2f})")
    figure, axes = new_figure(n_columns=2, width=4.2, height=3.4)
    reliability_diagram(axes[0], {n: torch.cat(p) for n, p in probabilities.items()}, torch.cat(labels))
    axes[0].set(title="Preferences of held-out pairs", xlim=(0.5, 1), ylim=(0.4, 1))
    axes[1].hist(list(utilities.values()), bins=15, label=list(utilities))
    axes[1].set(title="What is chosen of 200 candidates", xlabel="true utility", ylabel="number of choices")
    axes[1].legend(frameon=False, fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    print(f"\nplot: {output}")
    return {**scores, "utility": utilities}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one seed, a few epochs")
    parser.add_argument("--output", type=Path, default=Path("outputs/reward_modelling.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, arguments.output)
