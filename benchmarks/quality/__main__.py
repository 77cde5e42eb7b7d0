"""Trains, predicts and scores: every row of `rows.ROWS` by every column of `methods.columns`, on five splits.

    python -m benchmarks.quality [--quick] [--only TEXT] [--processes N] [--pretrained] [--answers] [--keep]
                                 [--atoms] [--rewards] [--volumes] [--first-seed N] [--json PATH] [--method FILE]

`--quick` takes one split and networks of a few epochs, to see that it runs. `--pretrained` adds what takes longest, the
fine-tuned transformer of `benchmarks.quality.freesolv` and heads of a text encoder (`texts`), `--answers` language
models that answer by choices and labels that are bought (`language`, `acquiring`), `--atoms` energies and forces of a
potential (`atoms`), `--volumes` areas in images (`volumes`), and `--rewards` the best of n answers by a learned reward
(`rewards`). With `--keep` the results are kept in results.json, in place of those of the same rows, and the pages are
written anew; `--json` writes them to a file of their own, such as those of other seeds, of which `--first-seed` is the
first. Every process has one thread. Afterwards come the checks of what else a posterior knows,
`benchmarks.quality.knows`.

`--method` measures a file with `fit(model, train, validation)`, which returns `predict(x)`, and prints its line below
those that are kept, and its negative log likelihood row by row (docs/quality.md); nothing is kept.

Nothing is chosen on test data, on shifted or on unseen inputs. The rule by which `la.calibrate` chooses was chosen on
other seeds, see `benchmarks.quality.rules`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import runpy
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality import (
    acquiring,
    atoms,
    freesolv,
    knows,
    language,
    page,
    rewards,
    summary,
    targets,
    texts,
    volumes,
)
from benchmarks.quality.data import Split
from benchmarks.quality.methods import Column, columns, own_columns, unseen_scores
from benchmarks.quality.rows import ROWS, Row
from benchmarks.quality.scores import scored
from benchmarks.quality.summary import rounded
from laplace.errors import LaplaceWarning

N_SPLITS = 5
QUICK = {"epochs": 3, "patience": 0}


def measured(row: Row, seed: int, method: Path | None = None) -> list[dict[str, Any]]:
    """The columns of one row on one split, or those of a user's file, as of `scored`."""
    split = row.split(seed)
    return scored(_columns(row, split, seed, method), split)


def _columns(row: Row, split: Split, seed: int, method: Path | None) -> Iterator[Column]:
    if method is None:
        return columns(row, split, seed)
    return own_columns(method.stem, runpy.run_path(str(method))["fit"], row, split, seed)


Found = tuple[list[dict[str, Any]], dict[str, Any]]
"""The columns of a row on one split, and its scores of unseen inputs."""


def _job(given: tuple[str, int, bool, Path | None]) -> tuple[str, int, float, Found]:
    name, seed, quick, method = given
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", LaplaceWarning)  # the evidence's columns are shown as they are, without advice
    start = time.process_time()
    row = ROWS[name]
    if quick:
        row = replace(row, options={**row.options, **QUICK}, posteriors=row.posteriors[:2])
    found = measured(row, seed, method), {} if method else unseen_scores(row, row.split(seed), seed)
    return name, seed, time.process_time() - start, found


def run(
    names: list[str], *, quick: bool, processes: int, first_seed: int = 0, method: Path | None = None
) -> list[dict[str, Any]]:
    """The rows of these names, with all columns on all splits; those whose data are not installed are left out."""
    sizes = {name: found for name in names if (found := _sizes(ROWS[name]))}
    names = list(sizes)
    jobs = [
        (name, seed, quick, method)
        for name in names
        for seed in range(first_seed, first_seed + (1 if quick else N_SPLITS))
    ]
    done: dict[str, dict[int, Found]] = {name: {} for name in names}
    seconds = dict.fromkeys(names, 0.0)
    if processes > 1:
        pool = multiprocessing.get_context("spawn").Pool(processes)
        # Processes find a function by the name of its module, which is another one where that is what was run.
        results = pool.imap_unordered(import_module("benchmarks.quality.__main__")._job, jobs)
    else:
        pool, results = None, map(_job, jobs)
    for name, seed, taken, found in results:
        done[name][seed] = found
        seconds[name] += taken
        print(f"{name}, split {seed}: {taken:.1f} s", flush=True)
    if pool is not None:
        pool.close()
        pool.join()
    return [
        {
            "name": name,
            "network": ROWS[name].network,
            "sizes": sizes[name],
            "seconds": seconds[name],
            "splits": [done[name][seed][0] for seed in sorted(done[name])],
            "unseen": [done[name][seed][1] for seed in sorted(done[name])],
        }
        for name in names
    ]


