"""Fits that die in the middle: cases, and a program that begins each in a process of its own and has it killed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from laplace import Laplace, ParametricLaplace
from laplace.curvature import NativeHessian
from tests import fresh

N_DATA, BATCH = 50, 8
N_BATCHES = 7


class Mortal(Dataset[tuple[Tensor, Tensor]]):
    """Data of which a read kills the process.

    Args:
        x: Inputs.
        y: Targets.
        reads: Number of reads that it survives; None for any.
    """

    def __init__(self, x: Tensor, y: Tensor, reads: int | None = None) -> None:
        self.x, self.y, self.reads = x, y, reads

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.reads is not None:
            if self.reads == 0:
                os._exit(9)
            self.reads -= 1
        return self.x[index], self.y[index]


@dataclass(frozen=True)
class Interrupted:
    """A fit that dies at a batch.

    Attributes:
        structure: Shape of the curvature.
        batch: Number of the batch that kills it, counted over all readings.
        wide: Whether layers are so wide that full curvature is summed by pairs, and Kronecker factors by few rows.
        shuffled: Whether the loader draws an order.
        options: Arguments of `Laplace`.
    """

    structure: str
    batch: int
    wide: bool = False
    shuffled: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A name that files can have."""
        marks = [mark for mark in ("wide", "shuffled") if getattr(self, mark)]
        return "-".join([self.structure, str(self.batch), *marks, *self.options])

    def build(self) -> ParametricLaplace:
        """A posterior that is not fitted."""
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        if self.wide:
            layers = nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5)
            model = nn.Sequential(*layers)
        return Laplace(model, "classification", "all", self.structure, **self.options)

    def loader(self, reads: int | None = None, *, seed: int = 3) -> DataLoader[Any]:
        """Its data, the same in every process.

        Args:
            reads: Number of data after which the process dies; None for never.
            seed: Of the order, where one is drawn.
        """
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(N_DATA, 16 if self.wide else 4, generator=generator)
        y = torch.randint(5 if self.wide else 3, (N_DATA,), generator=generator)
        order = torch.Generator().manual_seed(seed) if self.shuffled else None
        return DataLoader(Mortal(x, y, reads), BATCH, shuffle=self.shuffled, generator=order)

    def die(self, file: Path) -> None:
        """Fits, and ends the process at the batch."""
        readings, batches = divmod(self.batch, N_BATCHES)
        self.build().fit(self.loader(readings * N_DATA + batches * BATCH), resume=file, save_every=2)


_SAMPLED = {"backend_kwargs": {"stochastic": True}}

CASES = [
    *(
        Interrupted(name, 5)
        for name in ("full", "block", "kron", "diag", "ekfac", "lowrank", "lowrank_kron", "matrix_free")
    ),
    Interrupted("matrix_free", 5, options={"structure_kwargs": {"preconditioner": "kron", "dense_below": 0}}),
    *(Interrupted(name, 5, wide=True) for name in ("full", "block", "kron", "ekfac")),
    Interrupted("kron", 3, wide=True),  # while factors are held by rows
    *(Interrupted(name, N_BATCHES + 3) for name in ("ekfac", "lowrank", "lowrank_kron")),
    Interrupted("ekfac", N_BATCHES, wide=True),  # after what the first reading found, before a batch of the second
    Interrupted("ekfac", N_BATCHES + 3, wide=True, options=_SAMPLED),
    Interrupted("lowrank", 2 * N_BATCHES + 5, options={"structure_kwargs": {"rank": 0.9}}),
    Interrupted("lowrank_kron", N_BATCHES + 3, options=_SAMPLED),
    *(
        Interrupted("lowrank_kron", batch, wide=True, options={"structure_kwargs": {"rank": 3, "corrected": True}})
        for batch in (3, N_BATCHES + 3, 2 * N_BATCHES, 2 * N_BATCHES + 3)
    ),
    Interrupted("lowrank", N_BATCHES + 3, shuffled=True, options=_SAMPLED),
    Interrupted("kron", 5, shuffled=True, options=_SAMPLED),
    Interrupted("full", 5, options={"backend": NativeHessian}),
]


def left_behind(folder: Path, n_threads: int) -> None:
    """Files of all cases, each written by a process that died.

    Args:
        folder: Where they are to be.
        n_threads: Of PyTorch, as in the tests: with others sums have other bits.
    """
    program = f"from tests.fitting.interrupted import _die; _die({str(folder)!r}, {n_threads})"
    (done,) = fresh.run(program)
    assert not done.status, done.errors


def _die(folder: str, n_threads: int) -> None:
    torch.set_num_threads(1)  # threads that have run do not outlive a fork, and are waited for
    if not torch.cuda.is_available():  # with threads of a device, autograd does not outlive a fork
        CASES[0].build().fit(CASES[0].loader())  # what a first fit imports is imported once
    for case in CASES:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(n_threads)
            case.die(Path(folder) / case.name)
            os._exit(0)  # it should have died before
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != 9:
            raise SystemExit(f"{case.name} was not killed")
