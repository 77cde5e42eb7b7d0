"""Writes docs/papers.md: every claim of the papers that an experiment checked, our number, theirs and the verdict.

It reads what the full runs of the other scripts keep in `results/`.

    python papers/page.py
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from protocol.claims import LEVEL
from protocol.report import RESULTS, Report, Row, Table, load_report

PAGE = Path(__file__).parents[1] / "docs" / "papers.md"

CAUSES = ("data", "premise", "baseline", "real")
INTRODUCTION = """# The papers' experiments

{table}

What the papers claim, checked on data that need no download: characters in the fonts of matplotlib, moved, turned,
thickened and noisy, scikit-learn's data sets, and generated ones. Every script takes the real data set from disk
(`--data`).

A claim is a number per seed that is positive where the claim holds: most often a difference of two methods on the same
data and networks. The seeds are those of data, networks and samples; nothing was chosen on the seeds that are reported.
"Ours" is the number's mean with its standard error over seeds. "Theirs" are the papers' numbers. The verdict is a
one-sided t test at 95 %: **holds**, **fails** (the opposite is significant), or undecided. Of {n_claims} claims, were
there no difference in any, {by_chance} would fail by chance, and as many hold.

- **Holds trivially**: the claim would hold of any posterior that is wide enough, and the test NLL of this one is more
  than 0.02 above MAP's. There are {n_trivial}, which do not count as holding.
- **Premise absent**: the claim is about mending an over-confident network, and this one is not: its confidence is not
  significantly more than 0.02 above its accuracy, or its training loss not above 0.02 nats.

What fails or is undecided has one of four causes, with the measurement behind it:

- **data**: too few seeds, or data unlike the paper's; of what is undecided, how many seeds would decide it;
- **premise**: what the paper supposes is not so here;
- **baseline**: the method that it is compared with is better or worse than the paper's;
- **real**: the claim is not true here.

This page is written by `papers/page.py` from the results of the full runs, which are in `papers/results/`.
"""


def verdicts(rows: Iterable[Row]) -> str:
    """How many claims hold, fail and are undecided."""
    counts = Counter(row.verdict for row in rows)
    named = [("holds", "hold"), ("holds trivially", "hold trivially"), ("fails", "fail"), ("undecided", "undecided"),
             ("premise absent", "premise absent")]  # fmt: skip
    return ", ".join(f"{counts[verdict]} {name}" for verdict, name in named if counts[verdict])


def counted(rows: Iterable[Row]) -> list[str]:
    """The cells of the table: claims, and how many of each verdict and cause."""
    rows = list(rows)
    of_verdict = Counter(row.verdict for row in rows)
    of_cause = Counter(row.cause for row in rows if row.verdict == "fails")
    fails = ", ".join(f"{cause} {of_cause[cause]}" for cause in CAUSES if of_cause[cause])
    return [
        str(len(rows)), str(of_verdict["holds"]), str(of_verdict["holds trivially"]),
        f"{of_verdict['fails']}" + (f": {fails}" if fails else ""), str(of_verdict["undecided"]),
        str(of_verdict["premise absent"]),
    ]  # fmt: skip


def summary(reports: list[Report]) -> str:
    """One line per script, and one of all."""
    columns = ("paper", "script", "seeds", "minutes on one core", "claims", "hold", "hold trivially", "fail, by cause",
               "undecided", "premise absent")  # fmt: skip
    rows: list[list[str]] = []
    for report in sorted(reports, key=lambda each: (each.paper, each.script)):
        name = Path(report.script).stem
        cells = [report.paper, f"[{name}](#{name})", str(report.seeds), f"{report.minutes:.0f}"]
        rows.append([*cells, *counted(report.claims)])
    every_claim = [row for report in reports for row in report.claims]
    rows.append(["all", "", "", f"{sum(report.minutes for report in reports):.0f}", *counted(every_claim)])
    return Table("", columns, tuple(tuple(row) for row in rows)).markdown()


def claims(report: Report) -> str:
    """The claims of a script as a table, with notes below it."""
    lines = ["| item | claim | ours | theirs | verdict | cause |", "|---|---|---|---|---|---|"]
    notes = []
    for row in report.claims:
        mark = ""
        if row.note and row.verdict != "holds":
            if row.note not in notes:
                notes.append(row.note)
            mark = f" ({notes.index(row.note) + 1})"
        verdict = row.verdict if row.verdict in ("undecided", "premise absent") else f"**{row.verdict}**"
        cause = ": ".join(each for each in (row.cause, row.measured) if each)
        cells = (row.item, row.text, row.ours, row.theirs or "–", verdict + mark, cause)
        lines.append(("| " + " | ".join(cells) + " |").replace("\n", " "))
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join(lines) + ("\n\n" + "\n".join(numbered) if notes else "")


def section(report: Report) -> str:
    """Everything of a script."""
    parts = [f"## {Path(report.script).stem}", f"{report.paper}. `{report.script}`", report.protocol]
    parts += [f"**{table.title}**\n\n{table.markdown()}" for table in report.tables]
    if report.claims:
        parts.append(f"Claims: {verdicts(report.claims)}.\n\n{claims(report)}")
    if report.missing:
        parts.append("Not reproduced:\n\n" + "\n".join(f"- {item}: {why}" for item, why in report.missing))
    return "\n\n".join(parts)


def page(reports: list[Report]) -> str:
    """The whole page."""
    rows = [row for report in reports for row in report.claims]
    introduction = INTRODUCTION.format(
        table=summary(reports), n_claims=len(rows), by_chance=round((1 - LEVEL) * len(rows)),
        n_trivial=sum(row.verdict == "holds trivially" for row in rows),
    )  # fmt: skip
    return "\n\n".join([introduction.rstrip(), *(section(report) for report in reports)]) + "\n"


def main(output: Path = PAGE) -> None:
    """Writes the page.

    Args:
        output: Its file.
    """
    reports = [load_report(path) for path in sorted(RESULTS.glob("*.json"))]
    output.write_text(page(reports))
    print(f"{len(reports)} scripts, {verdicts(row for report in reports for row in report.claims)}: {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the same: it takes no time")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page")
    main(parser.parse_args().output)
