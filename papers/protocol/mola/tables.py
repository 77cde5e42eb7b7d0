"""The tables of `mixtures.py`."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.corruptions import SEVERITIES
from protocol.mola.tasks import ANGLES
from protocol.records import Records
from protocol.report import Table, table

LEVELS = {"rotated": ANGLES, "corrupted": SEVERITIES}
KINDS = ("inverted", "shuffled", "noise")
MEASURES = ("accuracy", "NLL", "Brier", "ECE", "MCE", "confidence")


def tables(records: Records) -> list[Table]:
    """All of them."""
    found: list[Table] = []
    for task, item, shift in (
        ("corrupted", "tables 1 and 3", "figure 8: means over corruptions and severities"),
        ("rotated", "table 4", "figure 7: means over angles"),
    ):
        found += [
            _ood(records, task, f"OOD images, networks of {task} digits ({item})"),
            table(records, f"{task}, test", f"{task}: test data", MEASURES),
            table(records, f"{task}, shifted", f"{task}: shifted test data ({shift})", MEASURES),
            *(_levels(records, task, measure) for measure in ("NLL", "ECE")),
            table(records, f"{task}, chosen", f"{task}: what was chosen on validation data"),
        ]
    return [
        *found,
        table(records, "variants: corrupted, shifted", "corrupted: variants of LLLA (figures 3, 6)", MEASURES),
        _numbers(records),
        table(records, "cost", "Costs after training: seconds of inference and of a prediction, MiB kept (table 2)"),
        table(records, "corrupted, far", "Mean confidence at 1000 x, and theorem 2"),
        table(records, "corrupted, weights", "Weights by the evidence (equation 10)"),
    ]


def _ood(records: Records, task: str, title: str) -> Table:
    columns = ("method", "confidence, test", *(f"{kind}: {m}" for kind in KINDS for m in ("confidence", "AUROC")))
    rows = []
    for method in records.methods(f"{task}, OOD"):
        keys = [(f"{task}, {kind}", measure) for kind in KINDS for measure in ("confidence", "AUROC")]
        every = [(f"{task}, test", "confidence"), *keys]
        rows.append((method, *_cells(records, method, every)))
    return Table(title, columns, tuple(rows))


def _levels(records: Records, task: str, measure: str) -> Table:
    levels = LEVELS[task]
    rows = [
        (method, *_cells(records, method, [(f"{task}, level {level}", measure) for level in levels]))
        for method in records.methods(f"{task}, level {levels[0]}")
    ]
    names = tuple(f"{level}°" if task == "rotated" else f"severity {level}" for level in levels)
    return Table(f"{task}: {measure} (figure 4)", ("method", *names), tuple(rows))


def numbers(records: Records) -> list[int]:
    """K of figure 10."""
    return [n for n in range(1, 101) if f"K = {n}: corrupted, shifted" in records.conditions()]


def _numbers(records: Records) -> Table:
    pairs = [(method, measure) for measure in ("NLL", "ECE", "accuracy", "confidence") for method in ("DE", "MoLA")]
    rows = []
    for n in numbers(records):
        condition = f"K = {n}: corrupted, shifted"
        rows.append((str(n), *(str(records.estimate(condition, method, measure)) for method, measure in pairs)))
    columns = ("K", *(f"{measure}, {method}" for method, measure in pairs))
    return Table("corrupted: number of components (figure 10)", columns, tuple(rows))


def _cells(records: Records, method: str, keys: Sequence[tuple[str, str]]) -> list[str]:
    return [str(records.estimate(condition, method, measure)) for condition, measure in keys]
