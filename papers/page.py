"""Writes docs/papers.md: every claim of the papers that an experiment checked, our number, theirs and the verdict.

It reads what the full runs of the other scripts keep in `results/`.

    python papers/page.py
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from protocol.report import RESULTS, Report, Row, load_report

PAGE = Path(__file__).parents[1] / "docs" / "papers.md"

INTRODUCTION = """# The papers' experiments

What the papers claim, checked on data that need no download: scikit-learn's, generated ones, and images that are
rotated, noisy or of other classes. Every script takes the real data set from disk (`--data`).

A claim is a number per seed that is positive where the claim holds: most often a difference of two methods on the same
data and networks. The seeds are those of data, networks and samples; nothing was chosen on the seeds that are reported.
"Ours" is the number's mean with its standard error over seeds. The verdict is a one-sided t test at 95 %: **holds**,
**fails** (the opposite is significant), or undecided. "Theirs" are the papers' numbers.

This page is written by `papers/page.py` from the results of the full runs, which are in
`papers/results/`.
"""


def verdicts(rows: Iterable[Row]) -> str:
    """How many claims hold, fail and are undecided."""
    counts = Counter(row.verdict for row in rows)
    return f"{counts['holds']} hold, {counts['fails']} fail, {counts['undecided']} undecided"


def summary(reports: list[Report]) -> str:
    """One line per script."""
    lines = ["| script | paper | seeds | minutes on one core | verdicts |", "|---|---|---|---|---|"]
    for report in reports:
        name = Path(report.script).stem
        cells = (
            f"[{name}](#{name})",
            report.paper,
            str(report.seeds),
            f"{report.minutes:.0f}",
            verdicts(report.claims),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def claims(report: Report) -> str:
    """The claims of a script as a table, with notes below it."""
    lines = ["| item | claim | ours | theirs | verdict |", "|---|---|---|---|---|"]
    notes = []
    for row in report.claims:
        mark = ""
        if row.note:
            if row.note not in notes:
                notes.append(row.note)
            mark = f" ({notes.index(row.note) + 1})"
        verdict = row.verdict if row.verdict == "undecided" else f"**{row.verdict}**"
        lines.append(
            f"| {row.item} | {row.text} | {row.ours} | {row.theirs or '–'} | {verdict}{mark} |".replace("\n", " ")
        )
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
    return "\n\n".join([INTRODUCTION.rstrip(), summary(reports), *(section(report) for report in reports)]) + "\n"


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
