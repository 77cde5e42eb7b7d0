"""The library's own errors and warnings, under one root each.

Every error derives from `LaplaceError` and from the built-in type that users of
similar libraries catch (`ValueError`, `TypeError`, `RuntimeError`). A message names the
argument, says what was given, what is accepted and what to do.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_LIBRARY = __name__.split(".")[0]


class LaplaceError(Exception):
    """Root of every error raised on purpose by this library."""


class InvalidArgument(LaplaceError, ValueError):
    """An argument has a value that is not accepted."""


class InvalidType(LaplaceError, TypeError, ValueError):
    """An argument has a type that is not accepted."""


class InvalidCall(InvalidArgument, TypeError):
    """A call lacks an argument, or has one that is not known; the message names it and the one that was meant."""


class InvalidData(LaplaceError, ValueError):
    """A batch of data cannot be used; the message names the batch and the fault.

    Attributes:
        is_named: True if the message names the batch already.
    """

    is_named: bool = False


class MissingKey(InvalidData, KeyError):
    """A batch that is a mapping lacks a key."""

    __str__ = Exception.__str__  # that of KeyError shows the message in quotation marks, on one line


class InvalidInputs(InvalidData, RuntimeError, TypeError):
    """Inputs on which the network cannot be run; the message names its layer, and PyTorch's own error is the cause."""


class NotFittedError(LaplaceError, RuntimeError, AttributeError):
    """A posterior quantity was asked for before `fit`."""


class StateError(LaplaceError, ValueError):
    """A state dict belongs to another model, class or version."""


class UnsupportedError(LaplaceError, ValueError):
    """A combination that has no meaning or no implementation; the message names one that works."""


class ReadOnlyError(UnsupportedError, AttributeError):
    """An attribute was assigned that is computed, or never read; the message says what to do instead."""


class CurvatureError(LaplaceError, RuntimeError):
    """A curvature is not what the posterior needs (indefinite, not finite)."""


class ModelChangedError(LaplaceError, RuntimeError):
    """The network's weights or structure changed after `fit` in a way that invalidates a result."""


class MissingDependency(LaplaceError, ImportError):
    """An optional package is needed; the message holds the install line."""


class ProcessError(LaplaceError, RuntimeError):
    """Another process of a group failed, or works on another network or with other settings; the message names it."""


class OutOfMemory(LaplaceError, torch.OutOfMemoryError):
    """Memory does not hold the smallest piece of work; the message says which, and what takes less."""


class LaplaceWarning(UserWarning):
    """Root of every warning of this library."""


class InstallationWarning(LaplaceWarning):
    """A package that was asked for is missing, or another one of our import name lies in the environment."""


class TuningWarning(LaplaceWarning):
    """A hyper-parameter search ended flat, on an edge of its grid, or met invalid candidates."""


class CalibrationWarning(LaplaceWarning):
    """A posterior predicts worse than its network on held-out data, or its calibration rests on little, or is gone."""


class ApproximationWarning(LaplaceWarning):
    """A quantity is approximated in a way that the caller may not expect."""


class DataWarning(LaplaceWarning):
    """Data are hardly those that were meant: left out, counted twice, or validated on what was fitted."""


class GradientWarning(LaplaceWarning):
    """A gradient was asked for that the result will not have."""


class StateWarning(LaplaceWarning):
    """A loaded state replaces settings of the object it is loaded into."""


class ModelChangedWarning(LaplaceWarning):
    """Something of the network that is no weight changed after `fit`, which may or may not change its outputs."""


class MemoryWarning(LaplaceWarning):
    """Memory ran out; the work went on in smaller pieces, slower and with the same numbers."""


class SlowWarning(LaplaceWarning):
    """Work of minutes is ahead and nothing would show that it goes on, or a structure lacks the fast way."""


_NUMBERS = re.compile(r"(?<![\w.'\"])[-+−]?(?:\d[\d.,]*(?:e[-+]?\d+)?|(?:nan|inf)\b)")
"""Numbers of a message that are no part of a name."""

_MOST = 4096
"""Kinds of warnings that are remembered."""

_shown: dict[tuple[str, int, type, str], tuple[Sequence[Any], tuple[Any, ...]]] = {}
"""Warnings that Python shows once: file, line, category and text without numbers, with the filters that said so."""


def warn(message: str, category: type[LaplaceWarning]) -> None:
    """Warns at the line of the user's code that called the library, however deep inside it the reason was found.

    Python's filters decide what becomes of it. Where they show a warning once per line, one that differs by its numbers
    alone is the same. Python's own memory does not serve: it goes by whole texts, and forgets whenever anybody, as
    PyTorch does in many calls, enters `warnings.catch_warnings`.
    """
    if _SILENT.get():
        return
    caller = frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] == _LIBRARY:
            caller = frame.f_back or frame
        frame = frame.f_back
    while caller is not None and caller.f_back is not None and _is_of_imports(caller.f_code.co_filename):
        caller = caller.f_back
    if caller is None:  # an interpreter without frames
        warnings.warn(message, category, stacklevel=2)
        return
    file, line = caller.f_code.co_filename, caller.f_lineno
    kind = file, line, category, _NUMBERS.sub("#", message)
    filters = _filters()
    if (known := _shown.get(kind)) is not None and known[0] is filters and known[1] == tuple(filters):
        return
    seen: dict[Any, Any] = {}
    warnings.warn_explicit(message, category, file, line, caller.f_globals.get("__name__") or "<string>", seen)
    if (message, category, line) in seen:  # to be shown once: not of "always", and nothing was shown under "ignore"
        if len(_shown) >= _MOST:
            _shown.clear()
        _shown[kind] = filters, tuple(filters)


_SILENT: ContextVar[bool] = ContextVar("silent", default=False)


@contextmanager
def silently() -> Iterator[None]:
    """A block in which this library warns of nothing, in this thread: of work that has been warned of already."""
    token = _SILENT.set(True)
    try:
        yield
    finally:
        _SILENT.reset(token)


def ignore(*kinds: tuple[str, type[Warning], str]) -> None:
    """Lets Python pass over warnings of other packages: beginnings of their texts, categories, and modules they name.

    Filters belong to the process. They are added, once, and stay: `warnings.catch_warnings`, which takes them off, puts
    back a list that other threads may have replaced meanwhile.
    """
    for message, category, module in kinds:
        entry = "ignore", re.compile(message, re.IGNORECASE), category, re.compile(module), 0
        if entry not in _filters():
            warnings.filterwarnings("ignore", message, category, module)


def _is_of_imports(file: str) -> bool:
    """True of the frames of an import statement, which Python leaves out, too."""
    return "importlib" in file and "_bootstrap" in file


def _filters() -> Sequence[Any]:
    """Filters of warnings: where they belong to a context, as in Python without a global lock, those of the present."""
    return getattr(warnings, "_get_filters", lambda: warnings.filters)()
