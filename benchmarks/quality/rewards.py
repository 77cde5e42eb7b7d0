"""The best of n answers by a learned reward, judged by the gold reward that this script holds.

An answer is six numbers, drawn by a policy with heavy tails. A network learns the reward from 500 pairs that the gold
reward compared. Of n answers to a prompt the one with the largest reward is often one whose reward is overestimated,
the more the larger n is; `laplace.pessimistic` takes off what the pairs leave open.

The gold reward, the sizes and τ were chosen on seeds 100 to 108, which are not measured here.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import laplace
from benchmarks.quality.targets import Target, mean_and_error
from laplace import Laplace
from laplace.errors import LaplaceWarning

NAME = "the best of n answers by a learned reward"
N_SEEDS, SIZE, N_PAIRS, N_PROMPTS, STEPS = 10, 6, 500, 300, 300
SHOWN = (1, 4, 16, 64, 256)
TAUS, TAU = (1.0, 2.0, 4.0, 8.0), 4.0
WAYS = ("plain", *(f"τ = {tau:g}" for tau in TAUS))
CHOSEN = f"τ = {TAU:g}"
QUANTILE = 1.645
"""Of a normal distribution at 95 %, for one-sided tests."""


def gold(seed: int) -> Callable[[Tensor], Tensor]:
    """A reward `[...]` of answers `[..., SIZE]`: waves on a slope, and less of it far away."""
    generator = torch.Generator().manual_seed(1000 + seed)
    waves = torch.randn(SIZE, 32, generator=generator) / SIZE**0.5
    heights = torch.randn(32, generator=generator) * 2 / 32**0.5
    slope = 2 * torch.randn(SIZE, generator=generator) / SIZE**0.5
    return lambda answers: (
        answers @ slope + torch.sin(1.5 * answers @ waves) @ heights - 0.15 * answers.square().sum(-1)
    )


def policy(*shape: int, generator: torch.Generator) -> Tensor:
    """Answers `[..., SIZE]` of Student's t distribution with four degrees of freedom."""
    normal = torch.randn(*shape, SIZE, generator=generator)
    return normal / torch.randn(*shape, 4, generator=generator).square().mean(-1, keepdim=True).sqrt()


class Reward(nn.Module):
    """A reward per answer: `[B, 1]` of answers `[B, SIZE]`, `[B, 2]` of pairs `[B, 2, SIZE]`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(SIZE, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1, bias=False)
        )

    def forward(self, answers: Tensor) -> Tensor:
        rewards = self.net(answers)
        return rewards.squeeze(-1) if answers.ndim == 3 else rewards


def fitted(truth: Callable[[Tensor], Tensor], seed: int, generator: torch.Generator, steps: int) -> Any:
    """The posterior over all weights of a network that was trained on pairs, with the prior of the highest evidence."""
    pairs = policy(N_PAIRS, 2, generator=generator)
    gap = truth(pairs[:, 1]) - truth(pairs[:, 0])
    preferred = (torch.rand(N_PAIRS, generator=generator) < gap.sigmoid()).long()
    torch.manual_seed(seed)
    model = Reward()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pairs), preferred).backward()
        optimizer.step()
    la = Laplace(model.eval(), "reward_modeling", "all", "full")
    la.fit([(pairs, preferred)])
    la.optimize_prior_precision()
    return la


def measured(seed: int, *, quick: bool) -> dict[str, list[list[float]]]:
    """Of every way and n: the mean gold reward of the chosen, and its mean gain over plain with its standard error."""
    generator, truth = torch.Generator().manual_seed(seed), gold(seed)
    la = fitted(truth, seed, generator, 20 if quick else STEPS)
    answers = policy(10 if quick else N_PROMPTS, SHOWN[-1], generator=generator)
    worth, prediction = truth(answers), la.predict(answers.flatten(0, 1))
    rewards = {"plain": prediction.latent_mean}
    rewards |= {f"τ = {tau:g}": laplace.pessimistic(prediction, tau) for tau in TAUS}

    def chosen(way: str, n: int) -> Tensor:
        best = rewards[way].view_as(worth)[:, :n].argmax(1, keepdim=True)
        return worth.gather(1, best)[:, 0]

    found: dict[str, list[list[float]]] = {}
    for way in WAYS:
        pairs = [(chosen(way, n), chosen("plain", n)) for n in SHOWN]
        found[way] = [[float(ours.mean()), *mean_and_error((ours - plain).tolist())] for ours, plain in pairs]
    return {**found, "best": [[float(worth[:, :n].amax(1).mean())] for n in SHOWN]}


def run(*, quick: bool) -> dict[str, Any]:
    """All seeds, with the seconds of processor time that they took."""
    torch.set_num_threads(1)
    start, seeds = time.process_time(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)  # the evidence's prior is taken without validation data
        for seed in range(1 if quick else N_SEEDS):
            seeds.append(measured(seed, quick=quick))
            print(f"{NAME}, seed {seed}: {seeds[-1][CHOSEN][-1]}, {time.process_time() - start:.0f} s", flush=True)
    return {"name": NAME, "seeds": seeds, "seconds": time.process_time() - start}


def table(row: dict[str, Any] | None) -> str:
    """Mean gold reward of the chosen answer over seeds by way and n, and in how many seeds it is above plain's."""
    if row is None:
        return "Not run."
    heading = ["chosen by", *(f"n = {n}" for n in SHOWN), f"n = {SHOWN[-1]}: above plain", "and by the test", "below"]
    lines = ["| " + " | ".join(heading) + " |", "| --- |" + " --: |" * (len(heading) - 1)]
    for way in (*WAYS, "best"):
        means = [mean_and_error([seed[way][k][0] for seed in row["seeds"]])[0] for k in range(len(SHOWN))]
        counts = ["–"] * 3
        if way not in ("plain", "best"):
            gains = [seed[way][-1][1:] for seed in row["seeds"]]
            signs = [gain >= 0 for gain, _ in gains], [gain >= QUANTILE * error for gain, error in gains]
            counts = [str(sum(each)) for each in (*signs, [gain < -QUANTILE * error for gain, error in gains])]
        name = f"**{way}**" if way == CHOSEN else way
        lines.append("| " + " | ".join([name, *(f"{mean:.2f}".replace("-", "−") for mean in means), *counts]) + " |")
    return "\n".join(lines)


def targets(row: dict[str, Any] | None) -> list[Target]:
    """The chosen's gold reward is at least plain choice's, seed by seed, and by a paired test over all."""
    text = f"best of {SHOWN[-1]}: gold reward of the pessimistic choice at least that of the plain one on 9 of 10 seeds"
    if row is None:
        return [Target(text, "no row", None)]
    gains = [seed[CHOSEN][-1][1:] for seed in row["seeds"]]
    good, clear = sum(gain >= 0 for gain, _ in gains), sum(gain >= QUANTILE * error for gain, error in gains)
    mean, error = mean_and_error([gain for gain, _ in gains])
    found = f"{good} of {len(gains)}, {clear} by a paired test at 95 %; gain {mean:.2f} ± {error:.2f}"
    return [Target(text, found, good >= math.ceil(0.9 * len(gains)))]
