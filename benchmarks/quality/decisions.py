"""Decisions with few labels on a real text encoder: the head beside the usual recipe, in its domain and under shift.

    python -m benchmarks.quality.decisions [--quick] [--draws N] [--topics N] [--seed N]

The encoder is frozen (all-MiniLM-L6-v2), its texts are tweets, and texts on films and products, which people rated: is
a text good or bad, where they agree (|rating| > 1)? A head is fitted to 60, 120 or 300 texts of one domain, and
predicts the rest of it, and the two others. A second task names the topic of a question, one of twenty. The usual
recipe is the same head with its weight decay and its temperature by five-fold cross-validation. It needs `make
pretrained`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.scores import losses
from laplace import acquire, metrics
from laplace.gp.heads import OF_NUMBERS, FeatureBasis, Labelled, decays_of, ridge_heads, softmax_heads
from laplace.integrations.decision import Decision, decision

RESULTS = Path(__file__).with_name("decisions.json")
DOMAINS, SIZES, N_TOPICS, MOST = ("tweets", "films", "products"), (60, 120, 300), 20, 3000
HEAD, USUAL, OURS = "head, weight decay by CV", "the same, temperature by CV", "decision"
TEMPERATURES = tuple(10 ** (k / 20) for k in range(-10, 21))
RISK, CONFIDENCE = 0.05, 0.9

Data = tuple[Tensor, Tensor]
"""Features `[N, D]`, and labels or ratings `[N]`."""


def data(cache: Path | None = None) -> dict[str, Data]:
    """Features and ratings of the domains, 3,000 texts of each, and of the topics; kept in a folder of the system."""
    from examples import pretrained_data

    path = (cache or Path(tempfile.gettempdir()) / "laplace-pretrained") / "decisions.pt"
    if path.exists():
        return torch.load(path, weights_only=True)
    model, tokenizer = pretrained_data.sentence_encoder()
    encoder = decision(model, tokenizer, None)
    found: dict[str, Data] = {}
    for domain in DOMAINS:
        texts, ratings = pretrained_data.ratings(domain)
        some = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[:MOST]
        found[domain] = encoder.features([texts[i] for i in some.tolist()]), ratings[some]
    texts, labels, _ = pretrained_data.topics()
    found["topics"] = encoder.features(texts), labels
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, path)
    return found


def sentiment(rated: Data) -> Data:
    """Texts of which people are sure, and whether they are good."""
    features, ratings = rated
    sure = ratings.abs() > 1
    return features[sure], (ratings[sure] > 0).long()


def most_frequent(labelled: Data) -> Data:
    """The twenty topics with most questions."""
    features, labels = labelled
    kept = torch.bincount(labels).argsort(descending=True, stable=True)[:N_TOPICS].sort().values
    inside = torch.isin(labels, kept)
    return features[inside], torch.searchsorted(kept, labels[inside])


def usual(features: Tensor, labels: Tensor, n_classes: int, seed: int) -> tuple[Callable[[Tensor], Tensor], float]:
    """Logits of the head whose weight decay five folds choose, and the temperature that they choose after it."""
    decays = decays_of(n_classes)
    left_out = torch.zeros(len(decays), len(labels), n_classes, dtype=torch.float64)
    for fold in torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).chunk(5):
        others = torch.ones(len(labels), dtype=torch.bool)
        others[fold] = False
        for k, logits in enumerate(_heads(features[others], labels[others], n_classes, decays)):
            left_out[k, fold] = logits(features[fold])
    loss = nn.functional.cross_entropy
    best = min(range(len(decays)), key=lambda k: float(loss(left_out[k], labels)))
    temperature = min(TEMPERATURES, key=lambda t: float(loss(left_out[best] / t, labels)))
    (head,) = _heads(features, labels, n_classes, decays[best : best + 1])
    return head, temperature


def _heads(
    features: Tensor, labels: Tensor, n_classes: int, decays: list[float]
) -> Iterator[Callable[[Tensor], Tensor]]:
    counts = torch.ones(len(labels), dtype=torch.float64)
    basis = FeatureBasis.from_features(features, counts, power=0.0)
    targets = nn.functional.one_hot(labels, n_classes).double()
    for head in softmax_heads(Labelled(basis.coordinates(features)[0], targets, counts), basis, decays):
        yield lambda x, at=head.at: basis.coordinates(x)[0] @ at


def scores(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Means over test data."""
    return {
        "nll": float(losses(probabilities, labels).mean()),
        "ece": float(metrics.expected_calibration_error(probabilities, labels)),
        "aurc": float(metrics.aurc(probabilities, labels)),
        "accuracy": float(metrics.accuracy(probabilities, labels)),
    }


def fitted(features: Tensor, labels: Tensor, n_classes: int) -> tuple[Decision, float]:
    """The decision, and seconds of processor time of its fit."""
    start = time.process_time()
    head = decision(None, None, list(range(n_classes))).fit(features, labels)
    return head, time.process_time() - start


