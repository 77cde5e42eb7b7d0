"""Writes the tables of docs/ that come from the results beside this file.

python -m benchmarks.quality.page
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.quality import (
    acquiring,
    atoms,
    decisions,
    knows,
    language,
    rewards,
    summary,
    texts,
    unlabelled,
    volumes,
)
from benchmarks.quality.methods import (
    CALIBRATE,
    CALIBRATED_ENSEMBLE,
    DROPOUT,
    ENSEMBLE,
    EVIDENCE,
    NETWORK,
    OOD_METHODS,
    POSTERIORS,
    REFITS,
    SNAPSHOTS,
    TEMPERATURE,
)
from benchmarks.quality.summary import number, shifted, signed, table, with_floor
from benchmarks.quality.targets import difference, gains, is_classification, lines, mean_and_error, values

FOLDER = Path(__file__).parent
PAGE, CHOOSE, LANGUAGE, LABELLING, SIXTY = (
    FOLDER.parents[1] / "docs" / f"{name}.md"
    for name in ("quality", "choose", "language_models", "labelling", "tutorials/sixty_labels")
)
RESULTS, RULES = FOLDER / "results.json", FOLDER / "rules.json"
READ = (RESULTS, RULES, knows.RESULTS, unlabelled.RESULTS, decisions.RESULTS)
"""What the pages are written from."""
LAST = "last layer, kron"
COLUMNS = {
    "temperature scaling": (TEMPERATURE, ""),
    "5 networks": (ENSEMBLE, ""),
    "MC dropout": (DROPOUT, ""),
    "default + evidence": (EVIDENCE, LAST),
    "calibrate": (CALIBRATE, LAST),
    "snapshots, calibrate": (SNAPSHOTS, LAST),
    "5 networks, calibrate": (CALIBRATED_ENSEMBLE, LAST),
}
"""Headings of the columns beside the network's, with method and posterior."""

SCORES = [name for name in OOD_METHODS if name != "network"]

Row = dict[str, Any]
Results = dict[str, Any]


def cell(row: Row, method: str, score: str, posterior: str, better: int = -1) -> str:
    """A difference from the network with its standard error: bold if better by two of them, italic if worse."""
    if not values(row, method, score, posterior):
        return "–"
    return marked(*difference(row, method, score, posterior), better)


def marked(mean: float, error: float, better: int = -1) -> str:
    """A difference with its standard error: bold if better by two of them, italic if worse."""
    text = f"{signed(mean)} ± {number(error)}"
    if abs(mean) <= 2 * error or abs(mean) < 0.0005:  # which is shown as 0
        return text
    return f"**{text}**" if better * mean > 0 else f"*{text}*"


def compared(rows: Iterable[Row], score: str, better: int = -1, columns: dict[str, tuple[str, str]] = COLUMNS) -> str:
    """The network's score, and the differences of the other columns."""
    rows = [row for row in rows if values(row, NETWORK, score)]
    columns = {
        name: (method, posterior)
        for name, (method, posterior) in columns.items()
        if any(values(row, method, score, posterior) for row in rows)
    }
    return table(
        ["data", "network", *columns],
        (
            [row["name"], number(statistics.mean(values(row, NETWORK, score)))]
            + [cell(row, method, score, posterior, better) for method, posterior in columns.values()]
            for row in rows
        ),
    )


def posteriors(rows: list[Row], score: str = "nll") -> str:
    """Differences of the evidence's and of the calibrated posterior, for every choice of weights and structure."""
    names = sorted({line["posterior"] for row in rows for line in row["splits"][0]} - {""}, reverse=True)
    names.sort(key=lambda name: (name != LAST, "full" in name, name))
    return table(
        ["data", *(f"{name}: {method}" for name in names for method in ("evidence", "calibrate"))],
        (
            [row["name"], *(cell(row, method, score, name) for name in names for method in (EVIDENCE, CALIBRATE))]
            for row in rows
        ),
    )


def unseen(rows: list[Row]) -> str:
    """AUROC of every score, as the difference from that of the network's largest probability, on every row."""

    def cells(row: Row) -> list[str]:
        network = statistics.mean(split[LAST]["network"][0] for split in row["unseen"])
        pairs = [mean_and_error(gains(row, score, LAST)) for score in SCORES]
        return [number(network), *(marked(mean, error, better=1) for mean, error in pairs)]

    return table(
        ["data", "network", *SCORES], ([row["name"], *cells(row)] for row in rows if gains(row, "network", LAST))
    )


