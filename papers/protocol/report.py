"""The results of a script: printed, and kept in `results/<name>.json`, from which `page.py` writes docs/papers.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from protocol.claims import Claim, check
from protocol.options import Options
from protocol.records import Records

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Table:
    """Means and standard errors over seeds.

    Attributes:
        title: What it shows, with the table or figure of the paper.
        columns: The first names the rows.
        rows: Cells as they are printed.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


@dataclass(frozen=True)
class Row:
    """A claim beside its verdict, its cause and the measurement behind that, as docs/papers.md shows it."""

    item: str
    text: str
    ours: str
    theirs: str
    verdict: str
    note: str
    cause: str = ""
    measured: str = ""


@dataclass(frozen=True)
class Report:
    """Everything of a script that is kept.

    Attributes:
        script: Its file, from the root of the repository.
        paper: Whose claims are checked, e.g. "Daxberger et al. (2021)".
        protocol: What is the paper's and what differs, in a few sentences.
        seeds: How many.
        minutes: Of processor time on one core, all seeds.
        tables: Means and standard errors.
        claims: With their verdicts.
        missing: Items of the paper that are not reproduced, and why.
    """

    script: str
    paper: str
    protocol: str
    seeds: int
    minutes: float
    tables: tuple[Table, ...]
    claims: tuple[Row, ...]
    missing: tuple[tuple[str, str], ...] = ()


def table(
    records: Records,
    condition: str,
    title: str,
    measures: Sequence[str] | None = None,
    theirs: dict[str, dict[str, str]] | None = None,
) -> Table:
    """Methods × measures of one condition, the paper's numbers in brackets behind ours.

    Args:
        records: Of all seeds.
        condition: Of the numbers.
        title: Of the table.
        measures: Its columns; None for all.
        theirs: The paper's numbers by method and measure.
    """
    columns = tuple(measures or records.measures(condition))
    theirs = theirs or {}
    rows = []
    for method in records.methods(condition):
        cells = [method]
        for measure in columns:
            if (condition, method, measure) not in records:
                cells.append("–")
                continue
            paper, ours = theirs.get(method, {}).get(measure), records.estimate(condition, method, measure)
            few = f", {ours.n_seeds} seeds" if ours.n_seeds < len(records.seeds) else ""
            cells.append(f"{ours}{few}" + (f" ({paper})" if paper else ""))
        rows.append(tuple(cells))
    return Table(title, ("method", *columns), tuple(rows))


def finish(
    options: Options,
    records: Records,
    *,
    script: str,
    paper: str,
    protocol: str,
    tables: Sequence[Table],
    claims: Sequence[Claim],
    missing: Sequence[tuple[str, str]] = (),
) -> Report:
    """Prints tables and verdicts; a full run on the data that are always there is kept in `results/`.

    Args:
        options: Of the command line.
        records: Of all seeds.
        script: The file's stem.
        paper: Whose claims are checked.
        protocol: What is the paper's and what differs.
        tables: To print and keep.
        claims: To check.
        missing: Items that are not reproduced, and why.
    """
    checked = [check(claim, records) for claim in claims]
    rows = tuple(
        Row(c.claim.item, c.claim.text, str(c.ours), c.claim.theirs, c.verdict, c.note, c.cause, c.measured)
        for c in checked
    )
    for each in tables:
        print(f"\n{each.title}\n{each.markdown()}")
    print()
    for row in rows:
        print(f"{row.verdict:<16}{row.cause:<9}{row.item}: {row.text}: {row.ours} {row.measured}")
    report = Report(
        f"papers/{script}.py", paper, protocol, len(records.seeds), round(records.minutes, 1),
        tuple(tables), rows, tuple(missing),
    )  # fmt: skip
    if not options.small and options.data is None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{script}.json").write_text(json.dumps(asdict(report), indent=1, ensure_ascii=False) + "\n")
    return report


def load_report(path: Path) -> Report:
    """A report from its file."""
    stored = json.loads(path.read_text())
    stored["tables"] = tuple(
        Table(each["title"], tuple(each["columns"]), tuple(tuple(row) for row in each["rows"]))
        for each in stored["tables"]
    )
    stored["claims"] = tuple(Row(**row) for row in stored["claims"])
    stored["missing"] = tuple((item, why) for item, why in stored["missing"])
    return Report(**stored)
