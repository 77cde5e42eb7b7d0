"""Digests of data by their content: whether those at hand were read before, in whichever order and batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.errors import DataWarning, warn

_ENTRIES = 64
"""Entries of a datum's tensor that are looked at, evenly spaced."""

_MOST = 4096
"""Data whose hashes are kept: those with the smallest, which are the same of equal data."""

_PARTS = 64
"""Parts that hashes are kept in: of more, as after updates one by one, the next update would take longer and longer."""

_FEWEST = 4
"""Data that must be found before data are called the same; and distinct ones of which there must be so many."""

_DISTINCT = 0.9
"""Share of the data that must differ from each other: equal rows, as of one-hot inputs, say nothing of where they are
from."""


@dataclass(frozen=True, eq=False)
class Content:
    """Hashes of some of the data of one reading or of several."""

    hashes: tuple[Tensor, ...]  # one per datum, inputs with targets, in parts `[n]`
    n_kept: int  # number of these
    n_hashed: int  # number of data that were hashed
    n_data: int  # number of data that were read

    def __add__(self, other: Content) -> Content:
        hashes, n_kept = (*self.hashes, *other.hashes), self.n_kept + other.n_kept
        if n_kept > 2 * _MOST:
            hashes, n_kept = (torch.cat([part.cpu() for part in hashes]).sort().values[:_MOST],), _MOST
        elif len(hashes) > _PARTS:
            hashes = (torch.cat([part.cpu() for part in hashes]),)
        return Content(hashes, n_kept, self.n_hashed + other.n_hashed, self.n_data + other.n_data)

    @cached_property
    def _distinct(self) -> Tensor:
        """Different hashes, ascending."""
        return torch.cat([part.cpu() for part in self.hashes]).unique()

    def holds(self, other: Content) -> bool:
        """True if other data are, to all appearance, among these.

        Of many data a part was looked at, of which so many must be found as chance would have it, in another order.
        """
        if not self.hashes or not other.hashes:
            return False
        if len(other._distinct) < max(_FEWEST, _DISTINCT * other.n_kept):
            return False
        n_common = int(torch.isin(other._distinct, self._distinct).sum())
        share = min(1.0, len(self._distinct) / max(1, self.n_data))  # of these data that are known here
        enough = _DISTINCT if share > _DISTINCT else 0.5 * share
        return n_common >= max(_FEWEST, enough * len(other._distinct))


class ContentReader:
    """Hashes batches as they are read: the first ones, then fewer and fewer, so that it takes no time."""

    def __init__(self) -> None:
        self._hashes: list[Tensor] = []
        self._n_batches = self._n_hashed = self._n_data = 0

    def see(self, x: Inputs, y: Tensor) -> None:
        """Looks at inputs and targets `[B, …]` of a batch."""
        number, self._n_batches = self._n_batches, self._n_batches + 1
        self._n_data += len(y)
        if number & (number - 1) == 0 and len(y):  # 0, 1, 2, 4, 8, …
            self._hashes.append(_hashes([*batches.tensors(x), y], len(y)))
            self._n_hashed += len(y)

    @property
    def content(self) -> Content:
        """The digest of all batches so far."""
        return Content(tuple(self._hashes), self._n_hashed, self._n_hashed, self._n_data)


def warn_of_training_data(fitted: Content, validation: Content) -> None:
    """Warns of validation data that are data of the fit.

    Warns:
        DataWarning: They are.
    """
    if fitted.holds(validation):
        warn(
            "the validation data are training data, at which the network is surer than elsewhere: what is chosen by "
            "them is too sure, too. Give data that were not fitted.",
            DataWarning,
        )


def _hashes(tensors: Iterable[Tensor], n_data: int) -> Tensor:
    """A hash of every datum, `[B]`, int64, of the tensors that have the data in their first dimension.

    It is Σ_i f_i b_i modulo 2^64, of the bits b_i of some entries and random odd f_i: integers, so that no order of
    summation shows.
    """
    columns: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() == 0 or tensor.ndim == 0 or len(tensor) != n_data or tensor.is_complex():
            continue
        if tensor.layout is not torch.strided:
            continue
        flat = tensor.detach().reshape(n_data, -1)
        step = max(1, -(-flat.shape[1] // _ENTRIES))
        columns.append(flat[:, step // 2 :: step].float())
    if not columns:
        return torch.zeros(n_data, dtype=torch.int64)
    bits = (columns[0].contiguous() if len(columns) == 1 else torch.cat(columns, 1)).view(torch.int32)
    return (bits * _factors(bits.shape[1], bits.device)).sum(1)


@lru_cache(maxsize=16)
def _factors(n: int, device: torch.device) -> Tensor:
    """Random odd numbers, `[n]`, int64: always the same."""
    with torch.inference_mode(False):
        odd = torch.randint(2**62, (n,), generator=torch.Generator().manual_seed(0)).mul_(2).add_(1)
        return odd.to(device)