def unseen_means(rows: list[Row]) -> str:
    """Mean over the rows and worst row of every score's difference from the network, for every posterior."""

    def cells(score: str) -> Iterator[str]:
        for posterior in POSTERIORS:
            auroc, fpr = (
                [statistics.mean(found) for row in rows if (found := gains(row, score, posterior, figure))]
                for figure in (0, 1)
            )
            yield f"{signed(statistics.mean(auroc))}, {signed(min(auroc))}" if auroc else "–"
            yield signed(statistics.mean(fpr)) if fpr else "–"

    heading = [text for name in POSTERIORS for text in (f"{name}: AUROC mean, worst row", "FPR95 mean")]
    return table(["score", *heading], ([f"`{score}`", *cells(score)] for score in SCORES))


def setting(rows: list[Row]) -> str:
    """Networks and numbers of data."""
    return table(
        ["data", "network", "training", "validation", "test"],
        ([row["name"], row["network"], *map(str, row["sizes"])] for row in rows),
    )


def heads(rows: list[Row]) -> str:
    """The frozen network, for every weight decay of its new head."""
    methods = {
        "temperature scaling": (TEMPERATURE, ""),
        "default + evidence": (EVIDENCE, LAST),
        "calibrate": (CALIBRATE, LAST),
        "calibrate, no validation data": (REFITS, LAST),
    }
    scores = ("nll", "ece", "auroc")

    def cells(row: Row, method: str, posterior: str) -> str:
        return ", ".join(signed(difference(row, method, score, posterior)[0]) for score in scores)

    return table(
        ["weight decay", "network", *methods],
        (
            [row["name"].rsplit(" ", 1)[1]]
            + [", ".join(number(statistics.mean(values(row, NETWORK, score))) for score in scores)]
            + [cells(row, method, posterior) for method, posterior in methods.values()]
            for row in rows
            if values(row, REFITS, "nll")
        ),
    )


def regression(rows: list[Row], score: str) -> str:
    """A score of regressions: coverage as it is, others as differences from the network."""
    names = {
        "5 networks": (ENSEMBLE, ""),
        "MC dropout": (DROPOUT, ""),
        "default + evidence": (EVIDENCE, LAST),
        "calibrate": (CALIBRATE, LAST),
        "all weights, kron: evidence": (EVIDENCE, "all weights, kron"),
        "all weights, kron: calibrate": (CALIBRATE, "all weights, kron"),
    }

    def shown(row: Row, method: str, posterior: str) -> str:
        if score != "coverage":
            return cell(row, method, score, posterior)
        mean, error = mean_and_error(values(row, method, score, posterior))
        text = f"{number(mean)} ± {number(error)}"
        return f"*{text}*" if abs(mean - 0.9) > 2 * error else text

    def network(row: Row) -> str:
        return shown(row, NETWORK, "") if score == "coverage" else number(statistics.mean(values(row, NETWORK, score)))

    return table(
        ["data", "network", *names],
        (
            [row["name"], network(row), *(shown(row, method, posterior) for method, posterior in names.values())]
            for row in rows
        ),
    )


def freesolv(row: Row | None) -> str:
    """The fine-tuned transformer."""
    if row is None:
        return "Not run: it needs the packages of `make pretrained`."
    found = {"network, noise of the validation data": NETWORK, "default + evidence": EVIDENCE, "calibrate": CALIBRATE}
    scores = ("nll", "crps", "coverage", "rmse")

    def shown(method: str, score: str) -> str:
        mean, error = mean_and_error(values(row, method, score))
        if score == "nll" and method != NETWORK:
            gain, paired = difference(row, method, score)
            return f"{number(mean)} ({signed(gain)} ± {number(paired)})"
        return f"{number(mean)} ± {number(error)}"

    return table(
        [f"{row['name']}, {len(row['splits'])} seeds", "NLL", "CRPS", "coverage of 90 %", "RMSE"],
        ([name, *(shown(method, score) for score in scores)] for name, method in found.items()),
    )


