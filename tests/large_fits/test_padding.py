"""Loaders of the processes of a group together give every datum once, whatever their samplers repeat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

from laplace.errors import InvalidData
from laplace.large_fits.processes import without_padding

N_PROCESSES = 3
SIZES = (1, 2, 5, 12, 13, 24, 25)


def data(n_data: int) -> TensorDataset:
    return TensorDataset(torch.rand(n_data, 2), torch.arange(n_data))


def seen(loaders: Iterable[Any]) -> list[int]:
    """Targets of all loaders, sorted; the number of batches is what a loader says."""
    found: list[int] = []
    for loader in loaders:
        batches = list(without_padding(loader, "labels"))
        assert len(batches) == len(without_padding(loader, "labels"))  # pyright: ignore[reportArgumentType]
        found += [target for _, y in batches for target in y.tolist()]
    return sorted(found)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("n_data", SIZES)
def test_distributed_samplers(n_data: int, shuffle: bool) -> None:
    dataset = data(n_data)
    samplers = [DistributedSampler(dataset, N_PROCESSES, rank, shuffle=shuffle) for rank in range(N_PROCESSES)]
    assert seen(DataLoader(dataset, 4, sampler=sampler) for sampler in samplers) == list(range(n_data))


def prepared(loader: DataLoader[Any], **options: Any) -> Iterator[Any]:
    """What accelerate makes of a loader, process by process."""
    module = pytest.importorskip("accelerate.data_loader")
    for rank in range(N_PROCESSES):
        yield module.prepare_data_loader(loader, num_processes=N_PROCESSES, process_index=rank, **options)


@pytest.mark.parametrize(("split", "even"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("n_data", SIZES)
def test_loaders_that_accelerate_prepares(n_data: int, split: bool, even: bool) -> None:
    loader = DataLoader(data(n_data), 6 if split else 4)
    assert seen(prepared(loader, split_batches=split, even_batches=even)) == list(range(n_data))


def test_what_is_left_out_is_not_repeated() -> None:
    """`drop_last` asks for whole batches, the same number for every process."""
    assert seen(prepared(DataLoader(data(23), 4, drop_last=True))) == list(range(12))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from data(5)


class Shuffled(BatchSampler):
    """Another order of the batches."""


@pytest.mark.parametrize(("loader", "match"), [
    (DataLoader(Stream(), 2), "of a stream"),
    (DataLoader(data(23), batch_sampler=Shuffled(range(23), 4, drop_last=False)), "any batch.*even_batches=False"),
])  # fmt: skip
def test_repeated_data_that_may_be_anywhere_are_refused(loader: DataLoader[Any], match: str) -> None:
    with pytest.raises(InvalidData, match=match):
        seen(prepared(loader))


def test_rows_that_are_not_the_data_are_refused() -> None:
    def twice(rows: list[Any]) -> Any:
        return tuple(torch.stack([row[part] for row in rows for _ in range(2)]) for part in range(2))

    with pytest.raises(InvalidData, match="rows are not its 4 data"):
        seen(prepared(DataLoader(data(23), 4, collate_fn=twice)))
