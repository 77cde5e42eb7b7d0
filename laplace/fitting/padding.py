"""Data that `DistributedSampler` repeats, so that every process has equally many: they count once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from laplace.core import batch as batches
from laplace.errors import InvalidData

_REMEDY = "Give the sampler drop_last=True, or data whose number the number of processes divides."


def without_padding(loader: Iterable[Any], dict_key_y: str) -> Iterable[Any]:
    """A loader's batches without the datum that its sampler repeats; the loader itself where there is none.

    What a `DistributedSampler` repeats comes last, at most one index for every process.

    Args:
        loader: Batches.
        dict_key_y: Key of the targets, for mappings.

    Raises:
        InvalidData: A datum is repeated, and a user's own batch sampler decides where it is.
    """
    if not isinstance(loader, DataLoader):
        return loader
    groups = loader.batch_sampler
    sampler = getattr(groups, "sampler", loader.sampler)  # what batch_sampler= was made of is not loader.sampler
    if not isinstance(sampler, DistributedSampler) or not isinstance(sampler.dataset, Sized):
        return loader
    places = range(sampler.rank, sampler.total_size, sampler.num_replicas)
    if not places or places[-1] < len(sampler.dataset):
        return loader
    if groups is None:
        size = 1
    elif type(groups) is BatchSampler and getattr(loader, "in_order", True):
        size = groups.batch_size
    else:
        raise InvalidData(f"DistributedSampler repeats a datum, and the loader may give it in any batch. {_REMEDY}")
    whole, rest = divmod(len(places) - 1, size)
    return _Shortened(loader, whole, rest, dict_key_y)


@dataclass(frozen=True)
class _Shortened:
    """The batches of a loader without the last of the indices that its sampler gives.

    Attributes:
        loader: Batches.
        whole: Number of batches that are as they are.
        rest: Number of indices of the batch after them that count; 0 where it is of the last index alone.
        dict_key_y: Key of the targets, for mappings.
    """

    loader: DataLoader[Any]
    whole: int
    rest: int
    dict_key_y: str

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            if number < self.whole:
                yield batch
            elif self.rest:
                yield self._without_last(batch)

    def _without_last(self, batch: Any) -> Any:
        """The last batch without its last datum.

        Raises:
            InvalidData: Its rows are not the data of the sampler one by one.
        """
        _, y = batches.split(batch, self.dict_key_y)
        if len(y) != self.rest + 1:
            raise InvalidData(
                f"DistributedSampler repeats a datum in the last batch, whose {len(y)} rows are not its "
                f"{self.rest + 1} data one by one. {_REMEDY}"
            )
        return batches.first(batch, self.dict_key_y, self.rest)
