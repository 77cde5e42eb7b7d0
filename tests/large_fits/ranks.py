"""Runs a function in several processes of one group, as `torchrun` does, and returns what each of them found."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from tests import fresh


def run(function: Callable[..., Any], *arguments: Any, size: int = 2, folder: Path, timeout: float = 240) -> list[Any]:
    """Values of `function(rank, *arguments)` in every process; an error of one is raised here.

    Args:
        function: Of a module that can be imported.
        *arguments: Can be pickled.
        size: Number of processes.
        folder: An empty one.
        timeout: Seconds, of all together.
    """
    (folder / "call").write_bytes(pickle.dumps((function, arguments)))
    script = f"from tests.large_fits.ranks import _serve; _serve({str(folder)!r}, {size}, "
    ended = fresh.run(*[f"{script}{rank})" for rank in range(size)], timeout=timeout)
    for rank, done in enumerate(ended):
        assert not done.status, f"rank {rank} ended with {done.status}: {done.errors}"
    found = [pickle.loads((folder / f"found {rank}").read_bytes()) for rank in range(size)]
    for rank, (value, error) in enumerate(found):
        assert error is None, f"rank {rank}: {error}{value}"
    return [value for value, _ in found]


def _serve(folder: str, size: int, rank: int) -> None:
    place = Path(folder)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        function, arguments = pickle.loads((place / "call").read_bytes())
        found = function(rank, *arguments), None
    except BaseException:
        found = None, traceback.format_exc()
    (place / f"found {rank}").write_bytes(pickle.dumps(found))
    distributed.destroy_process_group()
