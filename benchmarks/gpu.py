"""One command for one card: are its numbers the CPU's, how fast is it, and how much memory does it take?

    python -m benchmarks.gpu [--device cuda] [--quick] [--json PATH] [--only SECTION] [--processes N]

It needs PyTorch, NumPy, SciPy and scikit-learn, and for the language model `transformers` and `peft`; ten minutes do.

- *equality*: what `tests/other_device/cases.py` runs, in float32 and float64, beside the CPU. Given is the largest
  difference over the largest expected number, of the value that differs most.
- *speed*: fits by the batch, predictions and tuning in milliseconds, beside a forward pass and R, one forward pass and
  one backward pass for every output; operations that are dispatched, and reads that the host waits for.
- *memory*: the peak that a fit adds, beside what `la.plan` says before it.

With `--device cpu` the command runs as well: what it compares is then equal, and its times are those of a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models, work
from benchmarks.operations import Counted
from benchmarks.workloads import ENCODER, LENET, Setting, gpt2_with_adapters, mlp
from laplace import Laplace, ParametricLaplace

# Equality.

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Largest difference over the largest expected number."""
ITERATIVE = 1e-8
"""The same in float64 where conjugate gradients stop at a residual of this size."""
FLOOR = 1e-2
"""Stands in for smaller expected numbers: a difference between scores may be zero but for rounding."""


@dataclass(frozen=True)
class Difference:
    """A case on the device beside the CPU.

    Attributes:
        case: Of `tests/other_device/cases.py`.
        dtype: In which it ran.
        largest: Difference over the largest expected number.
        error: What ended it, or differs in kind.
        tolerance: Of the type.
    """

    case: str
    dtype: str
    largest: float
    error: str
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether the device gave the CPU's numbers."""
        return not self.error and self.largest <= self.tolerance

    def __str__(self) -> str:
        return f"{self.case:<55} {self.dtype:<14} {self.largest:9.1e}  {self.error[:200]}"


