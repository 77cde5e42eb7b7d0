"""The section on a GPU of benchmarks/results.md, from the numbers that `python -m benchmarks.gpu --json` wrote.

python -m benchmarks.gpu_page [benchmarks/gpu.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "gpu.json", ROOT / "benchmarks" / "results.md"
HEADING = "## On a GPU"

_TIMES = {
    "forward": "forward",
    "R": "R",
    "fit per batch": "fit per batch",
    "probit": "probit",
    "mc": "mc",
    "nn, 10": "nn, 10 samples",
    "tuning, 100 steps": "100 steps",
}
"""Columns of the table, by what was measured."""


def section(found: dict[str, Any]) -> str:
    """The section in Markdown, from its heading to the next one."""
    about, cases, lines = found["machine"], found["equality"], found["speed"]
    where = f"One {about['card']}, CUDA {about['cuda']}" if "card" in about else "No card: these are figures of a CPU"
    head = f"{where}, torch {about['torch']}. `python -m benchmarks.gpu` takes all figures of this section anew."
    parts = [HEADING, "", " ".join([head, *([about["note"]] if "note" in about else [])]), ""]
    parts += [_equality(cases), "", *_speed(lines), "", *_memory(lines)]
    return "\n".join(parts).rstrip() + "\n\n"


def _equality(cases: list[dict[str, Any]]) -> str:
    equal = [case for case in cases if case["equal"]]
    said = (
        f"**Equality.** {len(equal)} of {len(cases)} cases have the CPU's numbers: structures, choices of weights and "
        "likelihoods by pairs, recurrent networks, convolutions, attention, Monte Carlo, tuning, calibration, states. "
        "The largest difference, over the largest expected number, is then at most 1e-5 in float32 (without TF32) and "
        "1e-10 in float64 (1e-8 for `matrix_free`, which iterates)."
    )
    others = [f"{case['case']} in {case['dtype']} ({_why(case)})" for case in cases if not case["equal"]]
    return said if not others else f"{said} The others: {'; '.join(others)}."


def _why(case: dict[str, Any]) -> str:
    return case["error"] or f"{case['largest']:.0e}"


def _speed(lines: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of a batch, and what is dispatched for it."""
    head = ["network, weights, structure", "batch", *_TIMES.values(), "operations", "waits"]
    rows = [
        [line["name"], str(line["batch"]), *(_number(line["ms"].get(name)) for name in _TIMES)]
        + [str(line[kind].get("fit per batch", "")) for kind in ("operations", "reads")]
        for line in lines
    ]
    return [
        "**Speed**, in milliseconds per batch. R is one forward pass and one backward pass per output. Operations",
        "are those of one more batch of a fit, views left out; waits are the numbers that the host reads meanwhile.",
        "",
        *_table(head, rows),
    ]


def _memory(lines: list[dict[str, Any]]) -> list[str]:
    rows = [
        [line["name"], f"{line['peak_mib']:.0f}", f"{line['planned_mib']:.0f}"]
        for line in lines
        if line["peak_mib"] is not None
    ]
    if not rows:
        return []
    return ["**Memory** that a fit adds at its peak, in MiB.", "", *_table(["fit", "measured", "`la.plan`"], rows)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    marks = ["---", *["--:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in [head, marks, *rows]]


def rewritten(page: str, found: dict[str, Any]) -> str:
    """A page with its section made anew."""
    before, _, after = page.partition(HEADING)
    _, mark, rest = after.partition("\n## ")
    return f"{before}{section(found)}{mark.removeprefix(chr(10))}{rest}"


def main() -> None:
    """Rewrites the section in its page."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    PAGE.write_text(rewritten(PAGE.read_text(), json.loads(results.read_text())))


if __name__ == "__main__":
    main()
