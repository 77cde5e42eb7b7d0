"""Data that `DistributedSampler` repeats, so that every process has equally many: they count once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler

from laplace.core import batch as batches


def without_padding(loader: Iterable[Any], dict_key_y: str) -> Iterable[Any]:
    """A loader's batches without what its sampler repeats; the loader itself where that is nothing.

    Args:
        loader: Batches.
        dict_key_y: Key of the targets, for mappings.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or not isinstance(sampler.dataset, Sized):
        return loader
    n_data, ranks = len(sampler.dataset), sampler.num_replicas
    repeated = sum(1 for place in range(n_data, sampler.total_size) if place % ranks == sampler.rank)
    return _Shortened(loader, len(sampler) - repeated, dict_key_y) if repeated else loader


@dataclass(frozen=True)
class _Shortened:
    """The first data of a loader.

    Attributes:
        loader: Batches.
        n_data: Number of data that are left.
        dict_key_y: Key of the targets, for mappings.
    """

    loader: Iterable[Any]
    n_data: int
    dict_key_y: str

    def __len__(self) -> int:
        return len(self.loader)  # pyright: ignore[reportArgumentType]  (a loader with a sampler has a length)

    def __iter__(self) -> Iterator[Any]:
        left = self.n_data
        for batch in self.loader:
            if left == 0:
                return
            part, number = batches.first(batch, self.dict_key_y, left)
            left -= number
            yield part
