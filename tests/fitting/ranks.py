"""Runs a function in several processes of one group, as `torchrun` does, and returns what each of them found."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

_ROOT = Path(__file__).parents[2]

_PROGRAM = """
import sys
from tests.fitting.ranks import _serve

_serve(*sys.argv[1:])
"""


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
    command = [sys.executable, "-c", _PROGRAM, str(folder), str(size)]
    processes = [subprocess.Popen([*command, str(rank)], cwd=_ROOT) for rank in range(size)]
    try:
        for process in processes:
            process.wait(timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [pickle.loads((folder / f"found {rank}").read_bytes()) for rank in range(size)]
    for rank, (value, error) in enumerate(found):
        assert error is None, f"rank {rank}: {error}{value}"
    return [value for value, _ in found]


def _serve(folder: str, size: str, rank: str) -> None:
    place = Path(folder)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place / 'store'}", rank=int(rank), world_size=int(size),
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    try:
        function, arguments = pickle.loads((place / "call").read_bytes())
        found = function(int(rank), *arguments), None
    except BaseException:
        found = None, traceback.format_exc()
    (place / f"found {rank}").write_bytes(pickle.dumps(found))
    distributed.destroy_process_group()
