"""Measures every workload and prints it beside its target.

    python -m benchmarks [--quick] [--only NAME] [--json PATH] [--shared] [--peer PYTHON]

Candidate and reference run in turn, on the same data, with two threads in float32; one run of each comes first and is
not counted. A ratio is the median over the pairs, with the smallest and the largest beside it. Peak memory is that of
one first run in a process of its own, beyond what held interpreter, model and data.

Two threads need a quiet machine: each waits for the other. Where other work runs, `--shared` takes one thread and
counts its processor time, and leaves out what other processes do.

With `--peer`, the workloads of `benchmarks.peer` run by laplace-torch and by this library in turn instead.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import timing
from benchmarks.peer import run as peer
from benchmarks.timing import Case, Memory, Timing
from benchmarks.workloads import all_cases

THREADS = 2


@dataclass(frozen=True)
class Line:
    """A measured case.

    Attributes:
        name: Workload.
        value: What is compared with the target: a ratio, seconds, GiB or MiB.
        unit: Of value and target, as of `Case`.
        target: Largest value that meets it.
        note: Printed beside the result.
        timing: All times; None where memory alone counts.
        memory: Peak memory.
    """

    name: str
    value: float
    unit: str
    target: float
    note: str
    timing: Timing | None
    memory: Memory

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.value <= self.target

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        head = f"{self.name:<42} {self.value:7.3g} {self.target:7g} {self.unit:<9} {verdict:<6}"
        return f"{head} {self._times():<44} {self.memory.extra_mib:8.0f}  {self.note}"

    def _times(self) -> str:
        if self.timing is None:
            return ""
        spread = f"{self.timing.low:.3g} – {self.timing.high:.3g}"
        reference = self.timing.reference_seconds
        beside = "" if reference is None else f"{1e3 * reference:.1f}"
        return f"{spread:<15} {self.timing.best:8.3g} {1e3 * self.timing.seconds:9.1f} {beside:>9}"


HEADER = (
    f"{'workload':<42} {'median':>7} {'target':>7} {'':<9} {'':<6} {'range':<15} {'best':>8} {'ms':>9} {'ref., ms':>9} "
    f"{'peak MiB':>8}"
)


def machine(device: torch.device) -> str:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return (
        f"{platform.system()} {name}, {device}, torch {torch.__version__}, {torch.get_num_threads()} threads, float32"
    )


def measure(case: Case, device: torch.device, *, quick: bool, shared: bool) -> Line:
    """Measures the memory of one case in a process of its own, then its time in this one."""
    memory = timing.memory_in_subprocess(case.name, device)
    if case.unit in _MEMORY:
        value = _MEMORY[case.unit](memory) / 1024
        return Line(case.name, value, case.unit, case.target, _memory_note(case, memory), None, memory)
    job = build(case, device)
    if job.held is not None:
        kept = job.held(job.run(job.prepare()))
        return Line(case.name, kept / 2**20, case.unit, case.target, job.note, None, memory)
    clock = time.process_time if shared else time.perf_counter
    times = timing.time_job(job, device, repeats=3 if quick else 15, max_seconds=2 if quick else 12, clock=clock)
    return Line(case.name, times.median, case.unit, case.target, job.note, times, memory)


_MEMORY: dict[str, Callable[[Memory], float]] = {
    "GiB": lambda memory: memory.total_mib,
    "GiB added": lambda memory: memory.extra_mib,
}
"""MiB that are compared with a target, by its unit."""


def _memory_note(case: Case, memory: Memory) -> str:
    what = "the whole process" if case.unit == "GiB" else "beyond the loaded model"
    return what if memory.planned_mib is None else f"{what}; la.plan: {memory.planned_mib:.0f} MiB more"


def build(case: Case, device: torch.device) -> timing.Job:
    """The job of a case, with the same weights every time."""
    torch.manual_seed(0)
    return case.build(device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three pairs of each")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    parser.add_argument("--shared", action="store_true", help="one thread and processor time, on a machine in use")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peer", type=Path, help="Python of an environment that has laplace-torch, to compare with")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Runs the chosen cases and prints the table."""
    arguments = _arguments()
    if arguments.peer:
        peer.main(
            arguments.peer.absolute(),
            quick=arguments.quick,
            only=arguments.only,
            device=arguments.device,
            shared=arguments.shared,
            results=arguments.json,
        )
        return
    torch.set_num_threads(1 if arguments.shared else THREADS)
    device = torch.device(arguments.device)
    if arguments.memory_of:
        case = next(case for case in all_cases() if case.name == arguments.memory_of)
        print(json.dumps(asdict(timing.measure_memory(build(case, device), device))))
        return
    print(machine(device), HEADER, sep="\n\n", flush=True)
    lines: list[Line] = []
    for case in all_cases():
        if arguments.only in case.name and not (arguments.shared and case.in_other_processes):
            lines.append(measure(case, device, quick=arguments.quick, shared=arguments.shared))
            print(lines[-1], flush=True)
    print(f"\n{sum(line.met for line in lines)} of {len(lines)} targets met")
    if arguments.json is not None:
        results = [asdict(line) | {"met": line.met} for line in lines]
        arguments.json.write_text(json.dumps({"machine": machine(device), "lines": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