def cell(name: str, train: Data, tests: dict[str, Data], n_classes: int, seed: int) -> dict[str, Any]:
    """One fit, and its scores on every test set; thresholds of left-out data, and how wrong they are there."""
    head, seconds = fitted(*train, n_classes)
    logits, temperature = usual(*train, n_classes, seed)
    threshold = head.threshold(RISK, CONFIDENCE)
    found: dict[str, Any] = {"task": name, "n": len(train[1]), "seed": seed, "seconds": seconds, "tests": {}}
    for where, (x, y) in tests.items():
        predicted = {HEAD: logits(x).softmax(1), USUAL: (logits(x) / temperature).softmax(1), OURS: head(x)}
        answered = threshold.answers(predicted[OURS])
        wrong = (predicted[OURS].argmax(1) != y)[answered]
        found["tests"][where] = {
            "methods": {method: scores(probabilities, y) for method, probabilities in predicted.items()},
            "risk": float(wrong.double().mean()) if len(wrong) else 0.0,
            "coverage": float(answered.double().mean()),
        }
    return found


def cells(found: dict[str, Data], seed: int, n_draws: int, n_topic_draws: int, sizes: tuple[int, ...]) -> list[Any]:
    """All cells: domains with what is left of them and the other domains, and topics."""
    labelled = {domain: sentiment(found[domain]) for domain in DOMAINS}
    topics = most_frequent(found["topics"])
    done = []
    for n in sizes:
        for draw in range(n_draws):
            for domain in DOMAINS:
                train, rest = split(labelled[domain], n, seed + 100 * n + draw)
                others = {other: labelled[other] for other in DOMAINS if other != domain}
                done.append(cell(domain, train, {"in domain": rest} | others, 2, draw))
        for draw in range(n_topic_draws):
            train, rest = split(topics, n, seed + 100 * n + draw)
            done.append(cell("topics", train, {"in domain": rest}, N_TOPICS, draw))
    return done


def split(labelled: Data, n: int, seed: int) -> tuple[Data, Data]:
    """n data, and the others."""
    order = torch.randperm(len(labelled[1]), generator=torch.Generator().manual_seed(seed))
    parts = [(labelled[0][some], labelled[1][some]) for some in (order[:n], order[n:])]
    return parts[0], parts[1]


