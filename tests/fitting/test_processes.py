"""Fits in a process group: every rank sees its own data, which is said."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace import MixtureLaplace, OnlineLaplace
from laplace.errors import ApproximationWarning
from laplace.training.continual import TaskFit
from tests import grid

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without torch.distributed")

SHARD = r"one of 2 in a group.*DistributedSampler.*all the data, or fit in one process"


@pytest.fixture
def group() -> Iterator[Callable[[int], None]]:
    """Makes this process one of a group of so many that are not there; nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(ranks: int) -> None:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    yield start
    distributed.destroy_process_group()


@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_a_fit_in_one_of_several_processes_says_what_it_is_of(
    weights: str, structure: str, group: Callable[[int], None]
) -> None:
    la = grid.fitted(weights, structure)
    group(2)
    for _ in range(2):
        with pytest.warns(ApproximationWarning, match=SHARD) as caught:
            la.fit(grid.batches())
        assert [w.filename for w in caught] == [__file__]
    la(grid.data()[0])
    la.log_marginal_likelihood()


FITS: dict[str, Callable[[], Any]] = {
    "gp": lambda: grid.make("all", "gp", n_subset=5).fit(grid.batches()),
    "subset": lambda: grid.make("all", "kron").fit(grid.batches(), subset=7),
    "mixture": lambda: MixtureLaplace([grid.network()], "classification").fit(grid.batches()),
    "task": lambda: TaskFit.of(grid.make("all", "kron"), grid.batches()),
    "online": lambda: OnlineLaplace(grid.network(), grid.batches()).step(1),
}


@pytest.mark.parametrize("name", FITS)
def test_fits_of_every_kind_say_so(name: str, group: Callable[[int], None]) -> None:
    group(2)
    with pytest.warns(ApproximationWarning, match=SHARD):
        FITS[name]()


def test_a_group_of_one_is_the_usual_case(group: Callable[[int], None]) -> None:
    group(1)
    grid.make("all", "kron").fit(grid.batches())


RANK = """
import sys
from tests.fitting.test_processes import fits_of_a_rank

print(*fits_of_a_rank(1, sys.argv[1]), sep=";")
"""


def fits_of_a_rank(rank: int, store: str) -> list[str]:
    """Number of data and warnings of a fit to a shard, and of a fit to all the data."""
    limit = timedelta(seconds=120)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    try:
        data = TensorDataset(torch.randn(101, 3), torch.randint(3, (101,)))
        la, found = grid.make("all", "kron"), []
        for loader in (DataLoader(data, 20, sampler=DistributedSampler(data)), DataLoader(data, 20)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                la.fit(loader)
            found.append(f"{la.n_data} {[w.category.__name__ for w in caught]}")
        return found
    finally:
        distributed.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    """This one and another, each of which sees 51 of 101 data, and all of them where its loader has them."""
    store = str(tmp_path / "store")
    command = [sys.executable, "-c", RANK, store]
    other = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    try:
        mine = fits_of_a_rank(0, store)
        theirs = other.communicate(timeout=120)[0].strip().split(";")
    finally:
        other.kill()
    assert mine == theirs == ["51 ['ApproximationWarning']", "101 ['ApproximationWarning']"]
