"""Features of a head as a fit saw them: kept, while they are small, for what is asked after the fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

_MAX_BYTES = 2**26
"""Bytes of features, outputs and targets that are kept at most: beyond them nothing is."""


@dataclass(frozen=True, eq=False)
class SeenBatch:
    """A batch of a head without positions.

    Attributes:
        features: φ, `[B, D]`, without a 1 for the bias.
        f: Outputs `[B, C]`.
        y: Checked targets, one for every row.
    """

    features: Tensor
    f: Tensor
    y: Tensor


class HeadMemory:
    """Batches as a fit saw them: references to tensors that it had made, of which nothing is copied."""

    def __init__(self) -> None:
        self._batches: list[SeenBatch] = []
        self._versions: list[int] = []
        self._storages: dict[int, int] = {}
        self._is_full = False

    def add(self, features: Tensor, f: Tensor, y: Tensor) -> None:
        """Keeps a batch; of the first that is too much, or no plain tensors, and from then on nothing is kept."""
        if self._is_full:
            return
        tensors = (features, f, y)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage.nbytes()
        if sum(self._storages.values()) > _MAX_BYTES or any(tensor.is_inference() for tensor in tensors):
            self._batches, self._versions, self._storages, self._is_full = [], [], {}, True
            return
        self._batches.append(SeenBatch(*tensors))
        self._versions += [tensor._version for tensor in tensors]

    def batches(self) -> Sequence[SeenBatch]:
        """The batches that were kept; none if a tensor was written to since, as users may do with those of a loader."""
        tensors = (tensor for batch in self._batches for tensor in (batch.features, batch.f, batch.y))
        is_same = all(tensor._version == then for tensor, then in zip(tensors, self._versions, strict=True))
        return self._batches if is_same else ()
