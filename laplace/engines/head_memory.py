"""Features of a head as a fit saw them: kept, while they are small, for what is asked after the fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

_MAX_BYTES = 2**26
"""Bytes of features and outputs that are kept at most: beyond them nothing is."""


class SeenBatch(NamedTuple):
    """A batch of a head without positions.

    Attributes:
        features: φ, `[B, D]`, without a 1 for the bias.
        f: Outputs `[B, C]`.
        y: Checked targets, one for every row.
        versions: Numbers of writes to features and targets so far.
    """

    features: Tensor
    f: Tensor
    y: Tensor
    versions: tuple[int, int]

    @property
    def is_same(self) -> bool:
        """True if neither features nor targets were written to since."""
        return self.versions == (self.features._version, self.y._version)


class HeadMemory:
    """Batches as a fit saw them: references to tensors that were made for it, of which nothing is copied."""

    def __init__(self) -> None:
        self._batches: list[SeenBatch] = []
        self._storages: set[int] = set()
        self._n_bytes = 0

    def add(self, features: Tensor, f: Tensor, y: Tensor) -> None:
        """Keeps a batch; with the first that is too much, all are let go, and none is kept from then on."""
        if self._n_bytes > _MAX_BYTES:
            return
        storage = features.untyped_storage()  # of which the features may be a part: a loader's own inputs, say
        if storage.data_ptr() not in self._storages:
            self._storages.add(storage.data_ptr())
            self._n_bytes += storage.nbytes()
        self._n_bytes += f.nbytes
        if features.is_inference() or y.is_inference():  # of which no write is counted
            self._n_bytes = _MAX_BYTES + 1
        if self._n_bytes > _MAX_BYTES:
            self._batches.clear()
            return
        self._batches.append(SeenBatch(features, f, y, (features._version, y._version)))

    def batches(self) -> Sequence[SeenBatch]:
        """The batches that were kept; none if one was written to since, as users may do with inputs of a loader."""
        return self._batches if all(batch.is_same for batch in self._batches) else ()
