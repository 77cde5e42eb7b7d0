"""A fit that is bound by the processor: two processes of one thread, each with half of the data, against one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed, nn

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
    two, one = _Workers(2), _Workers(1)
    share = two.fit() / one.fit()
    return Job(lambda _: two.fit(), one.fit, note=f"one thread each; processor time of a rank {share:.2f} × one")


class _Workers:
    """Processes of one group, which fit when they are told to, and end with this one.

    Args:
        size: Number of processes.
    """

    def __init__(self, size: int) -> None:
        self.store = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "benchmarks.several_processes", str(size), self.store.name]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank)], cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, bufsize=1,
            )
            for rank in range(size)
        ]  # fmt: skip
        self.fit()

    def fit(self) -> float:
        """All of them fit once; returns the most processor seconds of one, which no other work on the machine takes."""
        for process in self.processes:
            assert process.stdin is not None  # noqa: S101  (a pipe)
            process.stdin.write("fit\n")
        most = 0.0
        for process in self.processes:
            assert process.stdout is not None  # noqa: S101  (a pipe)
            n_data, _, taken = process.stdout.readline().partition(" ")
            if n_data != str(_N_DATA):
                raise RuntimeError(f"a process fitted {n_data!r} data of {_N_DATA}.")
            most = max(most, float(taken))
        return most


def _serve(size: int, store: str, rank: int) -> None:
    """Fits for every line that comes in, and says of how many data."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = models.mlp(784, 512, 512, 10)
    shard = models.data((784,), 10, _N_DATA, _BATCH_SIZE, torch.device("cpu"))[rank::size]
    for _ in sys.stdin:
        start = time.process_time()
        n_data = _n_fitted(model, shard, distributed.group.WORLD if size > 1 else None)
        print(n_data, time.process_time() - start, flush=True)
    distributed.destroy_process_group()


def _n_fitted(model: nn.Module, batches: models.Batches, group: distributed.ProcessGroup | None) -> float:
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")
    la.fit(batches, group=group)
    return la.n_data


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
