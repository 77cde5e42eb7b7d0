"""Fits in a process group: every rank sees its own data, which is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace import MixtureLaplace, OnlineLaplace, TaskFit
from laplace.errors import ApproximationWarning
from tests import grid
from tests.large_fits import ranks

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
    "task": lambda: TaskFit.from_data(grid.make("all", "kron"), grid.batches()),
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


def fits_of_a_rank(rank: int) -> list[str]:
    """Number of data and warnings of a fit to a shard, and of a fit to all the data."""
    data = TensorDataset(torch.randn(101, 3), torch.randint(3, (101,)))
    la, found = grid.make("all", "kron"), []
    for loader in (DataLoader(data, 20, sampler=DistributedSampler(data)), DataLoader(data, 20)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            la.fit(loader)
        found.append(f"{la.n_data} {[w.category.__name__ for w in caught]}")
    return found


def test_two_processes(tmp_path: Path) -> None:
    """Each sees 51 of 101 data, and all of them where its loader has them."""
    for found in ranks.run(fits_of_a_rank, folder=tmp_path):
        assert found == ["51 ['ApproximationWarning']", "101 ['ApproximationWarning']"]