def rules(study: dict[str, Any]) -> str:
    """The study of rules."""
    groups = study["groups"]
    heading = ["rule"]
    for group, found in groups.items():
        heading += [f"{group} data ({next(iter(found.values()))['runs']} runs): within", "worst", "gain"]
    names = list(next(iter(groups.values())))
    return table(
        heading,
        (
            [f"**{name}**" if name == study["chosen"] else name]
            + [
                text
                for found in groups.values()
                for text in (
                    number(found[name]["within"]),
                    f"{found[name]['worst']:.3f}",
                    number(found[name]["gain"], 4),
                )
            ]
            for name in names
        ),
    )


def cost(results: Results) -> str:
    """Where it ran and how long it took."""
    minutes = sum(row["seconds"] for row in results["rows"]) / 60
    text = f"{results['where']}, one thread: {minutes:.0f} minutes of processor time in two processes"
    if (row := results.get("freesolv")) is not None:
        text += f", and {row['seconds'] / 60:.0f} for {row['name']} besides its training"
    return text + "."


def blocks(results: Results, study: dict[str, Any]) -> dict[str, str]:
    """What the script writes, by the name of its place in the page."""
    kinds: tuple[list[Row], list[Row]] = ([], [])
    for row in results["rows"]:
        kinds[not is_classification(row)].append(row)
    classes, targets = kinds
    return {
        "run": cost(results),
        "opening": summary.opening(classes),
        "setting": setting([*classes, *targets]),
        "heads": heads(classes),
        "nll": compared(classes, "nll"),
        "shifts": compared([part for row in classes for part in shifted(row)], "nll"),
        "auroc": compared(classes, "auroc", better=1),
        "unseen": unseen(classes),
        "unseen means": unseen_means(classes),
        "brier": compared(classes, "brier"),
        "ece": compared([with_floor(row) for row in classes], "excess"),
        "aurc": compared(classes, "aurc"),
        "posteriors": posteriors(classes),
        **{f"regression {score}": regression(targets, score) for score in ("nll", "coverage", "crps", "rmse")},
        "freesolv": freesolv(results.get("freesolv")),
        "texts": texts.lines(results.get("texts")),
        "targets": in_lines(lines(results)),
        "rules": rules(study),
    }


def in_lines(sentences: Iterable[str]) -> str:
    """A block of text whose lines fit into the site."""
    return "\n".join(["```text", *(textwrap.fill(one, 100, subsequent_indent=" " * 8) for one in sentences), "```"])


def written(page: str, found: dict[str, str]) -> str:
    """The page with every block between its marks, `<!-- NAME -->` and `<!-- end -->`."""
    names: list[str] = []

    def filled(match: re.Match[str]) -> str:
        names.append(match[1])
        return f"<!-- {match[1]} -->\n\n{found[match[1]]}\n\n<!-- end -->"

    text = re.sub(r"<!-- ((?!end)[\w ]+) -->.*?<!-- end -->", filled, page, flags=re.DOTALL)
    if sorted(names) != sorted(found):
        raise ValueError(f"places of the page: {sorted(names)}; blocks: {sorted(found)}")
    return text


def pages(
    results: Results,
    study: dict[str, Any],
    checks: list[dict[str, Any]],
    widths: list[dict[str, Any]],
    decided: dict[str, Any],
) -> dict[Path, dict[str, str]]:
    """The pages and their blocks."""
    said = [str(target) for name in language.NAMES for target in language.targets(results.get(name), name)]
    extensions = {"atoms": atoms, "rewards": rewards}
    judged = {f"{name} targets": in_lines(map(str, of.targets(results.get(name)))) for name, of in extensions.items()}
    tables = {name: language.table(results.get(name)) for name in language.NAMES}
    return {
        PAGE: {
            **blocks(results, study),
            "checks": knows.table(checks),
            "unlabelled": unlabelled.shown(widths),
            **judged,
            **volumes.tables(results.get("volumes")),
            **{name: of.table(results.get(name)) for name, of in extensions.items()},
        },
        CHOOSE: {"methods": summary.short([row for row in results["rows"] if is_classification(row)])},
        LANGUAGE: {**tables, "targets": in_lines(said)},
        LABELLING: {"acquiring": acquiring.table(results.get("acquiring"))},
        SIXTY: {"decisions": decisions.table(decided)},
    }


def main() -> None:
    """Writes the pages."""
    found = pages(*(json.loads(path.read_text("utf-8")) for path in READ))
    for path, parts in found.items():
        path.write_text(written(path.read_text("utf-8"), parts), "utf-8")


if __name__ == "__main__":
    main()