def compare(case: str, dtype: torch.dtype, device: str) -> Difference:
    """Runs a case on both."""
    from tests.other_device import cases

    run, default = (cases.CASES | cases.CARD_CASES)[case], torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # cuDNN's default, TF32, has 10 bits and is no float32.
        with warnings.catch_warnings(), torch.backends.cudnn.flags(allow_tf32=False):
            warnings.simplefilter("ignore")
            found, expected = (cases.outcome(run, place) for place in (device, "cpu"))
    finally:
        torch.set_default_dtype(default)
    error, largest = "", 0.0
    if isinstance(found, str) or isinstance(expected, str):
        error = " beside ".join(one if isinstance(one, str) else "numbers" for one in (found, expected))
    elif len(found) != len(expected):
        error = f"{len(found)} values, not {len(expected)}"
    else:
        for one, truth in zip(found, expected, strict=True):
            if isinstance(one, Tensor) and one.device.type != torch.device(device).type:
                error = f"a value lies on {one.device}"
            largest = max(largest, relative(torch.as_tensor(one).cpu(), torch.as_tensor(truth)))
    tolerance = max(TOLERANCE[dtype], ITERATIVE if "matrix_free" in case else 0.0)
    return Difference(case, str(dtype).removeprefix("torch."), largest, error, tolerance)


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected number; infinite where shapes or NaN differ."""
    found, expected = found.detach().double(), expected.detach().double()
    if found.shape != expected.shape or not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    expected, found = expected[expected.isfinite()], found[expected.isfinite()]
    if expected.numel() == 0:
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(FLOOR))


def equality(device: str, quick: bool, processes: int) -> Iterator[Difference]:
    """All cases, in processes that share the device."""
    from tests.other_device import cases

    names = list(cases.CASES | cases.CARD_CASES)[:: 8 if quick else 1]
    jobs = [(name, dtype, device) for dtype in TOLERANCE for name in names]
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(compare, *zip(*jobs, strict=True))


# Speed and memory.


@dataclass(frozen=True)
class Line:
    """A network with a posterior: what is measured, on batches of one size.

    Attributes:
        name: Network, weights and structure.
        setting: The network and its data.
        weights: `subset_of_weights`.
        structure: `hessian_structure`.
        reference: Whether R is measured beside; not of a thousand outputs.
    """

    name: str
    setting: Setting
    weights: str
    structure: str
    reference: bool = True


@dataclass
class Measured:
    """Of one line; times are medians in milliseconds."""

    name: str
    batch: int
    n_weights: int
    device: str = "cpu"
    ms: dict[str, float] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)
    peak_mib: float | None = None
    planned_mib: float | None = None
    error: str = ""

    def __str__(self) -> str:
        text = f"{self.name:<44} {self.batch:>4} " + "".join(f"{name} {value:.4g}  " for name, value in self.ms.items())
        counts = "  ".join(f"{name} {n}/{self.reads[name]}" for name, n in self.operations.items())
        memory = "" if self.peak_mib is None else f"  peak {self.peak_mib:.0f} MiB (plan {self.planned_mib or 0:.0f})"
        return f"{text}\n      operations/reads: {counts}{memory} {self.error[:300]}"


SMALL, MIDDLE, LARGE = mlp(64, 50, 50, 10), mlp(64, 256, 256, 10), mlp(784, 512, 512, 256, 10)
WRN = Setting(models.wide_resnet, (3, 32, 32), 512, 128)
RESNET = Setting(partial(models.resnet50, 1000), (3, 224, 224), 64, 32, 1000)
LINES = [
    Line("WRN-16-4, last layer, kron", WRN, "last_layer", "kron"),
    Line("MLP 64-256-256-10, last layer, full", MIDDLE, "last_layer", "full"),
    Line("MLP 64-256-256-10, last layer, kron", MIDDLE, "last_layer", "kron"),
    Line("LeNet, all, kron", LENET, "all", "kron"),
    Line("LeNet, all, diag", LENET, "all", "diag"),
    Line("MLP 784-512-512-256-10, all, kron", LARGE, "all", "kron"),
    Line("MLP 64-50-50-10, all, full", SMALL, "all", "full"),
    Line("encoder, all, kron", ENCODER, "all", "kron"),
    Line("WRN-16-4, all, kron", WRN, "all", "kron"),
    Line("WRN-16-4, all, diag", WRN, "all", "diag"),
    Line("LeNet, all, ekfac", LENET, "all", "ekfac"),
    Line("LeNet, all, lowrank", LENET, "all", "lowrank"),
    Line("ResNet-50, C=1000, last layer, kron", RESNET, "last_layer", "kron", reference=False),
    Line("ResNet-50, C=1000, all, kron, sampled", RESNET, "all", "kron", reference=False),
]


def measure(line: Line, device: torch.device, quick: bool) -> Measured:
    """A line, or what stopped it."""
    torch.manual_seed(0)
    model, batches = line.setting(device)
    if quick:
        batches = [(x[:8], y[:8]) for x, y in batches[:2]]
    n_weights = sum(p.numel() for p in model.parameters())
    result = Measured(line.name, len(batches[0][0]), n_weights, device.type)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _measure(line, model, batches, device, result)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
    return result


def _measure(line: Line, model: nn.Module, batches: models.Batches, device: torch.device, result: Measured) -> None:
    # Labels drawn from the model take one backward pass in place of one per class.
    options: dict[str, Any] = {"backend_kwargs": {"stochastic": True}} if "sampled" in line.name else {}
    make = partial(Laplace, model, "classification", line.weights, line.structure, **options)
    clock = partial(milliseconds, device)
    x = batches[0][0]

    def fit(n: int) -> ParametricLaplace:
        la = make()
        la.fit([batches[i % len(batches)] for i in range(n)])
        return la

    result.ms["forward"] = clock(work.forward(model, batches[:1]))
    if line.reference:
        result.ms["R"] = clock(work.per_output_gradients(model, batches[:1]), most=3)
    if device.type == "cuda":
        planned = make().plan(batches).peak_bytes
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        fit(2)
        result.peak_mib = (torch.cuda.max_memory_allocated(device) - held) / 2**20
        result.planned_mib = planned / 2**20
    few, many = (clock(partial(fit, n), most=3) for n in (3, 6))
    result.ms |= {"fit of 3": few, "fit per batch": (many - few) / 3}
    with counted(result, "fit of 5"):
        fit(5)
    with counted(result, "fit of 8"):
        la = fit(8)
    for counts in (result.operations, result.reads):
        counts["fit per batch"] = round((counts.pop("fit of 8") - counts.pop("fit of 5")) / 3)
    calls: dict[str, Callable[[], Any]] = {
        "probit": lambda: la(x),
        "mc": lambda: la(x, link_approx="mc", n_samples=100),
        "nn, 10": lambda: la(x, pred_type="nn", n_samples=10),
    }
    for name, call in calls.items():
        result.ms[name] = clock(call)
        with counted(result, name):
            call()
    first = make()
    first.load_state_dict(la.state_dict())
    result.ms["first evidence"] = clock(first.log_marginal_likelihood, most=1, warm=False)
    delta = torch.ones(1, device=device)
    la.log_marginal_likelihood(delta)
    result.ms["evidence"] = clock(lambda: la.log_marginal_likelihood(delta * 1.1))
    with counted(result, "evidence"):
        la.log_marginal_likelihood(delta * 1.2)
    with counted(result, "tuning, 100 steps"):
        la.optimize_prior_precision(n_steps=100)
    result.ms["tuning, 100 steps"] = clock(lambda: la.optimize_prior_precision(n_steps=100), most=1)
    if line.weights == "last_layer":
        unseen = [(-x, y) for x, y in batches]
        result.ms["calibrate"] = clock(lambda: la.calibrate(unseen), most=1)


class counted:  # noqa: N801
    """Counts what a block dispatches, under a name."""

    def __init__(self, result: Measured, name: str) -> None:
        self.result, self.name, self.mode = result, name, Counted(result.device)

    def __enter__(self) -> None:
        self.mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self.mode.__exit__(*error)
        self.result.operations[self.name], self.result.reads[self.name] = self.mode.operations, self.mode.reads


def milliseconds(device: torch.device, call: Callable[[], Any], most: int = 10, warm: bool = True) -> float:
    """Median of some calls until the device is done, after one that does not count; for at most two seconds."""
    times: list[float] = []
    start = time.perf_counter()
    if warm:
        call()
    while not times or (len(times) < most and time.perf_counter() - start < 2):
        _wait(device)
        begun = time.perf_counter()
        call()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def language_model(device: torch.device, quick: bool) -> Measured:
    """GPT-2 (124 million weights) with LoRA adapters, and the posterior that such a model gets by default."""
    result = Measured("GPT-2 with LoRA, lowrank_kron", 2 if quick else 16, 0, device.type)
    try:
        model = gpt2_with_adapters(device)
        result.n_weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, 50_000, (result.batch, 16 if quick else 128), generator=generator).to(device)
        batch = {"input_ids": tokens, "labels": torch.arange(result.batch, device=device) % 2}

        def fit(n: int) -> ParametricLaplace:
            la = Laplace(model, "classification", "all", "lowrank_kron")
            la.fit([batch] * n)
            return la

        def forward() -> None:
            with torch.no_grad():
                model(input_ids=tokens)

        clock = partial(milliseconds, device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result.ms["forward"] = clock(forward)
            few, many = (clock(partial(fit, n), most=1) for n in (1, 2))
            result.ms |= {"fit of 1": few, "fit per batch": many - few}
            la = fit(1)
            result.ms["probit"] = clock(lambda: la(batch))
            with counted(result, "probit"):
                la(batch)
            result.ms["evidence"] = clock(lambda: la.log_marginal_likelihood(torch.ones(1, device=device)))
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
    return result


def speed(device: torch.device, quick: bool) -> Iterator[Measured]:
    """All lines, each from an empty cache."""
    for line in LINES:
        if quick and line.setting is RESNET:
            continue
        yield measure(line, device, quick)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not quick:
        yield language_model(device, quick)


# The command.


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    about: dict[str, Any] = {"device": str(device), "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        about |= {"card": card.name, "memory_gib": round(card.total_memory / 2**30), "cuda": torch.version.cuda}
        about["cudnn"] = torch.backends.cudnn.version()
        about["tf32"] = {
            "matmul": torch.backends.cuda.matmul.allow_tf32,
            "cudnn": torch.backends.cudnn.allow_tf32,
        }
    return about


def main() -> None:
    """Runs the sections, prints what they find, and writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a part of the cases, tiny batches, no large network")
    parser.add_argument("--only", choices=["equality", "speed"], help="one section")
    parser.add_argument("--processes", type=int, default=4, help="that share the device while numbers are compared")
    parser.add_argument("--json", type=Path, help="where all numbers are written")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    found: dict[str, Any] = {"machine": machine(device), "equality": [], "speed": []}
    print(json.dumps(found["machine"]), flush=True)

    def save() -> None:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")

    if arguments.only != "speed":
        for difference in equality(arguments.device, arguments.quick, arguments.processes):
            found["equality"].append(asdict(difference) | {"equal": difference.equal})
            save()
            if not difference.equal:
                print(difference, flush=True)
        equal = sum(one["equal"] for one in found["equality"])
        print(f"{equal} of {len(found['equality'])} cases are equal", flush=True)
    if arguments.only != "equality":
        for measured in speed(device, arguments.quick):
            found["speed"].append(asdict(measured))
            save()
            print(measured, flush=True)


if __name__ == "__main__":
    main()
