"""Measures what a posterior costs, in passes of the network and in bytes, and writes the tables of docs/cost.md.

    python -m benchmarks.cost_table

One thread, processor time, so that other work on the machine counts little; less than two minutes of it. Fits and
predictions are ratios to a forward pass over the same data, in turn with it; what a factorisation takes is the first
prediction of one datum less a later one.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks import models, work
from benchmarks.timing import Job, Timing, time_job
from laplace import ParametricLaplace

PAGE = Path(__file__).parents[1] / "docs" / "cost.md"
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"
CPU = torch.device("cpu")

FACTORS = (256, 512, 1024, 2048)
"""Widths of Kronecker factors."""

CLASSES = (2, 5, 10, 20)
"""Of last layers with 256 features."""


@dataclass(frozen=True)
class Setting:
    """A network with its data.

    Attributes:
        name: For the table.
        make: Makes the network.
        inputs: Shape of one input.
        n_classes: C.
        n_data: N; the batches have 128.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    n_classes: int
    n_data: int

    def build(self) -> tuple[nn.Module, models.Batches]:
        """The network, with the same weights every time, and its data."""
        torch.manual_seed(0)
        return self.make(), models.data(self.inputs, self.n_classes, self.n_data, 128, CPU)


LENET = Setting("LeNet, 61,706 weights", models.lenet, (1, 28, 28), 10, 512)
MLP = Setting("MLP 784-1024-512-10, 1.3 million weights", partial(models.mlp, 784, 1024, 512, 10), (784,), 10, 512)
SMALL = Setting("MLP 64-32-32-10, 3,466 weights", partial(models.mlp, 64, 32, 32, 10), (64,), 10, 512)

CHOICES: tuple[tuple[Setting, tuple[tuple[str, str], ...]], ...] = (
    (LENET, (
        ("last_layer", "kron"), ("last_layer", "full"), ("all", "diag"), ("all", "kron"), ("all", "ekfac"),
        ("all", "lowrank_kron"), ("all", "lowrank"),
    )),
    (MLP, (("last_layer", "kron"), ("all", "diag"), ("all", "kron"), ("all", "lowrank_kron"))),
    (SMALL, (("all", "kron"), ("all", "block"), ("all", "full"))),
)  # fmt: skip


HEADER = ("weights, structure", "fit ÷ forward", "factorise, once", "predict ÷ forward", "state")


@dataclass(frozen=True)
class Line:
    """What one choice takes.

    Attributes:
        weights: Which are random.
        structure: Of their curvature.
        fit: Of all data, in forward passes over them.
        factorisation: Seconds, once per fit.
        predict: Probit predictions of all data, in forward passes.
        state: Bytes of `la.state_dict()`.
        forward: Seconds of one forward pass over all data.
    """

    weights: str
    structure: str
    fit: float
    factorisation: float
    predict: float
    state: int
    forward: float

    def cells(self) -> list[str]:
        """Of the table's row."""
        once = f"{1e3 * self.factorisation:,.0f} ms"
        return [
            f"`{self.weights}`, `{self.structure}`",
            _ratio(self.fit),
            once,
            _ratio(self.predict),
            _size(self.state),
        ]


def measured(setting: Setting, weights: str, structure: str) -> Line:
    """Times a fit, its factorisation and predictions of all data."""
    model, batches = setting.build()
    fit = partial(work.fitted, model, batches, weights, structure)
    forward = work.forward(model, batches)
    fits = _timed(Job(lambda _: fit(), forward))
    la = fit()
    first, later = (_seconds(partial(la, batches[0][0][:1])) for _ in range(2))
    predictions = _timed(Job(lambda _: work.predict(la, batches), forward))
    held, alone = work.held_bytes(la.state_dict()), fits.reference_seconds or 0.0
    return Line(weights, structure, fits.median, max(first - later, 0.0), predictions.median, held, alone)


def eigendecomposition(width: int) -> float:
    """Seconds for one symmetric matrix in float64, as Kronecker factors are factorised."""
    torch.manual_seed(0)
    rows = torch.randn(width, width, dtype=torch.float64)
    matrix = rows @ rows.T / width
    return min(_seconds(partial(torch.linalg.eigh, matrix)) for _ in range(3))


def page(settings: Iterable[tuple[Setting, Sequence[tuple[str, str]]]] = CHOICES) -> Iterator[str]:
    """The measured part of docs/cost.md, piece by piece."""
    yield f"Measured on one core of an {processor()} (torch {torch.__version__}, float32, one thread)."
    for setting, choices in settings:
        lines = [measured(setting, *choice) for choice in choices]
        forward = 1e3 * statistics.median(line.forward for line in lines)
        size = f"{setting.n_classes} classes, {setting.n_data} data"
        yield f"**{setting.name}**: {size}; a forward pass takes {forward:.1f} ms"
        yield table(HEADER, [line.cells() for line in lines])
    yield "**Eigendecomposition of one Kronecker factor**, n × n, in float64"
    yield table(("n", "seconds"), [[f"{width:,}", f"{eigendecomposition(width):.3f}"] for width in FACTORS])
    yield "**A last layer with 256 features and C classes**, 512 data"
    yield table(("C", "weights", "`full`, fit and once", "`full`, state", "`kron`, fit and once", "`kron`, state"),
                [_of_classes(n_classes) for n_classes in CLASSES])  # fmt: skip


def _of_classes(n_classes: int) -> list[str]:
    setting = Setting("", partial(models.mlp, 64, 256, n_classes), (64,), n_classes, 512)
    model, batches = setting.build()
    cells = [str(n_classes), f"{257 * n_classes:,}"]
    for structure in ("full", "kron"):
        prepare = partial(_fitted_and_factorised, model, batches, structure)
        seconds = min(_seconds(prepare) for _ in range(3))
        cells += [f"{1e3 * seconds:,.0f} ms", _size(work.held_bytes(prepare().state_dict()))]
    return cells


def _fitted_and_factorised(model: nn.Module, batches: models.Batches, structure: str) -> ParametricLaplace:
    la = work.fitted(model, batches, "last_layer", structure)
    la(batches[0][0][:1])
    return la


def _timed(job: Job) -> Timing:
    return time_job(job, CPU, repeats=5, max_seconds=2, clock=time.process_time)


def _seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def processor() -> str:
    """Name of the processor, where Linux says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def _ratio(value: float) -> str:
    return f"{value:.2g} ×" if value < 10 else f"{value:,.0f} ×"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**10:,.0f} KiB" if n_bytes < 2**20 else f"{n_bytes / 2**20:,.1f} MiB"


def main() -> None:
    """Measures, and replaces the tables of the page."""
    torch.set_num_threads(1)
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    pieces: list[str] = []
    for piece in page():
        print(piece, "\n", flush=True)
        pieces.append(piece)
    after = rest.partition(END)[2]
    PAGE.write_text("\n\n".join([before + BEGIN, *pieces, END]) + after, "utf-8")


if __name__ == "__main__":
    main()
