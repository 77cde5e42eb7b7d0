"""Decisions with few labels on a real text encoder: the head beside the usual recipe, in its domain and under shift.

    python -m benchmarks.quality.decisions [--quick] [--draws N] [--topics N] [--seed N]

The encoder is frozen (all-MiniLM-L6-v2), its texts are tweets, and texts on films and products, which people rated: is
a text good or bad, where they agree (|rating| > 1)? A head is fitted to 60, 120 or 300 texts of one domain, and
predicts the rest of it, and the two others. A second task names the topic of a question, one of twenty. The usual
recipe is the same head with its weight decay and its temperature by five-fold cross-validation. It needs `make
pretrained`. What is kept are means, which docs/tutorials/sixty_labels.md shows: write it by `benchmarks.quality.page`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality import summary
from benchmarks.quality.scores import losses
from benchmarks.quality.summary import rounded
from benchmarks.quality.targets import mean_and_error
from laplace import acquire, metrics
from laplace.gp.heads import OF_NUMBERS, FeatureBasis, Labelled, decays_of, ridge_heads, softmax_heads
from laplace.integrations.decision import Decision, Threshold, decision

RESULTS = Path(__file__).with_name("decisions.json")
DOMAINS, SIZES, N_TOPICS, MOST = ("tweets", "films", "products"), (60, 120, 300), 20, 3000
HEAD, USUAL, OURS = "head, weight decay by CV", "the same, temperature by CV", "decision"
TEMPERATURES = tuple(10 ** (k / 20) for k in range(-10, 21))
RISK, CONFIDENCE = 0.05, 0.9
TASKS = "good or bad, in its domain", "good or bad, in the two others", "twenty topics"

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
    """One fit, and its scores on every test set."""
    head, seconds = fitted(*train, n_classes)
    logits, temperature = usual(*train, n_classes, seed)
    found: dict[str, Any] = {"task": name, "n": len(train[1]), "seed": seed, "seconds": seconds, "tests": {}}
    for where, (x, y) in tests.items():
        predicted = {HEAD: logits(x).softmax(1), USUAL: (logits(x) / temperature).softmax(1), OURS: head(x)}
        found["tests"][where] = {
            "methods": {method: scores(probabilities, y) for method, probabilities in predicted.items()}
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
        labelled = Labelled(basis.coordinates(x[rows])[0], target, counts)
        found = ridge_heads(labelled, target, torch.arange(len(rows)), basis)
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


def thresholds(found: dict[str, Data], seed: int, n_splits: int) -> list[dict[str, Any]]:
    """Risk and coverage of the threshold of left-out data, of 120 and 300 texts, in the domain and out of it."""
    labelled, rows = {domain: sentiment(found[domain]) for domain in DOMAINS}, []
    for i in range(n_splits):
        domain, n = DOMAINS[i % 3], SIZES[1 + i // 3 % 2]
        train, rest = split(labelled[domain], n, seed + 500 + 100 * n + i)
        head, _ = fitted(*train, 2)
        threshold = head.threshold(RISK, CONFIDENCE)
        for where, test in {"in domain": rest, **labelled}.items():
            if where != domain:
                risk, coverage = answered(threshold, head(test[0]), test[1])
                rows.append({"shift": where != "in domain", "risk": risk, "coverage": coverage})
    return rows


def answered(threshold: Threshold, probabilities: Tensor, labels: Tensor) -> tuple[float, float]:
    """Share of wrong answers, 0 without any, and share of answers."""
    given = threshold.answers(probabilities)
    wrong = (probabilities.argmax(1) != labels)[given].double()
    return float(wrong.mean()) if len(wrong) else 0.0, float(given.double().mean())


def one_text(n_pairs: int = 400) -> dict[str, float]:
    """Median milliseconds of processor time of a decision on a text, and of the encoder alone, in turn.

    The encoder alone is its tokenizer, forward pass and mean over tokens, as its authors show them.
    """
    from examples import pretrained_data

    model, tokenizer = pretrained_data.sentence_encoder()
    texts, ratings = pretrained_data.ratings("tweets")
    head = decision(model, tokenizer, ["bad", "good"]).fit(texts[:60], [int(rating > 0) for rating in ratings[:60]])
    one = texts[100:101]

    def alone() -> Tensor:
        with torch.no_grad():
            batch = tokenizer(one, padding=True, truncation=True, return_tensors="pt")
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(2)
            return (hidden * mask).sum(1) / mask.sum(1)

    spent: dict[str, list[float]] = {"decision": [], "encoder": []}
    for i in range(n_pairs + 20):
        both = [("decision", lambda: head(one)), ("encoder", alone)]
        for name, call in both if i % 2 else both[::-1]:
            start = time.thread_time()
            call()
            spent[name].append(1000 * (time.thread_time() - start))
    ours, theirs = spent["decision"][20:], spent["encoder"][20:]
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return {"decision": statistics.median(ours), "encoder": statistics.median(theirs), "ratio": ratio}


# What was found: means over cells.


def means(rows: list[Any], *, shift: bool) -> dict[str, Any]:
    """Scores of every method, and differences of the decision from the usual recipe, paired.

    A run is a fit, with the mean over its test sets; a cell has the runs of a domain and a number of labels.
    """
    each: dict[str, dict[str, list[float]]] = {
        method: {
            score: [
                statistics.mean(
                    test["methods"][method][score]
                    for where, test in row["tests"].items()
                    if (where != "in domain") == shift
                )
                for row in rows
            ]
            for score in ("nll", "ece", "aurc", "accuracy")
        }
        for method in (HEAD, USUAL, OURS)
    }
    gaps = {
        score: [ours - usual for ours, usual in zip(each[OURS][score], each[USUAL][score], strict=True)]
        for score in ("nll", "ece", "aurc")
    }
    cells: dict[tuple[str, int], list[float]] = defaultdict(list)
    for gap, row in zip(gaps["nll"], rows, strict=True):
        cells[row["task"], row["n"]].append(gap)
    each_cell = [mean_and_error(values) for values in cells.values()]
    return {
        "runs": len(rows),
        "methods": {method: {score: statistics.mean(x) for score, x in of.items()} for method, of in each.items()},
        "gaps": {score: mean_and_error(values) for score, values in gaps.items()},
        "sizes": {
            str(n): mean_and_error([gap for gap, row in zip(gaps["nll"], rows, strict=True) if row["n"] == n])
            for n in sorted({row["n"] for row in rows})
        },
        "cells": len(cells),
        "within": sum(gap <= error for gap, error in each_cell),
        "worst": max(gap for gap, _ in each_cell),
    }  # fmt: skip


def aggregated(results: dict[str, Any]) -> dict[str, Any]:
    """What is kept of all cells: little."""
    texts, topics = ([row for row in results["cells"] if (row["task"] == "topics") == is_it] for is_it in (False, True))
    kept: dict[str, Any] = {
        "seed": results["seed"],
        "tasks": {
            TASKS[0]: means(texts, shift=False),
            TASKS[1]: means(texts, shift=True),
            TASKS[2]: means(topics, shift=False),
        },
        "seconds": statistics.median(row["seconds"] for row in texts if row["n"] == max(row["n"] for row in texts)),
    }  # fmt: skip
    for shift in (False, True):
        rows = [row for row in results["thresholds"] if row["shift"] == shift]
        kept["threshold, shift" if shift else "threshold"] = {
            "splits": len(rows),
            "violated": statistics.mean(row["risk"] > RISK for row in rows),
            "coverage": statistics.mean(row["coverage"] for row in rows),
        }
    rows = results["regression"]
    kept["ratings"] = {
        "cells": len(rows),
        "coverage": mean_and_error([row["coverage"] for row in rows]),
        "nll": mean_and_error([row["nll"] - row["ridge"] for row in rows]),
    }
    curves = {way: [row["nll"] for row in results["acquire"] if row["way"] == way] for way in ("random", "acquire")}
    kept["acquire"] = {
        way: [statistics.mean(values) for values in zip(*each, strict=True)] for way, each in curves.items()
    } | {"draws": len(curves["random"])}
    return rounded(kept | {"one text": results["one text"]})


def labels_to_equal(kept: dict[str, Any]) -> tuple[int, int]:
    """Labels of `acquire` with which the mean NLL is at most that of the most random ones, and their number."""
    random, chosen = kept["acquire"]["random"], kept["acquire"]["acquire"]
    first = next((k for k, nll in enumerate(chosen) if nll <= random[-1]), len(chosen) - 1)
    return 30 + 10 * first, 30 + 10 * (len(random) - 1)


def table(kept: dict[str, Any]) -> str:
    """The tasks beside the usual recipe, and sentences on what else was measured."""
    rows = []
    for task, found in kept["tasks"].items():
        usual, ours = found["methods"][USUAL], found["methods"][OURS]
        nll, ece = ([f"{of[score]:.3f}" for of in (usual, ours)] for score in ("nll", "ece"))
        rows.append([task, str(found["runs"]), *nll, in_words(found["gaps"]["nll"]), *ece])
    heading = ["", "fits", "NLL, usual", "NLL, decision", "difference", "ECE, usual", "ECE, decision"]
    return "\n".join([summary.table(heading, rows), "", *(f"- {line}" for line in sentences(kept))])


def sentences(kept: dict[str, Any]) -> Iterator[str]:
    """What else was measured."""
    for task, found in kept["tasks"].items():
        sizes = ", ".join(f"{in_words(gap)} with {n}" for n, gap in found["sizes"].items())
        yield (
            f"{task}: NLL {sizes} labels. In {found['within']} of {found['cells']} pairs of a domain and a number of "
            f"labels it is at most one standard error worse; the largest of these differences is "
            f"{signed(found['worst'])}. AURC {in_words(found['gaps']['aurc'])}."
        )
    inside, outside = kept["threshold"], kept["threshold, shift"]
    yield (
        f"`threshold({RISK}, {CONFIDENCE})` of left-out data: more than {RISK:.0%} wrong in {inside['violated']:.1%} "
        f"of {inside['splits']} splits, and in {outside['violated']:.0%} in other domains; "
        f"{inside['coverage']:.0%} and {outside['coverage']:.0%} are answered."
    )
    ratings = kept["ratings"]
    yield (
        f"ratings: 90 % intervals cover {ratings['coverage'][0]:.3f} ± {ratings['coverage'][1]:.3f}; NLL less that of "
        f"ridge regression with five folds {in_words(ratings['nll'])}."
    )
    few, many = labels_to_equal(kept)
    yield (
        f'`laplace.acquire(…, "epig")`, {kept["acquire"]["draws"]} draws: {few} labels are as good as {many} '
        "random ones."
    )
    cost = kept["one text"]
    yield (
        f"one text at a time takes {cost['ratio']:.3f} times what its encoder takes alone, tokens included, which is "
        f"{cost['encoder']:.1f} ms on one thread; a fit of the most labels takes {kept['seconds']:.1f} s."
    )


def in_words(gap: Sequence[float]) -> str:
    """A difference and its standard error."""
    return f"{signed(gap[0])} ± {gap[1]:.3f}"


def signed(value: float) -> str:
    """With its sign, and a zero before the point as in the page's other numbers."""
    return f"{value:+.3f}".replace("-", "−")


def run(seed: int, n_draws: int, n_topic_draws: int, *, quick: bool) -> dict[str, Any]:
    """Everything; `quick` for one draw of 60 labels."""
    found, sizes = data(), SIZES[:1] if quick else SIZES
    return {
        "cells": cells(found, seed, n_draws, n_topic_draws, sizes),
        "regression": regression(found, seed, n_draws, sizes),
        "acquire": labels_needed(found, seed, min(n_draws, 5), 40 if quick else 110),
        "thresholds": thresholds(found, seed, 3 if quick else 200),
        "one text": one_text(60 if quick else 400),
        "seed": seed,
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
    kept = aggregated(results)
    print(table(kept))
    if not given.quick:
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