def _sizes(row: Row) -> list[int]:
    """Numbers of training, validation and test data; empty where a package is missing."""
    try:
        split = row.split(0)
    except ImportError as error:
        print(f"{row.name} is left out: {error}")
        return []
    return [len(part[0]) for part in (split.train, split.val, split.test)]


def _in_lines(found: dict[str, Any]) -> str:
    """Results as JSON with a line for every row and every method."""
    text = json.dumps(found, ensure_ascii=False)
    return text.replace('{"name"', '\n{"name"').replace('{"method"', '\n{"method"') + "\n"


def _optional(name: str, measure: Callable[..., dict[str, Any]], *, quick: bool) -> dict[str, Any]:
    """A row by its name; nothing where a package is missing."""
    try:
        return {name: measure(quick=quick)}
    except ImportError as error:
        print(f"{name} is left out: {error}")
        return {}


def with_own(name: str, rows: list[dict[str, Any]], kept: list[dict[str, Any]]) -> str:
    """The table of all methods with a user's own as the last line, and its negative log likelihood row by row."""
    rows = [row for row in rows if all(targets.column(split, name) for split in row["splits"])]
    classes = [row for row in rows if targets.is_classification(row)]
    if not rows:
        return f"{name} was measured on no row."
    names = {row["name"] for row in rows}
    found = summary.Summary.of(classes, name, ("",))
    tables = [summary.opening([row for row in kept if row["name"] in names], {name: found})] if found else []
    return "\n\n".join([*tables, page.compared(rows, "nll", columns={name: (name, "")})])


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one split, networks of a few epochs")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--processes", type=int, default=2, help="at a time, one thread each")
    parser.add_argument("--pretrained", action="store_true", help="also the fine-tuned transformer and heads of texts")
    parser.add_argument("--answers", action="store_true", help="also language models and labels that are bought")
    parser.add_argument("--atoms", action="store_true", help="also energies and forces of a potential")
    parser.add_argument("--rewards", action="store_true", help="also the best of n answers by a learned reward")
    parser.add_argument("--volumes", action="store_true", help="also areas in images")
    parser.add_argument("--keep", action="store_true", help="keep the results, and write the page")
    parser.add_argument("--first-seed", type=int, default=0, help="of the splits; that of the pages is 0")
    parser.add_argument("--json", type=Path, help="write the rows here, and check nothing else")
    parser.add_argument(
        "--method", type=Path, help="a file with fit(model, train, validation), which returns predict(x)"
    )
    given = parser.parse_args()
    if given.keep and (given.quick or given.first_seed or given.json or given.method):
        parser.error("results of --quick, of other seeds, of --json and of --method are not kept")
    found: dict[str, Any] = {
        "where": f"{platform.system()} {platform.machine()}, torch {torch.__version__}",
        "rows": run(
            [name for name in ROWS if given.only in name],
            quick=given.quick, processes=given.processes, first_seed=given.first_seed, method=given.method,
        ),
    }  # fmt: skip
    if given.method:
        print(with_own(given.method.stem, found["rows"], json.loads(page.RESULTS.read_text("utf-8"))["rows"]))
        return
    if given.json:
        found = rounded(found)
        given.json.write_text(_in_lines(found), "utf-8")
        print(summary.opening([row for row in found["rows"] if targets.is_classification(row)]))
        return
    more = {"freesolv": freesolv.run, "texts": texts.run} if given.pretrained else {}
    if given.answers:
        more |= {name: partial(language.run, name) for name in language.NAMES} | {"acquiring": acquiring.run}
    more |= {"atoms": atoms.run} if given.atoms else {}
    more |= {"rewards": rewards.run} if given.rewards else {}
    more |= {"volumes": volumes.run} if given.volumes else {}
    for name, measure in more.items():
        found |= _optional(name, measure, quick=given.quick)
    found = rounded(found)
    warnings.simplefilter("ignore", LaplaceWarning)
    torch.set_num_threads(1)
    told = knows.checked(given.only, quick=given.quick, keep=given.keep)
    if given.keep:
        found = merged(found)
        page.RESULTS.write_text(_in_lines(found), "utf-8")
        page.main()
    answered = [target for name in language.NAMES for target in language.targets(found.get(name), name)]
    for part in (acquiring, atoms, rewards, volumes):
        answered += part.targets(found.get(part.__name__.rpartition(".")[2]))
    for line in (*targets.lines(found), *told, *answered):
        print(line)


def merged(found: dict[str, Any]) -> dict[str, Any]:
    """The results with those of other rows that were kept before."""
    before = json.loads(page.RESULTS.read_text("utf-8")) if page.RESULTS.exists() else {"rows": []}
    rows = {row["name"]: row for row in (*before["rows"], *found["rows"])}
    return {**before, **found, "rows": [rows[name] for name in ROWS if name in rows]}


if __name__ == "__main__":
    main()
