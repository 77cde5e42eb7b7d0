"""Conditions on numbers, read together: a host that asks one after the other waits for the device every time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from laplace.core.pieces import operations_are_dear
from laplace.errors import InvalidData

Fault = Callable[[], Exception | None]
"""Makes the error of a condition that failed; None if a closer look finds that all is well."""


class Conditions:
    """Conditions that wait to be read, in the order in which they were required."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []
        self._faults: list[Fault] = []
        self._was_read = False

    def add(self, holds: Tensor, fault: Fault) -> None:
        """Adds a condition, 0-dim, whose error will name the batch that is being read now."""
        self._flags.append(holds)
        self._faults.append(_naming(_BATCH.get(), fault))

    def read(self, question: Tensor | None = None) -> bool:
        """Reads all conditions and the answer to a question, 0-dim, in one transfer; True without a question."""
        flags, faults = self._flags, self._faults
        self._flags, self._faults = [], []
        self._was_read = True
        if not flags:
            return True if question is None else bool(question)
        device = flags[0].device if question is None else question.device
        answers = flags if question is None else [*flags, question]
        hold = torch.stack([flag.to(device) for flag in answers]).tolist()
        _raise_first(hold, faults)
        return question is None or bool(hold[-1])

    @contextmanager
    def collected(self, *, later: bool = False) -> Iterator[None]:
        """Collects the conditions that are required inside, and reads them at the end.

        If a question was asked inside, or with `later`, they wait for the next one, or for `read`. An error raised
        inside gives way to that of a condition that had failed before, of which it may be a consequence.
        """
        self._was_read = False
        token = _WAITING.set(self)
        try:
            yield
        except Exception:
            self.read()
            raise
        finally:
            _WAITING.reset(token)
        if not self._was_read and not later:
            self.read()


_WAITING: ContextVar[Conditions | None] = ContextVar("waiting", default=None)
"""Conditions that are being collected, or None where each is read at once."""

_UNREAD: ContextVar[bool] = ContextVar("unread", default=False)
"""Whether conditions are left unread."""

_BATCH: ContextVar[str | None] = ContextVar("batch", default=None)
"""Name of the batch that is being read."""


def require(holds: Tensor, fault: Fault) -> None:
    """Raises an error unless every entry is True: at once, or when the conditions of `together` are read."""
    waiting = _WAITING.get()
    if _UNREAD.get():
        return
    if waiting is not None:
        waiting.add(holds.all() if holds.ndim else holds, fault)
    elif not bool(holds.all()):
        _raise_first([False], [fault])


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """True, 0-dim, if every entry of every tensor is finite; also if there are none."""
    # Extremes, of which NaN is one, take a tenth of the time of a comparison of every entry.
    some = [tensor for tensor in tensors if tensor.numel()]
    if some and operations_are_dear(some[0].device):
        norms = torch._foreach_norm(some, torch.inf)
        return (norms[0] if len(norms) == 1 else torch.stack(norms).amax()) < torch.inf
    extremes = [extreme for tensor in some for extreme in torch.aminmax(tensor)]
    return torch.stack(extremes).abs().amax() < torch.inf if extremes else torch.ones((), dtype=torch.bool)


def where_not_finite(values: Tensor) -> str:
    """Words for the first row `[B, …]` that is not finite, after a look has failed; empty where all are bad, or none.

    Rows are counted from 0, in a batch that holds no ignored data any more.
    """
    bad = ~values.detach().isfinite().reshape(len(values), -1).all(1) if len(values) else values.new_zeros(0).bool()
    count = int(bad.sum())
    if not 0 < count < len(bad):
        return ""
    more = "" if count == 1 else f" and {count - 1} more"
    return f" at row {int(bad.nonzero()[0])}{more}, of {len(bad)} rows that count, from 0"


def are_finite(values: Tensor, *others: Tensor) -> Tensor:
    """True, 0-dim, if all values are finite: 0 · ∞ and 0 · NaN are NaN, which spreads in a sum."""
    if operations_are_dear(values.device):
        return all_finite([tensor.detach() for tensor in (values, *others)])
    return sum([(other * 0).sum() for other in others], (values * 0).sum()) == 0


def is_true(question: Tensor) -> bool:
    """The truth value of a 0-dim tensor, read together with the conditions that wait."""
    waiting = _WAITING.get()
    if _UNREAD.get():
        return False
    return bool(question) if waiting is None else waiting.read(question)


@contextmanager
def together() -> Iterator[None]:
    """Collects the conditions that are required inside, and reads all of them at the end."""
    waiting = Conditions()
    with waiting.collected():
        yield
    waiting.read()


def numbers_are_known() -> bool:
    """False inside of `unread`, where no shape can be that of numbers that are looked at."""
    return not _UNREAD.get()


@contextmanager
def unread() -> Iterator[None]:
    """Leaves conditions unread, of numbers that are not known yet, as where a function is traced.

    Questions are answered by no, which is the answer that holds for all numbers.
    """
    token = _UNREAD.set(True)
    try:
        yield
    finally:
        _UNREAD.reset(token)


@contextmanager
def named(batch: str) -> Iterator[None]:
    """Names the batch that is being read in errors about data."""
    token = _BATCH.set(batch)
    try:
        yield
    except InvalidData as error:
        if error.is_named:
            raise
        raise _with_name(batch, error) from error.__cause__ or error
    finally:
        _BATCH.reset(token)


def _with_name(batch: str, error: InvalidData) -> InvalidData:
    named_error = type(error)(f"{batch}: {error}")
    named_error.is_named = True
    return named_error


def _naming(batch: str | None, fault: Fault) -> Fault:
    """The fault with the name of a batch, if it is one of data."""

    def made() -> Exception | None:
        error = fault()
        return _with_name(batch, error) if batch is not None and isinstance(error, InvalidData) else error

    return made


def _raise_first(hold: list[bool], faults: list[Fault]) -> None:
    errors = (None if holds else fault() for holds, fault in zip(hold, faults, strict=False))  # a question has none
    for error in errors:
        if error is not None:
            try:
                raise error
            finally:
                del error  # whose traceback holds this frame, and with it the network until memory is collected


# Numbers of data, which are sums of weights where these are weighted.

_ROUNDING = 1e-9
"""Relative error of a sum of weights that counts as rounding."""


def as_count(number: float) -> float:
    """A number of samples, or a sum of their weights: an int where it is whole up to rounding."""
    return round(number) if same_count(number, round(number)) else number


def same_count(first: float, second: float) -> bool:
    """True if two numbers of samples differ by rounding alone."""
    return abs(first - second) <= _ROUNDING * max(1.0, abs(first))
