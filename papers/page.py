"""Writes docs/papers.md, the verdicts by script, and a page per paper: each claim, our number, theirs and the verdict.

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

**Which claims of the papers could we reproduce?**

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

This page and those of the papers are written by `papers/page.py` from the results of the full runs, which are in
`papers/results/`.

```{{toctree}}
:hidden:

{toctree}
```
"""

OF_A_PAPER = """---
nosearch: true
---

# The experiments of {paper}

**Which claims of {paper} could we reproduce?** How to read this: [the papers' experiments](../papers.md).
"""


def paper(report: Report) -> str:
    """Authors and year, without sections."""
    return report.paper.partition("),")[0].removesuffix(")") + ")"


def name_of(report: Report) -> str:
    """Name of the page of a script's paper: `"immer"`."""
    return report.paper.split()[0].lower()


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
        link = f"[{name}](papers/{name_of(report)}.md#{name})"
        cells = [report.paper, link, str(report.seeds), f"{report.minutes:.0f}"]
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


def pages(reports: list[Report]) -> dict[str, str]:
    """The page of every paper, by its name: all of its scripts."""
    found: dict[str, list[Report]] = {}
    for report in reports:
        found.setdefault(name_of(report), []).append(report)
    return {
        name: "\n\n".join([OF_A_PAPER.format(paper=paper(each[0])).rstrip(), *map(section, each)]) + "\n"
        for name, each in sorted(found.items())
    }


def page(reports: list[Report]) -> str:
    """The page that the others are found from: verdicts by script."""
    rows = [row for report in reports for row in report.claims]
    introduction = INTRODUCTION.format(
        table=summary(reports), n_claims=len(rows), by_chance=round((1 - LEVEL) * len(rows)),
        n_trivial=sum(row.verdict == "holds trivially" for row in rows),
        toctree="\n".join(f"papers/{name}" for name in pages(reports)),
    )  # fmt: skip
    return introduction


def main(output: Path = PAGE) -> None:
    """Writes the pages.

    Args:
        output: File of the first; those of the papers are in a folder of its name.
    """
    reports = [load_report(path) for path in sorted(RESULTS.glob("*.json"))]
    output.write_text(page(reports))
    folder = output.with_suffix("")
    folder.mkdir(exist_ok=True)
    for name, text in pages(reports).items():
        (folder / f"{name}.md").write_text(text)
    print(f"{len(reports)} scripts, {verdicts(row for report in reports for row in report.claims)}: {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the same: it takes no time")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page")
    main(parser.parse_args().output)
