"""Eigendecompositions of minutes are announced: by a bar where progress was asked for, else by one warning.

How long they take is said by their sizes and an assumed speed, never by a clock: whether there is a warning is the same
on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from tqdm.auto import tqdm

from laplace.errors import SlowWarning, warn

RATE = 5e9
"""n³ of eigendecompositions `[n, n]` in float64 per second, of a few cores: 4,000 × 4,000 in 13 s."""

LONG = 10.0
"""Seconds above which work is announced."""

Size = tuple[int, int]
"""Number of matrices and their width."""

_bars: ContextVar[bool] = ContextVar("bars", default=False)
_announced: ContextVar[bool] = ContextVar("announced", default=False)


@contextmanager
def bars(shown: bool) -> Iterator[None]:
    """Shows progress bars for long work inside of this block, or warnings in their place."""
    token = _bars.set(shown)
    try:
        yield
    finally:
        _bars.reset(token)


@dataclass
class Decompositions:
    """Eigendecompositions that are done one after the other.

    Attributes:
        sizes: Of every step, the matrices that it factorises.
        warned: Whether a warning told of them already.
    """

    sizes: Sequence[Sequence[Size]]
    warned: bool = False

    @property
    def is_long(self) -> bool:
        """True if they are announced."""
        return sum(map(_seconds, self.sizes)) > LONG

    @contextmanager
    def announced(self) -> Iterator[Callable[[int], None]]:
        """Gives what is called after every step, with its number.

        Warns:
            SlowWarning: They are long, and nothing shows their progress; once.
        """
        if not self.is_long or _announced.get():
            yield _nothing
            return
        token = _announced.set(True)
        try:
            if _bars.get():
                with _bar([_seconds(step) for step in self.sizes]) as tick:
                    yield tick
            else:
                if not self.warned:
                    self.warned = True
                    warn(self._message(), SlowWarning)
                yield _nothing
        finally:
            _announced.reset(token)

    def _message(self) -> str:
        every = [size for step in self.sizes for size in step]
        largest = max(width for _, width in every)
        return (
            f"the eigendecompositions of {sum(count for count, _ in every)} matrices, the largest {largest:,} × "
            f"{largest:,}, will take about {_told(sum(map(_seconds, self.sizes)))}. They are done once per fit; "
            "fit(..., progress_bar=True) does them at once and shows how far they are."
        )


def _seconds(sizes: Sequence[Size]) -> float:
    return sum(count * float(width) ** 3 for count, width in sizes) / RATE


def _told(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _nothing(step: int) -> None:
    del step


@contextmanager
def _bar(seconds: Sequence[float]) -> Iterator[Callable[[int], None]]:
    shape = "{l_bar}{bar}| {elapsed}<{remaining}"
    with tqdm(total=sum(seconds), desc="eigendecompositions", bar_format=shape) as bar:

        def tick(step: int) -> None:
            bar.update(seconds[step])

        yield tick
