"""Checkpoints: a fit between two batches, in a file that is replaced at once or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace.core import files
from laplace.core.memory import ran_out
from laplace.engines.engine import BatchSummary
from laplace.errors import StateError
from laplace.structures import fields

_VERSION = 1
"""Version of the format of the file."""

_KEYS = {"version", "account", "checkpoint"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A fit after some batches of one of its readings: all that another process needs to go on.

    Attributes:
        reading: Number of the reading, from 1.
        batches: Number of its batches that were read, those of ignored data alone among them.
        digest: Digest of these batches.
        order: States of the generators of the loader's order at the beginning of the reading.
        data_pass: State of the pass over the data.
        total: Sums of what the batches contribute besides curvature; None where no data counted.
        first: The same of the whole first reading, after it.
        coverage: Rules that have explained a tensor.
        draws: States of the engine's generator, before a reading and now; None without one.
    """

    reading: int
    batches: int
    digest: str
    order: tuple[Tensor, ...]
    data_pass: dict[str, Any]
    total: BatchSummary | None
    first: BatchSummary | None
    coverage: dict[str, str]
    draws: tuple[Tensor, ...] | None


def write(path: Path, account: Any, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint in the place of the former one, which stays whole until the new one is.

    Args:
        path: The file.
        account: What is fitted how: tensors, numbers, strings, and lists and dicts of them.
        checkpoint: What to write.
    """
    state = {"version": _VERSION, "account": account, "checkpoint": fields.state_of(checkpoint)}
    with files.replaced(path, _new(path)) as new, new.open("wb") as file:
        torch.save(state, file)


def read(path: Path, device: torch.device) -> tuple[Any, Checkpoint] | None:
    """The account and the checkpoint of a file; None if there is no file.

    Args:
        path: The file; no code in it is run.
        device: Where the sums are to be.

    Raises:
        StateError: The file is none of this library, or of another version.
    """
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if fields.entries(state).keys() != _KEYS or state["version"] != _VERSION:
            raise StateError("it holds something else, or is of another version.")
        return state["account"], fields.from_state(Checkpoint, fields.move(state["checkpoint"], device, None))
    except Exception as error:
        if ran_out(error):
            raise
        raise StateError(
            f"resume={str(path)!r}: the file is there, and no checkpoint of a fit that could be resumed: {error} "
            "Give another path, or remove the file to begin anew."
        ) from error


def remove(path: Path) -> None:
    """Removes the file of a fit that has ended, and what a process left that was killed while it wrote."""
    for file in (path, _new(path)):
        file.unlink(missing_ok=True)


def _new(path: Path) -> Path:
    """The file that is being written."""
    return path.with_name(f"{path.name}.new")