def regression(found: dict[str, Data], seed: int, n_draws: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Ratings: coverage of 90 % intervals, and NLL beside ridge regression with λ and noise by five folds."""
    rows = []
    for n in sizes:
        for draw in range(n_draws):
            for domain in DOMAINS:
                (x, y), (x_test, y_test) = split(found[domain], n, seed + 100 * n + draw)
                head = decision(None, None, None).fit(x, y)
                lower, upper = head.predict(x_test).interval(0.9)
                inside = (lower.squeeze(1) <= y_test) & (y_test <= upper.squeeze(1))
                ours = head.predict(x_test).distribution().log_prob(y_test.unsqueeze(1).double())
                mean, noise = _ridge(x, y.double(), draw)
                theirs = losses((mean(x_test), torch.full((len(y_test), 1), noise)), y_test.unsqueeze(1))
                rows.append(
                    {
                        "task": domain, "n": n, "seed": draw, "coverage": float(inside.double().mean()),
                        "nll": -float(ours.mean()), "ridge": float(theirs.mean()),
                    }
                )  # fmt: skip
    return rows


def _ridge(x: Tensor, y: Tensor, seed: int) -> tuple[Callable[[Tensor], Tensor], float]:
    shift, unit = y.mean(), y.std()

    def heads(rows: Tensor) -> list[Callable[[Tensor], Tensor]]:
        counts = torch.ones(len(rows), dtype=torch.float64)
        basis, target = FeatureBasis.from_features(x[rows], counts, power=0.0), ((y[rows] - shift) / unit).unsqueeze(1)
        places = basis.coordinates(x[rows])
        found = ridge_heads(Labelled(places[0], target, counts), places, target, torch.arange(len(rows)), basis)
        return [lambda new, at=head.at: basis.coordinates(new)[0] @ at * unit + shift for head in found]

    squares = torch.zeros(len(OF_NUMBERS), len(y), dtype=torch.float64)
    for fold in torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).chunk(5):
        others = torch.tensor(sorted(set(range(len(y))) - set(fold.tolist())))
        for k, head in enumerate(heads(others)):
            squares[k, fold] = (head(x[fold]).squeeze(1) - y[fold]).square()
    best = int(squares.mean(1).argmin())
    return heads(torch.arange(len(y)))[best], float(squares[best].mean())


def labels_needed(found: dict[str, Data], seed: int, n_draws: int, last: int) -> list[dict[str, Any]]:
    """Test NLL after 30, 40, … labels of tweets: chosen by `laplace.acquire`, ten at a time, or at random."""
    rows = []
    for draw in range(n_draws):
        (x, y), (x_test, y_test) = split(sentiment(found["tweets"]), 1000, seed + draw)
        for way in ("random", "acquire"):
            known, curve = list(range(30)), []
            while True:
                head, _ = fitted(x[known], y[known], 2)
                curve.append(scores(head(x_test), y_test)["nll"])
                if len(known) >= last:
                    break
                rest = torch.tensor(sorted(set(range(len(y))) - set(known)))
                new = rest[:10] if way == "random" else _chosen(head, x, rest)
                known += new.tolist()
            rows.append({"seed": draw, "way": way, "nll": curve})
    return rows


def _chosen(head: Decision, x: Tensor, rest: Tensor) -> Tensor:
    source = torch.Generator().manual_seed(0)
    return rest[acquire(head.la, x[rest].double(), 10, "epig", generator=source).indices]


# What was found, in words.


def paired(rows: list[Any], method: str, score: str, *, shift: bool) -> list[float]:
    """Differences of a method from the usual recipe, the mean over the test sets of every cell."""
    each = []
    for row in rows:
        tests = [test["methods"] for where, test in row["tests"].items() if (where != "in domain") == shift]
        if tests:
            each.append(statistics.mean(test[method][score] - test[USUAL][score] for test in tests))
    return each


def mean_and_error(values: list[float]) -> str:
    """Mean ± its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):+.4f} ± {error:.4f}"


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The table, and what is to be reached."""
    yield "| | task | cells | NLL | ECE | AURC | accuracy | NLL less the usual recipe's | worst |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|"
    groups: dict[tuple[str, bool], list[Any]] = defaultdict(list)
    for row in results["cells"]:
        kind = "topics" if row["task"] == "topics" else "sentiment"
        groups[kind, False].append(row)
        if kind == "sentiment":
            groups[kind, True].append(row)
    for (kind, shift), rows in groups.items():
        for method in (HEAD, USUAL, OURS):
            tests = [t["methods"][method] for r in rows for w, t in r["tests"].items() if (w != "in domain") == shift]
            means = " | ".join(
                f"{statistics.mean(t[s] for t in tests):.3f}" for s in ("nll", "ece", "aurc", "accuracy")
            )
            gaps = paired(rows, method, "nll", shift=shift)
            where = f"{kind}, {'shift' if shift else 'in domain'}"
            yield f"| {method} | {where} | {len(rows)} | {means} | {mean_and_error(gaps)} | {max(gaps):+.3f} |"
    yield ""
    for shift in (False, True):
        tests = [
            t for r in results["cells"] if r["task"] != "topics" for w, t in r["tests"].items()
            if (w != "in domain") == shift and t["coverage"] > 0
        ]  # fmt: skip
        if tests:
            share = statistics.mean(t["risk"] > RISK for t in tests)
            risk, coverage = (statistics.mean(t[name] for t in tests) for name in ("risk", "coverage"))
            yield (
                f"- threshold({RISK}, {CONFIDENCE}), {'under shift' if shift else 'in domain'}: {len(tests)} answered "
                f"some, {share:.0%} of these are wrong more often than {RISK:.0%}; mean risk {risk:.3f}, coverage "
                f"{coverage:.2f}"
            )
    if results["regression"]:
        rows = results["regression"]
        coverage = [row["coverage"] for row in rows]
        gaps = mean_and_error([row["nll"] - row["ridge"] for row in rows])
        yield f"- ratings: 90 % intervals cover {statistics.mean(coverage):.3f}; NLL less that of ridge by CV {gaps}"
    if results["acquire"]:
        for way in ("random", "acquire"):
            curves = [row["nll"] for row in results["acquire"] if row["way"] == way]
            means = ", ".join(f"{statistics.mean(values):.3f}" for values in zip(*curves, strict=True))
            yield f"- NLL after 30, 40, … labels, {way}: {means}"
    seconds = [row["seconds"] for row in results["cells"] if row["n"] == max(SIZES) and row["task"] != "topics"]
    if seconds:
        yield f"- a fit to {max(SIZES)} texts takes {statistics.median(seconds):.2f} s of processor time"


def run(seed: int, n_draws: int, n_topic_draws: int, *, quick: bool) -> dict[str, Any]:
    """Everything; `quick` for one draw of 60 labels."""
    found, sizes = data(), SIZES[:1] if quick else SIZES
    return {
        "cells": cells(found, seed, n_draws, n_topic_draws, sizes),
        "regression": regression(found, seed, n_draws, sizes),
        "acquire": labels_needed(found, seed, min(n_draws, 5), 40 if quick else 150),
    }


def main() -> None:
    """Runs the benchmark, prints what it found, and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one draw of 60 labels; nothing is kept")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--topics", type=int, default=10, help="draws of the topics, which take longest")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    draws = (1, 1) if given.quick else (given.draws, given.topics)
    results = run(given.seed, *draws, quick=given.quick)
    print("\n".join(lines(results)))
    if not given.quick:
        RESULTS.write_text(json.dumps({"seed": given.seed, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
