"""Progress of work on data that are read batch by batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def known_length(loader: Iterable[Any]) -> int | None:
    """Number of batches of any loader, or None."""
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except TypeError:  # of an iterable data set
        return None


class DataBar:
    """A progress bar that counts data; its total follows from the number of batches, where the loader knows that."""

    def __init__(self, label: str, loader: Iterable[Any], *, shown: bool) -> None:
        self.n_batches = known_length(loader)
        self._bar = _bar(label) if shown else None
        self._batches = 0

    def add(self, n_data: int) -> None:
        """Counts a batch."""
        bar = self._bar
        if bar is None:
            return
        self._batches += 1
        if self.n_batches is not None:  # as if all batches were like those so far
            bar.total = round((bar.n + n_data) * self.n_batches / self._batches)
        bar.update(n_data)

    def close(self) -> None:
        """Ends the bar, at the number of data that there were."""
        if self._bar is not None:
            self._bar.total = self._bar.n
            self._bar.close()


def _bar(label: str) -> Any:
    from tqdm.auto import tqdm

    return tqdm(desc=label, unit=" data")
