"""Which rule chooses among posteriors on few validation data: the study behind the rule of `la.calibrate`.

    python -m benchmarks.quality.rules [--seeds N] [--processes N] [--json PATH]

A run trains a network, fits a posterior, and scores candidates on validation data: prior precisions δ times scales c
of the covariance, and the network itself. A rule sees the candidates' log scores on the validation data, and is judged
by the test data. Seeds start at 100; those of the reported tables are 0 to 4. It takes about 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.quality import data
from benchmarks.quality.data import Array, Pair, Split
from benchmarks.quality.networks import mlp, trained
from laplace import Laplace
from laplace.errors import LaplaceWarning

FIRST_SEED, N_SEEDS = 100, 20
SETS: dict[str, Callable[[int], Split]] = {
    "digits": data.digits,
    "noisy digits": partial(data.digits, noise=0.4),
    "moons, 100": partial(data.moons, n_val=100),
    "flipped labels": data.flipped,
    "imbalanced": data.imbalanced,
    "waveform": data.waveform,
    "cover types": data.cover_types,
    "digits, 60": partial(data.digits, n_val=60),
    "noisy digits, 60": partial(data.digits, n_val=60, noise=0.4),
    "wine": data.wine,
    "breast cancer": data.breast_cancer,
    "iris": data.iris,
    "moons, 30": partial(data.moons, n_val=30),
    "flipped labels, 50": partial(data.flipped, n_val=50),
    "imbalanced, 50": partial(data.imbalanced, n_val=50),
    "waveform, 40": partial(data.waveform, n_val=40),
}
POSTERIORS: tuple[tuple[Any, Any], ...] = (("last_layer", "kron"), ("all", "kron"))
SCALES = tuple(10.0 ** (power / 2) for power in range(-8, 1))
"""Scales c of the covariance."""
MULTIPLES = tuple(10.0**power for power in range(-1, 4))
"""Prior precisions, as multiples of the one that the evidence chooses."""
MANY = 90
"""Validation data from which on runs are counted apart."""

Rule = Callable[[Array], int]
"""Takes the candidates' losses minus the network's, `[K, n]`, the network last, and returns the chosen one."""


@dataclass(frozen=True)
class Run:
    """The candidates of one posterior; the last one is the network.

    Attributes:
        name: Data set.
        posterior: Weights and structure.
        delta: Prior precision of every candidate, as a multiple of the evidence's, `[K]`; 0 for the network.
        scale: Scale c of the covariance, `[K]`; 0 for the network.
        val: Negative log scores of the validation data minus the network's, `[K, n]`.
        gain: Mean of the same on the test data, `[K]`; negative where a candidate is better.
        error: Its paired standard error, `[K]`.
        network: The network's mean negative log score on the test data.
    """

    name: str
    posterior: str
    delta: Array
    scale: Array
    val: Array
    gain: Array
    error: Array
    network: float


def candidates(name: str, seed: int) -> Iterator[Run]:
    """The runs of one network, one for every posterior."""
    split = SETS[name](seed)
    model = trained(mlp, split, seed)
    with torch.no_grad():
        network = [_loss(model(x), y).numpy() for x, y in (split.val, split.test)]
    for weights, structure in POSTERIORS:
        la: Any = Laplace(model, "classification", weights, structure)
        la.fit([split.train])
        la.optimize_prior_precision()
        evidence = la.prior_precision.clone()
        parts: tuple[list[Array], list[Array]] = ([], [])
        for multiple in MULTIPLES:
            la.prior_precision = multiple * evidence
            for part, pair, losses in zip(parts, (split.val, split.test), network, strict=True):
                part.append(_scaled_losses(la, pair) - losses)
        val, test = (np.vstack([*part, np.zeros_like(part[0][:1])]) for part in parts)
        yield Run(
            name=name,
            posterior=f"{weights}, {structure}",
            delta=np.append(np.repeat(MULTIPLES, len(SCALES)), 0.0),
            scale=np.append(np.tile(SCALES, len(MULTIPLES)), 0.0),
            val=val,
            gain=test.mean(1),
            error=test.std(1, ddof=1) / math.sqrt(test.shape[1]),
            network=float(network[1].mean()),
        )


def _scaled_losses(la: Any, pair: Pair) -> Array:
    """Negative log scores with the probit approximation, for every scale of the covariance, `[len(SCALES), N]`."""
    found = la.predict(pair[0], diagonal_output=True)
    scales = torch.tensor(SCALES).reshape(-1, 1, 1)
    logits = found.latent_mean / (1 + math.pi / 8 * scales * found.latent_variance).sqrt()
    return torch.stack([_loss(rows, pair[1]) for rows in logits]).numpy()


def _loss(logits: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.double(), y, reduction="none")


def bound(k: float, k_root: float = 0.0, least: float = 0.0, best: int = 0) -> Rule:
    """The smallest mean + (k + k_root / √n) standard errors; the network, unless that is below −`least` nats.

    Args:
        k: Standard errors, whatever the number of data n.
        k_root: Standard errors over √n.
        least: Nats that a candidate must gain.
        best: Data of every candidate that count as 0: those that speak most for it.
    """

    def rule(losses: Array) -> int:
        n = losses.shape[1]
        counted = np.sort(losses, 1)
        counted[:, :best] = 0.0
        scores = counted.mean(1) + (k + k_root / math.sqrt(n)) * counted.std(1, ddof=1) / math.sqrt(n)
        scores[-1] = -least
        return int(scores.argmin())

    return rule


def fewer_is_one(losses: Array) -> int:
    """Half a standard error from 90 data on, a whole one below."""
    return bound(0.5 if losses.shape[1] >= MANY else 1.0)(losses)


RULES: dict[str, Rule] = {
    "k = 0": bound(0.0),
    "k = 0.25": bound(0.25),
    "k = 0.5": bound(0.5),
    "k = 0.75": bound(0.75),
    "k = 1": bound(1.0),
    "k = 0.5 from 90 data on, 1 below": fewer_is_one,
    "k = 7/√n": bound(0.0, 7.0),
    "k = 0.5 + 4/√n": bound(0.5, 4.0),
    "k = 0.25 + 5/√n": bound(0.25, 5.0),
    "k = 0.25, without the best datum": bound(0.25, best=1),
    "k = 0.5, at least 0.001 nats": bound(0.5, least=1e-3),
    "k = 1, at least 0.001 nats": bound(1.0, least=1e-3),
    "k = 7/√n, at least 0.001 nats": bound(0.0, 7.0, 1e-3),
    "k = 0.5 + 4/√n, at least 0.001 nats": bound(0.5, 4.0, 1e-3),
    "k = 0.25 + 5/√n, at least 0.001 nats": bound(0.25, 5.0, 1e-3),
}
CHOSEN = "k = 0.5 + 4/√n, at least 0.001 nats"


def judged(runs: Iterable[Run], rule: Rule) -> dict[str, float]:
    """What a rule does on test data.

    Returns:
        `runs`: their number; `within`: share of runs whose test loss is at most the network's + one paired standard
        error; `worst`: the largest ratio of the losses; `gain`: the mean difference, in nats; `left`: share of runs
        where something else than the network was chosen.
    """
    kept, ratios, gains, left = [], [], [], []
    for run in runs:
        chosen = rule(run.val)
        kept.append(run.gain[chosen] <= run.error[chosen])
        ratios.append(1 + run.gain[chosen] / run.network)
        gains.append(-run.gain[chosen])
        left.append(chosen != len(run.gain) - 1)
    means = {"within": kept, "gain": gains, "left": left}
    return {"runs": len(kept), "worst": float(max(ratios)), **{k: float(np.mean(v)) for k, v in means.items()}}


def summary(runs: list[Run]) -> dict[str, Any]:
    """All rules, on the runs with many and on those with few validation data."""
    groups = {
        f"{MANY} and more": [run for run in runs if run.val.shape[1] >= MANY],
        f"fewer than {MANY}": [run for run in runs if run.val.shape[1] < MANY],
    }
    return {
        "chosen": CHOSEN,
        "sets": sorted({f"{run.name.split(',')[0]} ({run.val.shape[1]})" for run in runs}),
        "groups": {
            group: {name: {k: round(v, 4) for k, v in judged(part, rule).items()} for name, rule in RULES.items()}
            for group, part in groups.items()
            if part
        },
    }


def _job(given: tuple[str, int]) -> list[Run]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", LaplaceWarning)
    return list(candidates(*given))


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=N_SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    jobs = [(name, seed) for seed in range(FIRST_SEED, FIRST_SEED + given.seeds) for name in SETS]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        runs = [run for found in pool.imap(_job, jobs, chunksize=1) for run in found]
    found = summary(runs)
    for group, rules in found["groups"].items():
        for name, line in rules.items():
            figures = "  ".join(f"{key} {line[key]:.4f}" for key in ("within", "worst", "gain", "left"))
            print(f"{group:14} {name:38} {figures}")
    if given.json:
        given.json.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
