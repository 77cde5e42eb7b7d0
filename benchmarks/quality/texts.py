"""A frozen text encoder with a new head, calibrated on a hundred labels: the width that follows the input, for texts.

The encoder, the texts and their ratings are those of `benchmarks.quality.decisions`: is a text good or bad? The head is
trained on 100 or 300 texts of one domain. Shift are the two other domains, and what belongs to no class are questions
on topics. It needs `make pretrained`.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality import decisions
from benchmarks.quality.data import Split
from benchmarks.quality.methods import (
    CALIBRATE,
    NETWORK,
    TEMPERATURE,
    Column,
    batches,
    best_temperature,
    calibrated,
)
from benchmarks.quality.networks import trained
from benchmarks.quality.rows import HEAD, Row, head
from benchmarks.quality.scores import scored
from benchmarks.quality.summary import LAST, LEAST, number, signed, table
from benchmarks.quality.targets import ROUNDING, mean_and_error
from laplace.errors import LaplaceWarning

SIZES, N_VAL, N_TEST, N_SEEDS = (100, 300), 100, 600, 5


def split_of(texts: dict[str, decisions.Data], domain: str, n_train: int, seed: int) -> Split:
    """Texts of a domain, drawn anew for every seed."""
    features, labels = decisions.sentiment(texts[domain])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = order[: n_train + N_VAL + N_TEST].split([n_train, N_VAL, len(order[n_train + N_VAL :][:N_TEST])])
    train, val, test = ((features[part], labels[part]) for part in parts)
    others = {name: decisions.sentiment(texts[name]) for name in decisions.DOMAINS if name != domain}
    return Split(train, val, test, others, texts["topics"][0])


def columns(row: Row, split: Split, seed: int) -> Iterator[Column]:
    """The head as it was trained, its temperature, and its calibrated posterior."""
    model = trained(row.make, split, seed, **row.options)
    temperature = best_temperature(model, split.val)
    yield Column(NETWORK, "", lambda x: model(x).softmax(1))
    yield Column(TEMPERATURE, "", lambda x: (model(x) / temperature).softmax(1), f"T = {temperature:.3g}")
    yield calibrated(model, split, row.posteriors[0], batches(split.val))


def run(*, quick: bool, cache: Path | None = None) -> dict[str, Any]:
    """Every domain and size on every seed."""
    torch.set_num_threads(1)
    start, texts = time.process_time(), decisions.data(cache)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)
        for domain in decisions.DOMAINS:
            for n_train in SIZES:
                of_seed = partial(split_of, texts, domain, n_train)
                options = {**HEAD, "weight_decay": 0.001, "epochs": 3 if quick else HEAD["epochs"]}
                row = Row(f"{domain}, {n_train}", "head of a frozen MiniLM", of_seed, head, (LAST,), options)
                splits = [
                    scored(columns(row, split, seed), split)
                    for seed in range(1 if quick else N_SEEDS)
                    for split in [of_seed(seed)]
                ]
                found.append({"name": row.name, "splits": splits})
    return {"rows": found, "seconds": time.process_time() - start}


def lines(found: dict[str, Any] | None) -> str:
    """Means over domains and seeds, as differences from the network, for every number of labels."""
    if found is None:
        return "Not run."
    made: list[list[str]] = []
    for size in SIZES:
        runs = [split for row in found["rows"] if row["name"].endswith(f" {size}") for split in row["splits"]]
        for method in (TEMPERATURE, CALIBRATE):
            pairs = [({one["method"]: one for one in run}[method], run[0]) for run in runs]
            gaps = {
                score: mean_and_error([line[score] - network[score] for line, network in pairs])
                for score in ("nll", "auroc", "brier")
            }
            shift = mean_and_error(
                [
                    statistics.mean(line["shifts"][k][0] - of[0] for k, of in net["shifts"].items())
                    for line, net in pairs
                ]
            )
            paired = [line["paired"] for line, _ in pairs]
            within = statistics.mean(gap <= error + ROUNDING for gap, error in paired)
            least = statistics.mean(gap <= error + LEAST for gap, error in paired)
            worst = max(line["nll"] / network["nll"] for line, network in pairs)
            cells = [(gaps["nll"], 3), (shift, 3), (gaps["auroc"], 3), (gaps["brier"], 4)]
            nll, *more = (f"{signed(mean, digits)} ± {number(error, digits)}" for (mean, error), digits in cells)
            shares = f"{number(within, 2)} ({number(least, 2)})"
            made.append([f"{size} labels, {method}", nll, shares, f"{worst:.2f}", *more])
    heading = [
        "",
        "NLL",
        "within 1 s.e. (+ .001 nats)",
        "worst",
        "NLL in the other domains",
        "AUROC of topics",
        "Brier",
    ]
    return table(heading, made)
