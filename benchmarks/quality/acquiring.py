"""Labels that are bought: how many a new head needs to be right in 90 %, chosen by `laplace.acquire` or at random.

The inputs are features of MNIST's images by an EfficientNet that was trained on ImageNet. Every head begins with 100
labels drawn at random and gets 50 more at a time, out of 600 images drawn from the pool: those that tell most of its
weights, those that tell most of the labels of 40 other images, or the first.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

import laplace
from benchmarks.quality.targets import Target, mean_and_error
from laplace import Laplace

NAME = "labels to 90 % accuracy"
WAYS = ("random", "bald", "epig")
N_SEEDS, N_TEST, MOST, GOAL = 10, 1500, 2500, 0.9
FIRST, STEP, CANDIDATES, N_TARGETS, N_SAMPLES = 100, 50, 600, 40, 150
WEIGHT_DECAY = 1.0


def fitted(model: nn.Linear, x: Tensor, y: Tensor) -> nn.Linear:
    """The head at the mode of its prior, from where it is."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        decay = sum(weight.square().sum() for weight in model.parameters())
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum") + WEIGHT_DECAY / 2 * decay
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def bought(way: str, features: Tensor, labels: Tensor, seed: int) -> int:
    """Number of labels with which the head first reaches the goal on the test images, at most `MOST`."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    test, owned, rest = order[:N_TEST], order[N_TEST : N_TEST + FIRST], order[N_TEST + FIRST :]
    model = nn.Linear(features.shape[1], int(labels.max()) + 1)
    for weight in model.parameters():
        nn.init.zeros_(weight)
    while True:
        fitted(model, features[owned], labels[owned])
        right = model(features[test]).argmax(1) == labels[test]
        if float(right.float().mean()) >= GOAL or len(owned) >= MOST or len(rest) < STEP:
            return len(owned)
        rest = rest[torch.randperm(len(rest), generator=generator)]
        candidates = rest[:CANDIDATES]
        chosen = torch.arange(STEP)
        if way != "random":
            la = Laplace(model, "classification", "all", "kron", prior_precision=WEIGHT_DECAY)
            la.fit([(features[owned], labels[owned])])
            targets = features[rest[-N_TARGETS:]] if way == "epig" else None
            options: Any = {"targets": targets, "n_samples": N_SAMPLES, "generator": generator}
            chosen = laplace.acquire(la, features[candidates], STEP, way, **options).indices  # type: ignore[arg-type]
        owned = torch.cat([owned, candidates[chosen]])
        rest = rest[~torch.isin(rest, owned)]


def run(*, quick: bool) -> dict[str, Any]:
    """Labels of every way for every seed, with the seconds of processor time that they took."""
    from examples import pretrained_data

    features, labels = pretrained_data.efficientnet_features()
    torch.set_num_threads(1)
    start = time.process_time()
    found: dict[str, list[int]] = {way: [] for way in WAYS}
    for seed in range(1 if quick else N_SEEDS):
        for way in WAYS:
            found[way].append(bought(way, features, labels, seed))
        print(f"{NAME}, seed {seed}: {found}, {time.process_time() - start:.0f} s", flush=True)
    return {"name": NAME, "labels": found, "seconds": time.process_time() - start}


def table(row: dict[str, Any] | None) -> str:
    """Labels by way: mean, standard error, and the smallest and largest of the seeds."""
    if row is None:
        return "Not run."
    lines = ["| chosen | labels to 90 % | smallest, largest |", "| --- | --: | --: |"]
    for way, numbers in row["labels"].items():
        mean, error = mean_and_error(numbers)
        lines.append(f"| {way} | {mean:.0f} ± {error:.0f} | {min(numbers)}, {max(numbers)} |")
    return "\n".join(lines)


def targets(row: dict[str, Any] | None) -> list[Target]:
    """At most 0.8 times the labels of a random choice."""

    def judged(way: str) -> Target:
        text = f"active learning, {way}: labels to {GOAL:.0%} at most 0.8 times those of a random choice"
        if row is None:
            return Target(text, "no row", None)
        ours, random = (mean_and_error(row["labels"][each])[0] for each in (way, "random"))
        return Target(text, f"{ours:.0f} of {random:.0f}, {ours / random:.2f} times", ours <= 0.8 * random)

    return [judged(way) for way in WAYS[1:]]
