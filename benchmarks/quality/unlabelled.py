"""A width without labels, measured: the largest scale at which a network's own answers hardly lose.

Training-free Bayesianisation (Shi et al., 2024, arXiv:2412.05723) widens a posterior, c Σ, until the mean negative log
score of the network's own answers on unlabelled inputs is 1 + tolerance times what it is at c = 0. Its inputs here are
the validation data without their labels, and it is judged on the test data as every column of the table is.

    python -m benchmarks.quality.unlabelled
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.methods import POSTERIORS, batches
from benchmarks.quality.networks import trained
from benchmarks.quality.rows import CLASSIFICATION, Row
from benchmarks.quality.scores import losses, paired
from benchmarks.quality.summary import number, signed, table
from benchmarks.quality.targets import mean_and_error
from laplace import Laplace
from laplace.errors import LaplaceWarning

RESULTS = Path(__file__).parent / "unlabelled.json"
TOLERANCES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
SCALES = tuple(10 ** (k / 4) for k in range(-24, 17))
KINDS = ("last layer, kron", "all weights, kron")
N_SPLITS = 5
LEAST = 0.001
"""Nats that are no harm, as in the other tables."""


@dataclass(frozen=True)
class Widened:
    """Predictions of a posterior at scales c of its covariance."""

    la: Any
    prior_precision: Tensor

    def __call__(self, x: Tensor, scale: float) -> Tensor:
        """Probabilities `[N, C]`: the covariance at prior precision δ/c and temperature c is c Σ(δ)."""
        self.la.prior_precision, self.la.temperature = self.prior_precision / scale, scale
        return self.la(x)


def widest(own: list[float], network: float, tolerance: float) -> int | None:
    """Place of the last scale up to which own answers lose no more than the tolerance; None where the first does.

    Args:
        own: Mean negative log scores of the own answers, by scale.
        network: That of the network.
        tolerance: The share of it that may be lost.
    """
    within = [score <= (1 + tolerance) * network for score in own]
    first = within.index(False) if False in within else len(within)
    return first - 1 if first else None


def measured(row: Row, seed: int, kind: str) -> list[dict[str, Any]]:
    """What every tolerance chose, the difference of the test data's NLL from the network's, and its paired error.

    Beside them are the NLL of the network, that of its own answers on the validation data, and by how much the labels
    of the test data lose more than its answers there.
    """
    split = row.split(seed)
    model = trained(row.make, split, seed, **row.options)
    la = Laplace(model, "classification", *POSTERIORS[kind])
    la.fit(batches(split.train))
    la.optimize_prior_precision()
    at, x, (x_test, y_test) = Widened(la, la.prior_precision.clone()), split.val[0], split.test
    with torch.no_grad():
        answers = model(x).argmax(1)
        network, before = model(x).softmax(1), losses(model(x_test).softmax(1), y_test)
        own = [float(losses(at(x, scale), answers).mean()) for scale in SCALES]
        alone = float(losses(network, answers).mean())
        lines: list[dict[str, Any]] = []
        for tolerance in TOLERANCES:
            place = widest(own, alone, tolerance)
            line: dict[str, Any] = {"tolerance": tolerance, "scale": 0.0, "difference": 0.0, "error": 0.0}
            if place is not None:
                difference, error = paired(losses(at(x_test, SCALES[place]), y_test), before)
                line |= {"scale": SCALES[place], "difference": difference, "error": error}
            lines.append(line)
        surplus = float(before.mean()) - float(losses(model(x_test).softmax(1), model(x_test).argmax(1)).mean())
    lines = [{**line, "nll": float(before.mean()), "own": alone, "surplus": surplus} for line in lines]
    return [{name: float(f"{value:.4g}") for name, value in line.items()} for line in lines]


def run() -> list[dict[str, Any]]:
    """Every row, split and posterior; rows whose data are not installed are left out."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", LaplaceWarning)
    found: list[dict[str, Any]] = []
    for row in CLASSIFICATION:
        start = time.process_time()
        try:
            for kind in (kind for kind in KINDS if kind in row.posteriors):
                for seed in range(N_SPLITS):
                    lines = measured(row, seed, kind)
                    found += [{"name": row.name, "posterior": kind, "seed": seed, **line} for line in lines]
        except ImportError as error:
            print(f"{row.name} is left out: {error}")
        print(f"{row.name}: {time.process_time() - start:.0f} s", flush=True)
    return found


def shown(found: list[dict[str, Any]]) -> str:
    """A line for every posterior and tolerance."""

    def cells(kind: str, tolerance: float) -> list[str]:
        runs = [line for line in found if (line["posterior"], line["tolerance"]) == (kind, tolerance)]
        harm = [statistics.mean(run["difference"] > run["error"] + least for run in runs) for least in (0.0, LEAST)]
        by_seed = [[run["difference"] for run in runs if run["seed"] == seed] for seed in range(N_SPLITS)]
        mean, error = mean_and_error([statistics.mean(part) for part in by_seed])
        worst = max((run["nll"] + run["difference"]) / run["nll"] for run in runs)
        chosen = statistics.median(run["scale"] for run in runs)
        return [
            kind, f"{tolerance:g}", f"{len(runs)}", f"{chosen:.1g}", f"{number(harm[0])} ({number(harm[1])})",
            f"{signed(mean)} ± {number(error)}", f"{worst:.2f}",
        ]  # fmt: skip

    heading = ["posterior", "tolerance", "runs", "median c", "harm (+ .001 nats)", "NLL", "worst"]
    return table(heading, (cells(kind, tolerance) for kind in KINDS for tolerance in TOLERANCES))


def main() -> None:
    """Measures, keeps and prints."""
    found = run()
    RESULTS.write_text("[" + ",\n".join(json.dumps(line) for line in found) + "]\n", "utf-8")
    print(shown(found))


if __name__ == "__main__":
    main()
