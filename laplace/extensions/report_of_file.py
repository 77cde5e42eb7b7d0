"""The command `python -m laplace.extensions.report predictions.csv`: a report on the predictions in a file."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence

import torch
from torch import Tensor

from laplace.core.precision_policy import wide_dtype
from laplace.errors import InvalidArgument, InvalidData
from laplace.extensions.document import Report
from laplace.extensions.report_of_predictions import of_gaussians, of_probabilities, printable, require_distinct

_Y = ("y", "label", "labels", "target")
_MOMENTS = ("mean", "std")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes a report on the predictions in a file, and prints it; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m laplace.extensions.report",
        description="A report on predictions and their labels: are they calibrated, and what to do next?",
        epilog="The file has a head. Classification: a column per class, and 'label', the index of one of them. "
        "Regression: 'mean', 'std' (of the target, noise included) and 'y'.",
    )
    parser.add_argument("predictions", help="a CSV file")
    parser.add_argument("--ood", help="predictions for data of another kind, with the same columns but the label")
    parser.add_argument(
        "--out", default="report.html", help="file to write: .html, .png or .json (default: %(default)s)"
    )
    parser.add_argument("--name", default="model", help="what to call the model (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        report = _of_file(given.predictions, given.ood, given.name)
        report.save(given.out)
    except (InvalidData, InvalidArgument, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(report)  # noqa: T201
    return 0


def _of_file(path: str, ood: str | None, name: str) -> Report:
    names, values = _columns(path)
    strange_names, strange = (None, None) if ood is None else _columns(ood)
    labels = [column for column in names if column.lower() in _Y]
    if len(labels) > 1:
        raise InvalidData(f"{path}: {' and '.join(map(repr, labels))} both name the labels; leave one of them.")
    label = labels[0] if labels else None
    if label is None or len(values) == 0:
        raise InvalidData(
            f"{path}: rows of numbers under a head are needed, with a column {' or '.join(map(repr, _Y[:2]))} beside "
            f"one per class, or beside 'mean' and 'std'; this head is {', '.join(names[:8])}."
        )
    y, columns = values[:, names.index(label)], [column for column in names if column != label]
    places = [names.index(column) for column in columns]
    if strange_names is not None and [c for c in strange_names if c.lower() not in _Y] != columns:
        raise InvalidData(f"{ood}: the columns must be those of {path}: {', '.join(columns[:8])}.")
    if strange is not None and strange_names is not None:
        strange = strange[:, [strange_names.index(column) for column in columns]]
    if sorted(columns) == sorted(_MOMENTS):
        mean, std = (values[:, names.index(column)] for column in _MOMENTS)
        if bool((std <= 0).any()):
            raise InvalidData(f"{path}: 'std' holds numbers that are not positive.")
        outside = None if strange is None else strange[:, columns.index("std")].square()
        return of_gaussians(mean, std.square(), y, ood=outside, names=(f"not {name}", name))
    if not bool((y == y.round()).all()):
        raise InvalidData(f"{path}: labels are indices of the {len(columns)} columns of probabilities, from 0 on.")
    return of_probabilities(values[:, places], y.long(), ood=strange, classes=columns, names=(f"not {name}", name))


def _columns(path: str) -> tuple[list[str], Tensor]:
    """Names of the columns of a CSV file, and its numbers, `[N, K]`."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            head, *rows = [row for row in csv.reader(file) if row]
    except (OSError, ValueError, csv.Error) as error:
        raise InvalidData(f"{path}: {error or 'the file is empty'}") from error
    names = [printable(name.strip()) for name in head]
    require_distinct(f"{path}: the head", names)
    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise InvalidData(f"{path}: row {number} has {len(row)} values for {len(names)} columns.")
    try:
        return names, torch.tensor([[float(value) for value in row] for row in rows], dtype=wide_dtype())
    except ValueError as error:
        raise InvalidData(f"{path}: {error}; every value but those of the first row must be a number.") from error
