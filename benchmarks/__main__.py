"""Measures every workload and prints it beside its target.

    python -m benchmarks [--quick] [--only NAME] [--json PATH]

Candidate and reference run in turn, on the same data, with two threads in float32; one run of each comes first and is
not counted. A ratio is the median over the pairs, with the smallest and the largest beside it. Peak memory is that of
one first run in a process of its own, beyond what held interpreter, model and data.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import all_layers, evidence, full_last_layer, last_layer, timing
from benchmarks.timing import Case, Memory, Timing

THREADS = 2


@dataclass(frozen=True)
class Line:
    """A measured case.

    Attributes:
        name: Workload.
        value: What is compared with the target: a ratio, seconds or GiB.
        unit: Of value and target.
        target: Largest value that meets it.
        note: Printed beside the result.
        timing: All times.
        memory: Peak memory.
    """

    name: str
    value: float
    unit: str
    target: float
    note: str
    timing: Timing
    memory: Memory

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.value <= self.target

    def __str__(self) -> str:
        low, high = (f"{t:.3g}" for t in (self.timing.low, self.timing.high))
        spread = "" if self.unit == "GiB" else f"({low}–{high})"
        reference = self.timing.reference_seconds
        beside = "" if reference is None else f"{1e3 * reference:9.1f}"
        return (
            f"{self.name:<44} {self.value:8.3g} {spread:<13} {self.target:5g} {self.unit:<9} "
            f"{'met' if self.met else 'MISSED':<6} {1e3 * self.timing.seconds:9.1f} {beside:>9} "
            f"{self.memory.extra_mib:8.0f}  {self.note}"
        )


HEADER = (
    f"{'workload':<44} {'median':>8} {'(range)':<13} {'target':>5} {'':<8} {'':<6} {'ms':>9} {'ref ms':>9} "
    f"{'peak MiB':>8}"
)


def all_cases() -> list[Case]:
    """Every line of the table, in order."""
    return [*last_layer.cases(), *full_last_layer.cases(), *all_layers.cases(), *evidence.cases()]


def machine(device: torch.device) -> str:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return (
        f"{platform.system()} {name}, {device}, torch {torch.__version__}, {torch.get_num_threads()} threads, float32"
    )


def measure(case: Case, device: torch.device, *, quick: bool) -> Line:
    """Measures the memory of one case in a process of its own, then its time in this one."""
    memory = timing.memory_in_subprocess(case.name, device)
    job = build(case, device)
    times = timing.time_job(job, device, repeats=3 if quick else 15, max_seconds=2 if quick else 12)
    value = memory.total_mib / 1024 if case.unit == "GiB" else times.median
    return Line(case.name, value, case.unit, case.target, job.note, times, memory)


def build(case: Case, device: torch.device) -> timing.Job:
    """The job of a case, with the same weights every time."""
    torch.manual_seed(0)
    return case.build(device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three pairs of each")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Runs the chosen cases and prints the table."""
    arguments = _arguments()
    torch.set_num_threads(THREADS)
    device = torch.device(arguments.device)
    if arguments.memory_of:
        case = next(case for case in all_cases() if case.name == arguments.memory_of)
        print(json.dumps(asdict(timing.measure_memory(build(case, device), device))))
        return
    print(machine(device), HEADER, sep="\n\n", flush=True)
    lines: list[Line] = []
    for case in all_cases():
        if arguments.only in case.name:
            lines.append(measure(case, device, quick=arguments.quick))
            print(lines[-1], flush=True)
    print(f"\n{sum(line.met for line in lines)} of {len(lines)} targets met")
    if arguments.json is not None:
        results = [asdict(line) | {"met": line.met} for line in lines]
        arguments.json.write_text(json.dumps({"machine": machine(device), "lines": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
