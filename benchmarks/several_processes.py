"""A fit that is bound by the processor: two processes of one thread, each with half of the data, against one."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed

from benchmarks import models
from benchmarks.timing import Case, Job
from laplace import Laplace

_N_DATA, _BATCH_SIZE = 8192, 256


def cases() -> list[Case]:
    """The line of the table."""
    if not distributed.is_available():
        return []
    return [
        Case(
            "all layers, MLP, kron fit, two processes", 1 / 1.7, "× one", lambda _: _fit_job(), in_other_processes=True
        )
    ]


def _fit_job() -> Job:
    """On the CPU, whatever the device of other lines: the processes there would share one."""
    return Job(_Workers(2).fit, _Workers(1).fit, note="one thread each")


class _Workers:
    """Processes of one group, which wait for work.

    Args:
        size: Number of processes.
    """

    def __init__(self, size: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.store = tempfile.TemporaryDirectory()
        self.ends: list[Connection] = []
        for rank in range(size):
            end, other = spawn.Pipe()
            spawn.Process(target=_work, args=(other, rank, size, self.store.name), daemon=True).start()
            other.close()
            self.ends.append(end)
        self._answers()

    def fit(self, *_: object) -> None:
        """All of them fit once."""
        for end in self.ends:
            end.send(None)
        self._answers()

    def _answers(self) -> None:
        """Waits until all of them are done."""
        for end in self.ends:
            n_data = end.recv()
            if n_data != _N_DATA:
                raise RuntimeError(f"a process fitted {n_data} data of {_N_DATA}.")


def _work(end: Connection, rank: int, size: int, store: str) -> None:
    """Fits whenever it is told to, and says of how many data."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{Path(store) / 'store'}", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = models.mlp(784, 512, 512, 10)
    shard = models.data((784,), 10, _N_DATA, _BATCH_SIZE, torch.device("cpu"))[rank::size]
    fit = _fitter(model, shard, distributed.group.WORLD if size > 1 else None)
    end.send(fit())  # a first fit is not counted
    try:
        while True:
            end.recv()
            end.send(fit())
    except EOFError:  # the parent has ended
        distributed.destroy_process_group()


def _fitter(
    model: torch.nn.Module, batches: models.Batches, group: distributed.ProcessGroup | None
) -> Callable[[], int | float]:
    def fit() -> int | float:
        la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")
        la.fit(batches, group=group)
        return la.n_data

    return fit
